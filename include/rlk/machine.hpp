// What CPU code asks of the machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

#if defined(__linux__)
#  include <sched.h>
#  include <sys/mman.h>
#endif

namespace rlk {

// How many CPUs' time the process's cgroup and those above it grant, the least of them; infinite where none
// has a quota. Both versions of cgroups. In a container the path may be the host's and not there to read; the
// mount's top is then the container's own group. `root` stands before /proc and /sys.
inline double cpu_quota(const std::string& root = {}) {
  double least = std::numeric_limits<double>::infinity();
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string id, controllers, path;
       std::getline(std::getline(groups, id, ':'), controllers, ':') && std::getline(groups, path);) {
    const bool unified = controllers.empty();  // version 2
    if (!unified && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string mount = root + (unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
    for (;;) {
      const std::string group = mount + path;
      double quota = 0, period = 0;
      if (unified)
        std::ifstream(group + "/cpu.max") >> quota >> period;  // "max 100000" leaves 0
      else
        std::ifstream(group + "/cpu.cfs_quota_us") >> quota,
            std::ifstream(group + "/cpu.cfs_period_us") >> period;
      if (quota > 0 && period > 0) least = std::min(least, quota / period);
      const std::size_t above = path.rfind('/');
      if (above == std::string::npos) break;
      path.resize(above);
    }
  }
  return least;
}

// CPUs this process may use: taskset or a container can make them fewer than the machine has, and beyond a
// quota threads would only be stopped in turn. Asked once: a call and the workspace computed for it must see
// one number.
inline std::int32_t processors() {
  static const std::int32_t count = [] {
    int all = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) all = CPU_COUNT(&set);
#endif
    return std::max(1, static_cast<int>(std::min<double>(all, std::ceil(cpu_quota()))));
  }();
  return count;
}

// Memory on a page, to be freed with std::free; null when there is none. From 2 MiB on on large pages where
// the system has them: rows that lie a power of two apart then share the places of the second-level cache
// evenly, which on small pages is luck, and a matrix that is read once is not looked up anew every 4 KiB.
inline void* allocate(std::size_t bytes) noexcept {
  constexpr std::size_t kSmall = 4096, kLarge = std::size_t{2} << 20;
  const std::size_t page = bytes < kLarge ? kSmall : kLarge, size = (bytes + page - 1) / page * page;
  void* memory = std::aligned_alloc(page, size);
#if defined(__linux__)
  if (memory != nullptr && page == kLarge) madvise(memory, size, MADV_HUGEPAGE);
#endif
  return memory;
}

}  // namespace rlk
