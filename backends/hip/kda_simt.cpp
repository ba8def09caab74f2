// KDA on AMD GPUs by the portable kernels: every option, any GPU, the bits of the native backend.
#include "simt/kda_ops.hpp"

namespace rlk::hip {

kda::Launchers kda_portable();

namespace {

struct Portable {
  static constexpr std::int32_t kDevice = kDLROCM;
  static constexpr const char* kId = "hip.simt";
  static kda::Launchers launchers() { return kda_portable(); }
};

}  // namespace

extern const rlk_implementation kda_fwd_simt, kda_bwd_simt, kda_decode_simt, kda_gate_simt, kda_gate_bwd_simt;
const rlk_implementation kda_fwd_simt = kda::gpu::forward<Portable>();
const rlk_implementation kda_bwd_simt = kda::gpu::backward<Portable>();
const rlk_implementation kda_decode_simt = kda::gpu::decode<Portable>();
const rlk_implementation kda_gate_simt = kda::gpu::gate<Portable>();
const rlk_implementation kda_gate_bwd_simt = kda::gpu::gate_backward<Portable>();

}  // namespace rlk::hip
