// What the native implementations of the KDA ops share: workers with their own piece of the workspace.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "../simt/kda_bind.hpp"

namespace rlk::kda {

inline constexpr std::uint32_t kTypes = RLK_F32 | RLK_BF16 | RLK_F16;
inline constexpr std::uint32_t kTraits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT;

// Threads worth having; the number changes speed and workspace, never a bit.
inline std::int64_t workers_for(std::int32_t threads, std::int64_t tasks) {
  const std::int64_t all = threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
  return std::max<std::int64_t>(1, std::min({all, tasks, std::int64_t{256}}));
}

inline std::uint64_t line(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Workspace of a call: `shared` bytes, then one scratch per worker.
inline std::uint64_t workspace_for(std::int32_t threads, std::int64_t tasks, std::uint64_t scratch,
                                   std::uint64_t shared = 0) {
  return 64 + line(shared) + static_cast<std::uint64_t>(workers_for(threads, tasks)) * line(scratch);
}

// run(task, scratch) for every task, workers taking the next task when they are free.
template <class Run>
void run_tasks(const Call& call, std::int64_t tasks, std::uint64_t scratch, std::uint64_t shared, Run run) {
  std::byte* base = call.workspace().data();
  base += (64 - reinterpret_cast<std::uintptr_t>(base) % 64) % 64 + line(shared);
  std::atomic<std::int64_t> next{0};
  call.parallel_for(workers_for(call.threads(), tasks), [&](std::int64_t worker) {
    std::byte* mine = base + static_cast<std::uint64_t>(worker) * line(scratch);
    for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(task, mine);
  });
}

inline double* shared_part(const Call& call) {
  std::byte* base = call.workspace().data();
  return reinterpret_cast<double*>(base + (64 - reinterpret_cast<std::uintptr_t>(base) % 64) % 64);
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

}  // namespace rlk::kda
