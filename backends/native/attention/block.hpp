// The body of each block_<isa>.cpp: an Engine on vectors of the given type. A tile of keys is turned so that lanes go over keys
// for scores, and over Dv for the weighted values: every element keeps its one ascending chain.
#pragma once

#include <algorithm>
#include <utility>

#include "native/attention/engine.hpp"
#include "native/attention/products.hpp"
#include "native/attention/tree.hpp"

namespace rlk::native::attn {

template <class L, int W>
class Rows {
  using Row = native::Row<L, W>;
  using Type = rows::Type;
  static constexpr std::int64_t kTurned = 16;  // keys that are turned at a time: a cache line of floats

 public:
  Rows(const Problem& p, const Block& block, float* scratch)
      : p_(p),
        block_(block),
        q_begin_(p.q_begin(block.n)),
        k_begin_(p.k_begin(block.n)),
        keys_(p.kv_count(block.n)),
        offset_(keys_ - p.q_len(block.n)) {
    const auto take = [&scratch](std::int64_t floats) { return std::exchange(scratch, scratch + floats); };
    turned_ = take(kTile * p.width), values_ = take(kTile * p.value_width);
    some_ = take(kTurned * p.width), q_ = take(std::int64_t{kRows} * p.width);
    p_row_ = take(std::int64_t{kRows} * kTile);
    o_ = take(std::int64_t{kRows} * p.value_width), total_ = take(std::int64_t{kRows} * p.value_width);
    halves_ = take(kTile), m_ = take(kRows), l_ = take(kRows), a_ = take(kRows);
    total_m_ = take(kRows), total_l_ = take(kRows), begun_ = take(kRows);
  }

  void run() {
    begin();
    for (std::int64_t split = split_at(first_); first_ < last_ && split <= split_at(last_ - 1); ++split) {
      tiles(split);
      end_split(split);
    }
    for (int r = 0; r < block_.count; ++r) finish(r);
  }

  // The sums of one split that some row sees, in `parts`; and later the rows by those of all their splits.
  void run_split(std::int64_t split, float* parts) {
    begin();
    tiles(split);
    for (int r = 0; r < block_.count; ++r) {
      if (!sees(r, split)) continue;
      float* to = part(parts, r, split);
      to[0] = m_[r], to[1] = l_[r];
      std::copy_n(o_ + r * p_.value_width, p_.value_width, to + 2);
    }
  }
  void join_splits(const float* parts) {
    begin();
    for (std::int64_t split = split_at(first_); first_ < last_ && split <= split_at(last_ - 1); ++split) {
      for (int r = 0; r < block_.count; ++r) {
        if (!sees(r, split)) continue;
        const float* from = part(parts, r, split);
        m_[r] = from[0], l_[r] = from[1];
        std::copy_n(from + 2, p_.value_width, o_ + r * p_.value_width);
      }
      end_split(split);
    }
    for (int r = 0; r < block_.count; ++r) finish(r);
  }

 private:
  std::int64_t query(int r) const { return (block_.first + r) / p_.group; }
  std::int64_t head(int r) const { return block_.h * p_.group + (block_.first + r) % p_.group; }
  attn128::Visible visible(int r) const { return p_.visible(offset_ + query(r), keys_); }

  // All rows and the keys that some of them sees.
  void begin() {
    first_ = keys_, last_ = 0;
    for (int r = 0; r < block_.count; ++r) {
      Row::widen(p_.q.type, p_.q.at(block_.n, q_begin_ + query(r), head(r)), q_ + r * p_.width, p_.width);
      const attn128::Visible seen = visible(r);
      if (seen.first < seen.last) first_ = std::min(first_, seen.first), last_ = std::max(last_, seen.last);
      begun_[r] = 0;
    }
    restart();
  }

