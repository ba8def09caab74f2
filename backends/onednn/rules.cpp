#include "rules.hpp"

#include <cmath>

#include "rlk/half.hpp"

#if defined(__x86_64__)
#  include <xmmintrin.h>
#endif

namespace rlk::onednn {
namespace {

constexpr unsigned kDefault = 0x1f80;
constexpr unsigned kFlushing = 0x9fc0;  // subnormal results and inputs are zero

unsigned get_mode() {
#if defined(__x86_64__)
  return _mm_getcsr();
#else
  return 0;
#endif
}
void set_mode([[maybe_unused]] unsigned mode) {
#if defined(__x86_64__)
  _mm_setcsr(mode);
#endif
}

float kb1024(const float* a, const float* b, std::int64_t depth) {
  float total = 0;
  for (std::int64_t first = 0; first < depth; first += 1024) {
    float sum = 0;
    for (std::int64_t k = first; k < depth && k < first + 1024; ++k) sum = std::fma(a[k], b[k], sum);
    total = first == 0 ? sum : total + sum;
  }
  return total;
}

template <float (*Up)(std::uint16_t)>
float k32(const std::uint16_t* a, const std::uint16_t* b, std::int64_t depth) {
  const auto at = [depth](const std::uint16_t* x, std::int64_t k) { return k < depth ? Up(x[k]) : 0.0f; };
  float total = 0;
  for (std::int64_t first = 0; first < depth; first += 32) {
    float even = 0;
    float odd = 0;
    for (std::int64_t k = first; k < first + 32; k += 2) {
      even = std::fma(at(a, k), at(b, k), even);
      odd = std::fma(at(a, k + 1), at(b, k + 1), odd);
    }
    total += even + odd;
  }
  return total;
}

float up_bf16(std::uint16_t x) { return bf16_to_float(x); }
float up_f16(std::uint16_t x) { return f16_to_float(x); }

}  // namespace

DefaultFloatMode::DefaultFloatMode() noexcept : saved_(get_mode()) { set_mode(kDefault); }
DefaultFloatMode::~DefaultFloatMode() { set_mode(saved_); }

float rule(Type type, const void* a, const void* b, std::int64_t depth) {
  const DefaultFloatMode mode;
  if (type == Type::f32) return kb1024(static_cast<const float*>(a), static_cast<const float*>(b), depth);
  set_mode(kFlushing);
  const auto* x = static_cast<const std::uint16_t*>(a);
  const auto* y = static_cast<const std::uint16_t*>(b);
  return type == Type::bf16 ? k32<up_bf16>(x, y, depth) : k32<up_f16>(x, y, depth);
}

void fill(Type type, void* data, std::int64_t count, std::uint32_t seed) {
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const std::uint32_t r = state >> 8;  // the low bits of such a generator are not random
    if (type == Type::f32)               // 2^-2 .. 2^1, 20 random fraction bits
      static_cast<std::uint32_t*>(data)[i] =
          (r & 1u) << 31 | (125u + (r >> 1 & 3u)) << 23 | (r >> 3 & 0xfffffu) << 3;
    else if (type == Type::bf16)
      static_cast<std::uint16_t*>(data)[i] =
          static_cast<std::uint16_t>((r & 1u) << 15 | (125u + (r >> 1 & 3u)) << 7 | (r >> 3 & 0x7fu));
    else
      static_cast<std::uint16_t*>(data)[i] =
          static_cast<std::uint16_t>((r & 1u) << 15 | (13u + (r >> 1 & 3u)) << 10 | (r >> 3 & 0x3ffu));
  }
}

}  // namespace rlk::onednn
