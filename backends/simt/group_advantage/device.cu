// Launcher of the portable group_advantage kernel.
#include "simt/group_advantage/kernels.hpp"
#include "simt/group_advantage/launchers.hpp"
#include "simt/on_device.hpp"

namespace rlk::simt::group_advantage {

const char* run(const GroupProblem& p, void* stream, int device) {
  return on_device(device, [&] { launch(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::group_advantage