  std::int64_t split_at(std::int64_t key) const { return p_.split_of(key / kTile); }
  // The keys of a split that some row may see.
  attn128::Visible keys_of(std::int64_t split) const {
    const std::int64_t begin = split * p_.split;
    return {std::max(first_, begin), p_.split == 0 ? last_ : std::min(last_, begin + p_.split)};
  }
  bool sees(int r, std::int64_t split) const {
    const attn128::Visible keys = keys_of(split);
    return sees(r, keys.first, keys.last);
  }
  template <class Float>
  Float* part(Float* parts, int r, std::int64_t split) const {
    const std::int64_t row = (p_.cu_q ? q_begin_ : block_.n * p_.queries) + query(r);
    return parts + ((row * p_.heads * p_.group + head(r)) * split_count(p_) + split) * (p_.value_width + 2);
  }

  void tiles(std::int64_t split) {
    const attn128::Visible keys = keys_of(split);
    for (std::int64_t tile = keys.first / kTile; tile * kTile < keys.last; ++tile)
      one_tile(tile, first_, last_);
  }

  // Whether row r sees a key in [from, to).
  bool sees(int r, std::int64_t from, std::int64_t to) const {
    const attn128::Visible seen = visible(r);
    return seen.first < seen.last && seen.first < to && seen.last > from;
  }

  void restart() {
    std::fill_n(o_, std::int64_t{block_.count} * p_.value_width, 0.0f);
    std::fill_n(m_, block_.count, -__builtin_inff());
    std::fill_n(l_, block_.count, 0.0f);
  }

  // Keys [at, at + kTile) of which [first, last) are there; the others count as zeros and are not read.
  void load(std::int64_t at, std::int64_t first, std::int64_t last) {
    for (std::int64_t j = 0; j < kTile; j += kTurned) {
      for (std::int64_t i = 0; i < kTurned; ++i) {
        const std::int64_t key = at + j + i;
        float *k = some_ + i * p_.width, *v = values_ + (j + i) * p_.value_width;
        if (key < first || key >= last) {
          std::fill_n(k, p_.width, 0.0f), std::fill_n(v, p_.value_width, 0.0f);
          continue;
        }
        Row::widen(p_.k.type, p_.key(p_.k, block_.n, k_begin_, key, block_.h), k, p_.width);
        Row::widen(p_.v.type, p_.key(p_.v, block_.n, k_begin_, key, block_.h), v, p_.value_width);
      }
      for (std::int64_t d = 0; d < p_.width; ++d)
        for (std::int64_t i = 0; i < kTurned; ++i) turned_[d * kTile + j + i] = some_[i * p_.width + d];
    }
  }

  void one_tile(std::int64_t tile, std::int64_t first, std::int64_t last) {
    const std::int64_t at = tile * kTile;
    int from = 0, to = block_.count;  // rows that see a key of the tile lie side by side
    while (from < to && !sees(from, at, at + kTile)) ++from;
    while (from < to && !sees(to - 1, at, at + kTile)) --to;
    if (from == to) return;
    load(at, first, last);
    float* scores = p_row_ + from * kTile;
    std::fill_n(scores, (to - from) * kTile, 0.0f);
    Products<L, W>::add(q_ + from * p_.width, p_.width, turned_, kTile, scores, kTile, to - from, p_.width,
                        kTile);
    for (int r = from; r < to; ++r) weigh(r, at);
    const std::int64_t width = p_.value_width;
    for (int r = from; r < to; ++r)
      Row::map(width, [a = a_[r]](auto o) { return o * a; }, o_ + r * width, o_ + r * width);
    Products<L, W>::add(scores, kTile, values_, width, o_ + from * width, width, to - from, kTile, width);
    for (int r = from; r < to; ++r)  // -0 becomes +0
      Row::map(width, [](auto o) { return o + 0.0f; }, o_ + r * width, o_ + r * width);
  }

