// Launchers of the portable embedding kernels.
#include "simt/embedding/kernels.hpp"
#include "simt/embedding/launchers.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::embedding {

std::int64_t backward_workspace(std::int64_t tokens, std::int64_t vocab) {
  return backward_bytes(tokens, vocab);
}

const char* run_forward(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const Problem& p, void* workspace, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, workspace, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::embedding
