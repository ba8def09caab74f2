// Where the sequences, heads and states of a kda call lie: for its reference and its rule.
#pragma once

#include <cmath>

#include "registry/reference.hpp"

namespace rlk::registry::kda {

// A state matrix inside a tensor of states, stored either way.
struct Matrix {
  Rows rows;
  int64_t first, k, v;
  bool v_first;

  template <class View>
  Matrix(const View& t, int64_t index, int64_t k_, int64_t v_, bool turned)
      : rows(t), first(index * (turned ? v_ : k_)), k(k_), v(v_), v_first(turned) {}
  template <class Vector>
  void read(Vector& out) const {
    for (int64_t d = 0; d < k; ++d)
      for (int64_t j = 0; j < v; ++j)
        out[static_cast<std::size_t>(d * v + j)] = static_cast<typename Vector::value_type>(
            v_first ? rows.get(first + j, d) : rows.get(first + d, j));
  }
  template <class Vector>
  void write(const Vector& in) const {
    for (int64_t d = 0; d < k; ++d)
      for (int64_t j = 0; j < v; ++j) {
        const double x = in[static_cast<std::size_t>(d * v + j)];
        v_first ? rows.set(first + j, d, x) : rows.set(first + d, j, x);
      }
  }
};

struct Sizes {
  int64_t sequences, tokens, heads, value_heads, k, v;
  double scale;
};

template <class Args>
Sizes sizes_of(const Args& a) {
  const int64_t k = a.q.dim(3);
  return {
      a.cu_seqlens ? a.cu_seqlens.dim(0) - 1 : a.q.dim(0), a.q.dim(1), a.q.dim(2), a.v.dim(2), k, a.v.dim(3),
      a.scale != 0 ? a.scale : 1 / std::sqrt(double(k))};
}

struct Range {
  int64_t first, last;  // rows of [B * T]
};
template <class Args>
Range range_of(const Args& a, int64_t n) {
  if (!a.cu_seqlens) return {n * a.q.dim(1), (n + 1) * a.q.dim(1)};
  return {a.cu_seqlens.template data<int64_t>()[n], a.cu_seqlens.template data<int64_t>()[n + 1]};
}

// The place of a chunk, which starts at `row`, among the kept states.
template <class Args>
int64_t slot_of(const Args& a, int64_t n, int64_t row) {
  const int64_t first = range_of(a, n).first, c = a.chunk_size;
  return (a.cu_seqlens ? first / c + n : n * ((a.q.dim(1) + c - 1) / c)) + (row - first) / c;
}

}  // namespace rlk::registry::kda
