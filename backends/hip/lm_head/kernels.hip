// The lm_head kernels for AMD GPUs: portable chains, and matrix cores where a GPU has those that we know.
#include "simt/lm_head/mfma.hpp"
#include "simt/on_device.hpp"

namespace rlk::hip {

simt::lm_head::Launcher lm_head_portable();

namespace {

const char* launch(const simt::lm_head::Product& p, simt::lm_head::Sum sum, void* stream, int device) {
  return simt::on_device(device, [&] {
    const auto queue = static_cast<hipStream_t>(stream);
    return sum == simt::lm_head::Sum::mfma ? simt::lm_head::launch_mfma(p, queue)
                                           : simt::lm_head::launch(p, sum, queue);
  });
}

}  // namespace

simt::lm_head::Launcher lm_head_portable() { return &launch; }

}  // namespace rlk::hip
