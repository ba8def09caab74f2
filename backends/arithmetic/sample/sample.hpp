// sample and sample_verify (arithmetic sample/philox-g1): the calls as plain data, and what is done to one row and to one
// entry. For native code and GPU kernels alike; templates are over float or a GCC vector of float.
//
// Entries are ordered by (z descending, id ascending). Every filter keeps a beginning of that order, or what has a mass of at
// least so much, so a kept set is a Kept: three comparisons an entry. Masses are integers: their sums have no order.
#pragma once

#include "arithmetic/math.hpp"
#include "arithmetic/philox.hpp"
#include "arithmetic/rows.hpp"

namespace rlk::sampling {

using rows::Type;

inline constexpr int kLeaves = 8, kTile = 128;
inline constexpr float kLog2e = 1.44269504f;
inline constexpr float kOne = 0x1p40f;  // the mass of the largest entry

// A number for each row; absent when data is null. Strides count elements.
template <class T>
struct Column {
  T* data = nullptr;
  std::int64_t stride = 0;
  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD T& operator[](std::int64_t row) const { return data[row * stride]; }
};
struct IntegerColumn {
  const void* data = nullptr;
  bool wide = false;  // 64 bits
  std::int64_t stride = 0;
  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD std::int64_t operator[](std::int64_t row) const {
    return wide ? static_cast<const std::int64_t*>(data)[row * stride]
                : static_cast<const std::int32_t*>(data)[row * stride];
  }
};

struct TokenColumn {
  void* data = nullptr;
  bool wide = false;
  std::int64_t stride = 0;
  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD void put(std::int64_t row, std::int64_t token) const {
    if (wide)
      static_cast<std::int64_t*>(data)[row * stride] = token;
    else
      static_cast<std::int32_t*>(data)[row * stride] = static_cast<std::int32_t>(token);
  }
  RLK_HD bool none(std::int64_t row) const { return IntegerColumn{data, wide, stride}[row] < 0; }
};

enum class Audit : std::int32_t { ok, token_differs, logp_differs, not_kept, logp_raw_differs };

struct Problem {
  std::int64_t rows = 0, vocab = 0;
  const void* logits = nullptr;
  Type type = Type::f32;
  std::int64_t stride = 0;
  Type round = Type::f32;
  float softcap = 0;
  bool raw_temperature = true, min_p_first = false;
  Column<const float> temperature, top_p, min_p;
  IntegerColumn top_k, seed, stream, position;
  // sample
  TokenColumn token;
  Column<float> logp, logp_raw;
  Column<std::int32_t> count;
  std::int32_t* keep = nullptr;
  std::int64_t keep_stride = 0;
  std::int32_t* bad_count = nullptr;
  // sample_verify
  IntegerColumn recorded;
  Column<const float> recorded_logp, recorded_logp_raw;
  Column<std::int32_t> status;

  RLK_HD const void* logits_of(std::int64_t row) const {
    return static_cast<const char*>(logits) + row * stride * rows::size_of(type);
  }
  RLK_HD std::int64_t leaf() const { return 16 * ((vocab + kTile - 1) / kTile); }
  RLK_HD bool wants_logp() const { return logp || recorded_logp; }
  RLK_HD bool wants_raw() const { return logp_raw || recorded_logp_raw; }
};

// What a row's numbers say.
struct Parameters {
  float tau = 1, c = kLog2e, raw_tau = 1, raw_c = kLog2e;  // 1 / T, log2(e) / T
  bool valid = true, greedy = false;
  std::int64_t top_k = 0;  // 0: off
  float top_p = 1;         // 1: off
  float least = 0;         // of exp2, what min_p leaves; 0: off
  std::uint32_t key[2] = {}, position[2] = {}, stream = 0;

