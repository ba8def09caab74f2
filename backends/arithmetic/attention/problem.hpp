// attention as plain data, and the fp32 steps of its rule (arithmetic ids fma32/attn128/s<S>): one source for native code and
// GPU kernels. Templates take float or a GCC vector of float.
//
// Positions of keys are absolute: tiles of kTile keys and splits of `split` keys are counted from the sequence's first key,
// wherever it lies and whatever part of the queries a call holds.
#pragma once

#include "arithmetic/fp8.hpp"
#include "arithmetic/math.hpp"
#include "arithmetic/rows.hpp"

namespace rlk::attn128 {

using rows::Factors;
using rows::Type;

inline constexpr int kTile = 128;
inline constexpr std::int64_t kMostKeys = std::int64_t{1} << 60;  // of a sequence
inline constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147182f;

// int32 or int64, absent when data is null.
struct Integers {
  const void* data = nullptr;
  bool wide = false;
  std::int64_t stride[2] = {};

  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD std::int64_t get(std::int64_t i, std::int64_t j = 0) const {
    const std::int64_t at = i * stride[0] + j * stride[1];
    return wide ? static_cast<const std::int64_t*>(data)[at] : static_cast<const std::int32_t*>(data)[at];
  }
};

// [.., heads, width]: a packed token has no sequence stride; keys have theirs by sequence or by page.
struct Tensor {
  void* data = nullptr;
  Type type = Type::f32;
  bool f8 = false;  // elements are fp8, read as `type`
  std::int64_t sequence = 0, token = 0, head = 0;

  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD std::int64_t element_size() const { return f8 ? 1 : rows::size_of(type); }
  RLK_HD void* at(std::int64_t n, std::int64_t t, std::int64_t h) const {
    return static_cast<char*>(data) + (n * sequence + t * token + h * head) * element_size();
  }
};

// What an fp8 element is as one of `type`.
RLK_HD float widened(Type type, std::uint8_t byte, float factor) {
  return rows::round_to(type, simt::to_float(simt::fp8{byte}) * factor);
}
// Element i of a row of keys or values.
RLK_HD float element(const Tensor& t, const void* row, std::int64_t i, float factor) {
  return t.f8 ? widened(t.type, static_cast<const std::uint8_t*>(row)[i], factor)
              : rows::load(t.type, row, i);
}

// The keys that a query sees: [first, last).
struct Visible {
  std::int64_t first, last;
};

// Where a sequence's keys lie that are here: in rows from `begin` on, but for the first `shared` of them, which are another
// sequence's, from row `shared_begin` on.
struct KeyRows {
  std::int64_t begin = 0, shared = 0, shared_begin = 0;

  RLK_HD std::int64_t row(std::int64_t j) const {
    return j < shared ? shared_begin + j : begin + (j - shared);
  }
};

struct Problem {
  std::int64_t sequences = 0;
  std::int64_t queries = 0;  // rows of q in all, or of each sequence where cu_q is absent
  std::int64_t room = 0;     // keys there is memory for: in all where cu_k is there, else of each sequence
  std::int64_t page_size = 0, pages = 0;
  int heads = 1, group = 1, width = 0, value_width = 0;  // heads of k and v; heads of q to each
  Tensor q, k, v, out, lse;
  Factors k_scale, v_scale;
  Integers cu_q, cu_k, kv_len, block_table;
  Integers prefix_of;         // of packed keys: whose keys come before a sequence's own, or -1
  Integers k_first, k_last;   // of attention_part: the bounds of the keys that are here; kv_len is all keys'
  float* partials = nullptr;  // and what it leaves
  const float* sinks = nullptr;
  bool causal = true;
  std::int64_t window = 0, split = 0;
  double scale64 = 1, cap64 = 0;
  float scale = 1, cap = 0, c = 1;

