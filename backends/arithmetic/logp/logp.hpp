// logp in fp32 (arithmetic id lse128/l8): the call as plain data, and what is done to an entry, to two sums and to a row. For
// native code and GPU kernels alike; templates take float or a GCC vector of it.
//
// The vocabulary is cut in eight leaves, a leaf in tiles of 128. A tile is its maximum and a tree of 128 exponentials; tiles
// are joined ascending inside a leaf, leaves as a pairwise tree.
#pragma once

#include "arithmetic/math.hpp"
#include "arithmetic/rows.hpp"

namespace rlk::lse128 {

using rows::Type;

inline constexpr int kTile = 128, kLeaves = 8, kStats = 4;

RLK_HD float none() { return -__builtin_inff(); }

// Maximum, sum, and sum for the entropy of some entries. A sum of 0 is of nothing: entries of -inf take no part.
struct State {
  float m, s, u;
};
RLK_HD State nothing() { return {none(), 0, 0}; }

// 1 / temperature, and that times log2 e. NaN where either is no positive number.
struct Scale {
  float tau, c;
};
RLK_HD Scale scale_of(float temperature) {
  const float tau = 1 / temperature, c = tau * 1.44269504f;
  if (temperature > 0 && c > 0 && c < __builtin_inff()) return {tau, c};
  return {__builtin_nanf(""), __builtin_nanf("")};
}

// A matrix with one row for each of the call's.
struct Matrix {
  void* data = nullptr;
  Type type = Type::f32;
  std::int64_t stride = 0;

  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD void* row(std::int64_t r) const {
    return static_cast<char*>(data) + r * stride * rows::size_of(type);
  }
};

// Columns of this call are the tokens [start, start + here) of a vocabulary of `vocab`.
struct Problem {
  std::int64_t rows = 0, columns = 0, vocab = 0, start = 0, here = 0, leaf = 0;
  int first = 0, count = kLeaves;  // leaves

  Matrix logits, d_logits;
  Type round = Type::f32;
  float cap = 0, temperature = 1;
  std::int64_t ignored = -100;
  const void* target = nullptr;
  bool wide = false;  // targets of 64 bits
  const float* temperatures = nullptr;
  const std::uint32_t* keep = nullptr;
  std::int64_t words = 0;

  float *logp = nullptr, *lse = nullptr, *entropy = nullptr, *stats = nullptr;
  std::int32_t* bad_count = nullptr;
  const float *d_logp = nullptr, *d_entropy = nullptr, *given = nullptr;  // given: stats of the forward

  // `n` rows from `at` on as a problem of their own, but for the logits and their gradient.
  RLK_HD Problem part(std::int64_t at, std::int64_t n) const {
    Problem p = *this;
    p.rows = n;
    p.target = static_cast<const char*>(target) + at * (wide ? 8 : 4);
    if (temperatures) p.temperatures += at;
    if (keep) p.keep += at * words;
    if (logp) p.logp += at;
    if (lse) p.lse += at;
    if (entropy) p.entropy += at;
    if (stats) p.stats += at * kStats;
    if (given) p.given += at * kStats;
    if (d_logp) p.d_logp += at;
    if (d_entropy) p.d_entropy += at;
    p.bad_count = nullptr;
    return p;
  }

  // Columns of the call's leaf number j.
  RLK_HD std::int64_t leaf_begin(int j) const {
    const std::int64_t at = (first + j) * leaf;
    return (at < vocab ? at : vocab) - start;
  }
  RLK_HD std::int64_t leaf_end(int j) const { return leaf_begin(j + 1); }
  RLK_HD Scale scale(std::int64_t row) const {
    return scale_of(temperatures ? temperatures[row] : temperature);
  }
  RLK_HD std::int64_t id(std::int64_t row) const {
    return wide ? static_cast<const std::int64_t*>(target)[row]
                : std::int64_t{static_cast<const std::int32_t*>(target)[row]};
  }
  // Whether the row is left out: its target is ignored, or is no token at all.
  RLK_HD bool left_out(std::int64_t row) const {
    const std::int64_t t = id(row);
    return t == ignored || t < 0 || t >= vocab;
  }
  // -1: in another part of the vocabulary.
  RLK_HD std::int64_t column(std::int64_t row) const {
    const std::int64_t at = id(row) - start;
    return at >= 0 && at < here ? at : -1;
  }
  RLK_HD bool kept(std::int64_t row, std::int64_t c) const {
    return keep == nullptr || (keep[row * words + c / 32] >> (c % 32) & 1u) != 0;
  }
  // 1 for a target that is no token or is not kept; where the vocabulary is cut, in one part only.
  RLK_HD int bad(std::int64_t row) const {
    const std::int64_t t = id(row);
    if (t == ignored) return 0;
    if (t < 0 || t >= vocab) return first == 0 ? 1 : 0;
    const std::int64_t at = column(row);
    return at >= 0 && !kept(row, at) ? 1 : 0;
  }
};

// ---- an entry

// tanh of a logit that is already rounded, as softcap takes it.
template <class T>
RLK_HD T held(const Problem& p, T z) {
  return simt::tanh<T>(z / (T{} + p.cap));
}
// What a rounded logit is before the temperature; one that is infinite stays so.
template <class T>
RLK_HD T capped(const Problem& p, T z) {
  if (p.cap == 0) return z;
  const T infinity = T{} + __builtin_inff(), bent = (T{} + p.cap) * held<T>(p, z);
  const T up = z == infinity ? z : bent;
  return z == -infinity ? z : up;
}
// An exponential and its share of the entropy, beside the maximum of its tile.
template <class T>
RLK_HD T weight(T z, T m, T c) {
  const T zero = T{}, d = z - m;
  const T e = simt::exp2<T>(d * c);
  return z == T{} - __builtin_inff() ? zero : e;
}
template <class T>
RLK_HD T bend(T e, T z, T m, T tau) {
  const T zero = T{}, d = z - m;
  const T u = e * (d * tau);
  return e == zero ? zero : u;
}

// ---- two sums

RLK_HD float shifted(float s, float u, float d, float a, float tau) {
  return a == 0 ? 0 : simt::fused(s, d * tau, u);
}
// Of a, then b; `a_by` and `b_by` are exp2 of their distances from the common maximum m.
RLK_HD State joined(const State& a, const State& b, float m, float a_by, float b_by, float tau) {
  const float u1 = shifted(a.s, a.u, a.m - m, a_by, tau), u2 = shifted(b.s, b.u, b.m - m, b_by, tau);
  return {m, simt::fused(a.s, a_by, b.s * b_by), simt::fused(u1, a_by, u2 * b_by)};
}
RLK_HD State join(const State& a, const State& b, Scale k) {
  if (b.s == 0) return a;
  if (a.s == 0) return b;
  const float m = b.m > a.m ? b.m : a.m;
  return joined(a, b, m, simt::exp2<float>((a.m - m) * k.c), simt::exp2<float>((b.m - m) * k.c), k.tau);
}
// `count` of them, a power of two, pairwise in place.
RLK_HD State join_all(State* all, int count, Scale k) {
  for (; count > 1; count /= 2)
    for (int i = 0; i + 1 < count; i += 2) all[i / 2] = join(all[i], all[i + 1], k);
  return all[0];
}

// ---- a row

// What is known of a row when all is joined.
struct Row {
  State state;
  float target;  // its logit, -inf where it takes no part
  Scale k;

