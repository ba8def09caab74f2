// HIP for a machine without a GPU: every GPU thread is a fiber, so the portable kernels of backends/simt run
// in the tests, under ASan and UBSan too. For correctness, not for speed.
//
// A launch runs its blocks one after another on the calling thread. Inside a block each fiber runs until it
// ends or meets a barrier; a shuffle is a slot per lane and a barrier of the wave. What a GPU would leave to
// chance is made visible: dynamic shared memory starts as NaN and is an exact heap block (ASan sees an
// overrun), a barrier that not all threads reach stops the program with a message, and tests run kernels
// under several fiber orders and wave sizes, since a result that depends on either is a race.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#  include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#  include <ucontext.h>
#endif

#define RLK_FIBER 1
#ifndef RLK_FIBER_WAVE
#  define RLK_FIBER_WAVE 32
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3() = default;
  constexpr dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define RLK_FIBER_VECTOR(scalar, name)                                 \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };         \
  struct alignas(4 * sizeof(scalar)) name##4 { scalar x, y, z, w; };   \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; } \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
RLK_FIBER_VECTOR(float, float)
RLK_FIBER_VECTOR(int, int)
RLK_FIBER_VECTOR(unsigned, uint)
#undef RLK_FIBER_VECTOR

inline thread_local constinit dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace rlk_fiber {

enum class Order { ascending, descending, shuffled };

// Settings of the calling thread, for tests.
inline thread_local constinit int wave_size = RLK_FIBER_WAVE;
inline thread_local constinit int block_memory = 160 << 10;  // shared memory that a block may ask for
inline thread_local constinit Order order = Order::ascending;

inline constexpr std::size_t kStackBytes = std::size_t{256} << 10;

struct Fiber {
  void* stack = nullptr;
  dim3 index;
  bool done = false;
  unsigned shuffles = 0;
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
#endif
};

// A barrier counts arrivals against the threads still alive: a finished thread never holds the others up.
struct Barrier {
  unsigned alive = 0, arrived = 0, generation = 0;
  void release_if_full() {
    if (alive != 0 && arrived == alive) {
      arrived = 0;
      ++generation;
    }
  }
};

struct Wave {
  Barrier barrier;
  alignas(16) unsigned char slots[2][64][16];
  unsigned long long votes[2];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<unsigned> run_order;
  std::vector<Wave> waves;
  Barrier barrier;
  void* shared = nullptr;
  const std::function<void()>* body = nullptr;
  unsigned current = 0, stalled = 0;
  bool fresh = true;
  Fiber scheduler;
#if defined(__SANITIZE_ADDRESS__)
  const void* host_stack = nullptr;
  std::size_t host_stack_bytes = 0;
#endif

  ~Block() {
    for (Fiber& f : fibers) munmap(f.stack, kStackBytes);
  }
};

inline Block& block() {
  static thread_local Block b;
  return b;
}

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack pointer, loads the other side's. No system call, unlike
// swapcontext.
[[gnu::naked, gnu::noinline]] inline void swap_stacks(void** /*save: rdi*/, void* /*load: rsi*/) {
  asm volatile(
      "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
      "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
#endif

inline void swap(Fiber& from, Fiber& to, bool from_ends = false) {
#if defined(__SANITIZE_ADDRESS__)
  Block& b = block();
  const bool to_host = &to == &b.scheduler;
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack, to_host ? b.host_stack : to.stack,
                                 to_host ? b.host_stack_bytes : kStackBytes);
#endif
  (void)from_ends;
#if defined(__x86_64__)
  swap_stacks(&from.sp, to.sp);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

inline void entry() {
  Block& b = block();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &b.host_stack, &b.host_stack_bytes);
#endif
  Fiber& self = b.fibers[b.current];
  (*b.body)();
  self.done = true;
  Wave& wave = b.waves[b.current / unsigned(wave_size)];
  --wave.barrier.alive;
  wave.barrier.release_if_full();
  --b.barrier.alive;
  b.barrier.release_if_full();
  b.stalled = 0;
  swap(self, b.scheduler, true);
  std::abort();
}

inline void prepare(Fiber& f) {
  if (f.stack == nullptr) {
    f.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (f.stack == MAP_FAILED) std::abort();
    mprotect(f.stack, 4096, PROT_NONE);
  }
  f.done = false;
  f.shuffles = 0;
#if defined(__x86_64__)
  auto* top = reinterpret_cast<void**>(static_cast<char*>(f.stack) + kStackBytes) - 2;
  top[0] = reinterpret_cast<void*>(
      &entry);  // the return address of the first swap; then rsp % 16 == 8, as the ABI asks
  top[1] = nullptr;
  f.sp = static_cast<void*>(top - 6);
  std::memset(f.sp, 0, 6 * sizeof(void*));
#else
  getcontext(&f.context);
  f.context.uc_stack = {f.stack, 0, kStackBytes};
  makecontext(&f.context, &entry, 0);
#endif
}

inline void yield() {
  Block& b = block();
  Fiber& self = b.fibers[b.current];
  if (++b.stalled > 4 * b.fibers.size()) {
    std::fprintf(
        stderr,
        "fiber executor: block (%u,%u,%u) is stuck: not all threads reach the same barrier or shuffle\n",
        blockIdx.x, blockIdx.y, blockIdx.z);
    std::abort();
  }
  swap(self, b.scheduler);
}

inline void wait(Barrier& barrier) {
  Block& b = block();
  const unsigned generation = barrier.generation;
  ++barrier.arrived;
  b.stalled = 0;
  barrier.release_if_full();
  while (barrier.generation == generation) yield();
}

inline Wave& this_wave() {
  Block& b = block();
  return b.waves[b.current / unsigned(wave_size)];
}

inline void wave_barrier() { wait(this_wave().barrier); }

inline void* dynamic_shared() { return block().shared; }

// Two sets of slots in turn: a lane can be at most one shuffle ahead of the slowest reader, so one barrier is
// enough. A lane outside the group, or finished, answers with the caller's own value, as the hardware does.
template <class T, class Source>
T exchange(T v, Source source) {
  static_assert(sizeof(T) <= 16);
  Block& b = block();
  Wave& wave = this_wave();
  const unsigned lane = b.current % unsigned(wave_size);
  auto& slots = wave.slots[b.fibers[b.current].shuffles++ % 2];
  std::memcpy(slots[lane], &v, sizeof(T));
  wait(wave.barrier);
  const int from = source(int(lane));
  if (from < 0 || from >= wave_size) return v;
  std::memcpy(&v, slots[from], sizeof(T));
  return v;
}

inline unsigned long long ballot(bool predicate) {
  Block& b = block();
  Wave& wave = this_wave();
  auto& votes = wave.votes[b.fibers[b.current].shuffles++ % 2];
  if (wave.barrier.arrived == 0) votes = 0;
  votes |= static_cast<unsigned long long>(predicate) << (b.current % unsigned(wave_size));
  wait(wave.barrier);
  return votes;
}

inline void run_block(const std::function<void()>& body) {
  Block& b = block();
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  b.body = &body;
  b.barrier = Barrier{threads, 0, 0};
  b.stalled = 0;
  for (unsigned i = 0; i < threads; ++i) {
    Wave& wave = b.waves[i / unsigned(wave_size)];
    if (i % unsigned(wave_size) == 0) wave.barrier = Barrier{};
    ++wave.barrier.alive;
    b.fibers[i].index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y));
    prepare(b.fibers[i]);
  }
  while (b.barrier.alive != 0) {
    for (unsigned i : b.run_order) {
      if (b.fibers[i].done) continue;
      b.current = i;
      threadIdx = b.fibers[i].index;
      swap(b.scheduler, b.fibers[i]);
    }
  }
}

