// Launchers of the logp kernels by Hopper's exponential.
#include "cuda/logp/kernels.hpp"
#include "cuda/logp/sm90_ex2.h"
#include "simt/on_device.hpp"

namespace rlk::cuda::logp {
namespace {

// Sums of the leaves, then what logp's portable kernels make of them.
const char* run_sums(const Problem& p, void* states, void* stream, int device) {
  const char* error =
      simt::on_device(device, [&] { launch_sums(p, states, static_cast<hipStream_t>(stream)); });
  if (error != nullptr) return error;
  return simt::logp::run_finish(p, static_cast<State*>(states), nullptr, stream, device);
}

}  // namespace

const char* run_forward(const Problem& p, void* states, void* stream, int device) {
  return run_sums(p, states, stream, device);
}
const char* run_backward(const Problem& p, void* states, void* stream, int device) {
  if (!p.given)
    if (const char* error = run_sums(p, states, stream, device)) return error;
  return simt::on_device(device, [&] { launch_gradients(p, states, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::cuda::logp