  RLK_HD float logp() const {
    return state.s == 0 ? none() : (target - state.m) * k.tau - simt::ln<float>(state.s);
  }
  RLK_HD float lse() const {
    return state.s == 0 ? none() : simt::fused(state.m, k.tau, simt::ln<float>(state.s));
  }
  RLK_HD float entropy() const { return state.s == 0 ? 0 : simt::ln<float>(state.s) - state.u / state.s; }
};
// A row that is left out gives 0 everywhere, whatever its temperature. Of a cut vocabulary the first part says so, by a sum of 1;
// the others have nothing.
RLK_HD Row left_out(const Problem& p) {
  if (p.first != 0) return {nothing(), none(), scale_of(1)};
  return {{0, 1, 0}, 0, scale_of(1)};
}
RLK_HD void write(const Problem& p, std::int64_t row, const Row& x) {
  const auto number = [](float v) { return simt::from_float<float>(v); };
  if (p.logp) p.logp[row] = number(x.logp());
  if (p.lse) p.lse[row] = number(x.lse());
  if (p.entropy) p.entropy[row] = number(x.entropy());
  if (!p.stats) return;
  const bool valid = x.state.s == x.state.s;
  float* to = p.stats + row * kStats;
  to[0] = number(valid ? x.state.m : x.state.s);
  to[1] = number(x.state.s);
  to[2] = number(valid ? x.state.u : x.state.s);
  to[3] = number(valid ? x.target : x.state.s);
}

// The joining of shards: `parts` of them, [parts, rows, kStats].
struct Merge {
  Problem p;
  const float* partials = nullptr;
  int parts = 0;
};
RLK_HD Row merged(const Merge& m, std::int64_t row) {
  State all[kLeaves];
  Scale k = m.p.scale(row);
  if (k.c != k.c) k = scale_of(1);  // parts with entries are NaN by now, others are of a row that is left out
  float target = none();
  for (int i = 0; i < m.parts; ++i) {
    const float* from = m.partials + (i * m.p.rows + row) * kStats;
    all[i] = {from[0], from[1], from[2]};
    if (from[3] != none()) target = from[3];
  }
  return {join_all(all, m.parts, k), target, k};
}

// ---- the gradient

// What all entries of a row share.
struct Slope {
  float m, tau, c, rest, ln_s, entropy, g, h;
  bool nothing, bends;
};
RLK_HD Slope slope_of(const Problem& p, std::int64_t row, const State& state) {
  const Row x{state, 0, p.scale(row)};
  return {state.m,
          x.k.tau,
          x.k.c,
          1 / state.s,
          simt::ln<float>(state.s),
          x.entropy(),
          p.d_logp ? p.d_logp[row] + 0.0f : 0,  // -0 counts as +0
          p.d_entropy ? p.d_entropy[row] + 0.0f : 0,
          state.s == 0,
          p.d_entropy != nullptr};
}
// Of one entry before softcap's part: `one` is 1 at the target and 0 elsewhere. An entry of -inf takes no part.
template <class T>
RLK_HD T gradient(const Slope& k, T z, T one) {
  const T zero = T{}, m = T{} + k.m, tau = T{} + k.tau, c = T{} + k.c;
  const T p = weight<T>(z, m, c) * (T{} + k.rest);
  T sum = (T{} + k.g) * (one - p);
  if (k.bends) {
    const T ln_p = (z - m) * tau - (T{} + k.ln_s);
    const T full = (T{} + k.h) * p * (ln_p + (T{} + k.entropy));
    sum = sum - (p == zero ? zero : full);
  }
  const T slope = tau * sum;
  return z == T{} + none() ? zero : slope;
}
// Times what softcap leaves: 1 - tanh^2, of the rounded logit.
template <class T>
RLK_HD T through_cap(const Problem& p, T d, T z) {
  if (p.cap == 0) return d;
  const T y = held<T>(p, z);
  const T minus = -y;
  return d * simt::fused(minus, y, T{} + 1);
}

}  // namespace rlk::lse128
