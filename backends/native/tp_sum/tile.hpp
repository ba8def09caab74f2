// The body of each tile_<isa>.cpp: an Engine on vectors of the given type. Memory is read and written once.
#pragma once

#include <algorithm>

#include "native/rows.hpp"
#include "native/tp_sum/engine.hpp"

namespace rlk::native::tp_sum {

template <class L, int W>
class Tile {
  using Row = native::Row<L, W>;

  // at(t): the t-th partial sums
  template <class At>
  static void join(const Problem& p, At at, float* out, std::int64_t n) {
    if (p.count == 1)
      std::copy_n(at(0), n, out);
    else if (p.count == 2)
      Row::map(n, [](auto a, auto b) { return a + b; }, out, at(0), at(1));
    else if (p.count == 4)
      Row::map(
          n, [](auto a, auto b, auto c, auto d) { return rlk::tree8::four(a, b, c, d); }, out, at(0), at(1),
          at(2), at(3));
    else
      Row::map(
          n,
          [](auto a, auto b, auto c, auto d, auto e, auto f, auto g, auto h) {
            return rlk::tree8::eight(a, b, c, d, e, f, g, h);
          },
          out, at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
  }

  // sum = round(sum) + what lies at `from`
  static void add(const Problem& p, rows::Type type, const void* from, float* sum, std::int64_t n) {
    alignas(64) float more[kTile];
    const float *cs = sum, *cm = more;
    if (p.y.type != rows::Type::f32) {
      Row::narrow(p.y.type, sum, more, n);
      Row::widen(p.y.type, more, sum, n);
    }
    Row::widen(type, from, more, n);
    Row::map(n, [](auto a, auto b) { return a + b; }, sum, cs, cm);
  }

 public:
  static void run(const Problem& p, std::int64_t row, std::int64_t first) {
    alignas(64) float sum[kTile];
    const std::int64_t n = std::min(kTile, p.width - first);
    const auto place = [&](const rows::Tensor& t) {
      return static_cast<char*>(t.row(p.axes, row)) + first * rows::size_of(t.type);
    };
    join(p, [&](int t) { return reinterpret_cast<const float*>(place(p.partials[t])); }, sum, n);
    if (p.bias != nullptr)
      add(p, p.bias_type, static_cast<const char*>(p.bias) + first * rows::size_of(p.bias_type), sum, n);
    if (p.residual) add(p, p.residual.type, place(p.residual), sum, n);
    const bool stream = streams(p.axes, p.width, p.y.type);
    Row::narrow(p.y.type, sum, place(p.y), n, stream);
    Row::fence(stream);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Tile<L, W>::run};
}

}  // namespace rlk::native::tp_sum
