// The body of each tiles_<isa>.cpp: an Engine on vectors of the given type. A tile of 128 entries is widened to fp32 in the
// nearest cache; memory is read once, by the gradient once and written once.
#pragma once

#include <algorithm>

#include "native/logp/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::logp {

using lse128::kTile;
using lse128::Scale;

// Sums of neighbours: lanes 2i and 2i + 1 of a then b.
#if defined(__AVX2__)
inline simt::Float8 pairs(simt::Float8 a, simt::Float8 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
#endif
#if defined(__AVX512F__)
inline simt::Float16 pairs(simt::Float16 a, simt::Float16 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
// Sums over bit 3 of the lane: eight of a, eight of b.
inline simt::Float16 halves(simt::Float16 a, simt::Float16 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
#endif

template <class L, int W>
class Tiles {
  using Row = native::Row<L, W>;
  using Type = lse128::Type;
  static constexpr int kGroup = 64;  // tiles that are joined at once

  // The tree's last six folds, of what its first left: bit 3, then neighbours.
  static float tree(const float* v) {
    if constexpr (W == 1) {
      float w[kTile / 4];
      for (int q = 0; q < 4; ++q)
        for (int l = 0; l < 8; ++l) w[8 * q + l] = v[16 * q + l] + v[16 * q + 8 + l];
      for (int n = kTile / 8; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) w[i] = w[2 * i] + w[2 * i + 1];
      return w[0];
    } else {
      constexpr int kVectors = kTile / 4 / W;
      L w[kVectors];
      for (int i = 0; i < kVectors; ++i) {
        const L a = Row::load(v + 2 * i * W), b = Row::load(v + (2 * i + 1) * W);
        if constexpr (W == 8)
          w[i] = a + b;
        else
          w[i] = halves(a, b);
      }
      for (int n = kVectors / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) w[i] = pairs(w[2 * i], w[2 * i + 1]);
      for (int n = W / 2; n > 0; n /= 2) w[0] = pairs(w[0], w[0]);
      return w[0][0];
    }
  }

  // Entries [begin, begin + n) of the span as they go into the rule, before softcap too where `raw` is wanted.
  static void load(const Problem& p, const Span& span, std::int64_t begin, std::int64_t n, float* z,
                   float* raw) {
    const auto* from =
        static_cast<const std::byte*>(span.data) + (begin - span.begin) * rows::size_of(span.type);
    Row::widen(span.type, from, z, n);
    if (p.round != Type::f32 && p.round != span.type) {
      std::uint16_t narrow[kTile];
      Row::narrow(p.round, z, narrow, n);
      Row::widen(p.round, narrow, z, n);
    }
    if (raw) std::copy_n(z, n, raw);
    if (p.cap != 0)
      Row::map(
          n, [&p](auto x) { return lse128::capped<decltype(x)>(p, x); }, z, static_cast<const float*>(z));
  }
  static void mask(const Problem& p, const Span& span, std::int64_t begin, std::int64_t n, float* z,
                   float absent) {
    for (std::int64_t i = 0; p.keep && i < n; ++i)
      if (!p.kept(span.row, begin + i)) z[i] = absent;
  }

  static State tile(const Problem& p, const Span& span, std::int64_t begin, std::int64_t n, Scale k,
                    bool bends) {
    alignas(64) float z[kTile], e[kTile / 2], u[kTile / 2];
    load(p, span, begin, n, z, nullptr);
    mask(p, span, begin, n, z, lse128::none());
    std::fill(z + n, z + kTile, lse128::none());
    L most = L{} + lse128::none();
    for (int i = 0; i < kTile; i += W) {
      const L x = Row::load(z + i);
      most = x > most ? x : most;
    }
    float lanes[W], m = lse128::none();
    Row::store(lanes, most);
    for (float x : lanes) m = x > m ? x : m;
    m = m + 0.0f;  // one zero
    const L top = L{} + m, c = L{} + k.c, tau = L{} + k.tau;
    for (int i = 0; i < kTile / 2; i += W) {
      const L a = Row::load(z + i), b = Row::load(z + i + kTile / 2);
      const L x = lse128::weight<L>(a, top, c), y = lse128::weight<L>(b, top, c);
      Row::store(e + i, x + y);
      if (bends) Row::store(u + i, lse128::bend<L>(x, a, top, tau) + lse128::bend<L>(y, b, top, tau));
    }
    return {m, tree(e), bends ? tree(u) : 0};
  }

  // join() of a state and tiles one after another; their exponentials come first, several at once.
  static State join_tiles(State before, const State* tiles, int count, Scale k) {
    State some[kGroup];
    int n = 0;
    for (int i = 0; i < count; ++i) {
      if (tiles[i].s == 0) continue;
      if (before.s == 0)
        before = tiles[i];
      else
        some[n++] = tiles[i];
    }
    float top[kGroup], old_by[kGroup], new_by[kGroup], m = before.m;
    for (int i = 0; i < n; ++i) {
      top[i] = some[i].m > m ? some[i].m : m;
      old_by[i] = (m - top[i]) * k.c;
      new_by[i] = (some[i].m - top[i]) * k.c;
      m = top[i];
    }
    for (float* by : {old_by, new_by})
      Row::map(n, [](auto x) { return simt::exp2<decltype(x)>(x); }, by, static_cast<const float*>(by));
    for (int i = 0; i < n; ++i) before = lse128::joined(before, some[i], top[i], old_by[i], new_by[i], k.tau);
    return before;
  }

 public:
  static State fold(const Problem& p, const Span& span, State before, bool bends) {
    const Scale k = p.scale(span.row);
    State tiles[kGroup];
    for (std::int64_t at = span.begin; at < span.end;) {
      int count = 0;
      for (; count < kGroup && at < span.end; at += kTile)
        tiles[count++] = tile(p, span, at, std::min<std::int64_t>(kTile, span.end - at), k, bends);
      before = join_tiles(before, tiles, count, k);
    }
    return before;
  }

  static void gradient(const Problem& p, const Span& span, const State& of_row, void* to, Type type,
                       std::int64_t columns) {
    const lse128::Slope k = lse128::slope_of(p, span.row, of_row);
    const std::int64_t size = rows::size_of(type), target = p.column(span.row);
    const bool stream = columns * p.rows * size >= std::int64_t{16} << 20 && to != span.data;
    auto* out = static_cast<std::byte*>(to);
    for (std::int64_t at = span.begin; at < span.end; at += kTile, out += kTile * size) {
      const std::int64_t n = std::min<std::int64_t>(kTile, span.end - at);
      alignas(64) float z[kTile], raw[kTile], d[kTile];
      load(p, span, at, n, z, raw);
      slopes(p, k, n, z, raw, d);
      if (target >= at && target < at + n) {
        const std::int64_t i = target - at;
        d[i] = lse128::through_cap<float>(p, lse128::gradient<float>(k, z[i], 1), raw[i]);
      }
      if (k.nothing) std::fill_n(d, n, 0.0f);
      mask(p, span, at, n, d, 0);
      Row::narrow(type, d, out, n, stream);
    }
    if (columns > span.end)
      std::memset(static_cast<std::byte*>(to) + (span.end - span.begin) * size, 0,
                  static_cast<std::size_t>((columns - span.end) * size));
    Row::fence(stream);
  }

 private:
  static void slopes(const Problem& p, const lse128::Slope& k, std::int64_t n, const float* z,
                     const float* raw, float* d) {
    Row::map(
        n,
        [&](auto x, auto r) {
          using T = decltype(x);
          return lse128::through_cap<T>(p, lse128::gradient<T>(k, x, T{}), r);
        },
        d, z, raw);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {kTile, Tiles<L, W>::fold, Tiles<L, W>::gradient};
}

}  // namespace rlk::native::logp
