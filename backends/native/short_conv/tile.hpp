// The body of each tile_<isa>.cpp: an Engine on vectors of the given type. A row's inputs are read where they lie, in x or in the
// state, once for each of the 2 to 4 rows they serve: the nearest cache has them.
#pragma once

#include <algorithm>

#include "native/rows.hpp"
#include "native/short_conv/engine.hpp"

namespace rlk::native::short_conv {

namespace conv = rlk::conv32;

// Inputs of sequences that have no state.
inline constexpr float kZeros[kTile] = {};

template <class L, int W>
class Tile {
  using Row = native::Row<L, W>;
  using Span = conv::Span;
  using Type = rows::Type;

  static std::int64_t columns(const Problem& p, std::int64_t first) {
    return std::min(kTile, p.width - first);
  }
  static char* at(void* row, Type type, std::int64_t first) {
    return static_cast<char*>(row) + first * rows::size_of(type);
  }

  // A vector of elements, or one of them.
  template <class T, class S>
  static T take(const S* p) {
    if constexpr (sizeof(T) == sizeof(float))
      return simt::to_float(*p);
    else
      return Row::get(p);
  }
  template <class T>
  static T floats(const float* p) {
    return take<T>(p);
  }
  // body(element, T{}) for vectors, then for what is left.
  template <class Body>
  static void each(std::int64_t n, Body body) {
    std::int64_t i = 0;
    for (; i + W <= n; i += W) body(i, L{});
    for (; i < n; ++i) body(i, float{});
  }
  template <class S, class T>
  static void give(S* to, T x, bool stream) {
    if constexpr (sizeof(T) == sizeof(float))
      *to = simt::from_float<S>(x);
    else
      Row::set(to, x, stream);
  }

  // What a row is computed from: its inputs, oldest first, and the filter.
  template <class S, int Taps>
  struct Window {
    const S* x[Taps];
    const float* w[Taps];
    const float* bias;

    Window(const Problem& p, std::int64_t first, const float* parameters) {
      for (int t = 0; t < Taps; ++t) w[t] = parameters + t * p.width + first;
      bias = p.bias ? parameters + Taps * p.width + first : nullptr;
    }
    void move_to(const Problem& p, const Span& s, std::int64_t row, std::int64_t first) {
      for (int t = 0; t < Taps; ++t) {
        const auto* from = static_cast<const S*>(p.input(s, row - s.begin - (Taps - 1) + t));
        x[t] = from ? from + first : reinterpret_cast<const S*>(kZeros);
      }
    }
    // What goes through silu; `in` keeps the inputs.
    template <class T>
    T sum(std::int64_t i, T (&in)[Taps]) const {
      T z{};
      for (int t = 0; t < Taps; ++t) {
        in[t] = take<T>(x[t] + i);
        z = simt::fused(floats<T>(w[t] + i), in[t], z);
      }
      return bias ? z + floats<T>(bias + i) : z;
    }
  };

  template <class S, int Taps>
  static void forward_of(const Problem p, std::int64_t block, std::int64_t first, const float* parameters) {
    const std::int64_t n = columns(p, first), last = std::min(p.axes.rows, (block + 1) * kBlock);
    const bool streams = native::streams(p.axes, p.width, p.x.type);
    Window<S, Taps> window(p, first, parameters);
    Span s;
    for (std::int64_t row = block * kBlock; row < last; ++row) {
      if (row >= s.end) s = p.sequence_of(row);
      window.move_to(p, s, row, first);
      S* y = static_cast<S*>(p.y.row(p.axes, row)) + first;
      const bool stream = Row::aligned(y, streams);
      each(n, [&]<class T>(std::int64_t i, T) {
        T in[Taps];
        give(y + i, conv::silu<T>(window.sum(i, in)), stream);
      });
    }
    Row::fence(streams);
  }

  // Gradients of the sums of the last kMostTaps rows, and of one input.
  struct Scratch {
    float* memory;
    float* row(std::int64_t row) const { return memory + row % kMostTaps * kTile; }
    float* result() const { return memory + kMostTaps * kTile; }
  };

  // The gradient of input `at` of a sequence, from those of the outputs that it reaches, the newest first.
  template <int Taps>
  static void input_gradient(const Problem& p, const Span& s, std::int64_t at, std::int64_t first,
                             const float* parameters, const Scratch& scratch) {
    const std::int64_t n = columns(p, first), r = at - (s.length() - (Taps - 1));
    float* sum = scratch.result();
    if (p.d_final && r >= 0)
      Row::widen(p.d_final.type, Tile::at(p.d_final.row(s.number, r), p.d_final.type, first), sum, n);
    else
      std::fill_n(sum, n, 0.0f);
    for (std::int64_t out = std::min<std::int64_t>(at + Taps - 1, s.length() - 1);
         out >= std::max<std::int64_t>(at, 0); --out)
      Row::map(
          n, [](auto w, auto g, auto x) { return simt::fused(w, g, x); }, sum,
          parameters + (Taps - 1 - (out - at)) * p.width + first,
          static_cast<const float*>(scratch.row(s.begin + out)), static_cast<const float*>(sum));
  }

