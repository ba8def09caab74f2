// Loads and stores that order memory among GPUs of one host, or among threads that run fibers.
#pragma once

#include "simt/simt.hpp"

#if defined(RLK_FIBER)
#  include <sched.h>

#  include <atomic>
#  include <chrono>
#endif

namespace rlk::peers {

struct alignas(16) Word4 {
  std::uint32_t word[4];
};

// All that this thread, and by a barrier its block, wrote before is there before the flag is.
__device__ __forceinline__ void raise(std::uint32_t* flag, std::uint32_t value) {
#if defined(RLK_FIBER)
  std::atomic_ref(*flag).store(value, std::memory_order_release);
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#endif
}

__device__ __forceinline__ std::uint32_t seen(const std::uint32_t* flag) {
#if defined(RLK_FIBER)
  return std::atomic_ref(*const_cast<std::uint32_t*>(flag)).load(std::memory_order_acquire);
#else
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
#endif
}

// Two elements, each beside its number; eight bytes arrive as one.
__device__ __forceinline__ void put_words(void* to, Word4 v) {
#if defined(RLK_FIBER)
  auto* at = static_cast<std::uint64_t*>(to);
  for (int k = 0; k < 2; ++k)
    std::atomic_ref(at[k]).store(v.word[2 * k] | std::uint64_t{v.word[2 * k + 1]} << 32,
                                 std::memory_order_relaxed);
#else
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#endif
}
__device__ __forceinline__ Word4 get_words(const void* from) {
  Word4 v;
#if defined(RLK_FIBER)
  auto* at = const_cast<std::uint64_t*>(static_cast<const std::uint64_t*>(from));
  for (int k = 0; k < 2; ++k) {
    const std::uint64_t two = std::atomic_ref(at[k]).load(std::memory_order_relaxed);
    v.word[2 * k] = static_cast<std::uint32_t>(two),
               v.word[2 * k + 1] = static_cast<std::uint32_t>(two >> 32);
  }
#else
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
#endif
  return v;
}

// Sixteen bytes that another GPU wrote: past the cache of this multiprocessor.
__device__ __forceinline__ Word4 fresh(const void* from) {
#if defined(RLK_FIBER)
  return *static_cast<const Word4*>(from);
#else
  Word4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
  return v;
#endif
}

__device__ __forceinline__ std::uint64_t now() {
#if defined(RLK_FIBER)
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#else
  std::uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
#endif
}

// Patience with a rank: a kernel that waits in vain says for whom and fails, so that no rank hangs.
class Patience {
 public:
  __device__ Patience(std::uint64_t nanoseconds, std::uint32_t* late, int from)
      : nanoseconds_(nanoseconds), late_(late), from_(from) {}

  __device__ __forceinline__ void pass() {
#if defined(RLK_FIBER)
    rlk_fiber::block().stalled = 0;  // another rank's thread goes on
    rlk_fiber::yield();
    sched_yield();
#endif
    if (++passed_ % kLook != 0) return;
    const std::uint64_t t = now();
    if (began_ == 0) began_ = t;
    if (t - began_ > nanoseconds_) give_up();
  }

 private:
  static constexpr std::uint32_t kLook = 1024;

  __device__ void give_up() {
    raise(late_, 1 + static_cast<std::uint32_t>(from_));
#if defined(RLK_FIBER)
    std::abort();
#else
    __threadfence_system();
    asm volatile("trap;");
#endif
  }

  std::uint64_t nanoseconds_, began_ = 0;
  std::uint32_t* late_;
  int from_;
  std::uint32_t passed_ = 0;
};

}  // namespace rlk::peers
