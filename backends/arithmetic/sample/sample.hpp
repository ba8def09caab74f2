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

enum class Step { largest, top_k, top_p, token };

enum class Audit : std::int32_t { ok, token_differs, logp_differs, not_kept, logp_raw_differs };

struct Problem {
  std::int64_t rows = 0, vocab = 0;   // entries of this call
  std::int64_t whole = 0, first = 0;  // of the vocabulary, and where in it the call's entries start
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
  // sample_part
  Step step = Step::largest;
  int digit = 0, part = 0, first_leaf = 0, leaves = kLeaves;
  const std::int64_t* state = nullptr;
  std::int64_t state_stride = 0;
  std::int64_t* partials = nullptr;
  std::int64_t partials_stride = 0;

  RLK_HD const void* logits_of(std::int64_t row) const {
    return static_cast<const char*>(logits) + row * stride * rows::size_of(type);
  }
  RLK_HD std::int64_t leaf() const { return 16 * ((whole + kTile - 1) / kTile); }
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

// What parameters' tau and c are of, as logp takes it.
RLK_HD float temperature_of(const Problem& p, const Parameters& r, std::int64_t row) {
  return p.temperature && r.valid && !r.greedy ? p.temperature[row] : 1.0f;
}

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
  r.top_k = k > 0 && k < p.whole ? k : 0;
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

// A tile's or more tiles' maximum, and the sum of exp2 of the distances to it, at least 1; 0: no entry.
struct Part {
  float most = -__builtin_inff(), sum = 0;
};
RLK_HD Part joined(Part a, Part b, float c) {
  if (b.sum == 0) return a;
  if (a.sum == 0) return b;
  const float most = a.most > b.most ? a.most : b.most;
  const float left = simt::exp2<float>((a.most - most) * c), right = simt::exp2<float>((b.most - most) * c);
  return {most, simt::fused(a.sum, left, b.sum * right)};
}
// Of 1, 2, 4 or 8.
RLK_HD Part joined(const Part* leaves, float c, int count = kLeaves) {
  Part level[kLeaves];
  for (int i = 0; i < count; ++i) level[i] = leaves[i];
  for (; count > 1; count /= 2)
    for (int i = 0; i < count / 2; ++i) level[i] = joined(level[2 * i], level[2 * i + 1], c);
  return level[0];
}
RLK_HD float log_probability(float z, Part all, float tau) {
  return all.sum == 0 ? -__builtin_inff() : (z - all.most) * tau - simt::ln<float>(all.sum);
}

// ---- parts of a vocabulary
//
// A state has, for each row: the largest entry; for top_k and for top_p how many digits of the cut's place are known, these
// digits, and the value of what lies above; top_p's target; and how many of the entries that equal a cut each part keeps.

inline constexpr int kStateWidth = 24, kDrawnWidth = 8, kDigits = 3;
struct Slots {
  int digits, prefix, before, takes;
};
inline constexpr int kStateMost = 0, kStateTarget = 7;
RLK_HD Slots top_k_slots() { return {1, 2, 3, 8}; }
RLK_HD Slots top_p_slots() { return {4, 5, 6, 16}; }
RLK_HD Slots slots_of(Step step) { return step == Step::top_p ? top_p_slots() : top_k_slots(); }
inline constexpr std::int64_t kAllOfThem = -1;

RLK_HD int digit_bits(int digit) { return digit == 2 ? 10 : 11; }
RLK_HD int digit_shift(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
// A NaN is the canonical one.
RLK_HD std::int64_t bits_of(float x) {
  return static_cast<std::int64_t>(simt::float_bits(simt::from_float<float>(x)));
}
RLK_HD float float_of(std::int64_t bits) { return simt::bits_float(static_cast<std::uint32_t>(bits)); }
RLK_HD bool is_finite(float x) { return x - x == 0; }
RLK_HD std::uint64_t mass_below_one(float weight) { return mass(weight < 1 ? weight : 1.0f); }

// The cut of a filter that has all its digits. `take` is how many of those that equal it this part keeps.
struct Edge {
  bool there = false;
  float cut = 0;
  std::int64_t take = 0;
};
RLK_HD Edge edge_of(const std::int64_t* state, Slots at, int part) {
  const float cut = at_place(static_cast<std::uint32_t>(state[at.prefix]));
  return {state[at.digits] == kDigits && cut > -__builtin_inff(), cut, state[at.takes + part]};
}

// Whether this step counts a row's entries.
RLK_HD bool counts(const Problem& p, const Parameters& r, const std::int64_t* state) {
  const bool on = p.step == Step::top_p ? r.top_p < 1 : r.top_k > 0;
  return on && (p.digit == 0 || state[slots_of(p.step).digits] == p.digit);
}
RLK_HD bool has_prefix(const Problem& p, const std::int64_t* state, std::uint32_t place) {
  const std::int64_t prefix = state[slots_of(p.step).prefix];
  return p.digit == 0 ||
         static_cast<std::int64_t>(place >> (digit_shift(p.digit) + digit_bits(p.digit))) == prefix;
}
RLK_HD std::uint32_t bin_of(const Problem& p, std::uint32_t place) {
  return place >> digit_shift(p.digit) & ((1u << digit_bits(p.digit)) - 1);
}

// What a part found at the last step.
struct Found {
  float score = 0, z = 0;
  std::int64_t id = -1, count = 0;
  Part kept, all;
};
RLK_HD void put(std::int64_t* out, Part kept, Part all) {
  out[4] = bits_of(kept.most), out[5] = bits_of(kept.sum);
  out[6] = bits_of(all.most), out[7] = bits_of(all.sum);
}
RLK_HD void put(std::int64_t* out, const Found& f) {
  out[0] = bits_of(f.id < 0 ? 0.0f : f.score), out[1] = f.id, out[2] = bits_of(f.id < 0 ? 0.0f : f.z);
  out[3] = f.count;
  put(out, f.kept, f.all);
}
RLK_HD void put_nothing(std::int64_t* out) {
  for (int i = 0; i < kDrawnWidth; ++i) out[i] = i == 1 ? -1 : 0;
}

// sample_merge: parts [T, rows, width].
struct MergeProblem {
  std::int64_t rows = 0, parts = 0;
  Step step = Step::largest;
  int digit = 0;
  bool raw_temperature = true;
  const std::int64_t* partials = nullptr;
  std::int64_t part_stride = 0, row_stride = 0;
  Column<const float> temperature, top_p;
  IntegerColumn top_k;
  const std::int64_t* state = nullptr;
  std::int64_t state_stride = 0;
  std::int64_t* next = nullptr;
  std::int64_t next_stride = 0;
  TokenColumn token;
  Column<float> logp, logp_raw;
  Column<std::int32_t> count;
  std::int32_t* bad_count = nullptr;

  RLK_HD const std::int64_t* partial(std::int64_t part, std::int64_t row) const {
    return partials + part * part_stride + row * row_stride;
  }
  // Whether a row has no token, by what the parts found, or by what sample wrote.
  RLK_HD bool none(std::int64_t row) const {
    if (partials == nullptr) return token.none(row);
    bool found = false;
    for (std::int64_t t = 0; t < parts; ++t) found = found || partial(t, row)[1] >= 0;
    return !found;
  }
  RLK_HD Slots slots() const { return slots_of(step); }
  // What a bin has in all parts.
  RLK_HD std::uint64_t bin(std::int64_t row, int b) const {
    std::uint64_t sum = 0;
    for (std::int64_t t = 0; t < parts; ++t) sum += static_cast<std::uint64_t>(partial(t, row)[b]);
    return sum;
  }
};

struct Scales {
  float tau = 1, c = kLog2e, raw_tau = 1, raw_c = kLog2e;
};
RLK_HD Scales scales_of(const MergeProblem& p, std::int64_t row) {
  Scales s;
  const float tau = 1 / (p.temperature ? p.temperature[row] : 1.0f), c = tau * kLog2e;
  if (c < __builtin_inff()) s.tau = tau, s.c = c;
  if (p.raw_temperature) s.raw_tau = s.tau, s.raw_c = s.c;
  return s;
}

RLK_HD void merge_largest(const MergeProblem& p, std::int64_t row, std::int64_t* next) {
  float most = -__builtin_inff();
  bool bad = false;
  for (std::int64_t t = 0; t < p.parts; ++t) {
    const float x = float_of(p.partial(t, row)[0]);
    bad = bad || x != x;
    most = x > most ? x : most;
  }
  for (int i = 0; i < kStateWidth; ++i) next[i] = 0;
  next[kStateMost] = bits_of(bad || !is_finite(most) ? simt::from_float<float>(__builtin_nanf("")) : most);
}

// The state before a digit, and whether the row takes one.
RLK_HD bool begin_digit(const MergeProblem& p, std::int64_t row, std::int64_t* next) {
  const Slots at = p.slots();
  for (int i = 0; i < kStateWidth; ++i) next[i] = p.state[row * p.state_stride + i];
  if (p.digit == 0) {
    next[at.digits] = next[at.prefix] = next[at.before] = 0;
    if (p.step == Step::top_p) next[kStateTarget] = 0;
    for (int t = 0; t < kLeaves; ++t) next[at.takes + t] = 0;
  }
  return is_finite(float_of(next[kStateMost])) && next[at.digits] == p.digit;
}
RLK_HD std::uint64_t first_target(const MergeProblem& p, std::int64_t row, std::uint64_t total) {
  if (p.step == Step::top_k) {
    const std::int64_t k = p.top_k ? p.top_k[row] : 0;
    return k > 0 ? static_cast<std::uint64_t>(k) : 0;
  }
  const float share = p.top_p ? p.top_p[row] : 1.0f;
  return share < 1 && total > 0 ? wanted(share, total) : 0;
}
// `bin` reached the target, `before` lies above it; a bin of -1: none did.
RLK_HD void end_digit(const MergeProblem& p, std::int64_t row, std::uint64_t target, int bin,
                      std::uint64_t before, std::int64_t* next) {
  const Slots at = p.slots();
  if (bin < 0) {
    next[at.digits] = next[at.prefix] = next[at.before] = 0;
    return;
  }
  next[at.digits] = p.digit + 1;
  next[at.prefix] = static_cast<std::int64_t>(
      (static_cast<std::uint64_t>(next[at.prefix]) << digit_bits(p.digit)) + static_cast<std::uint64_t>(bin));
  next[at.before] = static_cast<std::int64_t>(before);
  if (p.digit + 1 < kDigits) return;
  std::uint64_t each = 1;
  if (p.step == Step::top_p)
    each = mass_below_one(weight(at_place(static_cast<std::uint32_t>(next[at.prefix])),
                                 float_of(next[kStateMost]), scales_of(p, row).c));
  if (each == 0) each = 1;
  std::uint64_t left = (target - before + each - 1) / each;
  for (std::int64_t t = 0; t < p.parts; ++t) {
    const std::uint64_t there = static_cast<std::uint64_t>(p.partial(t, row)[bin]) / each;
    next[at.takes + t] = there <= left ? kAllOfThem : static_cast<std::int64_t>(left);
    left -= there <= left ? there : left;
  }
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

// The best of what the parts found, of equal ones the lowest id.
RLK_HD bool merge_token(const MergeProblem& p, std::int64_t row) {
  const Scales s = scales_of(p, row);
  float best = 0, z = 0;
  std::int64_t id = -1;
  std::uint64_t count = 0;  // of whatever a caller gives
  Part kept[kLeaves], all[kLeaves];
  for (std::int64_t t = 0; t < p.parts; ++t) {
    const std::int64_t* part = p.partial(t, row);
    const float score = float_of(part[0]);
    count += static_cast<std::uint64_t>(part[3]);
    kept[t] = {float_of(part[4]), float_of(part[5])}, all[t] = {float_of(part[6]), float_of(part[7])};
    if (part[1] < 0 || (id >= 0 && !(score > best) && !(score == best && part[1] < id))) continue;
    best = score, id = part[1], z = float_of(part[2]);
  }
  const int parts = static_cast<int>(p.parts);
  float logp = __builtin_nanf(""), raw = logp;
  if (id >= 0) {
    logp = log_probability(z, joined(kept, s.c, parts), s.tau);
    raw = log_probability(z, joined(all, s.raw_c, parts), s.raw_tau);
  }
  if (p.token) p.token.put(row, id);
  if (p.logp) p.logp[row] = simt::from_float<float>(logp);
  if (p.logp_raw) p.logp_raw[row] = simt::from_float<float>(raw);
  if (p.count) p.count[row] = static_cast<std::int32_t>(id < 0 ? 0 : count);
  return id >= 0;
}

}  // namespace rlk::sampling