  // The row's scores become weights, rounded to v's dtype; m and l move on, and a is what O is multiplied by.
  void weigh(int r, std::int64_t at) {
    float* x = p_row_ + r * kTile;
    const attn128::Visible seen = visible(r);
    if (p_.cap != 0) Row::map(kTile, [this](auto s) { return attn128::capped(p_, s); }, x, x);
    const std::int64_t from = std::clamp<std::int64_t>(seen.first - at, 0, kTile),
                       to = std::clamp<std::int64_t>(seen.last - at, 0, kTile);
    std::fill_n(x, from, -__builtin_inff());
    std::fill(x + to, x + kTile, -__builtin_inff());
    const float top = largest(x) * p_.c, m = top > m_[r] ? top : m_[r], base = attn128::base_of(m);
    Row::map(
        kTile,
        [c = p_.c, base](auto s) { return attn128::weight(s, decltype(s){} + c, decltype(s){} - base); }, x,
        x);
    a_[r] = simt::exp2(m_[r] - base);
    l_[r] = simt::fused(l_[r], a_[r], tree<L, W>(x));
    m_[r] = m;
    if (p_.v.type == Type::f32) return;
    Row::narrow(p_.v.type, x, halves_, kTile);
    Row::widen(p_.v.type, halves_, x, kTile);
  }

  // NaN is none of them.
  static float largest(const float* x) {
    L most = L{} - __builtin_inff();
    for (int j = 0; j < kTile; j += W) {
      const L y = Row::load(x + j);
      most = y > most ? y : most;
    }
    float lanes[W], top = -__builtin_inff();
    Row::store(lanes, most);
    for (float y : lanes) top = y > top ? y : top;
    return top;
  }

  // Joins the sums of a split to those before it.
  void end_split(std::int64_t split) {
    const std::int64_t width = p_.value_width;
    for (int r = 0; r < block_.count; ++r) {
      if (!sees(r, split)) continue;
      float *total = total_ + r * width, *o = o_ + r * width;
      if (begun_[r] == 0) {
        std::copy_n(o, width, total);
        total_m_[r] = m_[r], total_l_[r] = l_[r], begun_[r] = 1;
        continue;
      }
      join(r, m_[r], l_[r], o);
    }
    restart();
  }
  void join(int r, float m, float l, const float* o) {
    const attn128::Join j = attn128::join(total_m_[r], m);
    float* total = total_ + r * p_.value_width;
    total_l_[r] = attn128::joined(total_l_[r], j.a, l, j.b);
    total_m_[r] = j.m;
    Row::map(
        p_.value_width, [j](auto x, auto y) { return simt::fused(x, decltype(x){} + j.a, y * j.b); }, total,
        total, o);
  }

  void finish(int r) {
    float* total = total_ + r * p_.value_width;
    const std::int64_t token = q_begin_ + query(r);
    float lse = p_.sinks != nullptr ? p_.sinks[head(r)] : -__builtin_inff();
    if (begun_[r] == 0 || total_l_[r] == 0) {
      std::fill_n(total, p_.value_width, 0.0f);
    } else {
      if (p_.sinks != nullptr) {
        std::fill_n(o_, p_.value_width, 0.0f);
        join(r, lse * attn128::kLog2e, 1, o_);
      }
      const float inverse = 1 / total_l_[r];
      Row::map(p_.value_width, [inverse](auto o) { return o * inverse; }, total, total);
      lse = attn128::lse_of(total_m_[r], total_l_[r]);
    }
    Row::narrow(p_.out.type, total, p_.out.at(block_.n, token, head(r)), p_.value_width);
    if (p_.lse) rows::store(Type::f32, p_.lse.at(block_.n, token, head(r)), 0, lse);
  }

  const Problem& p_;
  const Block& block_;
  const std::int64_t q_begin_, k_begin_, keys_, offset_;
  std::int64_t first_ = 0, last_ = 0;  // keys that some row sees
  float *turned_, *values_, *some_, *q_, *p_row_, *o_, *total_, *halves_, *m_, *l_, *a_, *total_m_, *total_l_,
      *begun_;
};

template <class L, int W>
void forward(const Problem& p, const Block& block, float* scratch) {
  Rows<L, W>(p, block, scratch).run();
}
template <class L, int W>
void forward_split(const Problem& p, const Block& block, std::int64_t split, float* parts, float* scratch) {
  Rows<L, W>(p, block, scratch).run_split(split, parts);
}
template <class L, int W>
void join_splits(const Problem& p, const Block& block, const float* parts, float* scratch) {
  Rows<L, W>(p, block, scratch).join_splits(parts);
}

template <class L, int W>
constexpr Engine engine() {
  return {forward<L, W>, forward_split<L, W>, join_splits<L, W>};
}

}  // namespace rlk::native::attn
