// attention_bwd as plain data, and the fp32 steps of its rule (arithmetic id fma32/attn128): one source for native code and GPU
// kernels. Splits are the forward's affair: gradients know tiles alone.
#pragma once

#include "arithmetic/attention/problem.hpp"

namespace rlk::attn128 {

struct Backward {
  Problem p;  // out is what the forward left
  Tensor d_out, d_lse, d_q, d_k, d_v;
  float* d_sinks = nullptr;
  std::int64_t key_batches = 0;  // k is [key_batches, room, heads, width], of which cu_k leaves one

  RLK_HD int all_heads() const { return p.heads * p.group; }
  // Rows of q in all, and the one that query i of sequence n is.
  RLK_HD std::int64_t rows() const { return p.queries * (p.cu_q ? 1 : p.sequences); }
  RLK_HD std::int64_t row(std::int64_t n, std::int64_t i) const {
    return p.cu_q ? p.q_begin(n) + i : n * p.queries + i;
  }
  // The queries of sequence n that see a key of [first, last): [first, last) of them.
  RLK_HD Visible queries(std::int64_t n, std::int64_t first, std::int64_t last) const {
    return queries(p.q_len(n), p.kv_count(n), first, last);
  }
  // Of `count` queries and `keys` keys.
  RLK_HD Visible queries(std::int64_t count, std::int64_t keys, std::int64_t first, std::int64_t last) const {
    const std::int64_t offset = keys - count;
    if (first >= keys) return {count, count};
    Visible v{0, count};
    if (p.causal && first > offset) v.first = first - offset;
    // A window may be any number.
    if (const std::int64_t key = last - 1 - offset; p.window > 0 && p.window < count - key)
      v.last = key + p.window;
    if (v.last < v.first) v.last = v.first;
    return v;
  }
  // Keys of sequence n that are its own, by position.
  RLK_HD Visible own_keys(std::int64_t n) const {
    const std::int64_t shared = p.shared(n), keys = p.kv_count(n);
    return {shared, keys > shared ? keys : shared};
  }
  // The sequence behind `reader` whose queries see keys of sequence n next, or p.sequences; n's own come first.
  RLK_HD std::int64_t next_reader(std::int64_t n, std::int64_t reader) const {
    if (!p.prefix_of) return p.sequences;
    do ++reader;
    while (reader < p.sequences && p.prefix(reader) != n);
    return reader;
  }
  // Rows of k behind the keys of sequence n and before those of the next: nobody's.
  RLK_HD Visible idle_keys(std::int64_t n) const {
    const Visible own = own_keys(n);
    return {p.k_begin(n) + own.last - own.first, p.cu_k && n + 1 < p.sequences ? p.k_begin(n + 1) : p.room};
  }
};

// What a row of q and a head have for all keys alike.
struct Stat {
  float base, delta;
};
RLK_HD float base_of_lse(float lse) { return base_of(lse * kLog2e); }

// A score as it takes part, and what its slope is multiplied by: with a softcap, the cap's own slope.
template <class T>
struct Capped {
  T score, slope;
};
template <class T>
RLK_HD Capped<T> capped_with_slope(const Problem& p, T score) {
  const T one = T{} + 1.0f;
  if (p.cap == 0) return {score, one};
  const T inner = score * p.scale / p.cap, y = simt::tanh<T>(inner), minus = -y;
  return {y * p.cap, simt::fused(minus, y, one)};
}

// Of one visible key: its weight P, and dS.
template <class T>
struct Slope {
  T p, ds;
};
template <class T>
RLK_HD Slope<T> slope_of(const Problem& p, const Capped<T>& s, T weight, T dp, Stat row) {
  const T difference = dp - row.delta;
  const T ds = weight * difference;
  return {weight, p.cap == 0 ? ds : T(ds * s.slope)};
}
template <class T>
RLK_HD Slope<T> slope_of(const Problem& p, T score, T dp, Stat row) {
  const Capped<T> s = capped_with_slope<T>(p, score);
  return slope_of<T>(p, s, attn128::weight(s.score, T{} + p.c, T{} - row.base), dp, row);
}

// Heads that share keys are joined as a pairwise tree where there are 2, 4, 8 .. of them, else ascending: how many form the
// left side of `count`.
RLK_HD int left_side(int group, int count) { return (group & (group - 1)) == 0 ? count / 2 : 1; }

// A row's part in the gradient of its head's sink.
RLK_HD double sink_term(float sink, float lse, float delta) {
  if (lse == -__builtin_inff()) return 0;
  return static_cast<double>(simt::exp(sink - lse)) * static_cast<double>(delta);
}

}  // namespace rlk::attn128
