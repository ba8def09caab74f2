// The body of each tile_<isa>.cpp: an Engine on vectors of the given type. A vector at a time is read, computed and written, so
// that memory moves while the exponential and its division are computed. (Rejected: a tile widened on the stack first; its
// passes through the cache were half the time in bf16.)
#pragma once

#include <algorithm>

#include "native/rows.hpp"
#include "native/swiglu/engine.hpp"

namespace rlk::native::swiglu {

template <class L, int W>
class Tile {
  using Row = native::Row<L, W>;
  using Tensor = rows::Tensor;
  using Type = rows::Type;

  static char* place(const Problem& p, const Tensor& t, std::int64_t row, std::int64_t first) {
    return static_cast<char*>(t.row(p.axes, row)) + first * rows::size_of(t.type);
  }
  template <class S>
  static S* at(const Problem& p, const Tensor& t, std::int64_t row, std::int64_t first) {
    return reinterpret_cast<S*>(place(p, t, row, first));
  }

  // act(gate) as the product takes it, a vector or one element; S is the dtype that it may be rounded to.
  template <class S, class T>
  static T activate(const Problem& p, T gate) {
    return held<S>(p, act32::activated(p, gate));
  }
  template <class S, class T>
  static T held(const Problem& p, T x) {
    if (!p.twice) return x;
    if constexpr (sizeof(T) == sizeof(float))
      return simt::to_float(simt::from_float<S>(x));
    else
      return Row::template through<S>(x);
  }

  // All tensors are of dtype S. The problem is a copy: nothing that is written can change it.
  template <class S>
  static void forward_of(const Problem p, std::int64_t row, std::int64_t first, std::int64_t n, bool stream) {
    const S *gate = at<const S>(p, p.gate, row, first), *up = at<const S>(p, p.up, row, first);
    S* out = at<S>(p, p.out, row, first);
    const auto product = [&p](auto g, auto u) { return activate<S>(p, g) * act32::held_up(p, u); };
    stream = Row::aligned(out, stream);
    std::int64_t i = 0;
    for (; i + W <= n; i += W) Row::set(out + i, product(Row::get(gate + i), Row::get(up + i)), stream);
    for (; i < n; ++i) out[i] = simt::from_float<S>(product(simt::to_float(gate[i]), simt::to_float(up[i])));
  }
  template <class S>
  static void backward_of(const Problem p, std::int64_t row, std::int64_t first, std::int64_t n,
                          bool stream) {
    const S *gate = at<const S>(p, p.gate, row, first), *up = at<const S>(p, p.up, row, first),
            *d = at<const S>(p, p.d_out, row, first);
    S *d_gate = p.d_gate ? at<S>(p, p.d_gate, row, first) : nullptr,
      *d_up = p.d_up ? at<S>(p, p.d_up, row, first) : nullptr;
    const bool stream_gate = Row::aligned(d_gate, stream), stream_up = Row::aligned(d_up, stream);
    std::int64_t i = 0;
    for (; i + W <= n; i += W) {
      const L g = Row::get(gate + i), u = Row::get(up + i), dy = Row::get(d + i);
      const act32::Inside<L> in = act32::inside<L>(p, g);
      const L e = act32::falling<L>(in);
      if (d_gate) Row::set(d_gate + i, act32::d_gate<L>(p, in, e, dy, g, u), stream_gate);
      if (d_up)
        Row::set(d_up + i, act32::d_up<L>(p, dy, held<S>(p, act32::activated<L>(in, e)), u), stream_up);
    }
    for (; i < n; ++i) {
      const float g = simt::to_float(gate[i]), u = simt::to_float(up[i]), dy = simt::to_float(d[i]);
      if (d_gate) d_gate[i] = simt::from_float<S>(act32::d_gate<float>(p, dy, g, u));
      if (d_up) d_up[i] = simt::from_float<S>(act32::d_up<float>(p, dy, activate<S>(p, g), u));
    }
  }

  // run(an element of the dtype that all tensors have)
  template <class Run>
  static void by_type(const Problem& p, Run run) {
    if (p.gate.type == Type::f32)
      run(float{});
    else if (p.gate.type == Type::bf16)
      run(simt::bf16{});
    else
      run(simt::fp16{});
  }

 public:
  static void forward(const Problem& p, std::int64_t row, std::int64_t first) {
    const std::int64_t n = std::min(kTile, p.width - first);
    const bool stream = streams(p.axes, p.width, p.out.type);
    by_type(p, [&]<class S>(S) { forward_of<S>(p, row, first, n, stream); });
    Row::fence(stream);
  }
  static void backward(const Problem& p, std::int64_t row, std::int64_t first) {
    const std::int64_t n = std::min(kTile, p.width - first);
    const bool stream = streams(p.axes, p.width, p.gate.type);
    by_type(p, [&]<class S>(S) { backward_of<S>(p, row, first, n, stream); });
    Row::fence(stream);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Tile<L, W>::forward, Tile<L, W>::backward};
}

}  // namespace rlk::native::swiglu
