// Workers for a CPU backend's tasks: each with its own part of the call's workspace, taking the next task
// when free.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "rlk/backend.hpp"
#include "rlk/machine.hpp"

namespace rlk::workers {

// Threads worth having; the number changes speed and workspace, never a bit.
inline std::int64_t workers_for(std::int32_t threads, std::int64_t tasks) {
  const std::int64_t all = threads > 0 ? threads : processors();
  return std::max<std::int64_t>(1, std::min({all, tasks, std::int64_t{256}}));
}

inline std::uint64_t line(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Workspace of a call: `shared` bytes, then one scratch per worker.
inline std::uint64_t workspace_for(std::int32_t threads, std::int64_t tasks, std::uint64_t scratch,
                                   std::uint64_t shared = 0) {
  return 64 + line(shared) + static_cast<std::uint64_t>(workers_for(threads, tasks)) * line(scratch);
}

// The shared part at the start of the workspace, on a cache line.
inline std::byte* shared_workspace(const Call& call) {
  std::byte* base = call.workspace().data();
  return base + (64 - reinterpret_cast<std::uintptr_t>(base) % 64) % 64;
}

struct Plain {};

// run(task, scratch) for every task, workers taking the next task when they are free; a Mode lives as long as
// its worker.
template <class Mode = Plain, class Run>
void run_tasks(const Call& call, std::int64_t tasks, std::uint64_t scratch, std::uint64_t shared, Run run) {
  std::byte* base = shared_workspace(call) + line(shared);
  std::atomic<std::int64_t> next{0};
  call.parallel_for(workers_for(call.threads(), tasks), [&](std::int64_t worker) {
    [[maybe_unused]] const Mode mode;
    std::byte* mine = base + static_cast<std::uint64_t>(worker) * line(scratch);
    for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(task, mine);
  });
}

}  // namespace rlk::workers
