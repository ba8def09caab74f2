// Launcher of linear's products: the portable chains of lm_head.
#include "simt/linear/launchers.hpp"
#include "simt/lm_head/kernel.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::linear {

const char* run(const Product& p, Sum sum, void* stream, int device) {
  return on_device(device, [&] { return lm_head::launch(p, sum, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::linear
