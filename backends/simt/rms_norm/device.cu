// Launchers of the portable rms_norm kernels.
#include "simt/on_device.hpp"
#include "simt/rms_norm/kernels.hpp"
#include "simt/rms_norm/launchers.hpp"

namespace rlk::simt::rms_norm {

std::int64_t backward_workspace(const Problem& p) { return backward_bytes(p); }

const char* run_forward(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const Problem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, workspace, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::rms_norm
