// Launcher of linear's products: the portable chains of lm_head.
#include "simt/linear/kernels.hpp"
#include "simt/linear/launchers.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::linear {

const char* run(const Product& p, void* stream, int device) {
  return on_device(device, [&] { return launch(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::linear
