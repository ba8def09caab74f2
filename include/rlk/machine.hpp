// What CPU code asks of the machine.
#pragma once

#include <cstddef>
#include <cstdlib>

#if defined(__linux__)
#  include <sys/mman.h>
#endif

namespace rlk {

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
