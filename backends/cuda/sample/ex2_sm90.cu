// Launchers of what sample has beside its portable kernels and logp's by Hopper's exponential.
#include "cuda/sample/kernels.hpp"
#include "cuda/sample/sm90_ex2.h"
#include "simt/on_device.hpp"

namespace rlk::cuda::sample {

const char* run_note(const Problem& p, const Sums& sums, void* stream, int device) {
  return simt::on_device(device, [&] { launch_note(p, sums, static_cast<hipStream_t>(stream)); });
}
const char* run_finish(const Problem& p, const Sums& sums, void* stream, int device) {
  return simt::on_device(device, [&] { launch_finish(p, sums, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::cuda::sample
