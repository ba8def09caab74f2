#include "onednn/rules.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "onednn/wide.hpp"
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

// row[depth] against columns[depth][kPanel] in one chain, and by amx/k32.
[[gnu::always_inline]] inline void chain_loop(const float* row, const float* columns, std::int64_t depth,
                                              float* sums) {
  for (std::int64_t j = 0; j < kPanel; ++j) sums[j] = 0;
  for (std::int64_t k = 0; k < depth; ++k, columns += kPanel)
    for (std::int64_t j = 0; j < kPanel; ++j) sums[j] = __builtin_fmaf(row[k], columns[j], sums[j]);
}

[[gnu::always_inline]] inline void pairs_loop(const float* row, const float* columns, std::int64_t depth,
                                              float* sums) {
  for (std::int64_t j = 0; j < kPanel; ++j) sums[j] = 0;
  for (std::int64_t first = 0; first < depth; first += 32) {
    float halves[2][kPanel] = {};
    for (std::int64_t k = first; k < std::min(first + 32, depth); ++k) {
      float* half = halves[(k - first) % 2];
      for (std::int64_t j = 0; j < kPanel; ++j)
        half[j] = __builtin_fmaf(row[k], columns[k * kPanel + j], half[j]);
    }
    for (std::int64_t j = 0; j < kPanel; ++j) sums[j] += halves[0][j] + halves[1][j];
  }
}

// Of each pair the odd position first. Of -0 the zeros behind K make +0.
[[gnu::always_inline]] inline void odd_first_loop(const float* row, const float* columns, std::int64_t depth,
                                                  float* sums) {
  for (std::int64_t j = 0; j < kPanel; ++j) sums[j] = 0;
  for (std::int64_t k = 0; k < (depth + 31) / 32 * 32; k += 2)
    for (const std::int64_t i : {k + 1, k})
      if (i < depth)
        for (std::int64_t j = 0; j < kPanel; ++j)
          sums[j] = __builtin_fmaf(row[i], columns[i * kPanel + j], sums[j]);
      else
        for (std::int64_t j = 0; j < kPanel; ++j) sums[j] += 0.f;
}

using Loop = void (*)(const float*, const float*, std::int64_t, float*);
void chain_anywhere(const float* row, const float* columns, std::int64_t depth, float* sums) {
  chain_loop(row, columns, depth, sums);
}
void pairs_anywhere(const float* row, const float* columns, std::int64_t depth, float* sums) {
  pairs_loop(row, columns, depth, sums);
}

void odd_first_anywhere(const float* row, const float* columns, std::int64_t depth, float* sums) {
  odd_first_loop(row, columns, depth, sums);
}

// Without the instruction a fused multiply-add is a call of the C library, 50 times slower: the check of a
// product would be noticed.
#if defined(__x86_64__)
[[gnu::target("avx2,fma"), gnu::optimize("O3")]] void chain_fused(const float* row, const float* columns,
                                                                  std::int64_t depth, float* sums) {
  chain_loop(row, columns, depth, sums);
}
[[gnu::target("avx2,fma"), gnu::optimize("O3")]] void pairs_fused(const float* row, const float* columns,
                                                                  std::int64_t depth, float* sums) {
  pairs_loop(row, columns, depth, sums);
}
[[gnu::target("avx2,fma"), gnu::optimize("O3")]] void odd_first_fused(const float* row, const float* columns,
                                                                      std::int64_t depth, float* sums) {
  odd_first_loop(row, columns, depth, sums);
}
const bool kFused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
const Loop chain = kFused ? chain_fused : chain_anywhere, pair_chains = kFused ? pairs_fused : pairs_anywhere,
           odd_first = kFused ? odd_first_fused : odd_first_anywhere;
#else
constexpr Loop chain = chain_anywhere, pair_chains = pairs_anywhere, odd_first = odd_first_anywhere;
#endif

// In blocks; chains that flush leave the sum of their sums alone.
void chains(Loop one, const float* row, const float* columns, std::int64_t depth, std::int64_t block,
            float* sums) {
  const unsigned mode = get_mode(), inside = one == odd_first ? kFlushing : mode;
  for (std::int64_t first = 0; first < depth; first += block) {
    float part[kPanel];
    set_mode(inside);
    one(row + first, columns + first * kPanel, std::min(block, depth - first), first == 0 ? sums : part);
    set_mode(mode);
    for (std::int64_t j = 0; first != 0 && j < kPanel; ++j) sums[j] += part[j];
  }
}

RLK_WIDE void upcast_bf16(const std::uint16_t* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(std::uint32_t{from[i]} << 16);
}

}  // namespace

DefaultFloatMode::DefaultFloatMode() noexcept : saved_(get_mode()) { set_mode(kDefault); }
DefaultFloatMode::~DefaultFloatMode() { set_mode(saved_); }

void rule_row(Rule rule, const float* row, const float* columns, std::int64_t depth, float* sums) {
  const DefaultFloatMode mode;
  if (rule == Rule::pairs) return chains(odd_first, row, columns, depth, depth <= 1024 ? 512 : 1024, sums);
  if (rule != Rule::k32) return chains(chain, row, columns, depth, rule == Rule::kb256 ? 256 : 1024, sums);
  set_mode(kFlushing);
  pair_chains(row, columns, depth, sums);
}

void upcast(Float type, const void* from, std::int64_t count, float* to) {
  if (type == Float::f32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  const auto* half = static_cast<const std::uint16_t*>(from);
  if (type == Float::bf16) return upcast_bf16(half, count, to);
  for (std::int64_t i = 0; i < count; ++i) to[i] = f16_to_float(half[i]);
}

void fill(Float type, void* data, std::int64_t count, std::uint32_t seed, bool tiny) {
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const std::uint32_t r = state >> 8;  // the low bits of such a generator are not random
    if (type == Float::f32)              // 2^-2 .. 2^1, 20 random fraction bits
      static_cast<std::uint32_t*>(data)[i] =
          (r & 1u) << 31 | (125u + (r >> 1 & 3u)) << 23 | (r >> 3 & 0xfffffu) << 3;
    else if (type == Float::bf16)
      static_cast<std::uint16_t*>(data)[i] = static_cast<std::uint16_t>(
          (r & 1u) << 15 | ((tiny ? 62u : 125u) + (r >> 1 & 3u)) << 7 | (r >> 3 & 0x7fu));
    else
      static_cast<std::uint16_t*>(data)[i] =
          static_cast<std::uint16_t>((r & 1u) << 15 | (13u + (r >> 1 & 3u)) << 10 | (r >> 3 & 0x3ffu));
  }
}

}  // namespace rlk::onednn
