// Launchers of the logp kernels by Hopper's exponential.
#include "cuda/logp/kernels.hpp"
#include "cuda/logp/sm90_ex2.h"
#include "simt/on_device.hpp"

namespace rlk::cuda::logp {

const char* run_sums(const Problem& p, void* states, void* stream, int device) {
  return simt::on_device(device, [&] { launch_sums(p, states, static_cast<hipStream_t>(stream)); });
}
const char* run_gradients(const Problem& p, void* states, void* stream, int device) {
  return simt::on_device(device, [&] { launch_gradients(p, states, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::cuda::logp
