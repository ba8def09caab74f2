// The rope family on AMD GPUs: one launch for q and k, 16-byte accesses. The kernels are the portable ones.
#include "hip/portable.hpp"
#include "simt/rope/ops.hpp"

namespace rlk::hip {

simt::RopeLaunchers rope_portable();

namespace {

struct Rotary : Portable {
  static simt::RopeLaunchers launchers() { return rope_portable(); }
};

}  // namespace

extern const rlk_implementation rope_simt, rope_bwd_simt, rope_in_place_simt, rope_mla_q_simt,
    rope_mla_q_bwd_simt, rope_mla_kv_simt, rope_mla_kv_bwd_simt, rope_tables_simt;
const rlk_implementation rope_simt = rope_gpu::rope<Rotary>();
const rlk_implementation rope_bwd_simt = rope_gpu::rope_bwd<Rotary>();
const rlk_implementation rope_in_place_simt = rope_gpu::rope_in_place<Rotary>();
const rlk_implementation rope_mla_q_simt = rope_gpu::mla_q<Rotary>();
const rlk_implementation rope_mla_q_bwd_simt = rope_gpu::mla_q_bwd<Rotary>();
const rlk_implementation rope_mla_kv_simt = rope_gpu::mla_kv<Rotary>();
const rlk_implementation rope_mla_kv_bwd_simt = rope_gpu::mla_kv_bwd<Rotary>();
const rlk_implementation rope_tables_simt = rope_gpu::tables<Rotary>();

}  // namespace rlk::hip
