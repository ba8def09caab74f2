// Launchers of the portable sample kernels.
#include "simt/on_device.hpp"
#include "simt/sample/kernels.hpp"
#include "simt/sample/launchers.hpp"

namespace rlk::simt::sample {

std::int64_t workspace_bytes(const Problem& p) {
  return takes_leaves(p) ? p.rows * static_cast<std::int64_t>(sizeof(RowRoom)) : 0;
}
const char* run(const Problem& p, void* workspace, void* stream, int device) {
  const auto rooms = takes_leaves(p) ? static_cast<RowRoom*>(workspace) : nullptr;
  return on_device(device, [&] { launch(p, rooms, static_cast<hipStream_t>(stream)); });
}

const char* run_part(const Problem& p, void* stream, int device) {
  return on_device(device, [&] { launch_part(p, static_cast<hipStream_t>(stream)); });
}
const char* run_merge(const MergeProblem& p, void* stream, int device) {
  return on_device(device, [&] { launch_merge(p, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::sample
