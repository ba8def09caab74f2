// The body of each backward_<isa>.cpp: a BackwardEngine on vectors of the given type.
#pragma once

#include <algorithm>
#include <utility>

#include "native/attention/backward_engine.hpp"
#include "native/attention/products.hpp"
#include "native/attention/tree.hpp"

namespace rlk::native::attention {

// Scores and dP of a row, in place of which come P and dS.
template <class L, int W>
void slopes(const Problem& p, Stat stat, std::int64_t columns, float* w, float* s) {
  using Row = native::Row<L, W>;
  for (std::int64_t j = 0; j < columns; j += W) {
    const attn128::Slope<L> slope = attn128::slope_of<L>(p, Row::load(w + j), Row::load(s + j), stat);
    Row::store(w + j, slope.p), Row::store(s + j, slope.ds);
  }
}
// Of a tile's keys, which begin with `at`, those that a row does not see count as +0.
inline void hide(attn128::Visible seen, std::int64_t at, std::int64_t columns, float* w, float* s) {
  const std::int64_t from = std::clamp<std::int64_t>(seen.first - at, 0, columns),
                     to = std::clamp<std::int64_t>(seen.last - at, 0, columns);
  for (float* x : {w, s}) std::fill_n(x, from, 0.0f), std::fill(x + to, x + columns, 0.0f);
}

// A sequence and a head of its keys.
struct OfHead {
  const Backward& g;
  const Problem& p;
  const std::int64_t h;
  const attn128::KeyRows key_rows;
  std::int64_t n, keys, offset;  // of the queries at hand, and how many keys their sequence has

  OfHead(const Backward& b, std::int64_t sequence, std::int64_t head)
      : g(b), p(b.p), h(head), key_rows(p.key_rows(sequence)) {
    read_by(sequence);
  }
  // Queries are those of a sequence whose first keys these are.
  void read_by(std::int64_t sequence) { n = sequence, keys = p.kv_count(n), offset = keys - p.q_len(n); }
};

// What both passes share: a tile of keys and a block of rows in fp32, dS and P of each pair, and their products.
template <class L, int W>
class FmaPairs : public OfHead {
  using Row = native::Row<L, W>;
  using Type = rows::Type;
  static constexpr std::int64_t kTurned = 16;  // keys that are turned at a time: a cache line of floats

 public:
  // Blocks of rows start at a multiple of it.
  static constexpr std::int64_t kAligned = 1;
  float *k, *k_turned, *v_turned, *q, *d_out, *weights, *ds;
  std::int64_t count = 0, columns = 0;  // keys of the tile, and what is computed of it

  // Takes what it needs from scratch, which moves on.
  FmaPairs(const Backward& b, std::int64_t sequence, std::int64_t head, float*& scratch)
      : OfHead(b, sequence, head) {
    const auto take = [&scratch](std::int64_t floats) { return std::exchange(scratch, scratch + floats); };
    k = take(kTile * p.width), k_turned = take(kTile * p.width);
    v_ = take(kTile * p.value_width), v_turned = take(kTile * p.value_width);
    q = take(kRows * p.width), d_out = take(kRows * p.value_width);
    weights = take(kRows * kTile), ds = take(kRows * kTile);
    halves_ = take(2 * kTile);
  }
  static std::int64_t scratch_floats(const Problem& p) {
    return (2 * kTile + kRows) * (p.width + p.value_width) + 2 * kRows * kTile + 2 * kTile;
  }
  // Sums of rows or keys: from one to the next, of `width` numbers, and how many keys a tile has room for.
  static std::int64_t pitch(std::int64_t width) { return width; }
  static constexpr std::int64_t kSpare = 0;  // rows behind those that are asked for that products write

  // Keys [at, at + kTile) as far as there are; up to a multiple of kTurned those behind the last are zeros.
  void load_keys(std::int64_t at) {
    count = std::min<std::int64_t>(kTile, keys - at), columns = (count + kTurned - 1) / kTurned * kTurned;
    load(p.k, p.width, at, k, k_turned);
    load(p.v, p.value_width, at, v_, v_turned);
  }
  // Query i of a head becomes row r of the block.
  void load_row(int r, std::int64_t i, std::int64_t head) {
    const std::int64_t token = p.q_begin(n) + i;
    Row::widen(p.q.type, p.q.at(n, token, head), q + r * p.width, p.width);
    Row::widen(g.d_out.type, g.d_out.at(n, token, head), d_out + r * p.value_width, p.value_width);
  }

