// The body of each block_<isa>.cpp: an Engine on vectors of the given type. A tile of keys is turned so that lanes go over keys
// for scores, and over Dv for the weighted values: every element keeps its one ascending chain.
#pragma once

#include <algorithm>
#include <utility>

#include "native/attention/cache.hpp"
#include "native/attention/products.hpp"
#include "native/attention/tree.hpp"

namespace rlk::native::attention {

// The products of a block and a tile: fma chains over fp32.
template <class L, int W>
class FmaTile {
  using Row = native::Row<L, W>;
  static constexpr std::int64_t kTurned = 16;  // keys that are turned at a time: a cache line of floats

 public:
  // Takes what it needs from scratch, which moves on.
  FmaTile(const Problem& p, float*& scratch) : p_(p) {
    const auto take = [&scratch](std::int64_t floats) { return std::exchange(scratch, scratch + floats); };
    turned_ = take(kTile * p.width), values_ = take(kTile * p.value_width);
    some_ = take(kTurned * p.width), q_ = take(std::int64_t{kRows} * p.width), halves_ = take(kTile);
  }
  static constexpr int kSpare = 0;  // rows behind the block that products write
  // From one row of O to the next.
  static std::int64_t pitch(const Problem& p) { return p.value_width; }

  void query(int r, const void* q) { Row::widen(p_.q.type, q, q_ + r * p_.width, p_.width); }
  // key(t, j): where key j of the tile lies in k or v; null: it counts as zeros.
  template <class Key>
  void load(Key key) {
    for (std::int64_t j = 0; j < kTile; j += kTurned) {
      for (std::int64_t i = 0; i < kTurned; ++i) {
        float *k = some_ + i * p_.width, *v = values_ + (j + i) * p_.value_width;
        const void* from = key(p_.k, j + i);
        if (from == nullptr) {
          std::fill_n(k, p_.width, 0.0f), std::fill_n(v, p_.value_width, 0.0f);
          continue;
        }
        if (!p_.k.f8) ask_for(p_, key, j + i + kTurned);
        Row::widen(p_.k.type, from, k, p_.width);
        Row::widen(p_.v.type, key(p_.v, j + i), v, p_.value_width);
      }
      turn<L, W>(some_, kTurned, p_.width, turned_ + j, kTile);
    }
  }
  // Of rows [from, to).
  void scores(int from, int to, float* scores) const {
    std::fill_n(scores + from * kTile, (to - from) * kTile, 0.0f);
    Products<L, W>::add(q_ + from * p_.width, p_.width, turned_, kTile, scores + from * kTile, kTile,
                        to - from, p_.width, kTile);
  }
  // A row's weights are rounded to v's dtype.
  void round(int, float* weights) {
    if (p_.v.type == rows::Type::f32) return;
    Row::narrow(p_.v.type, weights, halves_, kTile);
    Row::widen(p_.v.type, halves_, weights, kTile);
  }
  void add_values(int from, int to, const float* weights, float* o) const {
    const std::int64_t width = p_.value_width;
    Products<L, W>::add(weights + from * kTile, kTile, values_, width, o + from * width, width, to - from,
                        kTile, width);
  }

 private:
  const Problem& p_;
  float *turned_, *values_, *some_, *q_, *halves_;
};

// The splits of a row joined ascending, and what they make. O is elsewhere.
template <class L, int W>
class Total {
  using Row = native::Row<L, W>;

 public:
  void add(float m, float l, const float* o, float* total, std::int64_t width) {
    if (begun_) return join(m, l, o, total, width);
    std::copy_n(o, width, total);
    m_ = m, l_ = l, begun_ = true;
  }
  // Writes out, and gives lse. `sink`: null where there is none; `zeros` is as wide as O.
  float finish(const float* sink, float* total, float* zeros, rows::Type type, void* out,
               std::int64_t width) {
    float lse = sink != nullptr ? *sink : -__builtin_inff();
    if (!begun_ || l_ == 0) {
      std::fill_n(total, width, 0.0f);
    } else {
      if (sink != nullptr) {
        std::fill_n(zeros, width, 0.0f);
        join(lse * attn128::kLog2e, 1, zeros, total, width);
      }
      const float inverse = 1 / l_;
      Row::map(width, [inverse](auto o) { return o * inverse; }, total, total);
      lse = attn128::lse_of(m_, l_);
    }
    Row::narrow(type, total, out, width);
    return lse;
  }

 private:
  void join(float m, float l, const float* o, float* total, std::int64_t width) {
    const attn128::Join j = attn128::join(m_, m);
    l_ = attn128::joined(l_, j.a, l, j.b), m_ = j.m;
    Row::map(
        width, [j](auto x, auto y) { return simt::fused(x, decltype(x){} + j.a, y * j.b); }, total, total, o);
  }

  float m_ = -__builtin_inff(), l_ = 0;
  bool begun_ = false;
};

template <class L, int W, class Tile = FmaTile<L, W>>
class Rows {
  using Row = native::Row<L, W>;
  using Type = rows::Type;

