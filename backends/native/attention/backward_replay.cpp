#include "native/attention/backward_replay.hpp"

#include <algorithm>
#include <cstring>

#include "native/attention/tree.hpp"

namespace rlk::native::attention {
namespace {

constexpr int kRowsHere = kReplayBlock;

std::uint64_t line(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Up to a whole number of a chain's groups.
std::int64_t groups(std::int64_t count) { return (count + 15) / 16 * 16; }

std::uint16_t narrow(rows::Type type, float x) {
  return type == rows::Type::bf16 ? simt::from_float<simt::bf16>(x).bits
                                  : simt::from_float<simt::fp16>(x).bits;
}

// What both passes share: a tile of keys and a block of rows of one sequence, and P and dS of each pair.
class Pairs {
 public:
  const Backward& g;
  const Problem& p;
  const std::int64_t h;
  const attn128::KeyRows key_rows;
  std::int64_t n, keys, offset;  // of the queries at hand, and how many keys their sequence has
  std::uint16_t *k, *v, *q, *d_out, *weights,
      *ds;                           // [kTile] and [kRowsHere] rows; P and dS [kRowsHere, kTile]
  std::int64_t at = 0, columns = 0;  // the tile's first key; whole groups of 16 with a key
  std::int64_t rows = 0;             // of the block that are there

  // Takes what it needs from scratch, which moves on.
  Pairs(const Backward& b, std::int64_t sequence, std::int64_t head, const ReplayWay& way,
        std::byte*& scratch)
      : g(b),
        p(b.p),
        h(head),
        key_rows(p.key_rows(sequence)),
        kernels_(way.kernels),
        by_(way.by),
        scratch_(scratch) {
    read_by(sequence);
    take(kernel_scratch_, static_cast<std::int64_t>(kernels_.scratch_bytes));
    take(k, std::int64_t{kTile} * p.width), take(v, std::int64_t{kTile} * p.value_width);
    take(q, std::int64_t{kRowsHere} * p.width), take(d_out, std::int64_t{kRowsHere} * p.value_width);
    take(weights, kRowsHere * kTile), take(ds, kRowsHere * kTile);
    take(scores_, kRowsHere * kTile), take(dp_, kRowsHere * kTile);
  }
  // Queries are those of a sequence whose first keys these are.
  void read_by(std::int64_t sequence) { n = sequence, keys = p.kv_count(n), offset = keys - p.q_len(n); }
  template <class T>
  void take(T*& to, std::int64_t count) {
    to = reinterpret_cast<T*>(scratch_);
    scratch_ += line(static_cast<std::uint64_t>(count) * sizeof(T));
  }

  // Keys [first, first + kTile); those behind the last are zeros.
  void load_keys(std::int64_t first) {
    at = first, columns = std::min<std::int64_t>(kTile, groups(keys - at));
    for (std::int64_t j = 0; j < kTile; ++j) {
      const bool there = at + j < keys;
      load(there ? p.key(p.k, n, key_rows, at + j, h) : nullptr, k + j * p.width, p.width);
      load(there ? p.key(p.v, n, key_rows, at + j, h) : nullptr, v + j * p.value_width, p.value_width);
    }
  }
  // Query i of a head becomes row r; one below 0 is zeros.
  void load_row(int r, std::int64_t i, std::int64_t head) {
    const std::int64_t token = p.q_begin(n) + i;
    load(i >= 0 ? p.q.at(n, token, head) : nullptr, q + r * p.width, p.width);
    load(i >= 0 ? g.d_out.at(n, token, head) : nullptr, d_out + r * p.value_width, p.value_width);
  }

  // Of a matrix, rows of operands.
  struct Operand {
    const std::uint16_t* data;
    std::int64_t stride, count;
  };
  // c[i, j] by chains over the first `depth` of rows a[i] and b[j], from +0 or from what is there.
  void chains(const Operand& a, const Operand& b, std::int64_t depth, float* c, std::int64_t stride,
              bool continued) const {
    ReplayProduct product;
    product.rows = a.count, product.cols = b.count, product.depth = depth, product.type = p.q.type;
    product.hidden = a.data, product.hidden_stride = a.stride;
    product.weight = b.data, product.weight_stride = b.stride;
    product.out = c, product.out_stride = stride;
    if (continued) product.initial = c, product.initial_stride = stride;
    kernels_.run(product, {0, a.count, 0, b.count}, kernel_scratch_);
  }
  void multiply() {
    chains({q, p.width, rows}, {k, p.width, columns}, p.width, scores_, kTile, false);
    chains({d_out, p.value_width, rows}, {v, p.value_width, columns}, p.value_width, dp_, kTile, false);
  }
  // P and dS of row r, query i, as operands: +0 where a key is not seen.
  void weigh(int r, std::int64_t i, Stat stat) {
    const attn128::Visible seen = i >= 0 ? p.visible(offset + i, keys) : attn128::Visible{};
    for (std::int64_t j = 0, to = r * kTile; j < kTile; ++j, ++to) {
      attn128::Slope<float> slope{};
      if (at + j >= seen.first && at + j < seen.last) {
        const auto score = attn128::capped_with_slope<float>(p, scores_[to]);
        slope = attn128::slope_of(p, score, weight_by(by_, score.score, p.c, 0 - stat.base), dp_[to], stat);
      }
      weights[to] = narrow(p.v.type, slope.p), ds[to] = narrow(p.v.type, slope.ds);
    }
  }

 private:
  static void load(const void* from, std::uint16_t* to, std::int64_t width) {
    if (from != nullptr)
      std::memcpy(to, from, 2 * static_cast<std::size_t>(width));
    else
      std::fill_n(to, width, std::uint16_t{0});
  }

  const ReplayKernels& kernels_;
  const Exponential by_;
  std::byte*& scratch_;
  std::byte* kernel_scratch_;
  float *scores_, *dp_;
};

// [rows, columns] becomes [columns, rows].
void turn(const std::uint16_t* from, std::int64_t rows, std::int64_t columns, std::uint16_t* to) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
}

Stat stat_of(const Backward& g, std::int64_t n, std::int64_t token, std::int64_t head) {
  const Problem& p = g.p;
  const void *d_out = g.d_out.at(n, token, head), *out = p.out.at(n, token, head);
  float delta = 0, products[kTile];
  for (std::int64_t first = 0; first < p.value_width; first += kTile) {
    for (std::int64_t j = 0; j < kTile; ++j)
      products[j] = first + j < p.value_width
                        ? rows::load(g.d_out.type, d_out, first + j) * rows::load(p.out.type, out, first + j)
                        : 0.0f;
    delta += tree<float, 1>(products);
  }
  if (g.d_lse) delta -= *static_cast<const float*>(g.d_lse.at(n, token, head));
  return {attn128::base_of_lse(*static_cast<const float*>(p.lse.at(n, token, head))), delta};
}

// d_k and d_v of one tile of keys, a head of the group after another.
class Keys {
 public:
  Keys(const Backward& g, const KeyTile& tile, const Stat* stats, const ReplayWay& way, std::byte*& scratch)
      : pairs_(g, tile.n, tile.h, way, scratch), stats_(stats) {
    const Problem& p = g.p;
    pairs_.take(q_turned_, std::int64_t{kRowsHere} * p.width);
    pairs_.take(d_out_turned_, std::int64_t{kRowsHere} * p.value_width);
    pairs_.take(turned_, kRowsHere * kTile);
    pairs_.take(sums_, levels_of(p.group) * floats());
    pairs_.load_keys(tile.at);
    n_ = tile.n, last_ = std::min(tile.at + kTile, pairs_.keys);
  }

