// Launchers of the portable short_conv kernels.
#include "simt/on_device.hpp"
#include "simt/short_conv/kernels.hpp"
#include "simt/short_conv/launchers.hpp"

namespace rlk::simt::short_conv {

std::int64_t backward_workspace(const Problem& p) { return backward_bytes(p); }

const char* run_forward(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const Problem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, workspace, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::short_conv