 public:
  Rows(const Problem& p, const Block& block, float* scratch)
      : p_(p),
        block_(block),
        q_begin_(p.q_begin(block.n)),
        key_rows_(p.key_rows(block.n)),
        here_(p.here(block.n)),
        offset_(p.keys(block.n) - p.q_len(block.n)),
        pitch_(Tile::pitch(p)),
        cache_(p, block.h, scratch),
        tile_(p, scratch) {
    const auto take = [&scratch](std::int64_t floats) { return std::exchange(scratch, scratch + floats); };
    p_row_ = take(std::int64_t{kRows + Tile::kSpare} * kTile);
    o_ = take(std::int64_t{kRows + Tile::kSpare} * pitch_),
    total_ = take(std::int64_t{kRows} * p.value_width);
    m_ = take(kRows), l_ = take(kRows), a_ = take(kRows), base_ = take(kRows);
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
    split += split_at(here_.first);
    tiles(split);
    for (int r = 0; r < block_.count; ++r) {
      float* to = part(parts, r, split);
      if (sees(r, split)) {
        to[0] = m_[r];
        rows::store(Type::f32, to, 1, l_[r]);
        Row::narrow(Type::f32, o_ + r * pitch_, to + 2, p_.value_width);
      } else if (p_.partials != nullptr) {
        to[0] = -__builtin_inff(), to[1] = attn128::kNoKey;
        std::fill_n(to + 2, p_.value_width, 0.0f);
      }
    }
  }
  void join_splits(const float* parts) {
    begin();
    for (std::int64_t split = split_at(first_); first_ < last_ && split <= split_at(last_ - 1); ++split) {
      for (int r = 0; r < block_.count; ++r) {
        if (!sees(r, split)) continue;
        const float* from = part(parts, r, split);
        m_[r] = from[0], l_[r] = from[1];
        std::copy_n(from + 2, p_.value_width, o_ + r * pitch_);
      }
      end_split(split);
    }
    for (int r = 0; r < block_.count; ++r) finish(r);
  }

 private:
  std::int64_t query(int r) const { return (block_.first + r) / p_.group; }
  std::int64_t head(int r) const { return block_.h * p_.group + (block_.first + r) % p_.group; }
  attn128::Visible visible(int r) const { return visible_[r]; }