inline void launch_body(dim3 grid, dim3 threads, std::size_t shared_bytes,
                        const std::function<void()>& body) {
  Block& b = block();
  const unsigned count = threads.x * threads.y * threads.z;
  if (b.fibers.size() < count) b.fibers.resize(count);
  b.waves.resize((count + unsigned(wave_size) - 1) / unsigned(wave_size));
  b.run_order.resize(count);
  for (unsigned i = 0; i < count; ++i) b.run_order[i] = order == Order::descending ? count - 1 - i : i;
  if (order == Order::shuffled) {
    std::uint64_t state = 0x9e3779b97f4a7c15u;
    for (unsigned i = count; i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(b.run_order[i - 1], b.run_order[(state >> 33) % i]);
    }
  }
  gridDim = grid;
  blockDim = threads;
  b.shared = shared_bytes == 0 ? nullptr : std::aligned_alloc(16, (shared_bytes + 15) / 16 * 16);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        if (shared_bytes != 0) std::memset(b.shared, 0xff, shared_bytes);
        run_block(body);
      }
    }
  }
  std::free(b.shared);
  b.shared = nullptr;
}

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 threads, std::size_t shared_bytes, void* /*stream*/,
            A&&... args) {
  launch_body(grid, threads, shared_bytes, [&] { kernel(args...); });
}

}  // namespace rlk_fiber

