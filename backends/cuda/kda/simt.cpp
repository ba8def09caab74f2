// KDA on CUDA by the portable kernels: every option, any GPU, the bits of the native backend.
#include "cuda/portable.hpp"
#include "simt/kda/ops.hpp"

namespace rlk::cuda {

rlk::kda::Launchers kda_portable();

namespace {

struct Attention : Portable {
  static rlk::kda::Launchers launchers() { return kda_portable(); }
};

}  // namespace

extern const rlk_implementation kda_fwd_simt, kda_bwd_simt, kda_decode_simt, kda_gate_simt, kda_gate_bwd_simt;
const rlk_implementation kda_fwd_simt = rlk::kda::gpu::forward<Attention>();
const rlk_implementation kda_bwd_simt = rlk::kda::gpu::backward<Attention>();
const rlk_implementation kda_decode_simt = rlk::kda::gpu::decode<Attention>();
const rlk_implementation kda_gate_simt = rlk::kda::gpu::gate<Attention>();
const rlk_implementation kda_gate_bwd_simt = rlk::kda::gpu::gate_backward<Attention>();

}  // namespace rlk::cuda
