// The replay in integers, one output at a time: the rule as written, and what the vector kernel falls back
// to.
#include <bit>

#include "native/lm_head/float.hpp"
#include "native/lm_head/replay.hpp"

namespace rlk::native {
namespace {

constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr int kFractionBits = 25;

// A finite number as significand * 2^(exponent - fraction bits of its type), nothing normalised.
struct Decoded {
  std::uint32_t significand;
  int exponent;
  bool negative, infinite, nan;
};

Decoded decode(std::uint32_t bits, int fraction_bits, int exponent_bits) {
  const std::uint32_t field = (bits >> fraction_bits) & ((1u << exponent_bits) - 1);
  const std::uint32_t fraction = bits & ((1u << fraction_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const bool special = field == (1u << exponent_bits) - 1;
  return {field != 0 ? fraction | (1u << fraction_bits) : fraction,
          static_cast<int>(field != 0 ? field : 1) - bias,
          ((bits >> (fraction_bits + exponent_bits)) & 1u) != 0, special && fraction == 0,
          special && fraction != 0};
}

Decoded decode(std::uint16_t bits, Float type) {
  return type == Float::bf16 ? decode(bits, 7, 8) : decode(bits, 10, 5);
}

// sum * 2^(exponent - 25), truncated towards zero to fp32.
std::uint32_t truncate(std::int64_t sum, int exponent) {
  if (sum == 0) return 0;
  const std::uint32_t sign = sum < 0 ? 0x80000000u : 0;
  const std::uint64_t magnitude = static_cast<std::uint64_t>(sum < 0 ? -sum : sum);
  const int top = 63 - std::countl_zero(magnitude);
  const int result_exponent = top + exponent - kFractionBits;
  if (result_exponent > 127) return sign | kInfinity;
  if (result_exponent >= -126) {
    const std::uint64_t significand = top >= 23 ? magnitude >> (top - 23) : magnitude << (23 - top);
    return sign | static_cast<std::uint32_t>(result_exponent + 127) << 23 |
           (static_cast<std::uint32_t>(significand) & 0x7fffffu);
  }
  const int shift = exponent - kFractionBits + 149;  // to units of 2^-149; the result is below 2^23 of them
  const std::uint64_t units = shift >= 0 ? magnitude << shift : shift > -64 ? magnitude >> -shift : 0;
  return units == 0 ? 0 : sign | static_cast<std::uint32_t>(units);
}

// A magnitude with `fraction_bits`, cut at 25 bits below an exponent that is `below` larger than its own. (A
// zero's exponent counts for nothing and may be the larger one.)
std::int64_t cut(std::uint64_t significand, int fraction_bits, int below, bool negative) {
  if (significand == 0) return 0;
  const std::uint64_t magnitude = below < 64 ? (significand << (kFractionBits - fraction_bits)) >> below : 0;
  return negative ? -static_cast<std::int64_t>(magnitude) : static_cast<std::int64_t>(magnitude);
}

}  // namespace

std::uint32_t replay_group(std::uint32_t acc, const std::uint16_t* a, const std::uint16_t* b, int count,
                           Float type) {
  const int fraction_bits = type == Float::bf16 ? 14 : 20;  // of a product
  const Decoded sum = decode(acc, 23, 8);
  bool nan = sum.nan;
  bool plus = sum.infinite && !sum.negative;
  bool minus = sum.infinite && sum.negative;
  int largest = sum.significand != 0 ? sum.exponent : -100000;
  std::uint64_t significand[16];
  int exponent[16];
  bool negative[16];
  for (int i = 0; i < count; ++i) {
    const Decoded x = decode(a[i], type);
    const Decoded y = decode(b[i], type);
    negative[i] = x.negative != y.negative;
    significand[i] = std::uint64_t{x.significand} * y.significand;
    exponent[i] = x.exponent + y.exponent;
    if (x.nan || y.nan) nan = true;
    if (x.infinite || y.infinite) {
      if ((!x.infinite && x.significand == 0) || (!y.infinite && y.significand == 0)) nan = true;
      (negative[i] ? minus : plus) = true;
    }
    if (significand[i] != 0 && exponent[i] > largest) largest = exponent[i];
  }
  if (nan || (plus && minus)) return kCanonicalNan32;
  if (plus || minus) return (minus ? 0x80000000u : 0) | kInfinity;
  std::int64_t total = cut(sum.significand, 23, largest - sum.exponent, sum.negative);
  for (int i = 0; i < count; ++i)
    if (significand[i] != 0) total += cut(significand[i], fraction_bits, largest - exponent[i], negative[i]);
  return truncate(total, largest);
}

namespace {

void run_scalar(const ReplayProduct& p, const ChainTile& tile, void*) {
  const DefaultFloatMode mode;
  for (std::int64_t i = tile.row_begin; i < tile.row_end; ++i)
    for (std::int64_t j = tile.col_begin; j < tile.col_end; ++j) {
      const std::uint16_t* a = p.hidden_row(i);
      const std::uint16_t* b = p.weight + p.weight_row(j) * p.weight_stride;
      auto acc = std::bit_cast<std::uint32_t>(p.initial_at(i, j));
      for (std::int64_t k = 0; k < p.depth; k += 16)
        acc = replay_group(acc, a + k, b + k, static_cast<int>(p.depth - k < 16 ? p.depth - k : 16), p.type);
      finish_element(p.out, p.out_type, i * p.out_stride + j, std::bit_cast<float>(acc), p.bias, p.bias_type,
                     p.weight_row(j));
    }
}

}  // namespace

const ReplayKernels& replay_kernels_scalar() {
  static constexpr ReplayKernels kernels{"scalar", 0, &run_scalar};
  return kernels;
}

}  // namespace rlk::native
