// Gradients of rms_norm on Hopper: rms32, in one pass where rows are many; else by the portable kernels.
#include "cuda/rms_norm/sm90.h"

#include "arithmetic/rms_norm/bind.hpp"
#include "simt/portable.hpp"

namespace rlk::cuda {
namespace {

using rms32::problem_of;

std::uint64_t workspace(const RmsNormBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(simt::rms_norm::backward_workspace(problem_of(a)));
}
rlk_code run(const RmsNormBwd& a, const Call& call) {
  const rms32::Problem p = problem_of(a);
  const auto launch = rms_norm::suits(p) ? rms_norm::run_gradients : simt::rms_norm::run_backward;
  return simt::finished(call, "rms_norm_bwd",
                        launch(p, call.workspace().data(), call.stream(), call.device().id));
}

constexpr Facts kFacts = {.id = "cuda.sm90",
                          .doc = "clusters of two blocks have 128 rows, and read them once",
                          .priority = 110,
                          .arithmetic = "rms32",
                          .dtypes = kFloats,
                          .traits = kPinned | RLK_CAPTURE_SAFE,
                          .device_type = kDLCUDA,
                          .min_arch = 90,
                          .max_arch = 90};

}  // namespace

extern const rlk_implementation rms_norm_bwd_sm90;
constinit const rlk_implementation rms_norm_bwd_sm90 = implement<RmsNormBwd, run, nullptr, workspace>(kFacts);

}  // namespace rlk::cuda
