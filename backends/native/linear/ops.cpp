// linear and its gradients by chains (native/lm_head/chain.hpp), an implementation per instruction set:
//
//   native           fma32/tree8   fp32: eight leaves along the depth, joined as a tree; lanes over the columns
//   native.golden    fma64         fp64, one rounding
#include <optional>

#include "native/linear/run.hpp"

namespace rlk::native {
namespace {

void cut(ChainProduct& p, std::int64_t total, std::int64_t leaves) {
  p.block = leaves::width(total == 0 ? p.depth : total);
  p.leaves = static_cast<int>(leaves);
}

rlk_code compute(const Linear& a, const Call& call, const ChainKernels& kernels, Chain chain) {
  std::byte* room = shared_workspace(call);
  const ReadRows x(a.x, room);
  std::optional<ReadRows> residual;
  if (a.residual) residual.emplace(a.residual, room);
  ChainProduct p;
  p.rows = x.rows, p.cols = a.weight.dim(0), p.depth = x.width;
  p.a = x.matrix();
  p.b = {a.weight.data<void>(), float_of(a.weight.dtype()), 1, a.weight.stride(0)};
  p.out_type = float_of(a.y.dtype());
  cut(p, a.k_total, a.leaf_count);
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype());
  for_row_runs(a.y, p, [&](ChainProduct part, std::int64_t first) {
    part.a.data = x.row(first);
    if (residual) add_residual(part, *residual, first);
    run_chain(call, part, kernels, chain, copies(a));
  });
  return RLK_OK;
}

// d_x[m, k] = sum over n of d_y[m, n] * weight[n, k]
void input_gradient(const LinearBwd& a, const ReadRows& d_y, const Call& call, const ChainKernels& kernels,
                    Chain chain) {
  ChainProduct p;
  p.rows = d_y.rows, p.cols = a.weight.dim(1), p.depth = d_y.width;
  p.a = d_y.matrix();
  p.b = {a.weight.data<void>(), float_of(a.weight.dtype()), a.weight.stride(0), 1};
  p.out_type = float_of(a.d_x.dtype());
  cut(p, a.n_total, a.d_x_leaf_count);
  for_row_runs(a.d_x, p, [&](ChainProduct part, std::int64_t first) {
    part.a.data = d_y.row(first);
    run_chain(call, part, kernels, chain, copies(a));
  });
}

// d_weight[n, k] = sum over m, ascending, of d_y[m, n] * x[m, k]
void weight_gradient(const LinearBwd& a, const ReadRows& d_y, const ReadRows& x, const Call& call,
                     const ChainKernels& kernels, Chain chain) {
  ChainProduct p;
  p.rows = d_y.width, p.cols = x.width, p.depth = d_y.rows, p.block = kTokens;
  p.a = d_y.transposed();
  p.b = x.matrix();
  p.out = a.d_weight.data<void>(), p.out_type = float_of(a.d_weight.dtype());
  p.out_row_stride = a.d_weight.stride(0);
  run_chain(call, p, kernels, chain, copies(a));
}

rlk_code compute(const LinearBwd& a, const Call& call, const ChainKernels& kernels, Chain chain) {
  std::byte* room = shared_workspace(call);
  const ReadRows d_y(a.d_y, room), x(a.x, room);
  if (a.d_x) input_gradient(a, d_y, call, kernels, chain);
  if (a.d_weight) weight_gradient(a, d_y, x, call, kernels, chain);
  if (a.d_bias) bias_gradient(a, d_y, call, kernels, chain, copies(a));
  if (a.d_residual) residual_gradient(a, d_y, call, kernels, chain, copies(a));
  return RLK_OK;
}

template <Isa I, Chain Sum, class Args>
struct Linears {
  static rlk_code run(const Args& a, const Call& call) { return compute(a, call, *chain_kernels<I>(), Sum); }
  static rlk_verdict supports(const Args&, const rlk_request&) {
    return chain_kernels<I>() ? kAccept : refuse("this build lacks the instruction set");
  }
  static std::uint64_t workspace(const Args& a, const rlk_request& r) {
    const ChainKernels& kernels = *chain_kernels<I>();
    const std::size_t room = Sum == Chain::fma64 ? kernels.scratch_bytes : kernels.joined_scratch_bytes;
    return workspace_for(r.threads, most_tiles(a, kernels), room, copies(a));
  }
};

constexpr Facts kTree{.id = "",
                      .doc = "fp32 FMA chains over eight leaves, joined as a tree; lanes over the columns",
                      .priority = 100,
                      .arithmetic = "fma32/tree8",
                      .dtypes = kLmHeadTypes,
                      .traits = kPinned};
constexpr Facts kGolden{.id = "",
                        .doc = "ascending fp64 FMA chain, one rounding",
                        .priority = 0,
                        .arithmetic = "fma64",
                        .dtypes = kLmHeadTypes,
                        .traits = kPinned | RLK_GOLDEN};

template <Family F, Chain Sum, class Args>
constexpr Levels levels(const Facts& facts) {
  return by_level([&]<Isa I>() {
    using Forms = Linears<I, Sum, Args>;
    return implement<Args, Forms::run, Forms::supports, Forms::workspace>(facts_at<F, I>(facts));
  });
}

}  // namespace

extern const Levels linear_tree, linear_golden, linear_bwd_tree, linear_bwd_golden;
constinit const Levels linear_tree = levels<"native", Chain::fma32, Linear>(kTree);
constinit const Levels linear_golden = levels<"native.golden", Chain::fma64, Linear>(kGolden);
constinit const Levels linear_bwd_tree = levels<"native", Chain::fma32, LinearBwd>(kTree);
constinit const Levels linear_bwd_golden = levels<"native.golden", Chain::fma64, LinearBwd>(kGolden);

}  // namespace rlk::native
