// The body of each tile_<isa>.cpp: an Engine on vectors of the given type.
#pragma once

#include <algorithm>

#include "native/embedding/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::embedding {

template <class L, int W>
class Tile {
  using Row = native::Row<L, W>;

  static char* at(void* row, rows::Type type, std::int64_t column) {
    return static_cast<char*>(row) + column * rows::size_of(type);
  }

 public:
  static void forward(const Problem& p, std::int64_t token) {
    const rows::Type type = p.weight.type;
    void* out = p.tokens.row(p.axes, token);
    const std::int64_t row = p.row(token), bytes = p.width * rows::size_of(type);
    if (row < 0) {
      std::memset(out, 0, static_cast<std::size_t>(bytes));
    } else if (p.scale == 1) {
      std::memcpy(out, p.weight.row(row), static_cast<std::size_t>(bytes));
    } else {
      alignas(64) float x[kTile];
      const float* cx = x;
      for (std::int64_t first = 0; first < p.width; first += kTile) {
        const std::int64_t n = std::min(kTile, p.width - first);
        Row::widen(type, at(p.weight.row(row), type, first), x, n);
        Row::map(n, [&p](auto w) { return w * p.scale; }, x, cx);
        Row::narrow(type, x, at(out, type, first), n);
      }
    }
  }

  static void backward(const Problem& p, std::int64_t row, std::int64_t first, const std::int64_t* tokens,
                       std::int64_t count) {
    const std::int64_t n = std::min(kTile, p.width - first);
    char* out = at(p.weight.row(row), p.weight.type, first);
    const char* before = p.before.data ? at(p.before.row(row), p.before.type, first) : nullptr;
    if (count == 0) {
      const auto bytes = static_cast<std::size_t>(n * rows::size_of(p.weight.type));
      if (!before)
        std::memset(out, 0, bytes);
      else if (before != out)
        std::memcpy(out, before, bytes);
      return;
    }
    alignas(64) float sum[kTile] = {}, d[kTile];
    const float *cs = sum, *cd = d;
    for (std::int64_t t = 0; t < count; ++t) {
      Row::widen(p.tokens.type, at(p.tokens.row(p.axes, tokens[t]), p.tokens.type, first), d, n);
      Row::map(n, [](auto a, auto b) { return a + b; }, sum, cs, cd);
    }
    Row::map(n, [&p](auto x) { return x * p.scale; }, sum, cs);
    if (before) {
      Row::widen(p.before.type, before, d, n);
      Row::map(n, [](auto a, auto b) { return a + b; }, sum, cs, cd);
    }
    Row::narrow(p.weight.type, sum, out, n);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Tile<L, W>::forward, Tile<L, W>::backward};
}

}  // namespace rlk::native::embedding
