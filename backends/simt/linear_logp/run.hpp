// linear_logp and its gradients by the portable kernels of lm_head, logp and linear: a panel of logits at a time in the workspace, which
// logp's kernels take up, as on the CPU (native/linear_logp/composed.hpp). `Kernels` starts them:
//
//   logits(LmHead)                          a panel of them
//   product(Product)                        a part of linear_bwd
//   fold(p, panel, states, targets)         a panel of one leaf
//   finish(p, states, targets)              results of rows
//   count_bad(p)                            targets that are no token
//   gradient(p, panel, to, columns, states) of logits
//
// Each returns null, or the runtime's words for what went wrong, after which nothing is started.
#pragma once

#include "arithmetic/linear_logp/parts.hpp"
#include "simt/linear/bind.hpp"
#include "simt/logp/launchers.hpp"

namespace rlk::simt::linear_logp {

using namespace rlk::logp_parts;
using linear::Product;
using logp::Panel;
using lse128::Matrix;
using lse128::State;

// logp's share of the kernels, in a stream.
struct LogpIn {
  void* stream;
  int device;
  const char* fold(const Problem& p, const Panel& panel, State* states, float* targets) const {
    return logp::run_fold(p, panel, states, targets, stream, device);
  }
  const char* finish(const Problem& p, State* states, const float* targets) const {
    return logp::run_finish(p, states, targets, stream, device);
  }
  const char* count_bad(const Problem& p) const { return logp::run_count(p, stream, device); }
  const char* gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                       const State* states) const {
    return logp::run_gradient(p, panel, to, columns, states, stream, device);
  }
};

// Panels that fill a GPU: the weight is read once for so many rows.
inline constexpr Limits kLimits{
    .rows = 2048, .cached = std::int64_t{64} << 20, .held = std::int64_t{128} << 20, .columns = 16384};

// What stands in the workspace: sums of every leaf (of a run of rows, or where `all` of all), the targets' logits, logits.
struct Held {
  State* states = nullptr;
  float* targets = nullptr;
  std::byte* logits = nullptr;
};
template <class Args>
Held held(const Cut<Args>& cut, Room& room, bool all, bool reduces, std::int64_t elements) {
  Held h;
  const std::int64_t rows = all ? cut.p.rows : cut.rows();
  if (reduces) {
    h.states = reinterpret_cast<State*>(room.take(rows * cut.p.count * std::int64_t{sizeof(State)}));
    h.targets = reinterpret_cast<float*>(room.take(cut.rows() * std::int64_t{sizeof(float)}));
    elements = std::max(elements, cut.rows() * cut.columns());
  }
  h.logits = room.take(elements * cut.size);
  return h;
}
inline Held held(const Cut<LinearLogp>& cut, Room& room) { return held(cut, room, false, true, 0); }
inline Held held(const BackwardCut& cut, Room& room) {
  std::int64_t most = 0;
  for_rectangles(cut, [&](std::int64_t, std::int64_t n, std::int64_t begin, std::int64_t end, bool) {
    most = std::max(most, n * (end - begin));
  });
  return held(cut, room, true, !cut.a.stats, most);
}

template <class Args>
Panel panel_of(const Cut<Args>& cut, std::byte* logits, std::int64_t begin, std::int64_t end, int leaf) {
  return {{logits, cut.p.round, end - begin}, begin, end, leaf};
}

// Sums of all leaves, and rows' results; `all`: of every row a state stays.
template <class Args, class Kernels>
const char* reduce(const Cut<Args>& cut, const Held& h, bool all, Kernels& k) {
  const char* error = nullptr;
  for_runs(cut.p.rows, cut.limits.rows, [&](std::int64_t first, std::int64_t n) {
    const Problem p = cut.p.part(first, n);
    State* states = h.states + (all ? first * p.count : 0);
    for (int j = 0; j < p.count; ++j) {
      std::int64_t at = p.leaf_begin(j);
      do {  // an empty leaf has a panel, too
        const std::int64_t end = std::min(p.leaf_end(j), at + cut.columns());
        typename Cut<Args>::Logits l;
        cut.logits(first, n, at, end, h.logits, l);
        if (!error && end > at) error = k.logits(l.call);
        if (!error) error = k.fold(p, panel_of(cut, h.logits, at, end, j), states, h.targets);
        at = end;
      } while (at < p.leaf_end(j));
    }
    if (!error) error = k.finish(p, states, h.targets);
  });
  return error;
}

template <class Kernels>
const char* forward(const LinearLogp& a, std::byte* workspace, Kernels k, const Limits& limits = kLimits) {
  Cut cut(a, limits);
  lse128::add_results(cut.p, a);
  Room room{workspace};
  const char* error = reduce(cut, held(cut, room), false, k);
  if (error || !a.bad_count) return error;
  cut.p.bad_count = a.bad_count.data<std::int32_t>();
  return k.count_bad(cut.p);
}

// Where a gradient has rows that belong to no entry: +0, added to what they were before, as a product without depth.
template <class Kernels>
const char* clear_beyond(const Out& t, const In& before, std::int64_t first, const Kernels& k) {
  const std::int64_t rows = t.dim(0) - first;
  if (rows <= 0) return nullptr;
  const Tensor beyond = part(t, first, rows);
  Product p;
  p.rows = t.rank() == 1 ? 1 : rows, p.cols = t.rank() == 1 ? rows : t.dim(1);
  lm_head::write_to(p, Out(beyond));
  if (!before) return k.product(p);
  const Tensor so_far = part(before, first, rows);
  linear::add_residual(p, In(so_far));
  return k.product(p);
}

template <class Kernels>
const char* backward(const LinearLogpBwd& a, std::byte* workspace, Kernels k,
                     const Limits& limits = kLimits) {
  BackwardCut cut(a, limits);
  lse128::add_cotangents(cut.p, a);
  Room room{workspace};
  const Held h = held(cut, room);
  const char* error = a.stats ? nullptr : reduce(cut, h, true, k);
  for_rectangles(
      cut, [&](std::int64_t first, std::int64_t n, std::int64_t begin, std::int64_t end, bool to_hidden) {
        BackwardCut::Logits l;
        Back b;
        cut.logits(first, n, begin, end, h.logits, l);
        back(cut, l, dtype_of(cut.p.round), to_hidden, first, begin, b);
        const Panel panel = panel_of(cut, h.logits, begin, end, 0);
        if (!error) error = k.logits(l.call);
        if (!error)
          error = k.gradient(cut.p.part(first, n), panel, panel.logits, end - begin,
                             h.states ? h.states + first * cut.p.count : nullptr);
        if (!error && b.call.d_x) error = k.product(linear::d_x_product(b.call));
        if (!error && b.call.d_weight) error = k.product(linear::d_weight_product(b.call));
        if (!error && b.call.d_bias) error = k.product(linear::d_bias_product(b.call));
      });
  if (!error && a.d_weight) error = clear_beyond(a.d_weight, a.d_weight_before, cut.p.here, k);
  if (!error && a.d_bias) error = clear_beyond(a.d_bias, a.d_bias_before, cut.p.here, k);
  return error;
}

// Bytes of workspace.
template <class Args>
std::uint64_t room_of(const Args& a, const Limits& limits = kLimits) {
  const Cut cut(a, limits);
  Room room;
  held(cut, room);
  return room.used;
}

}  // namespace rlk::simt::linear_logp
