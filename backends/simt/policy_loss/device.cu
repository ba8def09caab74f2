// Launchers of the portable policy_loss kernels.
#include "simt/on_device.hpp"
#include "simt/policy_loss/kernels.hpp"
#include "simt/policy_loss/launchers.hpp"

namespace rlk::simt::policy_loss {

std::int64_t workspace_of(const PolicyProblem& p) { return workspace_bytes(p.sequences); }

const char* run_forward(const PolicyProblem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, workspace, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const FactorProblem& p, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, static_cast<hipStream_t>(stream)); });
}
const char* run_reduce(const Weighting& w, const float* totals, std::int64_t sequences, float* loss,
                       float* metrics, void* stream, int device) {
  return on_device(
      device, [&] { launch_reduce(w, totals, sequences, loss, metrics, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::policy_loss
