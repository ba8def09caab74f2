// The body of each tile_<isa>.cpp: an Engine on vectors of the given type. A tile is widened to fp32 on the stack; memory is
// read and written once.
#pragma once

#include <algorithm>

#include "native/rows.hpp"
#include "native/swiglu/engine.hpp"

namespace rlk::native::glu {

template <class L, int W>
class Tile {
  using Row = native::Row<L, W>;
  using Tensor = rows::Tensor;

  static char* place(const Problem& p, const Tensor& t, std::int64_t row, std::int64_t first) {
    return static_cast<char*>(t.row(p.axes, row)) + first * rows::size_of(t.type);
  }

  // act(gate) as the product takes it; `room` is overwritten.
  static void activate(const Problem& p, const float* gate, float* out, float* room, std::int64_t n) {
    Row::map(n, [&p](auto g) { return act32::activated(p, g); }, out, gate);
    if (!p.twice || p.gate.type == rows::Type::f32) return;
    Row::narrow(p.gate.type, out, room, n);
    Row::widen(p.gate.type, room, out, n);
  }

 public:
  static void forward(const Problem& p, std::int64_t row, std::int64_t first) {
    alignas(64) float gate[kTile], up[kTile], out[kTile];
    const float *cu = up, *co = out;
    const std::int64_t n = std::min(kTile, p.width - first);
    Row::widen(p.gate.type, place(p, p.gate, row, first), gate, n);
    Row::widen(p.up.type, place(p, p.up, row, first), up, n);
    activate(p, gate, out, gate, n);
    Row::map(n, [&p](auto x, auto u) { return x * act32::held_up(p, u); }, out, co, cu);
    const bool stream = streams(p.axes, p.width, p.out.type);
    Row::narrow(p.out.type, out, place(p, p.out, row, first), n, stream);
    Row::fence(stream);
  }

  static void backward(const Problem& p, std::int64_t row, std::int64_t first) {
    alignas(64) float gate[kTile], up[kTile], d[kTile], out[kTile], room[kTile];
    const float *cg = gate, *cu = up, *cd = d, *co = out;
    const std::int64_t n = std::min(kTile, p.width - first);
    const bool stream = streams(p.axes, p.width, p.gate.type);
    Row::widen(p.gate.type, place(p, p.gate, row, first), gate, n);
    Row::widen(p.up.type, place(p, p.up, row, first), up, n);
    Row::widen(p.d_out.type, place(p, p.d_out, row, first), d, n);
    if (p.d_gate) {
      Row::map(n, [&p](auto dy, auto g, auto u) { return act32::d_gate(p, dy, g, u); }, out, cd, cg, cu);
      Row::narrow(p.d_gate.type, out, place(p, p.d_gate, row, first), n, stream);
    }
    if (p.d_up) {
      activate(p, gate, out, room, n);
      Row::map(n, [&p](auto dy, auto x, auto u) { return act32::d_up(p, dy, x, u); }, out, cd, co, cu);
      Row::narrow(p.d_up.type, out, place(p, p.d_up, row, first), n, stream);
    }
    Row::fence(stream);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Tile<L, W>::forward, Tile<L, W>::backward};
}

}  // namespace rlk::native::glu
