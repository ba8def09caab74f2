// Launchers of the logp kernels by Hopper's exponential.
#include "cuda/logp/kernels.hpp"
#include "cuda/logp/sm90_ex2.h"
#include "simt/on_device.hpp"

namespace rlk::cuda::logp {

const char* run_fold(const Problem& p, const Panel& panel, int leaves, State* states, float* targets,
                     void* stream, int device) {
  return simt::on_device(
      device, [&] { launch_fold(p, panel, leaves, states, targets, static_cast<hipStream_t>(stream)); });
}
const char* run_gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                         const State* states, void* stream, int device) {
  return simt::on_device(
      device, [&] { launch_gradient(p, panel, to, columns, states, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::cuda::logp
