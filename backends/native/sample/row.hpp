// The body of each row_<isa>.cpp: an Engine on vectors of the given type.
//
// A row is widened once; its filters are radix selects over 32 bits of place (eleven, eleven, ten), of counts or of masses,
// the later two over the entries of one bin; one pass over tiles of 128 has the scores, the sum of the log-probability and the
// count. Tiles without a kept entry draw no noise.
#pragma once

#include <algorithm>

#include "native/rows.hpp"
#include "native/sample/engine.hpp"

namespace rlk::native::sample {

using sampling::kLeaves;
using sampling::kTile;
using sampling::Part;

template <class L, int W>
class Drawer {
  using Row = native::Row<L, W>;

  const Problem& p_;
  const sampling::Parameters r_;
  const Room& room_;
  const std::int32_t n_;  // the schema's bound on V is below 2^31
  float most_ = -__builtin_inff();
  Kept kept_;

  static constexpr float kAbsent = -__builtin_inff();

  Drawer(const Problem& p, std::int64_t row, const Room& room)
      : p_(p), r_(sampling::parameters_of(p, row)), room_(room), n_(static_cast<std::int32_t>(p.vocab)) {}

  // ---- the entries

  void round(rows::Type type) {
    if (type == rows::Type::f32) return;
    alignas(64) std::uint16_t halves[1024];
    for (std::int64_t i = 0; i < n_; i += 1024) {
      const std::int64_t m = std::min<std::int64_t>(1024, n_ - i);
      Row::narrow(type, room_.z + i, halves, m);
      Row::widen(type, halves, room_.z + i, m);
    }
  }

  // Over whole vectors.
  static float largest_of(const float* x, std::int64_t n) {
    L top = L{} + kAbsent;
    for (std::int64_t i = 0; i < n; i += W) {
      const L v = Row::load(x + i);
      top = v > top ? v : top;
    }
    float most = kAbsent, lanes[W];
    std::memcpy(lanes, &top, sizeof top);
    for (float v : lanes) most = v > most ? v : most;
    return most;
  }
  static float largest(const float* x, std::int64_t n) {
    float most = largest_of(x, n / W * W);
    for (std::int64_t i = n / W * W; i < n; ++i) most = x[i] > most ? x[i] : most;
    return most;
  }

  // Row::map over a tile, which is whole vectors.
  template <class F, class... In>
  static void map_tile(F f, float* out, const In*... in) {
    for (std::int64_t i = 0; i < kTile; i += W) Row::store(out + i, f(Row::load(in + i)...));
  }

  // False where an entry is NaN or +inf.
  bool read(std::int64_t row) {
    Row::widen(p_.type, p_.logits_of(row), room_.z, n_);
    round(p_.round);
    const float cap = p_.softcap;
    const float* z = room_.z;
    Row::map(n_, [cap](auto x) { return sampling::capped(x, cap); }, room_.z, z);
    most_ = largest(z, n_);
    std::int64_t numbers = 0;
    for (std::int64_t i = 0; i < n_; ++i) numbers += z[i] == z[i];
    return numbers == n_ && most_ < -kAbsent;
  }

  void weigh() {
    const float most = most_, c = r_.c;
    Row::map(
        n_, [most, c](auto z) { return sampling::weight(z, most, c); }, room_.weight,
        static_cast<const float*>(room_.z));
  }

  // ---- filters

  bool has(const Kept& k, std::int64_t i) const {
    return k.has(room_.z[i], static_cast<std::int32_t>(i)) && (k.least <= 0 || room_.weight[i] >= k.least);
  }

