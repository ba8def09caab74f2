// The body of each rows_<isa>.cpp: an Engine on vectors of the given type. A row is widened to fp32 in the scratch, where all
// passes over it hit the nearest cache; memory is read and written once.
#pragma once

#include <algorithm>

#include "native/rms_norm/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::rms_norm {

namespace norm = rlk::rms32;

template <class L, int W>
class Rows {
  using Row = native::Row<L, W>;

  // rms32 of x * y. Lanes behind a short row are +0: their half is left out, and only makes a +0 of a -0.
  static float sum(const float* x, const float* y, std::int64_t n, float* lanes) {
    std::int64_t held = W;
    while (held < std::min<std::int64_t>(n, kLanes)) held *= 2;
    for (std::int64_t lane = 0; lane < held; lane += W) {
      L total{};
      for (std::int64_t i = lane; i + W <= n; i += kLanes)
        total = simt::fused(Row::load(x + i), Row::load(y + i), total);
      Row::store(lanes + lane, total);
    }
    for (std::int64_t i = n / W * W; i < n; ++i)
      lanes[i % kLanes] = simt::fused(x[i], y[i], lanes[i % kLanes]);
    if (held < kLanes)
      Row::map(held, [](auto a) { return a + 0.0f; }, lanes, static_cast<const float*>(lanes));
    return Row::halve(lanes, held);
  }

  static void round(rows::Type type, float* x, void* scratch, std::int64_t n) {
    if (type == rows::Type::f32) return;
    Row::narrow(type, x, scratch, n);
    Row::widen(type, scratch, x, n);
  }

 public:
  static void weights(const Problem& p, float* out) {
    Row::widen(p.weight_type, p.weight, out, p.width);
    if (p.offset) Row::map(p.width, [](auto w) { return 1 + w; }, out, static_cast<const float*>(out));
  }

  // What is normalised, in fp32: x, or its sum with the residual, which is stored where it is asked for.
  static void read(const Problem& p, std::int64_t row, float* a, float* b, bool stream) {
    const std::int64_t n = p.width;
    Row::widen(p.x.type, p.x.row(p.axes, row), a, n);
    if (!p.residual) return;
    Row::widen(p.residual.type, p.residual.row(p.axes, row), b, n);
    Row::map(
        n, [](auto x, auto y) { return x + y; }, a, static_cast<const float*>(a),
        static_cast<const float*>(b));
    if (p.sum) Row::narrow(p.sum.type, a, p.sum.row(p.axes, row), n, stream);
    round(p.residual.type, a, b, n);
  }

  static void forward(const Problem& p, std::int64_t block, const float* weight, float* scratch) {
    const std::int64_t n = p.width;
    float *lanes = scratch, *a = lanes + kLanes, *b = a + n;
    const float *ca = a, *cb = b;
    const bool stream = streams(p.axes, n, p.x.type);
    const std::int64_t last = std::min(p.axes.rows, (block + 1) * kBlock);
    for (std::int64_t row = block * kBlock; row < last; ++row) {
      read(p, row, a, b, stream);
      const float r = norm::reciprocal(sum(a, a, n, lanes), n, p.eps);
      if (p.rstd) rows::store(p.rstd.type, p.rstd.row(p.axes, row), 0, r);
      if (weight && !p.early) {
        Row::map(n, [r](auto x, auto w) { return x * r * w; }, a, ca, weight);
      } else {
        Row::map(n, [r](auto x) { return x * r; }, a, ca);
        if (p.early) round(p.y.type, a, b, n);
        if (weight) Row::map(n, [](auto x, auto w) { return x * w; }, a, ca, weight);
      }
      if (p.gate) {
        Row::widen(p.gate.type, p.gate.row(p.axes, row), b, n);
        Row::map(n, [&p](auto x, auto g) { return x * activation::value(p.act, g); }, a, ca, cb);
      }
      Row::narrow(p.y.type, a, p.y.row(p.axes, row), n, stream);
    }
    Row::fence(stream);
  }

  static void backward(const Problem& p, std::int64_t block, const float* weight, float* scratch,
                       float* partial) {
    const std::int64_t n = p.width;
    float *lanes = scratch, *normal = lanes + kLanes, *d = normal + n, *gate = d + n, *out = gate + n;
    const float *cn = normal, *cd = d, *cg = gate, *co = out;
    if (partial) std::fill_n(partial, n, 0.0f);
    const bool stream = streams(p.axes, n, p.x.type);
    const std::int64_t last = std::min(p.axes.rows, (block + 1) * kBlock);
    for (std::int64_t row = block * kBlock; row < last; ++row) {
      read(p, row, normal, gate, stream);
      const float r = p.rstd ? rows::load(p.rstd.type, p.rstd.row(p.axes, row), 0)
                             : norm::reciprocal(sum(normal, normal, n, lanes), n, p.eps);
      Row::map(n, [r](auto x) { return x * r; }, normal, cn);
      Row::widen(p.d_y.type, p.d_y.row(p.axes, row), d, n);
      if (p.gate) through_gate(p, row, weight, normal, d, gate, out);
      if (partial)
        Row::map(
            n, [](auto g, auto x, auto s) { return simt::fused(g, x, s); }, partial, cd, cn,
            static_cast<const float*>(partial));
      if (!p.d_x && !p.d_residual) continue;
      if (weight) Row::map(n, [](auto g, auto w) { return g * w; }, d, cd, weight);
      const float mean = sum(d, normal, n, lanes) / static_cast<float>(n);
      Row::map(
          n,
          [r, mean](auto x, auto g) {
            using T = decltype(x);
            return norm::gradient<T>(T{} + r, x, T{} + mean, g);
          },
          out, cn, cd);
      if (p.d_sum) {
        Row::widen(p.d_sum.type, p.d_sum.row(p.axes, row), gate, n);
        Row::map(n, [](auto x, auto y) { return x + y; }, out, co, cg);
      }
      for (const rows::Tensor* to : {&p.d_x, &p.d_residual})
        if (*to) Row::narrow(to->type, out, to->row(p.axes, row), n, stream);
    }
    Row::fence(stream);
  }

 private:
  // d_gate, and d multiplied by the gate's value.
  static void through_gate(const Problem& p, std::int64_t row, const float* weight, const float* normal,
                           float* d, float* gate, float* out) {
    const std::int64_t n = p.width;
    const float *cd = d, *cg = gate, *co = out;
    Row::widen(p.gate.type, p.gate.row(p.axes, row), gate, n);
    if (p.d_gate) {
      std::copy_n(normal, n, out);
      if (weight) Row::map(n, [](auto x, auto w) { return x * w; }, out, normal, weight);
      Row::map(
          n, [&p](auto g, auto x, auto z) { return g * x * activation::slope(p.act, z); }, out, cd, co, cg);
      Row::narrow(p.d_gate.type, out, p.d_gate.row(p.axes, row), n);
    }
    Row::map(n, [&p](auto g, auto z) { return g * activation::value(p.act, z); }, d, cd, cg);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Rows<L, W>::weights, Rows<L, W>::forward, Rows<L, W>::backward};
}

}  // namespace rlk::native::rms_norm
