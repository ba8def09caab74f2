// Launchers of the portable rope kernels, and the kernel that builds tables.
#include "arithmetic/rope/table_math.hpp"
#include "simt/on_device.hpp"
#include "simt/rope/kv_kernel.hpp"
#include "simt/rope/launchers.hpp"

namespace rlk::simt::rope {
namespace {

// The frequencies travel as a kernel argument: 2 KiB, read through the constant cache.
__global__ void __launch_bounds__(kThreads) build_tables(const rotary::RotaryTable t) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < t.rows * t.pairs) table_entry(t, i / t.pairs, static_cast<int>(i % t.pairs));
}

hipError_t launch_tables(const rotary::RotaryTable& t, hipStream_t stream) {
  const std::int64_t blocks = (t.rows * t.pairs + kThreads - 1) / kThreads;
  hipLaunchKernelGGL(build_tables, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, t);
  return hipGetLastError();
}

}  // namespace

const char* run_rotate(const rotary::Geometry& g, void* stream, int device) {
  return on_device(device, [&] { return launch(g, static_cast<hipStream_t>(stream)); });
}
const char* run_split(const rotary::KvGeometry& g, bool backward, void* stream, int device) {
  return on_device(device, [&] { return launch_kv(g, backward, static_cast<hipStream_t>(stream)); });
}
const char* run_tables(const rotary::RotaryTable& t, void* stream, int device) {
  return on_device(device, [&] { return launch_tables(t, static_cast<hipStream_t>(stream)); });
}

}  // namespace rlk::simt::rope
