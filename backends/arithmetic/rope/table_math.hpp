// Rotary tables: frequencies on the host, sines and cosines on host or device. Arithmetic id "rope_tables64".
//
// Everything is fp64 with the project's own log, exp, sin and cos, written with explicit fma, so the bits do
// not depend on a C library: angle = fl(position * frequency), value = fl(cos(angle) * attention), rounded to
// fp32, then to the table's dtype. An fp32 angle at position 131071 would be off by up to 4e-3.
#pragma once

#include <cmath>
#include <string>

#include "arithmetic/math.hpp"
#include "arithmetic/rope/math.hpp"

namespace rlk::rotary {

// Nearest integer for |x| < 2^51, ties to even, without a library call.
RLK_HD double round_even(double x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
#if defined(__CUDA_ARCH__)
  return __dadd_rn(__dadd_rn(x, kMagic), -kMagic);
#else
  volatile double shifted = x + kMagic;  // keeps the compiler from folding the two additions
  return shifted - kMagic;
#endif
}

// sin and cos within about 1 ulp for |x| below 2^31: reduction by three parts of pi/2, then polynomials on
// [-pi/4, pi/4].
RLK_HD void sin_cos(double x, double& sine, double& cosine) {
  const double k = round_even(x * 0.63661977236758134308);
  double r = simt::fused(-k, 1.5707963267948965580e+00, x);
  r = simt::fused(-k, 6.1232339957367660359e-17, r);
  r = simt::fused(-k, -1.4973849048591833e-33, r);
  const double z = r * r;
  double s = simt::fused(z, 1.58969099521155010221e-10, -2.50507602534068634195e-08);
  s = simt::fused(z, s, 2.75573137070700676789e-06);
  s = simt::fused(z, s, -1.98412698298579493134e-04);
  s = simt::fused(z, s, 8.33333333332248946124e-03);
  s = simt::fused(z, s, -1.66666666666666324348e-01);
  s = simt::fused(r * z, s, r);
  double c = simt::fused(z, -1.13596475577881948265e-11, 2.08757232129817482790e-09);
  c = simt::fused(z, c, -2.75573143513906633035e-07);
  c = simt::fused(z, c, 2.48015872894767294178e-05);
  c = simt::fused(z, c, -1.38888888888741095749e-03);
  c = simt::fused(z, c, 4.16666666666666019037e-02);
  c = simt::fused(z * z, c, simt::fused(-0.5, z, 1.0));
  const auto quadrant = static_cast<long long>(k) & 3;
  const double first = (quadrant & 1) != 0 ? c : s, second = (quadrant & 1) != 0 ? s : c;
  sine = (quadrant & 2) != 0 ? -first : first;
  cosine = quadrant == 1 || quadrant == 2 ? -second : second;
}

inline constexpr int kMaxPairs = kMostTableDims / 2;
// Times the largest position it is 2^50, within the reach of round_even().
inline constexpr double kMaxFrequency = 0x1p19;

// One builder call, ready to run on either side.
struct RotaryTable {
  double frequency[kMaxPairs];
  double attention;
  Integers positions;
  std::int64_t position_stride, start, rows;
  void *cos, *sin;
  std::int64_t cos_row, sin_row;
  Float type;
  std::int32_t pairs;
  bool full, interleaved;
};

RLK_HD void put_table(void* base, Float type, std::int64_t i, float v) {
  switch (type) {
    case Float::f32:
      static_cast<float*>(base)[i] = v;
      break;
    case Float::bf16:
      static_cast<simt::bf16*>(base)[i] = simt::from_float<simt::bf16>(v);
      break;
    default:
      static_cast<simt::fp16*>(base)[i] = simt::from_float<simt::fp16>(v);
  }
}

RLK_HD void table_entry(const RotaryTable& t, std::int64_t row, int pair) {
  const std::int64_t position =
      t.positions.data != nullptr ? integer_at(t.positions, row * t.position_stride) : t.start + row;
  double s = NAN, c = NAN;  // of a position that is not served, which a GPU cannot refuse
  // served_position, which device code cannot call.
  if (position >= -kMostPosition && position <= kMostPosition)
    sin_cos(static_cast<double>(position) * t.frequency[pair], s, c);
  const auto sine = static_cast<float>(s * t.attention), cosine = static_cast<float>(c * t.attention);
  const int first = t.full && t.interleaved ? 2 * pair : pair;
  put_table(t.cos, t.type, row * t.cos_row + first, cosine);
  put_table(t.sin, t.type, row * t.sin_row + first, sine);
  if (t.full) {
    const int second = first + (t.interleaved ? 1 : t.pairs);
    put_table(t.cos, t.type, row * t.cos_row + second, cosine);
    put_table(t.sin, t.type, row * t.sin_row + second, sine);
  }
}

// ---- host only: the frequency rules

inline constexpr double kPi = 3.14159265358979323846, kLn2 = 0.69314718055994530942;

// ln and e^x within a few ulp, from the formula alone.
inline double own_log(double x) {
  int e = 0;
  double m = std::frexp(x, &e);
  if (m < 0.70710678118654752440) m *= 2, --e;
  const double t = (m - 1) / (m + 1), z = t * t;
  double sum = 0;
  for (int n = 27; n >= 3; n -= 2) sum = simt::fused(z, sum, 1.0 / n);
  return simt::fused(double(e), kLn2, simt::fused(2 * t * z, sum, 2 * t) + e * 2.3190468138462996e-17);
}
inline double own_exp(double x) {
  const double k = round_even(x / kLn2);
  const double r = simt::fused(-k, 2.3190468138462996e-17, simt::fused(-k, kLn2, x));
  double sum = 1;
  for (int n = 18; n >= 1; --n) sum = simt::fused(r / n, sum, 1.0);
  return std::ldexp(sum, static_cast<int>(k));
}
inline double own_power(double base, double exponent) { return own_exp(own_log(base) * exponent); }

inline double factor_at(const DLTensor& t, std::int64_t i) {
  const void* p = detail::data_of(t);
  i *= detail::stride_of(t, 0);
  return t.dtype.bits == 64 ? static_cast<const double*>(p)[i] : static_cast<const float*>(p)[i];
}

// Fills frequency and attention.
inline void frequencies(const TableRule& r, RotaryTable& t) {
  const auto d = static_cast<double>(r.rotary_dim);
  const auto original = static_cast<double>(r.original_max);
  double base = r.base, attention = 1;
  if (r.scaling == Scaling::ntk) base = r.base * own_power(r.factor, d / (d - 2));
  if (r.scaling == Scaling::dynamic) {
    const auto length = static_cast<double>(r.seq_len > r.original_max ? r.seq_len : r.original_max);
    base = r.base * own_power(r.factor * length / original - (r.factor - 1), d / (d - 2));
  }
  const auto yarn_dim = [&](double beta) {
    return d * own_log(original / (beta * 2 * kPi)) / (2 * own_log(r.base));
  };
  double low = 0, high = 0;
  if (r.scaling == Scaling::yarn) {
    low = yarn_dim(r.beta_fast), high = yarn_dim(r.beta_slow);
    if (r.truncate) low = std::floor(low), high = std::ceil(high);
    low = low < 0 ? 0 : low;
    high = high > d - 1 ? d - 1 : high;
    if (low == high) high += 0.001;
    const auto scale = [&](double a) { return r.factor <= 1 ? 1.0 : 0.1 * a * own_log(r.factor) + 1; };
    attention = r.mscale != 0 && r.mscale_all_dim != 0 ? scale(r.mscale) / scale(r.mscale_all_dim)
                : r.mscale != 0                        ? scale(r.mscale)
                                                       : scale(1);
  }
  if (r.scaling == Scaling::longrope && r.factor > 1) {
    attention = std::sqrt(1 + own_log(r.factor) / own_log(original));
  }
  t.attention = r.attention_factor != 0 ? r.attention_factor : attention;
  t.pairs = static_cast<std::int32_t>(r.rotary_dim / 2);
  for (int i = 0; i < t.pairs; ++i) {
    const double plain = own_power(base, -2.0 * i / d);
    double f = plain;
    if (r.scaling == Scaling::linear) f = plain / r.factor;
    if (r.scaling == Scaling::longrope) f = plain / factor_at(*r.factors, i);
    if (r.scaling == Scaling::yarn) {
      double ramp = (i - low) / (high - low);
      ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
      f = plain / r.factor * ramp + plain * (1 - ramp);
    }
    if (r.scaling == Scaling::llama3) {
      const double wavelength = 2 * kPi / plain;
      if (wavelength > original / r.low_freq_factor) {
        f = plain / r.factor;
      } else if (wavelength >= original / r.high_freq_factor) {
        const double k =
            (original / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
        f = (1 - k) * plain / r.factor + k * plain;
      }
    }
    t.frequency[i] = f;
  }
}

// From the slots of rope_tables.
inline std::string read_tables(const rlk_slot* s, RotaryTable& t) {
  TableRule rule;
  t = RotaryTable{};
  if (auto error = read_table_rule(s, rule, t.rows, t.full); !error.empty()) return error;
  frequencies(rule, t);
  for (int i = 0; i < t.pairs; ++i)
    if (!(t.frequency[i] >= 0 && t.frequency[i] <= kMaxFrequency))
      return detail::say("rope_tables: these attributes give pair %d the frequency %g, at most %g is served",
                         i, t.frequency[i], kMaxFrequency);
  if (!std::isfinite(t.attention))
    return detail::say("rope_tables: these attributes give the attention factor %g", t.attention);
  const rlk_slot* a = s + kTableArguments;
  t.interleaved = a[kTableWidth].i == 2;
  t.start = a[kTableStart].i;
  if (const DLTensor* p = s[kTablePositions].tensor) {
    t.positions = {detail::data_of(*p), p->dtype.bits == 64};
    t.position_stride = detail::stride_of(*p, 0);
  }
  const DLTensor &c = *s[kTableCos].tensor, &n = *s[kTableSin].tensor;
  Float sin_type{};
  if (!detail::float_type(c, t.type) || !detail::float_type(n, sin_type) || t.type != sin_type) {
    return detail::say("rope_tables: cos and sin must both be fp32, bf16 or fp16");
  }
  t.cos = const_cast<void*>(detail::data_of(c)), t.sin = const_cast<void*>(detail::data_of(n));
  t.cos_row = detail::stride_of(c, 0), t.sin_row = detail::stride_of(n, 0);
  return {};
}

}  // namespace rlk::rotary