  void run() {
    const Backward& g = pairs_.g;
    heads(0, g.p.group, 0);
    const float *d_k = sums_, *d_v = sums_ + std::int64_t{kTile} * g.p.width;
    for (std::int64_t j = 0; pairs_.at + j < last_; ++j) {
      const std::int64_t token = pairs_.key_rows.row(pairs_.at + j);
      for (std::int64_t d = 0; g.d_k && d < g.p.width; ++d)
        rows::store(g.d_k.type, g.d_k.at(n_, token, pairs_.h), d, d_k[j * g.p.width + d] * g.p.scale);
      for (std::int64_t d = 0; g.d_v && d < g.p.value_width; ++d)
        rows::store(g.d_v.type, g.d_v.at(n_, token, pairs_.h), d, d_v[j * g.p.value_width + d]);
    }
  }

 private:
  std::int64_t floats() const { return std::int64_t{kTile} * (pairs_.p.width + pairs_.p.value_width); }

  // The sums over heads [first, first + count) of the group, in the buffers of a level.
  void heads(int first, int count, int level) {
    float* const sums = sums_ + level * floats();
    if (count == 1) return one_head(first, sums);
    const int side = attn128::left_side(pairs_.p.group, count);
    heads(first, side, level);
    for (int next = first + side; next < first + count; next += side) {
      heads(next, side, level + 1);
      for (std::int64_t i = 0; i < floats(); ++i) sums[i] += sums[floats() + i];
    }
  }
  void one_head(int index, float* d_k) {
    const Backward& g = pairs_.g;
    std::fill_n(d_k, floats(), 0.0f);
    for (std::int64_t n = n_; n < g.p.sequences; n = g.next_reader(n_, n)) {
      pairs_.read_by(n);
      one_reader(n, index, d_k);
    }
  }
  // The queries of sequence n.
  void one_reader(std::int64_t n, int index, float* d_k) {
    const Backward& g = pairs_.g;
    const Problem& p = g.p;
    float* const d_v = d_k + std::int64_t{kTile} * p.width;
    const std::int64_t head = pairs_.h * p.group + index;
    const attn128::Visible rows = g.queries(n, pairs_.at, last_);
    for (std::int64_t first = rows.first / kRowsHere * kRowsHere; first < rows.last; first += kRowsHere) {
      const auto query = [&](int r) { return first + r < rows.last ? first + r : -1; };
      pairs_.rows = std::min<std::int64_t>(kRowsHere, rows.last - first);
      for (int r = 0; r < kRowsHere; ++r) pairs_.load_row(r, query(r), head);
      pairs_.multiply();
      for (int r = 0; r < kRowsHere; ++r)
        pairs_.weigh(r, query(r), query(r) < 0 ? Stat{} : stats_[g.row(n, first + r) * g.all_heads() + head]);
      const std::int64_t depth = groups(pairs_.rows), d = p.width, dv = p.value_width;
      turn(pairs_.q, kRowsHere, p.width, q_turned_);
      turn(pairs_.d_out, kRowsHere, p.value_width, d_out_turned_);
      turn(pairs_.ds, kRowsHere, kTile, turned_);
      pairs_.chains({turned_, kRowsHere, pairs_.columns}, {q_turned_, kRowsHere, d}, depth, d_k, d, true);
      turn(pairs_.weights, kRowsHere, kTile, turned_);
      pairs_.chains({turned_, kRowsHere, pairs_.columns}, {d_out_turned_, kRowsHere, dv}, depth, d_v, dv,
                    true);
    }
  }