  // Where the first entries of the order whose `value` adds up to `target` end; value(i) is 0 for entries that are not there.
  // False where all of them together are less.
  template <class Value>
  bool cut(Value value, std::uint64_t target, Kept& kept) const {
    std::int64_t listed = -1;  // entries of the bin; -1: not listed yet
    std::uint32_t prefix = 0;
    std::uint64_t before = 0;
    for (int shift : {21, 10, 0}) {
      const std::uint32_t bins = shift == 0 ? 1u << 10 : 1u << 11;
      std::fill_n(room_.bins, bins, 0);
      const auto bin_of = [&](std::int64_t i) { return sampling::place(room_.z[i]) >> shift; };
      const std::int64_t all = listed < 0 ? n_ : listed;
      const auto entry = [&](std::int64_t j) { return listed < 0 ? j : std::int64_t{room_.entries[j]}; };
      for (std::int64_t j = 0; j < all; ++j) room_.bins[bin_of(entry(j)) & (bins - 1)] += value(entry(j));
      std::uint32_t bin = 0;
      while (bin < bins && before + room_.bins[bin] < target) before += room_.bins[bin++];
      if (bin == bins) return false;
      prefix = prefix * bins + bin;
      std::int64_t next = 0;
      for (std::int64_t j = 0; j < all; ++j)
        if (const std::int64_t i = entry(j); bin_of(i) == prefix && value(i) > 0)
          room_.entries[next++] = static_cast<std::int32_t>(i);
      listed = next;
    }
    // What is left is equal, has equal values, and lies by ascending id.
    const std::uint64_t each = value(room_.entries[0]), take = (target - before + each - 1) / each;
    kept.cut = sampling::at_place(prefix);
    kept.last = room_.entries[take - 1];
    return true;
  }

  void filter() {
    if (r_.masses()) weigh();
    if (p_.min_p_first) kept_.least = r_.least;
    if (r_.top_k > 0)
      cut([this](std::int64_t i) { return std::uint64_t{has(kept_of_all(), i)}; },
          static_cast<std::uint64_t>(r_.top_k), kept_);
    if (r_.top_p < 1) {
      const Kept before = kept_;
      const auto value = [&](std::int64_t i) { return has(before, i) ? sampling::mass(room_.weight[i]) : 0; };
      std::uint64_t total = 0;
      for (std::int64_t i = 0; i < n_; ++i) total += value(i);
      cut(value, sampling::wanted(r_.top_p, total), kept_);
    }
    kept_.least = r_.least;
  }
  Kept kept_of_all() const {
    Kept k;
    k.least = kept_.least;
    return k;
  }

  // ---- the token

  // The entries of a tile, those that are not kept absent.
  void take(std::int64_t first, std::int64_t n, float* tile) const {
    const float *z = room_.z + first, cut = kept_.cut, least = kept_.least;
    const auto last = static_cast<std::int32_t>(kept_.last - first);
    for (std::int32_t i = 0; i < n; ++i) tile[i] = z[i] > cut || (z[i] == cut && i <= last) ? z[i] : kAbsent;
    if (least > 0)
      for (std::int64_t i = 0; i < n; ++i) tile[i] = room_.weight[first + i] >= least ? tile[i] : kAbsent;
    std::fill(tile + n, tile + kTile, kAbsent);
  }

  // Noise of the ids first.. of a tile; first is a multiple of 16.
  void noise(std::int64_t first, float* high, float* low) const {
    constexpr int kGroups = kTile / 4;
    std::uint32_t x[kGroups], y[kGroups], z[kGroups], w[kGroups];
    std::uint32_t key0 = r_.key[0], key1 = r_.key[1];
    for (int i = 0; i < kGroups; ++i) {
      x[i] = static_cast<std::uint32_t>(first / 4) + static_cast<std::uint32_t>(i);
      y[i] = r_.position[0], z[i] = r_.position[1], w[i] = r_.stream;
    }
    for (int round = 0; round < philox::kRounds; ++round) {
      for (int i = 0; i < kGroups; ++i) {
        const philox::Counter c = philox::round({x[i], y[i], z[i], w[i]}, key0, key1);
        x[i] = c.x, y[i] = c.y, z[i] = c.z, w[i] = c.w;
      }
      key0 += philox::kWeyl0, key1 += philox::kWeyl1;
    }
    for (int i = 0; i < kGroups; ++i) {
      const std::uint32_t words[4] = {x[i], y[i], z[i], w[i]};
      for (int k = 0; k < 4; ++k) {
        high[4 * i + k] = static_cast<float>(static_cast<std::int32_t>(words[k] >> 16));
        low[4 * i + k] = static_cast<float>(static_cast<std::int32_t>(words[k] & 0xffffu));
      }
    }
  }

