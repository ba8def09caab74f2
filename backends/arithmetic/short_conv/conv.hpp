// short_conv in fp32 (arithmetic id conv32): the call as plain data, passed to GPU kernels by value, and where its sequences lie.
#pragma once

#include "arithmetic/activation.hpp"
#include "arithmetic/rows.hpp"

namespace rlk::conv32 {

using rows::Tensor;
using rows::Type;

inline constexpr int kMostTaps = 4;
inline constexpr int kBlock = 128;  // rows whose share of d_weight and d_bias is one fp32 chain

// A sequence: its number, and its rows among all B * T.
struct Span {
  std::int64_t number = 0, begin = 0, end = 0;
  RLK_HD std::int64_t length() const { return end - begin; }
};

// A state [sequence, tap, channel]; strides count elements.
struct State {
  void* data = nullptr;
  Type type = Type::f32;
  std::int64_t sequence = 0, tap = 0;
  RLK_HD explicit operator bool() const { return data != nullptr; }
  RLK_HD void* row(std::int64_t n, std::int64_t r) const {
    return static_cast<char*>(data) + (n * sequence + r * tap) * rows::size_of(type);
  }
};

// Numbers that do not depend on the row: dense.
struct Parameter {
  void* data = nullptr;
  Type type = Type::f32;
  RLK_HD explicit operator bool() const { return data != nullptr; }
};

struct Problem {
  rows::Axes axes;  // of the B * T rows
  std::int64_t tokens = 0, sequences = 0, width = 0;
  int taps = 0;
  const std::int64_t* cu_seqlens = nullptr;
  Tensor x, y, d_y, d_x;
  State initial, final, d_initial, d_final;
  Parameter weight, bias, d_weight, d_bias;  // weight and its gradient [channel, tap]

  RLK_HD int back() const { return taps - 1; }
  RLK_HD std::int64_t blocks() const { return (axes.rows + kBlock - 1) / kBlock; }
  RLK_HD bool sums() const { return d_weight || d_bias; }
  // What one block leaves for d_weight and d_bias: `taps + 1` rows of the width.
  RLK_HD std::int64_t share() const { return (taps + 1) * width; }

  // Bounds may live on a device, where nobody checks them before a launch: whatever they hold, no access leaves the tensors.
  RLK_HD std::int64_t bound(std::int64_t n) const {
    const std::int64_t b = cu_seqlens[n];
    return b < 0 ? 0 : b > axes.rows ? axes.rows : b;
  }
  RLK_HD Span sequence(std::int64_t n) const {
    if (cu_seqlens == nullptr) return {n, n * tokens, (n + 1) * tokens};
    const std::int64_t begin = bound(n), end = bound(n + 1);
    return {n, begin, end < begin ? begin : end};
  }
  // The sequence that a row belongs to.
  RLK_HD Span sequence_of(std::int64_t row) const {
    if (cu_seqlens == nullptr) return sequence(row / tokens);
    std::int64_t low = 0, high = sequences;  // the last that begins at the row or before
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      if (bound(middle) <= row)
        low = middle;
      else
        high = middle;
    }
    Span s = sequences > 0 ? sequence(low) : Span{};
    if (s.begin > row) s.begin = row;
    if (s.end <= row) s.end = row + 1;
    return s;
  }
  // Where input `at` of a sequence lies, counted from its first: in x, in the state, or nowhere, which is zeros.
  RLK_HD const void* input(const Span& s, std::int64_t at) const {
    if (at >= 0) return x.row(axes, s.begin + at);
    return initial ? initial.row(s.number, back() + at) : nullptr;
  }
};

template <class T>
RLK_HD T silu(T z) {
  return activation::gated<T>(z, z);
}
// The gradient of silu's argument.
template <class T>
RLK_HD T d_silu(T d_y, T z) {
  return activation::times_slope<T>(d_y, z, z, T{} + 1);
}

}  // namespace rlk::conv32
