// Launchers of the portable KDA kernels.
#include "simt/kda/kernels.hpp"
#include "simt/kda/launchers.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::kda {

std::int64_t forward_workspace(const Problem& p) { return forward_bytes(p); }
std::int64_t backward_workspace(const Problem& p) { return backward_bytes(p); }
std::int64_t step_workspace(const Step& p) { return step_bytes(p); }
std::int64_t gate_backward_workspace(const Problem& p) { return gate_backward_bytes(p); }

const char* run_forward(const Problem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, workspace, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const Problem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, workspace, static_cast<hipStream_t>(stream)); });
}
const char* run_decode(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_decode(p, static_cast<hipStream_t>(stream)); });
}
const char* run_step(const Step& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_step(p, workspace, static_cast<hipStream_t>(stream)); });
}
const char* run_gate(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_gate(p, static_cast<hipStream_t>(stream)); });
}
const char* run_gate_backward(const Problem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_gate_backward(p, workspace, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::kda
