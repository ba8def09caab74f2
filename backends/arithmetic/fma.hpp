// fused and root of host code; the instruction where the processor has it, though the code around is compiled for those
// that lack it: a call of the C library for each fused multiply-add would be most of the time of such code.
#pragma once

#include "arithmetic/half.hpp"

#if defined(__FMA__)
#  include <immintrin.h>
#endif

namespace rlk::simt {

// Four lanes are what every 64-bit processor has.
typedef float Float4 __attribute__((vector_size(16)));

#if defined(__x86_64__) && !defined(__FMA__)
RLK_HD float fused(float a, float b, float c) {
  if (!__builtin_cpu_supports("fma")) return __builtin_fmaf(a, b, c);
  __asm__("vfmadd231ss %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
}
RLK_HD double fused(double a, double b, double c) {
  if (!__builtin_cpu_supports("fma")) return __builtin_fma(a, b, c);
  __asm__("vfmadd231sd %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
}
RLK_HD Float4 fused(Float4 a, Float4 b, Float4 c) {
  if (__builtin_cpu_supports("fma")) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
    return c;
  }
  for (int l = 0; l < 4; ++l) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
}
#else
RLK_HD float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
RLK_HD double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
RLK_HD Float4 fused(Float4 a, Float4 b, Float4 c) {
  for (int l = 0; l < 4; ++l) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
}
#endif
RLK_HD float root(float x) { return __builtin_sqrtf(x); }
RLK_HD double root(double x) { return __builtin_sqrt(x); }

}  // namespace rlk::simt