#define hipLaunchKernelGGL(kernel, grid, threads, shared_bytes, stream, ...) \
  ::rlk_fiber::launch(kernel, dim3(grid), dim3(threads), shared_bytes, stream __VA_OPT__(, ) __VA_ARGS__)

#define warpSize (::rlk_fiber::wave_size)

inline void __syncthreads() { ::rlk_fiber::wait(::rlk_fiber::block().barrier); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __shfl(T v, int lane, int width = warpSize) {
  return ::rlk_fiber::exchange(v, [=](int self) { return self / width * width + lane % width; });
}
template <class T>
T __shfl_xor(T v, int mask, int width = warpSize) {
  return ::rlk_fiber::exchange(
      v, [=](int self) { return (self ^ mask) / width == self / width ? self ^ mask : -1; });
}
template <class T>
T __shfl_up(T v, unsigned delta, int width = warpSize) {
  return ::rlk_fiber::exchange(v,
                               [=](int self) { return self % width >= int(delta) ? self - int(delta) : -1; });
}
template <class T>
T __shfl_down(T v, unsigned delta, int width = warpSize) {
  return ::rlk_fiber::exchange(
      v, [=](int self) { return self % width + int(delta) < width ? self + int(delta) : -1; });
}
inline unsigned long long __ballot(int predicate) { return ::rlk_fiber::ballot(predicate != 0); }
inline int __any(int predicate) { return ::rlk_fiber::ballot(predicate != 0) != 0; }
inline int __all(int predicate) { return ::rlk_fiber::ballot(predicate == 0) == 0; }

// Fibers of a launch never run at once, so a plain update is atomic.
template <class T>
T atomicAdd(T* p, T v) {
  const T old = *p;
  *p = old + v;
  return old;
}
template <class T>
T atomicMax(T* p, T v) {
  const T old = *p;
  *p = std::max(old, v);
  return old;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

// The host calls that launchers make. Device memory is host memory, every call has finished when it returns.
using hipStream_t = void*;
enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1 };
enum hipMemcpyKind { hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice };
enum hipDeviceAttribute_t {
  hipDeviceAttributeMultiprocessorCount,
  hipDeviceAttributeMaxSharedMemoryPerBlock,
  hipDeviceAttributeSharedMemPerBlockOptin,
  hipDeviceAttributeWarpSize
};
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize };

inline hipError_t hipGetLastError() { return hipSuccess; }
inline hipError_t hipPeekAtLastError() { return hipSuccess; }
inline const char* hipGetErrorString(hipError_t e) { return e == hipSuccess ? "no error" : "invalid value"; }
inline const char* hipGetErrorName(hipError_t e) {
  return e == hipSuccess ? "hipSuccess" : "hipErrorInvalidValue";
}
inline hipError_t hipGetDevice(int* device) { return *device = 0, hipSuccess; }
inline hipError_t hipSetDevice(int) { return hipSuccess; }
inline hipError_t hipGetDeviceCount(int* count) { return *count = 1, hipSuccess; }
inline hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  *value = attribute == hipDeviceAttributeWarpSize                  ? warpSize
           : attribute == hipDeviceAttributeMaxSharedMemoryPerBlock ? 64 << 10
           : attribute == hipDeviceAttributeSharedMemPerBlockOptin  ? rlk_fiber::block_memory
                                                                    : 2;
  return hipSuccess;
}
inline hipError_t hipDeviceSynchronize() { return hipSuccess; }
inline hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }
template <class T>
hipError_t hipMalloc(T** p, std::size_t bytes) {
  return *p = static_cast<T*>(std::malloc(bytes)), hipSuccess;
}
inline hipError_t hipFree(void* p) { return std::free(p), hipSuccess; }
inline hipError_t hipMemcpy(void* to, const void* from, std::size_t bytes, hipMemcpyKind) {
  return std::memmove(to, from, bytes), hipSuccess;
}
inline hipError_t hipMemcpyAsync(void* to, const void* from, std::size_t bytes, hipMemcpyKind kind,
                                 hipStream_t = nullptr) {
  return hipMemcpy(to, from, bytes, kind);
}
inline hipError_t hipMemset(void* to, int value, std::size_t bytes) {
  return std::memset(to, value, bytes), hipSuccess;
}
inline hipError_t hipMemsetAsync(void* to, int value, std::size_t bytes, hipStream_t = nullptr) {
  return hipMemset(to, value, bytes);
}
template <class T>
hipError_t hipFuncSetAttribute(T, hipFuncAttribute, int) {
  return hipSuccess;
}
