// Launchers of the portable sample kernels.
#include "simt/on_device.hpp"
#include "simt/sample/kernels.hpp"
#include "simt/sample/launchers.hpp"

namespace rlk::simt::sample {

const char* run(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch(p, static_cast<hipStream_t>(stream)); });
}

const char* run_part(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_part(p, static_cast<hipStream_t>(stream)); });
}
const char* run_merge(const MergeProblem& p, void* stream, int device) {
  return on_device(device, [&] { launch_merge(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::sample
