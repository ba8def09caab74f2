// linear and its gradients on Hopper:
//
//   cuda.sm90         sm90/t25k16/tree8   wgmma, eight leaves joined as a tree (tree_kernel.cuh)
//   cuda.sm90_tree8   sm90/t25k16/tree8   lm_head's gradients by the same rule
//
// d_bias and d_residual are the portable chains, whose bits the id asks for. No workspace.
#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "arithmetic/linear/lm_head_gradients.hpp"
#include "arithmetic/linear/segments.hpp"
#include "cuda/device.hpp"
#include "cuda/linear/tree.h"
#include "cuda/lm_head/views.hpp"
#include "registry/linear/geometry.hpp"
#include "simt/linear/bind.hpp"
#include "simt/linear/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::cuda {
namespace {

using linear::Product;
using lm_head::operand;
using lm_head::rows_of;

void write_to(Product& g, const Out& out) {
  g.c = out.data<void>(), g.ldc = rows_of(out).stride, g.out = float_of(out.dtype());
}
void cut(Product& g, std::int64_t total, std::int64_t leaves) {
  g.width = leaves::width(total == 0 ? g.k : total), g.leaves = static_cast<int>(leaves);
}

Product forward_product(const Linear& a) {
  Product g;
  g.m = rows_of(a.x).rows, g.n = a.weight.dim(0), g.k = a.weight.dim(1);
  g.a = operand(a.x, true), g.b = operand(a.weight, true);
  write_to(g, a.y);
  cut(g, a.k_total, a.leaf_count);
  if (a.bias) g.bias = a.bias.data<void>(), g.bias_type = float_of(a.bias.dtype());
  if (a.residual) {
    g.residual = a.residual.data<void>(), g.residual_type = float_of(a.residual.dtype());
    g.residual_ld = rows_of(a.residual).stride;
  }
  if (a.activation == Linear::Activation::none) return g;
  g.n /= 2;
  const gate_up::Layout rows(a.gate_up == Linear::GateUp::interleaved64, g.n);
  g.run = rows.run, g.step = rows.step, g.up = rows.up;
  g.twice = a.roundings == Linear::Roundings::twice;
  return g;
}

// d_x[M, K] = d_y[M, N] * weight[N, K]: the leaves are of N.
Product d_x_product(const LinearBwd& a) {
  Product g;
  g.m = rows_of(a.d_y).rows, g.n = a.weight.dim(1), g.k = a.weight.dim(0);
  g.a = operand(a.d_y, true), g.b = operand(a.weight, false);
  write_to(g, a.d_x);
  cut(g, a.n_total, a.d_x_leaf_count);
  g.segments = leaves::segments_of(a);
  if (a.segments)
    g.width = std::accumulate(g.segments.width, g.segments.width + g.segments.count, std::int64_t{0});
  return g;
}

// d_weight[N, K] = d_y[M, N]^T * x[M, K]: blocks of tokens, in order.
Product d_weight_product(const LinearBwd& a) {
  Product g;
  g.m = a.weight.dim(0), g.n = a.weight.dim(1), g.k = rows_of(a.d_y).rows;
  g.a = operand(a.d_y, false), g.b = operand(a.x, false);
  write_to(g, a.d_weight);
  g.width = simt::linear::kTokens;
  g.leaves = static_cast<int>((g.k + g.width - 1) / g.width);
  if (a.d_weight_before) {
    g.residual = a.d_weight_before.data<void>(), g.residual_type = Float::f32;
    g.residual_ld = rows_of(a.d_weight_before).stride;
  }
  return g;
}

// The size of a segment whose leaves are not whole steps; 0: there is none.
constexpr std::int64_t kEvenSegment = 64 * leaves::kLeaves;
std::int64_t uneven_segment(const LinearBwd& a) {
  const auto* sizes = a.segments ? a.segments.data<std::int64_t>() : nullptr;
  for (std::int64_t i = 0; sizes && i < a.segments.dim(0); ++i)
    if (sizes[i] % kEvenSegment != 0) return sizes[i];
  return 0;
}

rlk_verdict check_product(const Product& g) {
  constexpr std::int64_t kTensorMapLimit = std::numeric_limits<std::int32_t>::max();
  if (g.m == 0 || g.n == 0 || g.k == 0) return refuse("an empty product");
  const std::int64_t longest = std::max({g.m, g.up > 0 ? 2 * g.n : g.n, g.k});
  if (longest >= kTensorMapLimit)
    return refuse("a dimension is {0}, tensor maps take less than {1}", {longest, kTensorMapLimit});
  if (const rlk_verdict v = lm_head::check_aligned(g.a, g.b); v.code != RLK_OK) return v;
  return linear::tree_available() ? kAccept : refuse("the driver offers no tensor maps");
}

rlk_verdict supports(const Linear& a, const rlk_request&) {
  rlk_verdict v = lm_head::check_rows(a.x, 0);
  if (v.code == RLK_OK) v = lm_head::check_rows(a.weight, 1);
  if (v.code == RLK_OK && a.residual) v = lm_head::check_rows(a.residual, 3);
  if (v.code == RLK_OK) v = lm_head::check_rows(a.y, 4);
  return v.code == RLK_OK ? check_product(forward_product(a)) : v;
}
rlk_verdict supports(const LinearBwd& a, const rlk_request&) {
  if (a.d_y.dtype() != a.x.dtype())
    return refuse("the tensor core takes two operands of one 16-bit dtype, d_y is fp32", {},
                  "round d_y to x's dtype", 0);
  if (const std::int64_t size = uneven_segment(a); size != 0)
    return refuse("a segment has {0} rows, steps of 64 in every leaf take multiples of {1}",
                  {size, kEvenSegment});
  rlk_verdict v = lm_head::check_rows(a.d_y, 0);
  if (v.code == RLK_OK) v = lm_head::check_rows(a.x, 1);
  if (v.code == RLK_OK) v = lm_head::check_rows(a.weight, 2);
  if (v.code == RLK_OK && a.d_x) v = lm_head::check_rows(a.d_x, 3);
  if (v.code == RLK_OK && a.d_weight) v = lm_head::check_rows(a.d_weight, 4);
  if (v.code == RLK_OK && a.d_weight_before) v = lm_head::check_rows(a.d_weight_before, 7);
  if (v.code == RLK_OK && a.d_bias) v = lm_head::check_rows(a.d_bias, 5);
  if (v.code == RLK_OK && a.d_residual) v = lm_head::check_rows(a.d_residual, 6);
  if (v.code == RLK_OK && a.d_x) v = check_product(d_x_product(a));
  if (v.code == RLK_OK && a.d_weight) v = check_product(d_weight_product(a));
  return v;
}

cudaError_t launch(const Product& g, const Call& call) {
  linear::Card card;
  if (cudaError_t e = linear::read_card(&card, call.device().id); e != cudaSuccess) return e;
  return linear::launch_tree(g, linear::cut_for(g, card), card.multiprocessors, stream_of(call));
}

rlk_code run(const Linear& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  return check(call, "linear", launch(forward_product(a), call));
}

rlk_code run_portable(const simt::linear::Product& p, const Call& call) {
  return simt::finished(call, "linear_bwd", simt::linear::run(p, call.stream(), call.device().id));
}
rlk_code run(const LinearBwd& a, const Call& call) {
  if (const rlk_code bad = leaves::check_segments(a, call); bad != RLK_OK) return bad;
  if (const std::int64_t size = uneven_segment(a); size != 0)
    return call.fail(RLK_INVALID_ARGUMENT,
                     "linear_bwd: a segment has " + std::to_string(size) + " rows, and had a multiple of " +
                         std::to_string(kEvenSegment) + " when calls of these shapes were checked");
  const DeviceGuard guard(call.device().id);
  cudaError_t error = cudaSuccess;
  if (a.d_x) error = launch(d_x_product(a), call);
  if (error == cudaSuccess && a.d_weight) error = launch(d_weight_product(a), call);
  rlk_code code = check(call, "linear_bwd", error);
  if (code == RLK_OK && a.d_bias) code = run_portable(simt::linear::d_bias_product(a), call);
  if (code == RLK_OK && a.d_residual) code = run_portable(simt::linear::d_residual_product(a), call);
  return code;
}

rlk_code run(const LmHeadBwd& a, const Call& call) { return run(leaves::as_linear(a), call); }
rlk_verdict supports(const LmHeadBwd& a, const rlk_request& r) { return supports(leaves::as_linear(a), r); }

constexpr Facts kSm90 = {.id = "cuda.sm90",
                         .doc = "Hopper's tensor cores, eight leaves joined as a tree",
                         .priority = 300,
                         .arithmetic = "sm90/t25k16/tree8",
                         .dtypes = RLK_BF16 | RLK_F16,
                         .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
                         .device_type = kDLCUDA,
                         .min_arch = 90,
                         .max_arch = 90};
// Behind lm_head's own: nobody gets other bits unasked.
constexpr Facts kHead = [] {
  Facts f = kSm90;
  f.id = "cuda.sm90_tree8", f.priority = 40;
  return f;
}();

template <class Args>
constexpr rlk_code (*kRun)(const Args&, const Call&) = run;
template <class Args>
constexpr rlk_verdict (*kSupports)(const Args&, const rlk_request&) = supports;

}  // namespace

extern const rlk_implementation linear_sm90, linear_bwd_sm90, lm_head_bwd_sm90_tree8;
const rlk_implementation linear_sm90 = implement<Linear, kRun<Linear>, kSupports<Linear>>(kSm90);
const rlk_implementation linear_bwd_sm90 = implement<LinearBwd, kRun<LinearBwd>, kSupports<LinearBwd>>(kSm90);
const rlk_implementation lm_head_bwd_sm90_tree8 =
    implement<LmHeadBwd, kRun<LmHeadBwd>, kSupports<LmHeadBwd>>(kHead);

}  // namespace rlk::cuda