  // All rows and the keys that some of them sees.
  void begin() {
    first_ = here_.last, last_ = here_.first;
    for (int r = 0; r < block_.count; ++r) {
      tile_.query(r, p_.q.at(block_.n, q_begin_ + query(r), head(r)));
      const attn128::Visible seen = visible_[r] = p_.visible(offset_ + query(r), here_);
      if (seen.first < seen.last) first_ = std::min(first_, seen.first), last_ = std::max(last_, seen.last);
      totals_[r] = {};
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
    return p_.part(parts, row * p_.heads * p_.group + head(r), split - split_at(here_.first));
  }

  void tiles(std::int64_t split) {
    const attn128::Visible keys = keys_of(split);
    for (std::int64_t tile = keys.first / kTile; tile * kTile < keys.last; ++tile)
      one_tile(tile, first_, last_);
    // -0 becomes +0: the rule says so after every tile, but a zero's sign shows in nothing until here.
    for (int r = 0; r < block_.count; ++r)
      Row::map(p_.value_width, [](auto o) { return o + 0.0f; }, o_ + r * pitch_, o_ + r * pitch_);
  }

  // Whether row r sees a key in [from, to).
  bool sees(int r, std::int64_t from, std::int64_t to) const {
    const attn128::Visible seen = visible(r);
    return seen.first < seen.last && seen.first < to && seen.last > from;
  }

  void restart() {
    std::fill_n(o_, std::int64_t{block_.count} * pitch_, 0.0f);
    std::fill_n(m_, block_.count, -__builtin_inff());
    std::fill_n(l_, block_.count, 0.0f);
  }

  void one_tile(std::int64_t tile, std::int64_t first, std::int64_t last) {
    const std::int64_t at = tile * kTile;
    int from = 0, to = block_.count;  // rows that see a key of the tile lie side by side
    while (from < to && !sees(from, at, at + kTile)) ++from;
    while (from < to && !sees(to - 1, at, at + kTile)) --to;
    if (from == to) return;
    // Keys of [first, last) are there; the others are not read.
    const auto key = [&](const attn128::Tensor& t, std::int64_t j) -> const void* {
      const bool there = at + j >= first && at + j < last;
      return there ? p_.key(t, block_.n, key_rows_, at + j - here_.first, block_.h) : nullptr;
    };
    if (p_.k.f8)
      tile_.load(cache_.load(key));
    else
      tile_.load(key);
    tile_.scores(from, to, p_row_);
    weigh(from, to, at);
    for (int r = from; r < to; ++r)
      if (a_[r] != 1)
        Row::map(p_.value_width, [a = a_[r]](auto o) { return o * a; }, o_ + r * pitch_, o_ + r * pitch_);
    tile_.add_values(from, to, p_row_, o_);
  }

  // Scores of rows [from, to) become weights, rounded to v's dtype; m and l move on, and a is what O is multiplied by. Step by
  // step for all rows: one's steps wait for each other, those of several need not.
  void weigh(int from, int to, std::int64_t at) {
    for (int r = from; r < to; ++r) {
      const float top = largest<L, W>(seen_scores(r, at)) * p_.c, m = top > m_[r] ? top : m_[r];
      base_[r] = attn128::base_of(m);
      a_[r] = m_[r] - base_[r];
      m_[r] = m;
    }
    Row::map(to - from, [](auto x) { return simt::exp2<decltype(x)>(x); }, a_ + from, a_ + from);
    for (int r = from; r < to; ++r)
      Row::map(
          kTile,
          [c = p_.c, base = base_[r]](auto s) {
            return attn128::weight(s, decltype(s){} + c, decltype(s){} - base);
          },
          p_row_ + r * kTile, p_row_ + r * kTile);
    for (int r = from; r < to; ++r) {
      l_[r] = simt::fused(l_[r], a_[r], tree<L, W>(p_row_ + r * kTile));
      tile_.round(r, p_row_ + r * kTile);
    }
  }

  // A row's scores as they take part, those of keys that it does not see at -inf.
  const float* seen_scores(int r, std::int64_t at) {
    float* x = p_row_ + r * kTile;
    const attn128::Visible seen = visible(r);
    if (p_.cap != 0) Row::map(kTile, [this](auto s) { return attn128::capped(p_, s); }, x, x);
    if (seen.first <= at && seen.last >= at + kTile) return x;
    const std::int64_t from = std::clamp<std::int64_t>(seen.first - at, 0, kTile),
                       to = std::clamp<std::int64_t>(seen.last - at, 0, kTile);
    std::fill_n(x, from, -__builtin_inff());
    std::fill(x + to, x + kTile, -__builtin_inff());
    return x;
  }

  // Joins the sums of a split to those before it.
  void end_split(std::int64_t split) {
    const std::int64_t width = p_.value_width;
    for (int r = 0; r < block_.count; ++r)
      if (sees(r, split)) totals_[r].add(m_[r], l_[r], o_ + r * pitch_, total_ + r * width, width);
    restart();
  }

  void finish(int r) {
    const std::int64_t token = q_begin_ + query(r);
    const float lse =
        totals_[r].finish(p_.sinks != nullptr ? p_.sinks + head(r) : nullptr, total_ + r * p_.value_width, o_,
                          p_.out.type, p_.out.at(block_.n, token, head(r)), p_.value_width);
    if (p_.lse) rows::store(Type::f32, p_.lse.at(block_.n, token, head(r)), 0, lse);
  }

  const Problem& p_;
  const Block& block_;
  const std::int64_t q_begin_;
  const attn128::KeyRows key_rows_;
  const attn128::Visible here_;
  const std::int64_t offset_, pitch_;
  const WidenedTile<L, W> cache_;
  Tile tile_;
  std::int64_t first_ = 0, last_ = 0;  // keys that some row sees
  float *p_row_, *o_, *total_, *m_, *l_, *a_, *base_;
  Total<L, W> totals_[kRows];
  attn128::Visible visible_[kRows];
};

template <class L, int W, class Tile>
void forward(const Problem& p, const Block& block, float* scratch) {
  Rows<L, W, Tile>(p, block, scratch).run();
}
template <class L, int W, class Tile>
void forward_split(const Problem& p, const Block& block, std::int64_t split, float* parts, float* scratch) {
  Rows<L, W, Tile>(p, block, scratch).run_split(split, parts);
}
template <class L, int W, class Tile>
void join_splits(const Problem& p, const Block& block, const float* parts, float* scratch) {
  Rows<L, W, Tile>(p, block, scratch).join_splits(parts);
}

template <class L, int W>
void merge(const attn128::Merge& g, std::int64_t row) {
  constexpr int kMostWidth = 512;
  alignas(64) float sum[kMostWidth], zeros[kMostWidth];
  const attn128::MergeRow at = attn128::merge_row(g, row);
  Total<L, W> total;
  for (std::int64_t i = 0; i < g.parts * g.splits; ++i)
    if (const float* part = attn128::split_at(g, at, i); part[1] != attn128::kNoKey)
      total.add(part[0], part[1], part + 2, sum, g.width);
  const float lse = total.finish(g.sinks != nullptr ? g.sinks + at.head : nullptr, sum, zeros, g.out.type,
                                 g.out.at(at.n, at.token, at.head), g.width);
  if (g.lse) rows::store(rows::Type::f32, g.lse.at(at.n, at.token, at.head), 0, lse);
}

template <class L, int W, class Tile = FmaTile<L, W>>
constexpr Engine engine() {
  return {forward<L, W, Tile>, forward_split<L, W, Tile>, join_splits<L, W, Tile>, merge<L, W>};
}

}  // namespace rlk::native::attention
