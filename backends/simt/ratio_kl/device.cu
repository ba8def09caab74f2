// Launchers of the portable ratio_kl kernels.
#include "simt/on_device.hpp"
#include "simt/ratio_kl/kernels.hpp"
#include "simt/ratio_kl/launchers.hpp"

namespace rlk::simt::ratio_kl {

const char* run_forward(const RatioProblem& p, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const RatioProblem& p, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::ratio_kl
