// Launcher of the portable qk_norm_rope kernel.
#include "simt/on_device.hpp"
#include "simt/qk_norm_rope/kernels.hpp"
#include "simt/qk_norm_rope/launchers.hpp"

namespace rlk::simt::qk_norm_rope {

const char* run_forward(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_forward(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::qk_norm_rope
