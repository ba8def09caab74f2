#include "native/attention/replay.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "native/attention/cache.hpp"

namespace rlk::native::attention {
namespace {

using rows::Type;

std::uint64_t line(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Sums of weights by the bits 1 and 2 of their index, whose other bits are folded in the order 3, 0, 6, 4, 5.
struct Classes {
  float sums[4];
};
Classes classes_of(const float* p) {
  float v[kTile];
  std::copy_n(p, kTile, v);
  int folded = 0;
  for (int bit : {3, 0, 6, 4, 5}) {
    folded |= 1 << bit;
    for (int j = 0; j < kTile; ++j)
      if ((j & folded) == 0) v[j] += v[j + (1 << bit)];
  }
  return {{v[0], v[2], v[4], v[6]}};
}

std::uint16_t narrow(Type type, float x) {
  return type == Type::bf16 ? simt::from_float<simt::bf16>(x).bits : simt::from_float<simt::fp16>(x).bits;
}

class Rows {
 public:
  Rows(const Problem& p, const Block& block, const ReplayKernels& kernels, float* scratch)
      : p_(p),
        block_(block),
        kernels_(kernels),
        q_begin_(p.q_begin(block.n)),
        key_rows_(p.key_rows(block.n)),
        here_(p.here(block.n)),
        offset_(p.keys(block.n) - p.q_len(block.n)),
        cache_(p, block.h, scratch) {
    auto* at = reinterpret_cast<std::byte*>(scratch);
    const auto take = [&at]<class T>(T*& to, std::int64_t count) {
      to = reinterpret_cast<T*>(at);
      at += line(static_cast<std::uint64_t>(count) * sizeof(T));
    };
    take(kernel_scratch_, static_cast<std::int64_t>(kernels.scratch_bytes));
    take(q_, std::int64_t{kReplayRows} * p.width), take(k_, std::int64_t{kTile} * p.width);
    take(turned_, std::int64_t{kTile} * p.value_width), take(weights_, std::int64_t{kReplayRows} * kTile);
    take(scores_, std::int64_t{kReplayRows} * kTile);
    take(o_, std::int64_t{kReplayRows} * p.value_width),
        take(total_, std::int64_t{kReplayRows} * p.value_width);
  }

  void run() {
    std::int64_t first = here_.last, last = here_.first;  // keys that some row sees
    for (int r = 0; r < block_.count; ++r) {
      std::memcpy(q_ + r * p_.width, p_.q.at(block_.n, q_begin_ + query(r), head(r)), 2 * width());
      const attn128::Visible seen = visible(r);
      if (seen.first < seen.last) first = std::min(first, seen.first), last = std::max(last, seen.last);
      sums_[r] = {};
      if (p_.partials != nullptr) no_parts(r);
    }
    restart();
    for (std::int64_t tile = first / kTile; tile * kTile < last; ++tile) {
      one_tile(tile * kTile, first, last);
      const std::int64_t next = tile + 1;
      if (next * kTile >= last || p_.split_of(next) != p_.split_of(tile)) end_split(tile);
    }
    for (int r = 0; p_.partials == nullptr && r < block_.count; ++r) finish(r);
  }

 private:
  // Of the split at hand, and of those before it.
  struct Sums {
    float m = -__builtin_inff(), total_m = -__builtin_inff(), total_l = 0;
    Classes l{};
    bool begun = false;
  };

  std::size_t width() const { return static_cast<std::size_t>(p_.width); }
  std::int64_t query(int r) const { return (block_.first + r) / p_.group; }
  std::int64_t head(int r) const { return block_.h * p_.group + (block_.first + r) % p_.group; }
  attn128::Visible visible(int r) const { return p_.visible(offset_ + query(r), here_); }
  bool sees(int r, std::int64_t from, std::int64_t to) const {
    const attn128::Visible seen = visible(r);
    return seen.first < seen.last && seen.first < to && seen.last > from;
  }

  void restart() {
    std::fill_n(o_, std::int64_t{block_.count} * p_.value_width, 0.0f);
    for (int r = 0; r < block_.count; ++r) sums_[r].m = -__builtin_inff(), sums_[r].l = {};
  }

  // Keys [at, at + kTile) of which [first, last) are there; the others count as zeros and are not read.
  void load(std::int64_t at, std::int64_t first, std::int64_t last) {
    const auto key = [&](const attn128::Tensor& t, std::int64_t j) -> const void* {
      const bool there = at + j >= first && at + j < last;
      return there ? p_.key(t, block_.n, key_rows_, at + j - here_.first, block_.h) : nullptr;
    };
    if (p_.k.f8)
      take_tile(cache_.load(key));
    else
      take_tile(key);
  }
  template <class Key>
  void take_tile(Key key) {
    for (std::int64_t j = 0; j < kTile; ++j) {
      const void* const k = key(p_.k, j);
      if (k != nullptr)
        std::memcpy(k_ + j * p_.width, k, 2 * width());
      else
        std::fill_n(k_ + j * p_.width, p_.width, std::uint16_t{0});
      const auto* const v = static_cast<const std::uint16_t*>(key(p_.v, j));
      for (std::int64_t d = 0; d < p_.value_width; ++d)
        turned_[d * kTile + j] = v != nullptr ? v[d] : std::uint16_t{0};
    }
  }

  // [count, columns] from rows [from, from + count) by chains over `depth`.
  void chains(const std::uint16_t* a, const std::uint16_t* b, std::int64_t depth, std::int64_t columns,
              int from, int count, float* c, bool continued) const {
    ReplayProduct product;
    product.rows = count, product.cols = columns, product.depth = depth, product.type = p_.q.type;
    product.hidden = a + from * depth, product.hidden_stride = depth;
    product.weight = b, product.weight_stride = depth;
    product.out = c + from * columns, product.out_stride = columns;
    if (continued) product.initial = c + from * columns, product.initial_stride = columns;
    kernels_.run(product, {0, count, 0, columns}, kernel_scratch_);
  }

  void one_tile(std::int64_t at, std::int64_t first, std::int64_t last) {
    int from = 0, to = block_.count;  // rows that see a key of the tile lie side by side
    while (from < to && !sees(from, at, at + kTile)) ++from;
    while (from < to && !sees(to - 1, at, at + kTile)) --to;
    if (from == to) return;
    load(at, first, last);
    chains(q_, k_, p_.width, kTile, from, to - from, scores_, false);
    for (int r = from; r < to; ++r) weigh(r, at);
    chains(weights_, turned_, kTile, p_.value_width, from, to - from, o_, true);
  }

  // The row's scores become weights; m, l and O move on.
  void weigh(int r, std::int64_t at) {
    float* x = scores_ + r * kTile;
    Sums& s = sums_[r];
    const attn128::Visible seen = visible(r);
    const std::int64_t from = std::clamp<std::int64_t>(seen.first - at, 0, kTile),
                       to = std::clamp<std::int64_t>(seen.last - at, 0, kTile);
    float top = -__builtin_inff();
    for (std::int64_t j = from; j < to; ++j) {
      x[j] = attn128::capped(p_, x[j]);
      top = x[j] > top ? x[j] : top;
    }
    // Of the scores the largest exceeds m by most.
    const float before = s.m;
    if ((before == -__builtin_inff() || simt::fused(top, p_.c, -before) > attn128::kHeld) &&
        top * p_.c > before)
      s.m = top * p_.c;
    const float base = attn128::base_of(s.m), a = s.m == before ? 1 : simt::exp2(before - base);
    for (std::int64_t j = 0; j < kTile; ++j)
      x[j] = j >= from && j < to ? weight_by(Exponential::unit, x[j], p_.c, -base) : 0.0f;
    const Classes tile = classes_of(x);
    for (int c = 0; c < 4; ++c) s.l.sums[c] = s.l.sums[c] * a + tile.sums[c];
    for (std::int64_t j = 0; j < kTile; ++j) weights_[r * kTile + j] = narrow(p_.v.type, x[j]);
    float* o = o_ + r * p_.value_width;
    for (std::int64_t d = 0; d < p_.value_width; ++d) o[d] *= a;
  }

  // Joins the sums of the split that ends with this tile to those before it.
  void end_split(std::int64_t tile) {
    const std::int64_t begin = p_.split_of(tile) * p_.split, end = (tile + 1) * kTile;
    for (int r = 0; r < block_.count; ++r) {
      if (!sees(r, begin, end)) continue;
      Sums& s = sums_[r];
      const float* c = s.l.sums;
      const float l = (c[0] + c[1]) + (c[2] + c[3]);
      if (p_.partials != nullptr) {
        put_part(r, p_.split_of(tile), s.m, l, o_ + r * p_.value_width);
        continue;
      }
      if (s.begun) {
        join(r, s.m, l, o_ + r * p_.value_width);
        continue;
      }
      std::copy_n(o_ + r * p_.value_width, p_.value_width, total_ + r * p_.value_width);
      s.total_m = s.m, s.total_l = l, s.begun = true;
    }
    restart();
  }
  // Of attention_part.
  std::int64_t first_split() const { return p_.split_of(here_.first / kTile); }
  void no_parts(int r) const {
    for (std::int64_t s = 0; s < p_.splits(); ++s)
      put_part(r, first_split() + s, -__builtin_inff(), attn128::kNoKey, nullptr);
  }
  void put_part(int r, std::int64_t split, float m, float l, const float* o) const {
    const std::int64_t row = (p_.cu_q ? q_begin_ : block_.n * p_.queries) + query(r);
    float* to = p_.part(p_.partials, row * p_.heads * p_.group + head(r), split - first_split());
    to[0] = m;
    rows::store(Type::f32, to, 1, l);
    for (std::int64_t d = 0; d < p_.value_width; ++d)
      rows::store(Type::f32, to, 2 + d, o != nullptr ? o[d] : 0.0f);
  }
  // Null: zeros.
  void join(int r, float m, float l, const float* o) {
    Sums& s = sums_[r];
    const attn128::Join j = attn128::join(s.total_m, m);
    s.total_l = attn128::joined(s.total_l, j.a, l, j.b), s.total_m = j.m;
    float* total = total_ + r * p_.value_width;
    for (std::int64_t d = 0; d < p_.value_width; ++d)
      total[d] = attn128::joined(total[d], j.a, o != nullptr ? o[d] : 0, j.b);
  }

  void finish(int r) {
    const Sums& s = sums_[r];
    float* total = total_ + r * p_.value_width;
    const std::int64_t token = q_begin_ + query(r);
    float lse = p_.sinks != nullptr ? p_.sinks[head(r)] : -__builtin_inff();
    const bool none = !s.begun || s.total_l == 0;
    if (!none) {
      if (p_.sinks != nullptr) join(r, lse * attn128::kLog2e, 1, nullptr);
      lse = attn128::lse_of(s.total_m, s.total_l);
    }
    const float inverse = none ? 0 : 1 / s.total_l;
    void* out = p_.out.at(block_.n, token, head(r));
    for (std::int64_t d = 0; d < p_.value_width; ++d)
      rows::store(p_.out.type, out, d, none ? 0.0f : total[d] * inverse);
    if (p_.lse) rows::store(Type::f32, p_.lse.at(block_.n, token, head(r)), 0, lse);
  }

  const Problem& p_;
  const Block& block_;
  const ReplayKernels& kernels_;
  const std::int64_t q_begin_;
  const attn128::KeyRows key_rows_;
  const attn128::Visible here_;
  const std::int64_t offset_;
  const WidenedTile<float, 1> cache_;
  std::byte* kernel_scratch_;
  std::uint16_t *q_, *k_, *turned_, *weights_;
  float *scores_, *o_, *total_;
  Sums sums_[kReplayRows];
};

}  // namespace

std::uint64_t replay_scratch(const Problem& p, const ReplayKernels& kernels) {
  const auto d = static_cast<std::uint64_t>(p.width), dv = static_cast<std::uint64_t>(p.value_width);
  constexpr std::uint64_t kRowsHere = kReplayRows, kKeys = kTile;
  return line(4 * static_cast<std::uint64_t>(widened_floats(p))) + line(kernels.scratch_bytes) +
         line(2 * kRowsHere * d) + line(2 * kKeys * d) + line(2 * kKeys * dv) + line(2 * kRowsHere * kKeys) +
         line(4 * kRowsHere * kKeys) + 2 * line(4 * kRowsHere * dv);
}

void replay_forward(const Problem& p, const Block& block, const ReplayKernels& kernels, void* scratch) {
  Rows(p, block, kernels, static_cast<float*>(scratch)).run();
}

}  // namespace rlk::native::attention
