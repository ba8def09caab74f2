// How linear_logp and its gradients are cut into calls of lm_head, logp and linear, and those calls' arguments: for the CPU and for
// portable GPU kernels alike. Whatever the cut, the bits are those of the whole (native/linear_logp/composed.hpp).
#pragma once

#include <algorithm>

#include "arithmetic/logp/bind.hpp"

namespace rlk::logp_parts {

using lse128::Problem;

inline DType dtype_of(lse128::Type t) {
  return t == lse128::Type::f32 ? DType::f32 : t == lse128::Type::bf16 ? DType::bf16 : DType::f16;
}

// Rows [first, first + n) of a tensor whose rows lie along its first axis.
template <class View>
Tensor part(const View& t, std::int64_t first, std::int64_t n) {
  auto* data = const_cast<char*>(static_cast<const char*>(t.template data<char>())) +
               first * t.stride(0) * size_of(t.dtype());
  if (t.rank() == 1) return Tensor(data, {n}, t.dtype());
  return Tensor(data, {n, t.dim(1)}, t.dtype(), {kDLCPU, 0}, {t.stride(0), 1});
}

// How many rows are taken at a time (16 or more), and bytes of logits: of a panel of a leaf, which is whole tiles, and of whole
// rows or columns. What fits a CPU's caches is the default.
struct Limits {
  std::int64_t rows = 512, cached = std::int64_t{2} << 20, held = std::int64_t{64} << 20, columns = 2048;
  std::int64_t tile = lse128::kTile;
};

// How the rows and columns are cut.
template <class Args>
struct Cut {
  const Args& a;
  const Limits limits;
  Problem p;
  std::int64_t size;  // of a logit

  explicit Cut(const Args& args, Limits most = {})
      : a(args),
        limits(most),
        p(lse128::options_of(args, args.weight.dim(0))),
        size(rows::size_of(p.round)) {}
  // Of the forward.
  std::int64_t rows() const { return std::min(p.rows, limits.rows); }
  std::int64_t columns() const {
    const std::int64_t fit = limits.cached / (size * std::max<std::int64_t>(1, rows())) / limits.tile;
    return std::min(p.leaf, std::max<std::int64_t>(1, fit) * limits.tile);
  }
  // Of the gradients: whole rows of logits, and whole columns of them.
  std::int64_t whole_rows() const {
    return std::clamp<std::int64_t>(limits.held / (size * std::max<std::int64_t>(1, p.here)) / 16 * 16, 16,
                                    limits.rows);
  }
  std::int64_t whole_columns() const {
    return std::clamp<std::int64_t>(limits.held / (size * std::max<std::int64_t>(1, p.rows)) / 16 * 16, 16,
                                    limits.columns);
  }

  // Logits of rows [row, row + n) and columns [begin, end), as a call of lm_head.
  struct Logits {
    Tensor hidden, weight, bias, out;
    LmHead call;
  };
  void logits(std::int64_t row, std::int64_t n, std::int64_t begin, std::int64_t end, void* to,
              Logits& l) const {
    l.hidden = part(a.hidden, row, n), l.weight = part(a.weight, begin, end - begin);
    l.out = Tensor(to, {n, end - begin}, dtype_of(p.round));
    l.call = LmHead{.hidden = l.hidden, .weight = l.weight, .out = l.out};
    if (a.bias) l.bias = part(a.bias, begin, end - begin), l.call.bias = l.bias;
  }
};

// body(row, n) for runs of rows, body(begin, end) for runs of columns.
template <class Body>
void for_runs(std::int64_t n, std::int64_t each, Body body) {
  for (std::int64_t at = 0; at < n; at += each) body(at, std::min(each, n - at));
}
// body(leaf, begin, end) for the panels of the forward, ascending in every leaf.
template <class Args, class Body>
void for_panels(const Cut<Args>& cut, Body body) {
  for (int j = 0; j < cut.p.count; ++j)
    for (std::int64_t at = cut.p.leaf_begin(j); at < cut.p.leaf_end(j); at += cut.columns())
      body(j, at, std::min(cut.p.leaf_end(j), at + cut.columns()));
}

// The pieces of a call's workspace, in order; without one it only counts.
struct Room {
  std::byte* base = nullptr;
  std::uint64_t used = 0;
  std::byte* take(std::int64_t bytes) {
    std::byte* piece = base ? base + used : nullptr;
    used += (static_cast<std::uint64_t>(bytes) + 63) / 64 * 64;
    return piece;
  }
};

// ---- backward

// The gradients of one rectangle of logits, as a call of linear_bwd: d_hidden takes whole rows of logits, whose leaves are those
// of the vocabulary; d_weight and d_bias whole columns.
struct Back {
  Tensor d_logits, hidden, weight, d_hidden, d_weight, d_bias, weight_before, bias_before;
  LinearBwd call;
};
using BackwardCut = Cut<LinearLogpBwd>;

// d_weight and d_bias of columns [begin, begin + n), and what they are added to.
inline void add_columns(const LinearLogpBwd& a, std::int64_t begin, std::int64_t n, Back& b) {
  const auto add = [&](const auto& whole, Tensor& rows, auto& argument) {
    if (whole) rows = part(whole, begin, n), argument = rows;
  };
  if (a.d_weight) {
    add(a.d_weight, b.d_weight, b.call.d_weight);
    add(a.d_weight_before, b.weight_before, b.call.d_weight_before);
  }
  if (a.d_bias) {
    add(a.d_bias, b.d_bias, b.call.d_bias);
    add(a.d_bias_before, b.bias_before, b.call.d_bias_before);
  }
}

// The logits' gradient lies in place of the logits, row by row; it is of type `slope`, which is the logits' or a narrower one.
inline void back(const BackwardCut& cut, const BackwardCut::Logits& l, DType slope, bool to_hidden,
                 std::int64_t row, std::int64_t begin, Back& b) {
  const LinearLogpBwd& a = cut.a;
  const std::int64_t n = l.hidden.dl().shape[0], columns = l.weight.dl().shape[0];
  b.d_logits =
      Tensor(l.out.dl().data, {n, columns}, slope, {kDLCPU, 0}, {columns * cut.size / size_of(slope), 1});
  b.hidden = l.hidden, b.weight = l.weight;
  b.call = LinearBwd{.d_y = b.d_logits, .x = b.hidden, .weight = b.weight};
  if (to_hidden) {
    b.d_hidden = part(a.d_hidden, row, n), b.call.d_x = b.d_hidden;
    b.call.d_x_leaf_first = cut.p.first, b.call.d_x_leaf_count = cut.p.count, b.call.n_total = cut.p.vocab;
    return;
  }
  add_columns(a, begin, columns, b);
}

// body(row, rows, begin, end, to_hidden) for every rectangle of logits that the gradients take.
template <class Body>
void for_rectangles(const BackwardCut& cut, Body body) {
  if (cut.a.d_hidden)
    for_runs(cut.p.rows, cut.whole_rows(),
             [&](std::int64_t row, std::int64_t n) { body(row, n, std::int64_t{0}, cut.p.here, true); });
  if (cut.a.d_weight || cut.a.d_bias)
    for_runs(cut.p.here, cut.whole_columns(), [&](std::int64_t begin, std::int64_t n) {
      body(std::int64_t{0}, cut.p.rows, begin, begin + n, false);
    });
}

}  // namespace rlk::logp_parts
