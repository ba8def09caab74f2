// Launchers of the portable logp kernels.
#include "simt/logp/kernels.hpp"
#include "simt/logp/launchers.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::logp {

const char* run_forward(const Problem& p, void* states, void* stream, int device) {
  return on_device(device, [&] { launch_reduction(p, states, static_cast<hipStream_t>(stream)); });
}
const char* run_backward(const Problem& p, void* states, void* stream, int device) {
  return on_device(device, [&] { launch_backward(p, states, static_cast<hipStream_t>(stream)); });
}
const char* run_merge(const Merge& m, void* stream, int device) {
  return on_device(device, [&] { launch_merge(m, static_cast<hipStream_t>(stream)); });
}
const char* run_fold(const Problem& p, const Panel& panel, State* states, float* targets, void* stream,
                     int device) {
  return on_device(device,
                   [&] { launch_fold(p, panel, 1, states, targets, static_cast<hipStream_t>(stream)); });
}
const char* run_finish(const Problem& p, State* states, const float* targets, void* stream, int device) {
  return on_device(device, [&] { launch_finish(p, states, targets, static_cast<hipStream_t>(stream)); });
}
const char* run_count(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_count(p, static_cast<hipStream_t>(stream)); });
}
const char* run_gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                         const State* states, void* stream, int device) {
  return on_device(device,
                   [&] { launch_gradient(p, panel, to, columns, states, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::logp
