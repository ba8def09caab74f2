// The rope family on NVIDIA GPUs: one launch for q and k, 16-byte accesses, tables kept in registers across
// heads.
#include "simt/rope_ops.hpp"

namespace rlk::cuda {

simt::RopeLaunchers rope_portable();

namespace {

struct Portable {
  static constexpr std::int32_t kDevice = kDLCUDA;
  static constexpr const char* kId = "cuda.simt";
  static simt::RopeLaunchers launchers() { return rope_portable(); }
};

using rotary::Form;

}  // namespace

extern const rlk_implementation rope_simt, rope_bwd_simt, rope_in_place_simt, rope_mla_q_simt,
    rope_mla_q_bwd_simt, rope_mla_kv_simt, rope_mla_kv_bwd_simt, rope_tables_simt;
const rlk_implementation rope_simt =
    rope_gpu::rope<Portable, Rope, Form::out_of_place>("q and k in one launch");
const rlk_implementation rope_bwd_simt =
    rope_gpu::rope<Portable, RopeBwd, Form::backward>("the transposed rotation");
const rlk_implementation rope_in_place_simt =
    rope_gpu::rope<Portable, RopeInPlace, Form::in_place>("touches only the rotary dims");
const rlk_implementation rope_mla_q_simt =
    rope_gpu::mla_q<Portable, RopeMlaQ, false>("the trailing dims turn");
const rlk_implementation rope_mla_q_bwd_simt =
    rope_gpu::mla_q<Portable, RopeMlaQBwd, true>("the transposed rotation");
const rlk_implementation rope_mla_kv_simt =
    rope_gpu::mla_kv<Portable, RopeMlaKv, false>("copies, and one rotation per token");
const rlk_implementation rope_mla_kv_bwd_simt =
    rope_gpu::mla_kv<Portable, RopeMlaKvBwd, true>("copies, and an fp32 sum over heads");
const rlk_implementation rope_tables_simt = rope_gpu::tables<Portable>();

}  // namespace rlk::cuda
