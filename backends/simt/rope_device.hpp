// The rope kernels and their launchers, for the one file of a backend that its device compiler builds.
#pragma once

#include "rope_kv_kernel.hpp"
#include "rope_launchers.hpp"
#include "rope_table_math.hpp"

namespace rlk::simt::rope_kernel {

// The frequencies travel as a kernel argument: 2 KiB, read through the constant cache.
__global__ void __launch_bounds__(kThreads) build_tables(const RotaryTable t) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < t.rows * t.pairs) table_entry(t, i / t.pairs, static_cast<int>(i % t.pairs));
}

inline hipError_t launch_tables(const RotaryTable& t, hipStream_t stream) {
  const std::int64_t blocks = (t.rows * t.pairs + kThreads - 1) / kThreads;
  hipLaunchKernelGGL(build_tables, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, t);
  return hipGetLastError();
}

// Runs with the device current and puts back the caller's.
template <class Body>
const char* on_device(int device, Body&& body) {
  int before = device;
  hipError_t error = hipGetDevice(&before);
  if (error == hipSuccess && before != device) error = hipSetDevice(device);
  if (error == hipSuccess) error = body();
  if (before != device) static_cast<void>(hipSetDevice(before));
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

inline RopeLaunchers launchers() {
  return {[](const rotary::Geometry& g, void* stream, int device) {
            return on_device(device, [&] { return launch(g, static_cast<hipStream_t>(stream)); });
          },
          [](const rotary::KvGeometry& g, bool backward, void* stream, int device) {
            return on_device(device,
                             [&] { return launch_kv(g, backward, static_cast<hipStream_t>(stream)); });
          },
          [](const RotaryTable& t, void* stream, int device) {
            return on_device(device, [&] { return launch_tables(t, static_cast<hipStream_t>(stream)); });
          }};
}

}  // namespace rlk::simt::rope_kernel