  struct Best {
    float score = kAbsent;
    std::int64_t id = -1;
  };
  void choose(std::int64_t first, const float* tile, Best& best) const {
    alignas(64) float scores[kTile], high[kTile], low[kTile];
    const float *values = tile, *h = high, *l = low;
    const float most = most_, tau = r_.tau;
    if (!r_.greedy) {
      noise(p_.first + first, high, low);
      map_tile([most, tau](auto z, auto a, auto b) { return sampling::score(z, most, tau, a, b); }, scores,
               tile, h, l);
      values = scores;
    }
    const float top = largest_of(values, kTile);
    if (top > best.score || (best.id < 0 && top == top))
      best = {top, first + (std::find(values, values + kTile, top) - values)};
  }

  // The bit-tree of 128: bits 6, 3, 0, 1, 2, 4, 5.
  static float tree(const float* v) {
    float a[64], b[32], c[16], d[8];
    for (int i = 0; i < 64; ++i) a[i] = v[i] + v[i + 64];
    for (int i = 0; i < 32; ++i) b[i] = a[i / 8 * 16 + i % 8] + a[i / 8 * 16 + i % 8 + 8];
    for (int i = 0; i < 16; ++i) c[i] = b[2 * i] + b[2 * i + 1];
    for (int i = 0; i < 8; ++i) d[i] = c[2 * i] + c[2 * i + 1];
    return ((d[0] + d[1]) + (d[2] + d[3])) + ((d[4] + d[5]) + (d[6] + d[7]));
  }
  static Part part(const float* tile, float c) {
    const float most = largest_of(tile, kTile);
    if (most == kAbsent) return {};
    alignas(64) float e[kTile];
    map_tile([most, c](auto z) { return sampling::weight(z, most, c); }, e, tile);
    return {most, tree(e)};
  }

  // body(first id, entries, leaf) for the tiles of the leaves.
  template <class Body>
  void for_tiles(Body body) const {
    const std::int64_t width = p_.leaf();
    for (int leaf = 0; leaf < kLeaves; ++leaf) {
      const std::int64_t end = std::min<std::int64_t>(n_, (leaf + 1) * width);
      for (std::int64_t first = leaf * width; first < end; first += kTile)
        body(first, std::min<std::int64_t>(kTile, end - first), leaf);
    }
  }

  struct Tiles {
    Best best;
    Part kept[kLeaves], all[kLeaves];
    std::int32_t count = 0;
  };
  Tiles tiles(bool logp, bool raw) const {
    alignas(64) float tile[kTile];
    Tiles out;
    for_tiles([&](std::int64_t first, std::int64_t n, int leaf) {
      take(first, n, tile);
      std::int32_t count = 0;
      for (float z : tile) count += z > kAbsent;
      if (count > 0) choose(first, tile, out.best);
      out.count += count;
      if (logp && count > 0) out.kept[leaf] = sampling::joined(out.kept[leaf], part(tile, r_.c), r_.c);
      if (!raw) return;
      std::copy_n(room_.z + first, n, tile);
      std::fill(tile + n, tile + kTile, kAbsent);
      out.all[leaf] = sampling::joined(out.all[leaf], part(tile, r_.raw_c), r_.raw_c);
    });
    return out;
  }

  Drawn drawn() const {
    const bool logp = p_.wants_logp(), raw = p_.wants_raw();
    const Tiles found = tiles(logp, raw);
    Drawn d;
    d.token = found.best.id, d.count = found.count;
    const float z = room_.z[d.token];
    if (logp) d.logp = sampling::log_probability(z, sampling::joined(found.kept, r_.c), r_.tau);
    if (raw) d.logp_raw = sampling::log_probability(z, sampling::joined(found.all, r_.raw_c), r_.raw_tau);
    return d;
  }

  void keep(std::int64_t row, bool none) const {
    std::int32_t* words = p_.keep + row * p_.keep_stride;
    for (std::int64_t w = 0; 32 * w < n_; ++w) {
      std::uint32_t bits = 0;
      for (std::int64_t i = 32 * w; i < std::min<std::int64_t>(n_, 32 * (w + 1)); ++i)
        bits |= std::uint32_t{!none && has(kept_, i)} << (i - 32 * w);
      words[w] = static_cast<std::int32_t>(bits);
    }
  }

