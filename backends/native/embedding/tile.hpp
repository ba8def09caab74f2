// The body of each tile_<isa>.cpp: an Engine on vectors of the given type.
#pragma once

#include <algorithm>

#include "native/embedding/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::embedding {

template <class L, int W>
class Tile {
  using Row = native::Row<L, W>;

  static constexpr std::int64_t kAhead = 4096;  // bytes from a row to the one that is asked for
  static constexpr std::int64_t kRun = 2048;    // bytes of zeros that are worth going around the caches

  static char* at(void* row, rows::Type type, std::int64_t column) {
    return static_cast<char*>(row) + column * rows::size_of(type);
  }

  // Neighbours are copied while a row that comes soon is asked for, and results beyond the caches go around them.
  static void copied(const Problem& p, std::int64_t first, std::int64_t last) {
    const rows::Type type = p.weight.type;
    const std::int64_t bytes = p.width * rows::size_of(type),
                       ahead = std::max<std::int64_t>(1, kAhead / (bytes + 1));
    const bool stream = streams(p.axes, p.width, type);
    for (std::int64_t t = first; t < last; ++t) {
      const std::int64_t row = p.row(t), next = t + ahead < p.axes.rows ? p.row(t + ahead) : -1;
      char* out = static_cast<char*>(p.tokens.row(p.axes, t));
      if (row < 0)
        std::memset(out, 0, static_cast<std::size_t>(bytes));
      else
        Row::copy(at(p.weight.row(row), type, 0), out, bytes, stream,
                  next < 0 ? nullptr : at(p.weight.row(next), type, 0));
    }
    Row::fence(stream);
  }
  static void scaled(const Problem& p, std::int64_t token) {
    const rows::Type type = p.weight.type;
    void* out = p.tokens.row(p.axes, token);
    const std::int64_t row = p.row(token);
    if (row < 0) {
      std::memset(out, 0, static_cast<std::size_t>(p.width * rows::size_of(type)));
      return;
    }
    alignas(64) float x[kTile];
    const float* cx = x;
    for (std::int64_t first = 0; first < p.width; first += kTile) {
      const std::int64_t n = std::min(kTile, p.width - first);
      Row::widen(type, at(p.weight.row(row), type, first), x, n);
      Row::map(n, [&p](auto w) { return w * p.scale; }, x, cx);
      Row::narrow(type, x, at(out, type, first), n);
    }
  }

  template <class S>
  static void add(const S* d, float* sum, std::int64_t n) {
    std::int64_t i = 0;
    for (; i + W <= n; i += W) Row::store(sum + i, Row::load(sum + i) + Row::get(d + i));
    for (; i < n; ++i) sum[i] = sum[i] + simt::to_float(d[i]);
  }
  template <class S>
  static void finish(const float* sum, float scale, const float* before, S* out, std::int64_t n) {
    const auto value = [&](auto x, auto y) { return before ? x * scale + y : x * scale; };
    std::int64_t i = 0;
    for (; i + W <= n; i += W)
      Row::set(out + i, value(Row::load(sum + i), before ? Row::load(before + i) : L{}));
    for (; i < n; ++i) out[i] = simt::from_float<S>(value(sum[i], before ? before[i] : 0.0f));
  }
  // run(p as what it points to)
  template <class Run>
  static void typed(rows::Type type, void* p, Run run) {
    if (type == rows::Type::f32)
      run(static_cast<float*>(p));
    else if (type == rows::Type::bf16)
      run(static_cast<simt::bf16*>(p));
    else
      run(static_cast<simt::fp16*>(p));
  }

  // n columns of a row of d_weight.
  static void gradient(const Problem& p, const std::int64_t* tokens, std::int64_t count, std::int64_t column,
                       std::int64_t n, const char* before, char* out, bool stream) {
    const std::int64_t bytes = n * rows::size_of(p.weight.type);
    if (count == 0 && !before) return Row::clear(out, bytes, stream);
    if (count == 0) {
      if (before != out) Row::copy(before, out, bytes, stream, nullptr);
      return;
    }
    alignas(64) float sum[kTile] = {};
    for (std::int64_t t = 0; t < count; ++t)
      typed(p.tokens.type, at(p.tokens.row(p.axes, tokens[t]), p.tokens.type, column),
            [&](const auto* d) { add(d, sum, n); });
    typed(p.weight.type, out,
          [&](auto* to) { finish(sum, p.scale, reinterpret_cast<const float*>(before), to, n); });
  }

 public:
  static void forward(const Problem& p, std::int64_t first, std::int64_t last) {
    if (p.scale == 1) return copied(p, first, last);
    for (std::int64_t t = first; t < last; ++t) scaled(p, t);
  }

  static void backward(const Problem& p, const Order& order, std::int64_t first, std::int64_t last,
                       std::int64_t column) {
    const std::int64_t n = std::min(kTile, p.width - column), size = rows::size_of(p.weight.type);
    const bool stream = streams(p.vocab * p.width * size) && n * size >= kRun;
    for (std::int64_t v = first; v < last; ++v)
      gradient(p, order.tokens + order.begin[v], order.begin[v + 1] - order.begin[v], column, n,
               p.before.data ? at(p.before.row(v), p.before.type, column) : nullptr,
               at(p.weight.row(v), p.weight.type, column), stream);
    Row::fence(stream);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Tile<L, W>::forward, Tile<L, W>::backward};
}

}  // namespace rlk::native::embedding
