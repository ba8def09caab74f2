// Launchers of the portable swiglu kernels.
#include "simt/on_device.hpp"
#include "simt/swiglu/kernels.hpp"
#include "simt/swiglu/launchers.hpp"

namespace rlk::simt::swiglu {

const char* run_forward(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::swiglu
