// Launchers of the portable attention kernels.
#include "simt/attention/backward.hpp"
#include "simt/attention/kernels.hpp"
#include "simt/attention/launchers.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::attention {

std::int64_t forward_workspace(const Problem& p) { return workspace_bytes_of(p); }

const char* run_forward(const Problem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, workspace, static_cast<hipStream_t>(stream)); });
}

const char* run_part(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_part(p, static_cast<hipStream_t>(stream)); });
}

const char* run_merge(const Merge& g, void* stream, int device) {
  return on_device(device, [&] { launch_merge(g, static_cast<hipStream_t>(stream)); });
}

std::int64_t backward_workspace(const Backward& g) { return backward_bytes_of(g); }

const char* run_backward(const Backward& g, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_backward(g, workspace, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::attention
