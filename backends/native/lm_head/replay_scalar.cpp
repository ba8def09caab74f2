// The replay in integers: the rule as written, one group at a time, which is what the vector kernel falls back to; and
// blocks of outputs that share what is decoded.
#include <algorithm>
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

constexpr std::int64_t kRows = 16, kColumns = 64, kDepth = 256;  // 16 x 64 sums over panels that stay in L2
constexpr std::int16_t kZero = -8000;                            // exponent of a zero: loses every comparison

// Numbers of one operand, decoded once for all that they meet: signed significands and exponents, a short last group
// filled with zeros, and which groups hold an infinity or a NaN.
struct Panel {
  std::int16_t significand[kDepth], exponent[kDepth];
  bool special[kDepth / 16];

  void decode_row(const std::uint16_t* from, std::int64_t count, Float type) {
    for (std::int64_t k = 0; k < (count + 15) / 16 * 16; k += 16) {
      special[k / 16] = false;
      for (std::int64_t i = k; i < k + 16; ++i) {
        const Decoded x = i < count ? decode(from[i], type) : Decoded{};
        significand[i] = static_cast<std::int16_t>(x.negative ? -static_cast<int>(x.significand)
                                                              : static_cast<int>(x.significand));
        exponent[i] = x.significand == 0 ? kZero : static_cast<std::int16_t>(x.exponent);
        special[k / 16] |= x.infinite || x.nan;
      }
    }
  }
};
struct Scratch {
  Panel rows[kRows], columns[kColumns];
  std::uint32_t sums[kRows][kColumns];
};

// replay_group without infinities and NaNs.
std::uint32_t finite_group(std::uint32_t acc, const Panel& a, const Panel& b, std::int64_t k, int up) {
  const Decoded sum = decode(acc, 23, 8);
  const std::int16_t *const x = a.exponent + k, *const y = b.exponent + k;
  std::int16_t exponent[16], most = 2 * kZero;
  for (int i = 0; i < 16; ++i) {
    exponent[i] = static_cast<std::int16_t>(x[i] + y[i]);
    most = exponent[i] > most ? exponent[i] : most;
  }
  if (most < kZero / 2) return sum.significand == 0 ? 0 : acc;  // no product but zeros: the sum as it is
  const int largest = sum.significand != 0 && sum.exponent > most ? sum.exponent : most;
  std::int64_t total = cut(sum.significand, 23, largest - sum.exponent, sum.negative);
  for (int i = 0; i < 16; ++i) {
    const std::int32_t product = a.significand[k + i] * b.significand[k + i], sign = product >> 31;
    const int below = largest - exponent[i] < 31 ? largest - exponent[i] : 31;
    const std::int32_t magnitude = (((product ^ sign) - sign) << up) >> below;
    total += (magnitude ^ sign) - sign;
  }
  return truncate(total, largest);
}

void add_panels(const ReplayProduct& p, const ChainTile& t, std::int64_t k0, Scratch& s) {
  const std::int64_t depth = p.depth - k0 < kDepth ? p.depth - k0 : kDepth;
  const int up = kFractionBits - (p.type == Float::bf16 ? 14 : 20);
  for (std::int64_t i = t.row_begin; i < t.row_end; ++i)
    s.rows[i - t.row_begin].decode_row(p.hidden_row(i) + k0, depth, p.type);
  for (std::int64_t j = t.col_begin; j < t.col_end; ++j) {
    const std::uint16_t* column = p.weight + p.weight_row(j) * p.weight_stride + k0;
    Panel& right = s.columns[j - t.col_begin];
    right.decode_row(column, depth, p.type);
    for (std::int64_t i = t.row_begin; i < t.row_end; ++i) {
      const Panel& left = s.rows[i - t.row_begin];
      std::uint32_t acc = s.sums[i - t.row_begin][j - t.col_begin];
      for (std::int64_t k = 0; k < depth; k += 16)
        acc = left.special[k / 16] || right.special[k / 16] || (acc & kInfinity) == kInfinity
                  ? replay_group(acc, p.hidden_row(i) + k0 + k, column + k,
                                 static_cast<int>(depth - k < 16 ? depth - k : 16), p.type)
                  : finite_group(acc, left, right, k, up);
      s.sums[i - t.row_begin][j - t.col_begin] = acc;
    }
  }
}

void run_block(const ReplayProduct& p, const ChainTile& t, Scratch& s) {
  for (std::int64_t i = t.row_begin; i < t.row_end; ++i)
    for (std::int64_t j = t.col_begin; j < t.col_end; ++j)
      s.sums[i - t.row_begin][j - t.col_begin] = std::bit_cast<std::uint32_t>(p.initial_at(i, j));
  for (std::int64_t k = 0; k < p.depth; k += kDepth) add_panels(p, t, k, s);
  for (std::int64_t i = t.row_begin; i < t.row_end; ++i)
    for (std::int64_t j = t.col_begin; j < t.col_end; ++j)
      finish_element(p.out, p.out_type, i * p.out_stride + j,
                     std::bit_cast<float>(s.sums[i - t.row_begin][j - t.col_begin]), p.bias, p.bias_type,
                     p.weight_row(j));
}

void run_scalar(const ReplayProduct& p, const ChainTile& tile, void* scratch) {
  const DefaultFloatMode mode;
  for (std::int64_t i = tile.row_begin; i < tile.row_end; i += kRows)
    for (std::int64_t j = tile.col_begin; j < tile.col_end; j += kColumns)
      run_block(p, {i, std::min(i + kRows, tile.row_end), j, std::min(j + kColumns, tile.col_end)},
                *static_cast<Scratch*>(scratch));
}

}  // namespace

const ReplayKernels& replay_kernels_scalar() {
  static constexpr ReplayKernels kernels{"scalar", sizeof(Scratch), &run_scalar};
  return kernels;
}

}  // namespace rlk::native
