// The host side of portable ops: backends/simt/<op>/ops.cpp, which CUDA and HIP compile each for itself.
//
// An op is three files and a line in portable.def:
//   launchers.hpp  the seam: plain data and functions, for the host compiler and the device compiler alike
//   device.cu      the kernels' launchers, compiled by nvcc and, as HIP, by clang
//   ops.cpp        `implementations`, from the typed arguments to the launchers
// One that is made of other ops' kernels alone is its ops.cpp.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rlk/backend.hpp"

namespace rlk::simt {

// The backend that this is compiled for.
#if defined(__HIP_PLATFORM_AMD__)
inline constexpr std::int32_t kDevice = kDLROCM;
inline constexpr const char* kId = "hip.simt";
#else
inline constexpr std::int32_t kDevice = kDLCUDA;
inline constexpr const char* kId = "cuda.simt";
#endif

#define RLK_PORTABLE(op)                                            \
  namespace op {                                                    \
  extern const std::span<const rlk_implementation> implementations; \
  }
#include "simt/portable.def"
#undef RLK_PORTABLE

// A backend's own implementations, then the portable ones, but before those of the same op that are tried later.
inline std::vector<const rlk_implementation*> with_portable(std::span<const rlk_implementation* const> own) {
  std::vector<const rlk_implementation*> all(own.begin(), own.end());
  const auto add = [&](const rlk_implementation& i) {
    const auto later = [&](const rlk_implementation* other) {
      return std::string_view(other->op) == i.op && other->priority < i.priority;
    };
    all.insert(std::find_if(all.begin(), all.end(), later), &i);
  };
#define RLK_PORTABLE(op) \
  for (const rlk_implementation& i : op::implementations) add(i);
#include "simt/portable.def"
#undef RLK_PORTABLE
  return all;
}

// The facts of a pinned portable kernel.
constexpr Facts portable_facts(const char* doc, const char* arithmetic, std::uint32_t dtypes = kFloats) {
  return {.id = kId,
          .doc = doc,
          .priority = 100,
          .arithmetic = arithmetic,
          .dtypes = dtypes,
          .traits = kPinned | RLK_CAPTURE_SAFE,
          .device_type = kDevice};
}

// A launcher's answer, which is null or the runtime's words, as that of a call.
inline rlk_code finished(const Call& call, const char* op, const char* error) {
  return error == nullptr ? RLK_OK : call.fail(RLK_BACKEND_ERROR, std::string(op) + ": " + error);
}

}  // namespace rlk::simt
