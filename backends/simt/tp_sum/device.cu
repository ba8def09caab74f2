// Launchers of the portable tp_sum kernels.
#include "simt/on_device.hpp"
#include "simt/tp_sum/kernels.hpp"
#include "simt/tp_sum/launchers.hpp"

namespace rlk::simt::tp_sum {

const char* run(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch(p, static_cast<hipStream_t>(stream)); });
}

const char* run(const Spread& p, void* stream, int device) {
  return on_device(device, [&] { launch(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::tp_sum