  // Scores and dP of rows [from, to), in place of weights and ds.
  void multiply(int from, int to) {
    float *scores = weights + from * kTile, *dp = ds + from * kTile;
    for (int r = 0; r < to - from; ++r)
      std::fill_n(scores + r * kTile, columns, 0.0f), std::fill_n(dp + r * kTile, columns, 0.0f);
    Products<L, W>::add(q + from * p.width, p.width, k_turned, kTile, scores, kTile, to - from, p.width,
                        columns);
    Products<L, W>::add(d_out + from * p.value_width, p.value_width, v_turned, kTile, dp, kTile, to - from,
                        p.value_width, columns);
  }
  // They become P and dS of query i, rounded as operands, +0 where a key is not seen.
  void weigh(int r, std::int64_t i, std::int64_t at, Stat stat) {
    float *w = weights + r * kTile, *s = ds + r * kTile;
    slopes<L, W>(p, stat, columns, w, s);
    round(w), round(s);
    hide(p.visible(offset + i, keys), at, columns, w, s);
  }
  // d_q's part of the tile, of rows [from, to): to[0] is the first one's.
  void multiply_keys(int from, int to, float* part) const {
    std::fill_n(part, (to - from) * p.width, 0.0f);
    Products<L, W>::add(ds + from * kTile, kTile, k, p.width, part, p.width, to - from, count, p.width);
  }
  // d_k and d_v go on over `depth` rows; either may be null.
  void add_rows(int depth, float* d_k, float* d_v) {
    if (d_k) Products<L, W>::template add<true>(ds, kTile, q, p.width, d_k, p.width, count, depth, p.width);
    if (d_v)
      Products<L, W>::template add<true>(weights, kTile, d_out, p.value_width, d_v, p.value_width, count,
                                         depth, p.value_width);
  }
  const float* row_of_d_out(int r) { return d_out + r * p.value_width; }
  std::int64_t room() const { return count; }  // keys that a tile has sums of

 private:
  void load(const attn128::Tensor& t, std::int64_t width, std::int64_t at, float* to, float* turned) {
    for (std::int64_t j = 0; j < columns; j += kTurned) {
      float* some = to + j * width;
      for (std::int64_t i = 0; i < kTurned; ++i) {
        const std::int64_t key = at + j + i;
        if (key < keys)
          Row::widen(t.type, p.key(t, n, key_rows, key, h), some + i * width, width);
        else
          std::fill_n(some + i * width, width, 0.0f);
      }
      turn<L, W>(some, kTurned, width, turned + j, kTile);
    }
  }
  void round(float* x) {
    if (p.v.type == Type::f32) return;
    Row::narrow(p.v.type, x, halves_, columns);
    Row::widen(p.v.type, halves_, x, columns);
  }

  float *v_, *halves_;
};

// The first pass, of one block of rows.
template <class L, int W, class Pairs>
class QueryGradients {
  using Row = native::Row<L, W>;

 public:
  QueryGradients(const Backward& g, const Block& block, Stat* stats, float* scratch)
      : pairs_(g, block.n, block.h, scratch), block_(block), stats_(stats) {
    sum_ = scratch, part_ = sum_ + kRows * pitch();
  }
  static std::int64_t scratch_floats(const Problem& p) {
    return (2 * kRows + Pairs::kSpare) * Pairs::pitch(std::max(p.width, p.value_width));
  }

  void run() {
    const Backward& g = pairs_.g;
    std::int64_t first = pairs_.keys, last = 0;  // keys that some row sees
    for (int r = 0; r < block_.count; ++r) {
      pairs_.load_row(r, query(r), head(r));
      stat(r) = stat_of(r);
      const attn128::Visible seen = visible(r);
      if (seen.first < seen.last) first = std::min(first, seen.first), last = std::max(last, seen.last);
    }
    if (!g.d_q) return;
    const std::int64_t width = g.p.width;
    std::fill_n(sum_, block_.count * pitch(), 0.0f);
    for (std::int64_t at = first / kTile * kTile; at < last; at += kTile) one_tile(at);
    for (int r = 0; r < block_.count; ++r) {
      float* x = sum_ + r * pitch();
      Row::map(width, [scale = g.p.scale](auto y) { return y * scale; }, x, x);
      Row::narrow(g.d_q.type, x, g.d_q.at(block_.n, g.p.q_begin(block_.n) + query(r), head(r)), width);
    }
  }

