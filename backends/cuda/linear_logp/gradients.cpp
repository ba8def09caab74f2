#include "cuda/linear_logp/gradients.hpp"

#include <algorithm>

#include "arithmetic/tp_sum/bind.hpp"
#include "cuda/device.hpp"
#include "cuda/lm_head/cublaslt.hpp"
#include "cuda/lm_head/select.hpp"
#include "cuda/lm_head/views.hpp"
#include "cuda/logp/sm90_ex2.h"
#include "simt/linear/launchers.hpp"
#include "simt/tp_sum/launchers.hpp"

namespace rlk::cuda {
extern const rlk_implementation linear_bwd_sm90;
}

namespace rlk::cuda::linear_logp {
namespace {

using logp_parts::for_runs;
using logp_parts::part;

constexpr std::int64_t kMiB = 1 << 20, kBlock = 4096;  // rows of a block of d_weight
// Bytes of gradients of logits and of shares, rows of logits in fp32.
constexpr std::int64_t kSlopes = 320 * kMiB, kSums = 512 * kMiB, kRows = 1024;
constexpr Limits forward_limits(By by) { return {.rows = kRows, .cached = 80 * kMiB, .tile = tile_of(by)}; }

const char* words(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

// +0 from row `first` on: a share of no entries, rows of a gradient that belong to none.
const char* clear(const Out& t, std::int64_t first, cudaStream_t stream) {
  const std::int64_t rows = t.dim(0) - first, size = size_of(t.dtype()), width = t.rank() == 1 ? 1 : t.dim(1);
  if (rows <= 0) return nullptr;
  return words(cudaMemset2DAsync(
      t.data<std::byte>() + first * t.stride(0) * size, static_cast<std::size_t>(t.stride(0) * size), 0,
      static_cast<std::size_t>(width * size), static_cast<std::size_t>(rows), stream));
}

bool narrow(const BackwardCut& cut) { return cut.p.round != lse128::Type::f32; }

}  // namespace

const char* Hopper::logits(const LmHead& a) const {
  return words(lm_head::launch_fastest(lm_head::forward_product(a), device, call.workspace().data(),
                                       lm_head::kLibraryWorkspace, stream_of(call)));
}
const char* Hopper::fold(const Problem& p, const Panel& panel, State* states, float* targets) const {
  if (by == By::portable) return LogpIn::fold(p, panel, states, targets);
  return logp::run_fold(p, panel, 1, states, targets, stream, device);
}
const char* Hopper::gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                             const State* states) const {
  if (by == By::portable) return LogpIn::gradient(p, panel, to, columns, states);
  return logp::run_gradient(p, panel, to, columns, states, stream, device);
}
const char* Hopper::product(const LmHeadBwd& a) const {
  return words(
      lm_head::launch_fastest(a.d_hidden ? lm_head::d_hidden_product(a) : lm_head::d_weight_product(a),
                              device, call.workspace().data(), lm_head::kLibraryWorkspace, stream_of(call)));
}

const char* Hopper::product(const simt::linear::Product& p) const {
  return simt::linear::run(p, stream, device);
}

Gradients::Sizes::Sizes(const BackwardCut& cut) {
  const std::int64_t all = cut.p.rows, leaf = std::max<std::int64_t>(1, cut.p.leaf),
                     width = std::max<std::int64_t>(1, cut.a.hidden.dim(1));
  const std::int64_t fit =
      std::max<std::int64_t>(128, std::min(kSlopes / (2 * leaf), kSums / (kShares * 4 * width)) / 128 * 128);
  together = all <= fit;
  rows = std::min(all, fit);
  columns = together ? leaf : std::min(leaf, std::max<std::int64_t>(128, kSlopes / (2 * all) / 128 * 128));
  at_once = narrow(cut) ? all : std::min(all, kRows);
}

Gradients::Held::Held(const BackwardCut& cut, const Sizes& sizes, Room& room) {
  const std::int64_t panel = sizes.together ? 0 : sizes.columns;
  // 16-bit logits lie where their gradient will.
  const std::int64_t logits = narrow(cut) ? 0 : sizes.at_once * cut.p.leaf;
  forward = simt::linear_logp::held(cut, room, true, !cut.a.stats, logits);
  d_logits = room.take(2 * std::max(sizes.rows * cut.p.leaf, cut.p.rows * panel));
  const std::int64_t share = cut.a.d_hidden && cut.p.count > 1 ? 4 * sizes.rows * cut.a.hidden.dim(1) : 0;
  for (std::byte*& s : shares) s = room.take(share);
}

Gradients::Gradients(const LinearLogpBwd& a, const Call& call, By by)
    : cut_(a, forward_limits(by)),
      call_(call),
      kernels_(call, by),
      sizes_(cut_),
      room_{kernels_.behind()},
      held_(cut_, sizes_, room_) {
  lse128::add_cotangents(cut_.p, a);
}

std::uint64_t Gradients::bytes(const LinearLogpBwd& a, By by) {
  const BackwardCut cut(a, forward_limits(by));
  Room room;
  const Held pieces(cut, Sizes(cut), room);
  return Hopper::kOwn + room.used;
}

// Of n rows of an area, from its `row`-th on.
Tensor Gradients::d_logits(const Area& area, std::int64_t row, std::int64_t n) const {
  return Tensor(held_.d_logits + 2 * row * area.stride(), {n, area.columns()}, cut_.a.hidden.dtype(),
                {kDLCPU, 0}, {area.stride(), 1});
}

// The gradient of an area's logits.
const char* Gradients::slopes(const Area& area, int leaf) {
  const char* error = nullptr;
  for_runs(area.rows, sizes_.at_once, [&](std::int64_t at, std::int64_t n) {
    const std::int64_t first = area.row + at;
    BackwardCut::Logits l;
    cut_.logits(first, n, area.begin, area.end, held_.forward.logits, l);
    const Tensor slope = d_logits(area, at, n);
    const lse128::Matrix to{slope.dl().data, rows::type_of(cut_.a.hidden.dtype()), area.stride()};
    lse128::Matrix logits{held_.forward.logits, cut_.p.round, area.columns()};
    if (narrow(cut_)) l.out = slope, l.call.out = l.out, logits = to;
    if (!error) error = kernels_.logits(l.call);
    if (!error)
      error =
          kernels_.gradient(cut_.p.part(first, n), {logits, area.begin, area.end, leaf}, to, area.columns(),
                            held_.forward.states ? held_.forward.states + first * cut_.p.count : nullptr);
  });
  return error;
}

// A leaf's share of d_hidden, joined with those before it: two of one size as soon as there are two.
const char* Gradients::add_share(const Area& area, int leaf) {
  const std::int64_t width = cut_.a.hidden.dim(1);
  const Tensor out = part(cut_.a.d_hidden, area.row, area.rows);
  const auto share = [&](int i) {
    return Tensor(held_.shares[static_cast<std::size_t>(i)], {area.rows, width}, DType::f32);
  };
  const Tensor to = cut_.p.count == 1 ? out : share(shares_++);
  if (area.columns() == 0) {
    if (const char* error = clear(to, 0, stream_of(call_))) return error;
  } else {
    const Tensor d = d_logits(area, 0, area.rows), hidden = part(cut_.a.hidden, area.row, area.rows),
                 weight = part(cut_.a.weight, area.begin, area.columns());
    if (const char* error =
            kernels_.product(LmHeadBwd{.d_out = d, .hidden = hidden, .weight = weight, .d_hidden = to}))
      return error;
  }
  for (int size = 2; size <= cut_.p.count && (leaf + 1) % size == 0; size *= 2) {
    --shares_;
    const Tensor left = share(shares_ - 1), right = share(shares_), sum = size == cut_.p.count ? out : left;
    const TpSum join{.partials = left, .y = sum, .p1 = right};
    if (const char* error = simt::tp_sum::run(tree8::problem_of(join), call_.stream(), call_.device().id))
      return error;
  }
  if (leaf + 1 == cut_.p.count) shares_ = 0;
  return nullptr;
}

// d_weight and d_bias of an area that has all rows.
const char* Gradients::weight(const Area& area) {
  if (area.columns() == 0) return nullptr;
  const LinearLogpBwd& a = cut_.a;
  const Tensor d = d_logits(area, 0, area.rows), w = part(a.weight, area.begin, area.columns());
  logp_parts::Back b;
  b.call = LinearBwd{.d_y = d, .x = a.hidden, .weight = w};
  add_columns(a, area.begin, area.columns(), b);
  // Of one block of rows d_weight is a product of lm_head's kind, if nothing is added to it.
  const bool alone = a.d_weight && !a.d_weight_before && area.rows <= kBlock;
  if (alone) b.call.d_weight = {};
  if (b.call.d_bias || b.call.d_weight) code_ = call_.run(linear_bwd_sm90, b.call, {});
  if (!alone || code_ != RLK_OK) return nullptr;
  return kernels_.product(LmHeadBwd{.d_out = d, .hidden = a.hidden, .weight = w, .d_weight = b.d_weight});
}

const char* Gradients::leaves(std::int64_t row, std::int64_t rows, bool to_hidden, bool to_weight) {
  const char* error = nullptr;
  for (int j = 0; j < cut_.p.count && !error && code_ == RLK_OK; ++j) {
    const Area area{row, rows, cut_.p.leaf_begin(j), cut_.p.leaf_end(j)};
    if (area.columns() > 0) error = slopes(area, j);
    if (!error && to_hidden) error = add_share(area, j);
    if (!error && to_weight) error = weight(area);
  }
  return error;
}

const char* Gradients::all() {
  const LinearLogpBwd& a = cut_.a;
  const bool weights = a.d_weight || a.d_bias;
  const std::int64_t all = cut_.p.rows;
  const char* error = a.stats ? nullptr : simt::linear_logp::reduce(cut_, held_.forward, true, kernels_);
  if (error) return error;
  if (sizes_.together) return leaves(0, all, static_cast<bool>(a.d_hidden), weights);
  for (std::int64_t row = 0; a.d_hidden && row < all && !error; row += sizes_.rows)
    error = leaves(row, std::min(sizes_.rows, all - row), true, false);
  for (int j = 0; weights && j < cut_.p.count; ++j)
    for (std::int64_t at = cut_.p.leaf_begin(j); at < cut_.p.leaf_end(j) && !error && code_ == RLK_OK;
         at += sizes_.columns) {
      const Area area{0, all, at, std::min(cut_.p.leaf_end(j), at + sizes_.columns)};
      error = slopes(area, j);
      if (!error) error = weight(area);
    }
  return error;
}

// Rows of a gradient that belong to no entry.
const char* Gradients::clear_rest(const Out& t, const In& before) {
  if (!before) return clear(t, cut_.p.here, stream_of(call_));
  return simt::linear_logp::clear_beyond(t, before, cut_.p.here, kernels_);
}

rlk_code Gradients::run() {
  const char* error = all();
  if (code_ != RLK_OK) return code_;
  if (!error && cut_.a.d_weight) error = clear_rest(cut_.a.d_weight, cut_.a.d_weight_before);
  if (!error && cut_.a.d_bias) error = clear_rest(cut_.a.d_bias, cut_.a.d_bias_before);
  return simt::finished(call_, "linear_logp_bwd", error);
}

}  // namespace rlk::cuda::linear_logp