  // The gradient of a row's sum; its part of d_weight and d_bias is added to `share`.
  template <class S, int Taps>
  static void row_gradient(const Problem& p, const Window<S, Taps>& window, std::int64_t row,
                           std::int64_t first, float* g, float* share) {
    const auto* d_y = static_cast<const S*>(p.d_y.row(p.axes, row)) + first;
    each(columns(p, first), [&]<class T>(std::int64_t i, T) {
      T in[Taps];
      const T d = conv::d_silu<T>(take<T>(d_y + i), window.sum(i, in));
      put(g + i, d);
      if (!share) return;
      for (int t = 0; t < Taps; ++t) {
        float* to = share + t * p.width + first + i;
        put(to, simt::fused(d, in[t], floats<T>(to)));
      }
      float* to = share + Taps * p.width + first + i;
      put(to, floats<T>(to) + d);
    });
  }
  static void put(float* to, float x) { *to = x; }
  template <class T>
  static void put(float* to, T x) {
    Row::store(to, x);
  }

  template <class S, int Taps>
  static void backward_of(const Problem p, std::int64_t block, std::int64_t first, const float* parameters,
                          float* memory, float* share) {
    const std::int64_t begin = block * kBlock, last = std::min(p.axes.rows, begin + kBlock);
    const Scratch scratch{memory};
    Window<S, Taps> window(p, first, parameters);
    Span s, of_input;
    for (std::int64_t row = begin; row < last + (p.d_x ? Taps - 1 : 0); ++row) {
      if (row < p.axes.rows) {
        if (row >= s.end) s = p.sequence_of(row);
        window.move_to(p, s, row, first);
        row_gradient(p, window, row, first, scratch.row(row), row < last ? share : nullptr);
      }
      const std::int64_t input = row - (Taps - 1);
      if (!p.d_x || input < begin) continue;
      if (input >= of_input.end) of_input = p.sequence_of(input);
      input_gradient<Taps>(p, of_input, input - of_input.begin, first, parameters, scratch);
      Row::narrow(p.d_x.type, scratch.result(), at(p.d_x.row(p.axes, input), p.d_x.type, first),
                  columns(p, first));
    }
  }

  template <class S, int Taps>
  static void d_state_of(const Problem p, std::int64_t sequence, std::int64_t first, const float* parameters,
                         float* memory) {
    const Span s = p.sequence(sequence);
    const Scratch scratch{memory};
    Window<S, Taps> window(p, first, parameters);
    for (std::int64_t row = s.begin; row < std::min<std::int64_t>(s.end, s.begin + Taps - 1); ++row) {
      window.move_to(p, s, row, first);
      row_gradient<S, Taps>(p, window, row, first, scratch.row(row), nullptr);
    }
    for (std::int64_t r = 0; r < Taps - 1; ++r) {
      input_gradient<Taps>(p, s, r - (Taps - 1), first, parameters, scratch);
      Row::narrow(p.d_initial.type, scratch.result(),
                  at(p.d_initial.row(sequence, r), p.d_initial.type, first), columns(p, first));
    }
  }

  // run.operator()<dtype of x, taps>()
  template <class S, class Run>
  static void by_taps(const Problem& p, Run run) {
    if (p.taps == 2)
      run.template operator()<S, 2>();
    else if (p.taps == 3)
      run.template operator()<S, 3>();
    else
      run.template operator()<S, 4>();
  }
  template <class Run>
  static void by_type(const Problem& p, Run run) {
    if (p.x.type == Type::f32)
      by_taps<float>(p, run);
    else if (p.x.type == Type::bf16)
      by_taps<simt::bf16>(p, run);
    else
      by_taps<simt::fp16>(p, run);
  }

 public:
  static void forward(const Problem& p, std::int64_t block, std::int64_t first, const float* parameters) {
    by_type(p, [&]<class S, int Taps>() { forward_of<S, Taps>(p, block, first, parameters); });
  }
  static void backward(const Problem& p, std::int64_t block, std::int64_t first, const float* parameters,
                       float* scratch, float* share) {
    by_type(p,
            [&]<class S, int Taps>() { backward_of<S, Taps>(p, block, first, parameters, scratch, share); });
  }
  static void d_state(const Problem& p, std::int64_t sequence, std::int64_t first, const float* parameters,
                      float* scratch) {
    by_type(p, [&]<class S, int Taps>() { d_state_of<S, Taps>(p, sequence, first, parameters, scratch); });
  }
  // Rows ascending: where the result is the initial state itself, what is read was not written yet.
  static void state(const Problem& p, std::int64_t sequence, std::int64_t first, float* scratch) {
    const Span s = p.sequence(sequence);
    const std::int64_t n = columns(p, first);
    for (std::int64_t r = 0; r < p.back(); ++r) {
      const void* from = p.input(s, s.length() - p.back() + r);
      if (from)
        Row::widen(p.x.type, at(const_cast<void*>(from), p.x.type, first), scratch, n);
      else
        std::fill_n(scratch, n, 0.0f);
      Row::narrow(p.final.type, scratch, at(p.final.row(sequence, r), p.final.type, first), n);
    }
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Tile<L, W>::forward, Tile<L, W>::state, Tile<L, W>::backward, Tile<L, W>::d_state};
}

}  // namespace rlk::native::short_conv