 private:
  std::int64_t pitch() const { return Pairs::pitch(pairs_.p.width); }
  std::int64_t query(int r) const { return (block_.first + r) / pairs_.p.group; }
  std::int64_t head(int r) const { return block_.h * pairs_.p.group + (block_.first + r) % pairs_.p.group; }
  attn128::Visible visible(int r) const { return pairs_.p.visible(pairs_.offset + query(r), pairs_.keys); }
  Stat& stat(int r) { return stats_[pairs_.g.row(block_.n, query(r)) * pairs_.g.all_heads() + head(r)]; }

  bool sees(int r, std::int64_t at) const {
    const attn128::Visible seen = visible(r);
    return seen.first < seen.last && seen.first < at + kTile && seen.last > at;
  }

  Stat stat_of(int r) {
    const Problem& p = pairs_.p;
    const std::int64_t token = p.q_begin(block_.n) + query(r), width = p.value_width;
    const float* d_out = pairs_.row_of_d_out(r);
    Row::widen(p.out.type, p.out.at(block_.n, token, head(r)), part_, width);
    float delta = 0, products[kTile];
    for (std::int64_t d = 0; d < width; d += kTile) {
      const std::int64_t count = std::min<std::int64_t>(kTile, width - d);
      std::fill(products + count, products + kTile, 0.0f);
      Row::map(count, [](auto x, auto y) { return x * y; }, products, d_out + d, part_ + d);
      delta += tree<L, W>(products);
    }
    if (pairs_.g.d_lse) delta -= *static_cast<const float*>(pairs_.g.d_lse.at(block_.n, token, head(r)));
    return {attn128::base_of_lse(*static_cast<const float*>(p.lse.at(block_.n, token, head(r)))), delta};
  }

  void one_tile(std::int64_t at) {
    int from = 0, to = block_.count;  // rows that see a key of the tile lie side by side
    while (from < to && !sees(from, at)) ++from;
    while (from < to && !sees(to - 1, at)) --to;
    if (from == to) return;
    pairs_.load_keys(at);
    pairs_.multiply(from, to);
    for (int r = from; r < to; ++r) pairs_.weigh(r, query(r), at, stat(r));
    pairs_.multiply_keys(from, to, part_);
    float* sum = sum_ + from * pitch();
    Row::map((to - from) * pitch(), [](auto x, auto y) { return x + y; }, sum, sum, part_);
  }

  Pairs pairs_;
  const Block& block_;
  Stat* stats_;
  float *sum_, *part_;
};

// The second pass, of one tile of keys; with d_q's sums, which it adds to, all of the gradients.
template <class L, int W, class Pairs>
class KeyGradients {
  using Row = native::Row<L, W>;

 public:
  KeyGradients(const Backward& g, const KeyTile& tile, const Stat* stats, float* scratch,
               float* d_q = nullptr)
      : pairs_(g, tile.n, tile.h, scratch), tile_(tile), stats_(stats), d_q_(d_q) {
    part_ = scratch, sums_ = part_ + (kRows + Pairs::kSpare) * Pairs::pitch(g.p.width);
  }
  static std::int64_t scratch_floats(const Problem& p) {
    const std::int64_t d = Pairs::pitch(p.width), dv = Pairs::pitch(p.value_width);
    return (kRows + Pairs::kSpare) * d + levels_of(p.group) * kTile * (d + dv);
  }

  void run() {
    const Backward& g = pairs_.g;
    const std::int64_t d = g.p.width, dv = g.p.value_width;
    pairs_.load_keys(tile_.at);
    heads(0, g.p.group, 0);
    const std::int64_t count = pairs_.count;
    Row::map(count * pitch(d), [scale = g.p.scale](auto x) { return x * scale; }, d_k(0), d_k(0));
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t token = pairs_.key_rows.row(tile_.at + j);
      if (g.d_k) Row::narrow(g.d_k.type, d_k(0) + j * pitch(d), g.d_k.at(tile_.n, token, tile_.h), d);
      if (g.d_v) Row::narrow(g.d_v.type, d_v(0) + j * pitch(dv), g.d_v.at(tile_.n, token, tile_.h), dv);
    }
  }

 private:
  // Sums of all keys of the tile, d_v behind d_k.
  static std::int64_t pitch(std::int64_t width) { return Pairs::pitch(width); }
  std::int64_t floats() const {
    return pairs_.room() * (pitch(pairs_.p.width) + pitch(pairs_.p.value_width));
  }
  float* d_k(int level) { return sums_ + level * floats(); }
  float* d_v(int level) { return d_k(level) + pairs_.room() * pitch(pairs_.p.width); }

