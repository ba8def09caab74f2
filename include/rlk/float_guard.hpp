// The caller's floating-point environment must not reach the bits: flush-to-zero, denormals-are-zero and
// rounding mode live in a thread's control register, and other libraries switch them on behind everybody's
// back.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && !defined(__HIP_DEVICE_COMPILE__)
#  include <xmmintrin.h>
#endif

namespace rlk {

// While it lives, the thread computes with IEEE defaults: nearest even, subnormals kept, exceptions masked.
// Reading the register costs under 1 ns; writing it only happens when somebody had changed it.
class FloatGuard {
 public:
#if defined(__x86_64__) && !defined(__HIP_DEVICE_COMPILE__)
  FloatGuard() noexcept : before_(_mm_getcsr()) {
    if ((before_ & ~kFlags) != kDefault) [[unlikely]]
      _mm_setcsr(kDefault);
  }
  ~FloatGuard() {
    if ((before_ & ~kFlags) != kDefault) [[unlikely]]
      _mm_setcsr(before_);
  }
  // For threads of our own: they inherit the register of whoever created them.
  static void reset() noexcept { _mm_setcsr(kDefault); }

 private:
  static constexpr uint32_t kFlags = 0x3f, kDefault = 0x1f80;
  uint32_t before_;
#elif defined(__aarch64__)
  FloatGuard() noexcept {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if (before_) [[unlikely]]
      set(0);
  }
  ~FloatGuard() {
    if (before_) [[unlikely]]
      set(before_);
  }
  static void reset() noexcept { set(0); }

 private:
  static void set(uint64_t value) noexcept { asm volatile("msr fpcr, %0" ::"r"(value)); }
  uint64_t before_ = 0;
#else
  FloatGuard() noexcept = default;
  ~FloatGuard() {}
  static void reset() noexcept {}
#endif
 public:
  FloatGuard(const FloatGuard&) = delete;
  FloatGuard& operator=(const FloatGuard&) = delete;
};

}  // namespace rlk
