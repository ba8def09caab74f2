// Launchers of the portable logp kernels.
#include "simt/logp/kernels.hpp"
#include "simt/logp/launchers.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::logp {

const char* run_forward(const Problem& p, void* states, void* stream, int device) {
  return on_device(device, [&] { launch_reduction(p, states, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const Problem& p, void* states, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, states, static_cast<hipStream_t>(stream)); });
}
const char* run_merge(const Merge& m, void* stream, int device) {
  return on_device(device, [&] { launch_merge(m, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::logp
