// The body of each rows_<isa>.cpp: an Engine on vectors of the given type. A head is widened to fp32, and everything is done to it
// in the nearest cache; the factors of a token's turn are read once for all its heads.
#pragma once

#include <algorithm>

#include "native/qk_norm_rope/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::qk_norm_rope {

template <class L, int W>
class Rows {
  using Row = native::Row<L, W>;
  using Floats = float[kMostDims];

  // What a token's pairs turn by: y = fma(a, cos, b * -sin) for the first of a pair, fma(b, cos, a * sin) for the second.
  struct Turn {
    alignas(64) float cos[kMostDims / 2], sin[kMostDims / 2], minus[kMostDims / 2];

    Turn(const Problem& p, std::int64_t token) {
      const std::int64_t row = p.position(token), size = rows::size_of(p.table_type);
      const auto at = [&](const void* table, std::int64_t step) {
        return static_cast<const char*>(table) + row * step * size;
      };
      Row::widen(p.table_type, at(p.cos, p.cos_row), cos, p.turned / 2);
      Row::widen(p.table_type, at(p.sin, p.sin_row), sin, p.turned / 2);
      Row::map(p.turned / 2, [](auto s) { return -s; }, minus, static_cast<const float*>(sin));
    }
  };

  // rms32 of x * x. Of its 1024 lanes those behind x are +0, which changes no square.
  static float squares(const float* x, int n) {
    alignas(64) Floats lanes;
    int width = 2;
    while (width < n) width *= 2;
    Row::map(n, [](auto a) { return a * a; }, lanes, x);
    std::fill(lanes + n, lanes + width, 0.0f);
    return Row::halve(lanes, width);
  }

  // As a tensor of this type holds it.
  static void round(rows::Type type, float* x, int n) {
    if (type == rows::Type::f32) return;
    alignas(64) std::uint16_t cells[kMostDims];
    Row::narrow(type, x, cells, n);
    Row::widen(type, cells, x, n);
  }

  static void normalise(const Problem& p, float* x, const float* weight) {
    const int n = p.dims;
    const float* cx = x;
    const float r = rms32::reciprocal(squares(x, n), n, p.eps);
    if (p.early) {
      Row::map(n, [r](auto a) { return a * r; }, x, cx);
      round(p.type, x, n);
      Row::map(n, [](auto a, auto w) { return a * w; }, x, cx, weight);
    } else {
      Row::map(n, [r](auto a, auto w) { return a * r * w; }, x, cx, weight);
    }
    round(p.type, x, n);
  }

  static void turn(const Turn& t, const float* a, const float* b, float* first, float* second, int pairs) {
    const auto rotated = [](auto x, auto y, auto c, auto m) { return simt::fused(x, c, y * m); };
    Row::map(pairs, rotated, first, a, b, t.cos, t.minus);
    Row::map(pairs, rotated, second, b, a, t.cos, t.sin);
  }
  static void turn(const Problem& p, const Turn& t, const float* x, float* y) {
    const int pairs = p.turned / 2;
    if (!p.adjacent) {
      turn(t, x, x + pairs, y, y + pairs, pairs);
    } else {
      alignas(64) float a[kMostDims / 2], b[kMostDims / 2], first[kMostDims / 2], second[kMostDims / 2];
      for (int i = 0; i < pairs; ++i) a[i] = x[2 * i], b[i] = x[2 * i + 1];
      turn(t, a, b, first, second, pairs);
      for (int i = 0; i < pairs; ++i) y[2 * i] = first[i], y[2 * i + 1] = second[i];
    }
    std::copy(x + p.turned, x + p.dims, y + p.turned);
  }

  // Dims that neither turn nor are normalised are copied bit for bit.
  static void put(const Problem& p, const float* y, const void* x, void* to) {
    Row::narrow(p.type, y, to, p.dims);
    if (p.normed() || p.turned == p.dims) return;
    const auto skip = static_cast<std::size_t>(p.turned * rows::size_of(p.type));
    std::memcpy(static_cast<char*>(to) + skip, static_cast<const char*>(x) + skip,
                static_cast<std::size_t>((p.dims - p.turned) * rows::size_of(p.type)));
  }

  // Numbers of q's dtype, which are overwritten, into an fp8 cache.
  static void keep(float* x, int n, float factor, void* to) {
    const float r = 1 / factor;
    Row::map(n, [r](auto a) { return a * r; }, x, static_cast<const float*>(x));
    Row::narrow(x, static_cast<simt::fp8*>(to), n);
  }

  static void heads(const Problem& p, const Part& part, std::int64_t token, const float* weight,
                    const Turn& t) {
    const std::int64_t slot = part.cache ? p.slot(token) : -1;
    if (!part.y && slot < 0) return;
    for (std::int64_t h = 0; h < part.heads; ++h) {
      alignas(64) Floats x, y;
      const void* from = part.x.row(p.type, token, h);
      Row::widen(p.type, from, x, p.dims);
      if (p.normed()) normalise(p, x, weight);
      turn(p, t, x, y);
      if (part.y) put(p, y, from, part.y.row(p.type, token, h));
      if (slot < 0) continue;
      if (!p.f8) {
        put(p, y, from, p.cached(part, slot, h));
      } else {
        round(p.type, y, p.dims);
        keep(y, p.dims, part.factors.of(h), p.cached(part, slot, h));
      }
    }
  }

  static void value(const Problem& p, std::int64_t token, std::int64_t slot, std::int64_t h) {
    const void* from = p.v.x.row(p.type, token, h);
    void* to = p.cached(p.v, slot, h);
    if (!p.f8) {
      std::memcpy(to, from, static_cast<std::size_t>(p.v_dims * rows::size_of(p.type)));
    } else {
      alignas(64) Floats x;
      Row::widen(p.type, from, x, p.v_dims);
      keep(x, p.v_dims, p.v.factors.of(h), to);
    }
  }

 public:
  static void weights(const Problem& p, Weights& out) {
    for (const auto& [part, to] : {std::pair{&p.q, out.q}, std::pair{&p.k, out.k}}) {
      Row::widen(p.weight_type, part->weight, to, p.dims);
      if (p.offset) Row::map(p.dims, [](auto w) { return 1 + w; }, to, static_cast<const float*>(to));
    }
  }

  static void token(const Problem& p, std::int64_t token, const Weights& weights) {
    const Turn t(p, token);
    heads(p, p.q, token, weights.q, t);
    heads(p, p.k, token, weights.k, t);
    const std::int64_t slot = p.v.cache ? p.slot(token) : -1;
    for (std::int64_t h = 0; slot >= 0 && p.v_dims > 0 && h < p.v.heads; ++h) value(p, token, slot, h);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Rows<L, W>::weights, Rows<L, W>::token};
}

}  // namespace rlk::native::qk_norm_rope