  // The sums over heads [first, first + count) of the group, in the buffers of a level.
  void heads(int first, int count, int level) {
    if (count == 1) return one_head(first, d_k(level), d_v(level));
    const int side = attn128::left_side(pairs_.p.group, count);
    heads(first, side, level);
    for (int next = first + side; next < first + count; next += side) {
      heads(next, side, level + 1);
      Row::map(floats(), [](auto x, auto y) { return x + y; }, d_k(level), d_k(level), d_k(level + 1));
    }
  }

  void one_head(int index, float* d_k, float* d_v) {
    const Backward& g = pairs_.g;
    std::fill_n(d_k, floats(), 0.0f);
    for (std::int64_t n = tile_.n; n < g.p.sequences; n = g.next_reader(tile_.n, n)) {
      pairs_.read_by(n);
      one_reader(n, index, d_k, d_v);
    }
    Row::map(floats(), [](auto x) { return x + 0.0f; }, d_k, d_k);  // -0 becomes +0
  }
  // The queries of sequence n.
  void one_reader(std::int64_t n, int index, float* d_k, float* d_v) {
    const Backward& g = pairs_.g;
    const std::int64_t head = tile_.h * g.p.group + index;
    const attn128::Visible rows = g.queries(n, tile_.at, tile_.at + pairs_.count);
    for (std::int64_t first = rows.first / Pairs::kAligned * Pairs::kAligned; first < rows.last;
         first += kRows) {
      const auto depth = static_cast<int>(std::min<std::int64_t>(kRows, rows.last - first));
      for (int r = 0; r < depth; ++r) pairs_.load_row(r, first + r, head);
      pairs_.multiply(0, depth);
      for (int r = 0; r < depth; ++r)
        pairs_.weigh(r, first + r, tile_.at, stats_[g.row(n, first + r) * g.all_heads() + head]);
      if (d_q_ != nullptr) add_queries(first, depth, index, rows.first);
      pairs_.add_rows(depth, g.d_k ? d_k : nullptr, g.d_v ? d_v : nullptr);
    }
  }

  // The tile's part of d_q of the rows at hand, of which those from `seeing` on see a key of it.
  void add_queries(std::int64_t first, int depth, int index, std::int64_t seeing) {
    const std::int64_t width = pairs_.p.width, group = pairs_.p.group;
    pairs_.multiply_keys(0, depth, part_);
    for (int r = static_cast<int>(std::max<std::int64_t>(0, seeing - first)); r < depth; ++r) {
      float* sum = d_q_ + ((first + r) * group + index) * width;
      Row::map(width, [](auto x, auto y) { return x + y; }, sum, sum, part_ + r * pitch(width));
    }
  }

  Pairs pairs_;
  const KeyTile& tile_;
  const Stat* stats_;
  float *d_q_, *part_, *sums_;
};

// Both passes at once, of a sequence and head.
template <class L, int W, class Pairs>
void pair_gradients(const Backward& g, std::int64_t n, std::int64_t h, const Stat* stats, float* sums,
                    float* scratch) {
  using Row = native::Row<L, W>;
  const Problem& p = g.p;
  const std::int64_t width = p.width, rows = p.q_len(n) * p.group;
  std::fill_n(sums, rows * width, 0.0f);
  for (std::int64_t at = 0; at < p.kv_count(n); at += kTile) {
    const KeyTile tile{n, h, at};
    KeyGradients<L, W, Pairs>(g, tile, stats, scratch, sums).run();
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    float* x = sums + r * width;
    Row::map(width, [scale = p.scale](auto y) { return y * scale; }, x, x);
    Row::narrow(g.d_q.type, x, g.d_q.at(n, p.q_begin(n) + r / p.group, h * p.group + r % p.group), width);
  }
}

template <class L, int W, class Pairs>
void query_gradients(const Backward& g, const Block& block, Stat* stats, float* scratch) {
  QueryGradients<L, W, Pairs>(g, block, stats, scratch).run();
}
template <class L, int W, class Pairs>
void key_gradients(const Backward& g, const KeyTile& tile, const Stat* stats, float* scratch) {
  KeyGradients<L, W, Pairs>(g, tile, stats, scratch).run();
}

template <class L, int W, class Pairs>
std::int64_t gradient_floats(const Problem& p) {
  return 512 + Pairs::scratch_floats(p) +
         std::max(QueryGradients<L, W, Pairs>::scratch_floats(p),
                  KeyGradients<L, W, Pairs>::scratch_floats(p));
}

template <class L, int W, class Pairs = FmaPairs<L, W>>
constexpr BackwardEngine backward_engine() {
  return {query_gradients<L, W, Pairs>, key_gradients<L, W, Pairs>, pair_gradients<L, W, Pairs>,
          gradient_floats<L, W, Pairs>};
}

}  // namespace rlk::native::attention
