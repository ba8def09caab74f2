// What the native implementations of the KDA ops share: workers with their own piece of the workspace.
#pragma once

#include <string>

#include "arithmetic/kda/bind.hpp"
#include "rlk/workers.hpp"

namespace rlk::native::kda {

inline constexpr std::uint32_t kTypes = RLK_F32 | RLK_BF16 | RLK_F16;
inline constexpr std::uint32_t kTraits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT;

using workers::line;
using workers::run_tasks;
using workers::workers_for;
using workers::workspace_for;

inline double* shared_part(const Call& call) {
  return reinterpret_cast<double*>(workers::shared_workspace(call));
}

// Bounds of packed sequences must start at 0, never fall, and end at T.
template <class Args>
rlk_code check_bounds(const Args& a, const Call& call) {
  if (!a.cu_seqlens) return RLK_OK;
  const auto* bounds = a.cu_seqlens.template data<std::int64_t>();
  const std::int64_t n = a.cu_seqlens.dim(0) - 1, tokens = a.q.dim(1);
  const auto fail = [&](std::int64_t i, const std::string& want) {
    return call.fail(RLK_INVALID_ARGUMENT, std::string(Args::kName) + ": cu_seqlens[" + std::to_string(i) +
                                               "] is " + std::to_string(bounds[i]) + ", expected " + want);
  };
  if (bounds[0] != 0) return fail(0, "0");
  for (std::int64_t i = 1; i <= n; ++i) {
    if (bounds[i] < bounds[i - 1]) return fail(i, "at least " + std::to_string(bounds[i - 1]));
  }
  if (bounds[n] != tokens) return fail(n, "T=" + std::to_string(tokens));
  return RLK_OK;
}

}  // namespace rlk::native::kda