  RLK_HD bool masses() const { return top_p < 1 || least > 0; }
  RLK_HD philox::Counter noise(std::uint32_t group) const {
    return philox::words({group, position[0], position[1], stream}, key[0], key[1]);
  }
};

RLK_HD float whole(float x) { return static_cast<float>(static_cast<std::int64_t>(x)); }

RLK_HD Parameters parameters_of(const Problem& p, std::int64_t row) {
  Parameters r;
  const float temperature = p.temperature ? p.temperature[row] : 1.0f;
  r.valid = temperature >= 0 && temperature < __builtin_inff();
  const float tau = 1 / temperature, c = tau * kLog2e;
  r.greedy = !(c < __builtin_inff());  // also a temperature too small for its reciprocal
  if (r.valid && !r.greedy) r.tau = tau, r.c = c;
  if (p.raw_temperature) r.raw_tau = r.tau, r.raw_c = r.c;
  const std::int64_t k = p.top_k ? p.top_k[row] : 0;
  r.top_k = k > 0 && k < p.vocab ? k : 0;
  if (p.top_p) {
    const float x = p.top_p[row];
    r.valid = r.valid && x == x;
    r.top_p = x < 1 ? x : 1.0f;
  }
  if (p.min_p) {
    const float x = p.min_p[row];
    r.valid = r.valid && x == x;
    r.least = x >= 1 ? 1.0f : x > 0 ? whole(x * kOne) * (1 / kOne) : 0.0f;
  }
  const auto seed = static_cast<std::uint64_t>(p.seed[row]);
  const auto position = static_cast<std::uint64_t>(p.position ? p.position[row] : 0);
  r.key[0] = static_cast<std::uint32_t>(seed), r.key[1] = static_cast<std::uint32_t>(seed >> 32);
  r.position[0] = static_cast<std::uint32_t>(position);
  r.position[1] = static_cast<std::uint32_t>(position >> 32);
  r.stream = static_cast<std::uint32_t>(p.stream ? p.stream[row] : 0);
  return r;
}

// ---- one entry

// A logit that was rounded already, as it is ordered: -0 and +0 are one number, and what is not finite stays what it is.
template <class T>
RLK_HD T capped(T x, float softcap) {
  const T zero = T{}, difference = x - x;
  if (softcap > 0) {
    const T y = softcap * simt::tanh<T>(x / softcap);
    x = difference == zero ? y : x;
  }
  return x + zero;
}

// exp2 of the distance to the largest entry: 1 there, 0 where an entry is absent.
template <class T>
RLK_HD T weight(T z, float most, float c) {
  const T zero = T{}, absent = T{} - __builtin_inff();
  const T distance = z - most;
  const T e = simt::exp2<T>(distance * c);
  return z == absent ? zero : e;
}
RLK_HD std::uint64_t mass(float weight) { return static_cast<std::uint64_t>(weight * kOne); }

// -log(1 - v) for the word high * 2^16 + low, v = (word + 1/2) / 2^32 rounded once and at most 1 - 2^-24: never 0, never
// infinite.
template <class T>
RLK_HD T exponential(T high, T low) {
  const T half = T{} + 0.5f, most = T{} + 0x1.fffffep-1f;
  T v = (high * 0x1p16f + (low + half)) * 0x1p-32f;
  v = v < most ? v : most;
  const T minus = -v;
  return -simt::log1p<T>(minus);
}
template <class T>
RLK_HD T score(T z, float most, float tau, T high, T low) {
  const T distance = z - most;
  return distance * tau - simt::ln<T>(exponential<T>(high, low));
}
RLK_HD float score(float z, float most, float tau, std::uint32_t word) {
  return score<float>(z, most, tau, static_cast<float>(static_cast<std::int32_t>(word >> 16)),
                      static_cast<float>(static_cast<std::int32_t>(word & 0xffffu)));
}

// ---- kept sets

// Ascending where z descends.
RLK_HD std::uint32_t place(float z) {
  const std::uint32_t bits = simt::float_bits(z);
  return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}
RLK_HD float at_place(std::uint32_t place) {
  return simt::bits_float(place >> 31 ? place : place ^ 0x7fffffffu);
}

struct Kept {
  float cut = -__builtin_inff();  // what is above is kept,
  std::int32_t last = -1;         // and what equals it up to this id,
  float least = 0;                // if its weight is at least this
  RLK_HD bool has(float z, std::int32_t id) const { return z > cut || (z == cut && id <= last); }
};

// ceil(p * total) for 0 < p < 1 by p's exact value; 1 below.
RLK_HD std::uint64_t wanted(float p, std::uint64_t total) {
  if (!(p > 0)) return 1;
  const std::uint32_t bits = simt::float_bits(p), exponent = bits >> 23;
  const std::uint64_t digits = (bits & 0x7fffffu) | (exponent ? 0x800000u : 0u);
  const int shift = 150 - static_cast<int>(exponent ? exponent : 1);  // p = digits / 2^shift
  if (shift >= 128) return 1;
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(digits) * total, quotient = product >> shift;
  return static_cast<std::uint64_t>(quotient) + (quotient << shift != product);
}

// ---- the log-probability (rule lse128/l8)

// A tile's or more tiles' maximum, and the sum of exp2 of the distances to it; none: no entry.
struct Part {
  float most = -__builtin_inff(), sum = 0;
};
RLK_HD Part joined(Part a, Part b, float c) {
  if (a.most == -__builtin_inff()) return b;
  if (b.most == -__builtin_inff()) return a;
  const float most = a.most > b.most ? a.most : b.most;
  const float left = simt::exp2<float>((a.most - most) * c), right = simt::exp2<float>((b.most - most) * c);
  return {most, simt::fused(a.sum, left, b.sum * right)};
}
RLK_HD Part joined(const Part* leaves, float c) {
  Part level[kLeaves / 2];
  for (int i = 0; i < 4; ++i) level[i] = joined(leaves[2 * i], leaves[2 * i + 1], c);
  return joined(joined(level[0], level[1], c), joined(level[2], level[3], c), c);
}
RLK_HD float log_probability(float z, Part all, float tau) {
  return (z - all.most) * tau - simt::ln<float>(all.sum);
}

// ---- results

struct Drawn {
  std::int64_t token = -1;
  float logp = __builtin_nanf(""), logp_raw = __builtin_nanf("");
  std::int32_t count = 0;
  bool recorded_kept = false;  // the token that sample_verify was given
};

RLK_HD bool same_bits(float a, float b) {
  return simt::float_bits(simt::from_float<float>(a)) == simt::float_bits(simt::from_float<float>(b));
}
RLK_HD Audit compared(const Problem& p, std::int64_t row, const Drawn& d) {
  const std::int64_t recorded = p.recorded[row];
  if (d.token < 0 ? recorded != -1 : !d.recorded_kept) return Audit::not_kept;
  if (recorded != d.token) return Audit::token_differs;
  if (p.recorded_logp && !same_bits(p.recorded_logp[row], d.logp)) return Audit::logp_differs;
  if (p.recorded_logp_raw && !same_bits(p.recorded_logp_raw[row], d.logp_raw)) return Audit::logp_raw_differs;
  return Audit::ok;
}
RLK_HD void write(const Problem& p, std::int64_t row, const Drawn& d) {
  if (p.token) p.token.put(row, d.token);
  if (p.logp) p.logp[row] = simt::from_float<float>(d.logp);
  if (p.logp_raw) p.logp_raw[row] = simt::from_float<float>(d.logp_raw);
  if (p.count) p.count[row] = d.count;
  if (p.status) p.status[row] = static_cast<std::int32_t>(compared(p, row, d));
}

}  // namespace rlk::sampling