  Pairs pairs_;
  const Stat* stats_;
  std::int64_t n_, last_;  // whose keys these are, and the position behind the last
  std::uint16_t *q_turned_, *d_out_turned_, *turned_;
  float* sums_;
};

}  // namespace

std::uint64_t backward_replay_scratch(const Problem& p, const ReplayKernels& kernels) {
  const auto both = static_cast<std::uint64_t>(p.width + p.value_width);
  constexpr std::uint64_t kRows = kRowsHere, kKeys = kTile, kLines = 16 * 64;
  const std::uint64_t shared = kernels.scratch_bytes + 2 * (kKeys + kRows) * both + 12 * kRows * kKeys;
  const std::uint64_t queries = (2 * kKeys + 8 * kRows) * static_cast<std::uint64_t>(p.width);
  const std::uint64_t sums = static_cast<std::uint64_t>(levels_of(p.group)) * 4 * kKeys * both;
  return line(shared + std::max(queries, 2 * kRows * both + 2 * kRows * kKeys + sums) + kLines);
}

void replay_queries(const Backward& g, const Block& block, Stat* stats, const ReplayWay& way,
                    std::byte* scratch) {
  const Problem& p = g.p;
  Pairs pairs(g, block.n, block.h, way, scratch);
  pairs.rows = block.count;
  const auto query = [&](int r) { return r < block.count ? (block.first + r) / p.group : -1; };
  const auto head = [&](int r) { return block.h * p.group + (block.first + r) % p.group; };
  Stat own[kRowsHere] = {};
  std::int64_t first = pairs.keys, last = 0;  // keys that some row sees
  for (int r = 0; r < kRowsHere; ++r) {
    pairs.load_row(r, query(r), head(r));
    if (r >= block.count) continue;
    own[r] = stat_of(g, block.n, p.q_begin(block.n) + query(r), head(r));
    stats[g.row(block.n, query(r)) * g.all_heads() + head(r)] = own[r];
    const attn128::Visible seen = p.visible(pairs.offset + query(r), pairs.keys);
    if (seen.first < seen.last) first = std::min(first, seen.first), last = std::max(last, seen.last);
  }
  if (!g.d_q) return;
  std::uint16_t* k_turned;
  float *sum, *part;
  pairs.take(k_turned, std::int64_t{kTile} * p.width);
  pairs.take(sum, std::int64_t{kRowsHere} * p.width), pairs.take(part, std::int64_t{kRowsHere} * p.width);
  std::fill_n(sum, std::int64_t{kRowsHere} * p.width, 0.0f);
  for (std::int64_t at = first / kTile * kTile; at < last; at += kTile) {
    pairs.load_keys(at);
    pairs.multiply();
    for (int r = 0; r < kRowsHere; ++r) pairs.weigh(r, query(r), own[r]);
    turn(pairs.k, kTile, p.width, k_turned);
    pairs.chains({pairs.ds, kTile, pairs.rows}, {k_turned, kTile, p.width}, pairs.columns, part, p.width,
                 false);
    for (std::int64_t i = 0; i < pairs.rows * p.width; ++i) sum[i] += part[i];
  }
  for (int r = 0; r < block.count; ++r)
    for (std::int64_t d = 0; d < p.width; ++d)
      rows::store(g.d_q.type, g.d_q.at(block.n, p.q_begin(block.n) + query(r), head(r)), d,
                  sum[r * p.width + d] * p.scale);
}

void replay_keys(const Backward& g, const KeyTile& tile, const Stat* stats, const ReplayWay& way,
                 std::byte* scratch) {
  Keys(g, tile, stats, way, scratch).run();
}

}  // namespace rlk::native::attention
