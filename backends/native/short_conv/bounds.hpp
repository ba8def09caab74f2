// What the native implementations of short_conv ask of packed sequences.
#pragma once

#include <string>

#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::native::short_conv {

// Bounds must start at 0, never fall, and end at T.
template <class Args>
rlk_code check_bounds(const Args& a, const Call& call) {
  if (!a.cu_seqlens) return RLK_OK;
  const auto* bounds = a.cu_seqlens.template data<std::int64_t>();
  const std::int64_t n = a.cu_seqlens.dim(0) - 1, tokens = a.x.dim(1);
  const auto fail = [&](std::int64_t i, const std::string& want) {
    return call.fail(RLK_INVALID_ARGUMENT, std::string(Args::kName) + ": cu_seqlens[" + std::to_string(i) +
                                               "] is " + std::to_string(bounds[i]) + ", expected " + want);
  };
  if (bounds[0] != 0) return fail(0, "0");
  for (std::int64_t i = 1; i <= n; ++i)
    if (bounds[i] < bounds[i - 1]) return fail(i, "at least " + std::to_string(bounds[i - 1]));
  return bounds[n] == tokens ? RLK_OK : fail(n, "T=" + std::to_string(tokens));
}

}  // namespace rlk::native::short_conv