  // What bounds of another size than the memory say is held to the memory, so that no kernel leaves it.
  RLK_HD static std::int64_t held(std::int64_t x, std::int64_t most) {
    return x < 0 ? 0 : x > most ? most : x;
  }
  RLK_HD std::int64_t q_begin(std::int64_t n) const { return cu_q ? held(cu_q.get(n), queries) : 0; }
  RLK_HD std::int64_t q_len(std::int64_t n) const {
    if (!cu_q) return queries;
    const std::int64_t begin = q_begin(n), end = held(cu_q.get(n + 1), queries);
    return end > begin ? end - begin : 0;
  }
  RLK_HD std::int64_t k_begin(std::int64_t n) const { return cu_k ? held(cu_k.get(n), room) : 0; }
  // Keys that sequence n alone has room for, and those of them that are in use where all of its keys are its own.
  RLK_HD std::int64_t own_room(std::int64_t n) const {
    if (!cu_k) return room;
    const std::int64_t most = held(cu_k.get(n + 1), room) - k_begin(n);
    return most < 0 ? 0 : most;
  }
  RLK_HD std::int64_t own_count(std::int64_t n) const {
    const std::int64_t most = own_room(n);
    return held(kv_len ? kv_len.get(n) : most, most);
  }
  // The sequence whose keys come first, or -1. It comes before, and has none before it.
  RLK_HD std::int64_t prefix(std::int64_t n) const {
    if (!prefix_of) return -1;
    const std::int64_t first = prefix_of.get(n);
    return first < 0 || first >= n ? -1 : first;
  }
  RLK_HD std::int64_t shared(std::int64_t n) const {
    const std::int64_t first = prefix(n);
    return first < 0 ? 0 : own_count(first);
  }
  RLK_HD std::int64_t kv_count(std::int64_t n) const {
    if (!prefix_of) return own_count(n);
    const std::int64_t most = shared(n) + own_room(n);
    return held(kv_len ? kv_len.get(n) : most, most);
  }
  RLK_HD KeyRows key_rows(std::int64_t n) const {
    KeyRows at{k_begin(n), 0, 0};
    if (const std::int64_t first = prefix(n); first >= 0)
      at.shared = own_count(first), at.shared_begin = k_begin(first);
    return at;
  }
  // All keys of sequence n, and those of them that are here, by absolute position.
  RLK_HD std::int64_t keys(std::int64_t n) const {
    return k_first ? held(kv_len.get(n), kMostKeys) : kv_count(n);
  }
  RLK_HD Visible here(std::int64_t n) const {
    if (!k_first) return {0, kv_count(n)};
    const std::int64_t first = held(k_first.get(n), kMostKeys), all = keys(n);
    const std::int64_t last = k_last && k_last.get(n) < all ? k_last.get(n) : all;
    return {first, first + held(last > first ? last - first : 0, own_room(n))};
  }
  // Row of k or v that holds key j of those here of sequence n.
  RLK_HD const void* key(const Tensor& t, std::int64_t n, const KeyRows& rows, std::int64_t j,
                         std::int64_t h) const {
    if (!block_table) return t.at(n, rows.row(j), h);
    const std::int64_t page = held(block_table.get(n, j / page_size), pages - 1);
    return t.at(page, j % page_size, h);
  }
  RLK_HD Visible visible(std::int64_t position, Visible here) const {
    Visible v = here;
    if (causal && position + 1 < v.last) v.last = position + 1;
    if (window > 0 && position + 1 > window && position + 1 - window > v.first)
      v.first = position + 1 - window;
    if (v.last < v.first) v.last = v.first;
    return v;
  }
  RLK_HD Visible visible(std::int64_t position, std::int64_t keys) const {
    return visible(position, Visible{0, keys});
  }
  RLK_HD std::int64_t split_of(std::int64_t tile) const { return split == 0 ? 0 : tile * kTile / split; }
  // Splits that there is room for.
  RLK_HD std::int64_t splits() const { return split == 0 ? 1 : room / split + (room % split != 0); }
  // m, l and O of a split of a row of q and its head.
  template <class Float>
  RLK_HD Float* part(Float* parts, std::int64_t row, std::int64_t split) const {
    return parts + (row * splits() + split) * (value_width + 2);
  }
};

// A score as it takes part.
template <class T>
RLK_HD T capped(const Problem& p, T score) {
  if (p.cap == 0) return score;
  const T inner = score * p.scale / p.cap;
  return simt::tanh<T>(inner) * p.cap;
}

// Where the maximum is held (sm90/t25k16/ex2/h8): m moves where score * c is above it by more.
inline constexpr float kHeld = 8;

// Maxima are those of score * c. -inf stands for no score yet, where 0 takes its place in differences.
RLK_HD float base_of(float m) { return m == -__builtin_inff() ? 0.0f : m; }

template <class T>
RLK_HD T weight(T score, T c, T minus_base) {
  return simt::exp2<T>(simt::fused(score, c, minus_base));
}

// What the sums of two sides are multiplied by when they are joined.
struct Join {
  float m, a, b;
};
RLK_HD Join join(float m, float other) {
  const float most = m > other ? m : other, base = base_of(most);
  return {most, simt::exp2(m - base), simt::exp2(other - base)};
}
RLK_HD float joined(float x, float a, float y, float b) { return simt::fused(x, a, y * b); }

// l of a split with no visible key, in what attention_part leaves.
inline constexpr float kNoKey = -1;

RLK_HD float lse_of(float m, float l) { return simt::fused(m, kLn2, simt::ln(l)); }

// attention_merge: parts [parts, .., heads, splits, 2 + width] of each row, ascending.
struct Merge {
  const float* partials = nullptr;
  std::int64_t part = 0, sequence = 0, token = 0, head = 0, split = 0;  // strides
  std::int64_t parts = 0, splits = 0, sequences = 0, tokens = 0, heads = 0;
  int width = 0;
  const float* sinks = nullptr;
  Tensor out, lse;

  RLK_HD std::int64_t rows() const { return sequences * tokens * heads; }
};
// One row of it, and its i-th split: the parts' splits one after another.
struct MergeRow {
  std::int64_t n, token, head;
};
RLK_HD MergeRow merge_row(const Merge& g, std::int64_t row) {
  return {row / g.heads / g.tokens, row / g.heads % g.tokens, row % g.heads};
}
RLK_HD const float* split_at(const Merge& g, const MergeRow& at, std::int64_t i) {
  return g.partials + i / g.splits * g.part + i % g.splits * g.split + at.n * g.sequence +
         at.token * g.token + at.head * g.head;
}

}  // namespace rlk::attn128