  // ---- a part of a vocabulary

  // What the filter whose cut is this leaves of this part's entries.
  void cut_at(const sampling::Edge& edge) {
    if (!edge.there || (edge.take == sampling::kAllOfThem && kept_.cut == edge.cut)) return;
    kept_.cut = edge.cut, kept_.last = edge.take == sampling::kAllOfThem ? n_ : -1;
    std::int64_t taken = 0;
    for (std::int32_t i = 0; i < n_ && taken < edge.take; ++i)
      if (room_.z[i] == edge.cut && (kept_.least <= 0 || room_.weight[i] >= kept_.least))
        kept_.last = i, ++taken;
  }

  void count_digit(const std::int64_t* state, std::int64_t* bins) {
    if (!sampling::counts(p_, r_, state)) return;
    if (r_.masses()) weigh();
    if (p_.min_p_first) kept_.least = r_.least;
    const bool masses = p_.step == sampling::Step::top_p;
    if (masses) cut_at(sampling::edge_of(state, sampling::top_k_slots(), p_.part));
    for (std::int64_t i = 0; i < n_; ++i) {
      const std::uint32_t place = sampling::place(room_.z[i]);
      if (!has(kept_, i) || !sampling::has_prefix(p_, state, place)) continue;
      bins[sampling::bin_of(p_, place)] +=
          masses ? static_cast<std::int64_t>(sampling::mass_below_one(room_.weight[i])) : 1;
    }
  }

  sampling::Found found(const std::int64_t* state) {
    if (r_.least > 0) weigh();
    if (p_.min_p_first) kept_.least = r_.least;
    cut_at(sampling::edge_of(state, sampling::top_k_slots(), p_.part));
    cut_at(sampling::edge_of(state, sampling::top_p_slots(), p_.part));
    kept_.least = r_.least;
    const Tiles t = tiles(true, true);
    sampling::Found f;
    f.count = t.count;
    f.kept = sampling::joined(t.kept, r_.c), f.all = sampling::joined(t.all, r_.raw_c);
    if (t.best.id >= 0) f.score = t.best.score, f.id = p_.first + t.best.id, f.z = room_.z[t.best.id];
    return f;
  }

 public:
  static std::optional<Kept> part(const Problem& p, std::int64_t row, const Room& room) {
    Drawer d(p, row, room);
    std::int64_t* out = p.partials + row * p.partials_stride;
    const bool numbers = d.read(row);
    if (p.step == sampling::Step::largest) {
      const float none = simt::from_float<float>(__builtin_nanf(""));
      out[0] = sampling::bits_of(numbers && d.r_.valid ? d.most_ : none);
      return {};
    }
    const std::int64_t* state = p.state + row * p.state_stride;
    d.most_ = sampling::float_of(state[sampling::kStateMost]);
    const bool there = sampling::is_finite(d.most_);
    if (p.step == sampling::Step::token) {
      if (there)
        sampling::put(out, d.found(state));
      else
        sampling::put_nothing(out);
      if (p.keep) d.keep(row, !there);
      return there ? std::optional(d.kept_) : std::nullopt;
    }
    std::fill_n(out, kBins, 0);
    if (there) d.count_digit(state, out);
    return {};
  }

  static RowResult draw(const Problem& p, std::int64_t row, const Room& room) {
    Drawer d(p, row, room);
    RowResult out;
    const bool there = d.read(row) && d.most_ > kAbsent && d.r_.valid;
    if (there) {
      d.filter();
      out = {d.drawn(), d.kept_, d.most_};
    }
    if (p.keep) d.keep(row, !there);
    if (p.recorded)
      if (const std::int64_t id = p.recorded[row]; there && id >= 0 && id < p.vocab)
        out.drawn.recorded_kept = d.has(d.kept_, id);
    return out;
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Drawer<L, W>::draw, Drawer<L, W>::part};
}

}  // namespace rlk::native::sample
