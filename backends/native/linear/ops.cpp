// linear and its gradients by chains (native/lm_head/chain.hpp), an implementation per instruction set:
//
//   native           fma32/tree8   fp32: eight leaves along the depth, joined as a tree; lanes over the columns
//   native.golden    fma64         fp64, one rounding
//   native.tree8     fma32/tree8   lm_head's gradients by the same rule, for who asks for them
#include <optional>

#include "arithmetic/linear/lm_head_gradients.hpp"
#include "arithmetic/linear/segments.hpp"
#include "native/linear/gate.hpp"

namespace rlk::native {
namespace {

void cut(ChainProduct& p, std::int64_t total, std::int64_t leaves) {
  p.block = leaves::width(total == 0 ? p.depth : total);
  p.leaves = static_cast<int>(leaves);
}

std::size_t room_of(const ChainKernels& kernels, Chain chain) {
  return chain == Chain::fma64 ? kernels.scratch_bytes : kernels.joined_scratch_bytes;
}

ChainProduct product_of(const Linear& a, const ReadRows& x) {
  ChainProduct p;
  p.rows = x.rows, p.cols = a.weight.dim(0), p.depth = x.width;
  p.a = x.matrix();
  p.b = {a.weight.data<void>(), float_of(a.weight.dtype()), 1, a.weight.stride(0)};
  p.out_type = float_of(a.y.dtype());
  cut(p, a.k_total, a.leaf_count);
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype());
  return p;
}

// A tile of both products into `room`, and their swiglu to y.
void run_gated_tile(const Linear& a, const ChainProduct& whole, const ChainTile& tile,
                    const ChainKernels& kernels, Chain chain, Activate activate, std::byte* scratch) {
  const auto run = chain == Chain::fma64 ? kernels.fma64 : kernels.fma32;
  const auto bytes = [](const void* data, std::int64_t elements, Float type) {
    return data ? static_cast<const std::byte*>(data) + elements * bytes_of(type) : nullptr;
  };
  std::byte* const products = scratch + line(room_of(kernels, chain));
  const std::int64_t columns = tile.col_end - tile.col_begin;
  ChainProduct p = whole;
  p.rows = tile.row_end - tile.row_begin;
  p.a.data = bytes(whole.a.data, tile.row_begin * whole.a.row_stride, whole.a.type);
  p.out_row_stride = 2 * columns;
  for_products(a, tile, [&](std::int64_t row, std::int64_t count, std::int64_t at) {
    p.cols = count;
    p.b.data = bytes(whole.b.data, row * whole.b.col_stride, whole.b.type);
    if (whole.bias) p.bias = bytes(whole.bias, row, whole.bias_type);
    p.out = products + at * bytes_of(p.out_type);
    run(p, {0, p.rows, 0, count}, scratch);
  });
  const DefaultFloatMode mode;
  auto* const out = static_cast<std::byte*>(whole.out) +
                    (tile.row_begin * whole.out_row_stride + tile.col_begin) * bytes_of(p.out_type);
  GatedRows{p.out_type,
            p.rows,
            columns,
            interleaved(a) ? gate_up::kRun : columns,
            products,
            2 * columns,
            out,
            whole.out_row_stride,
            a.roundings == Linear::Roundings::twice}
      .activate(activate);
}

rlk_code compute_gated(const Linear& a, const Call& call, const ChainKernels& kernels, Chain chain,
                       Activate activate) {
  std::byte* room = shared_workspace(call);
  const ReadRows x(a.x, room);
  const std::uint64_t scratch = line(room_of(kernels, chain)) + GatedTiles::kBytes;
  for_row_runs(a.y, product_of(a, x), [&](ChainProduct part, std::int64_t first) {
    part.a.data = x.row(first);
    const std::int64_t workers = workers_for(call.threads(), std::int64_t{1} << 30);
    const GatedTiles tiles(part.rows, part.cols / 2, workers > 1 ? 4 * workers : 1);
    run_tasks(call, tiles.count(), scratch, copies(a), [&](std::int64_t index, std::byte* mine) {
      run_gated_tile(a, part, tiles.tile(index), kernels, chain, activate, mine);
    });
  });
  return RLK_OK;
}

rlk_code compute(const Linear& a, const Call& call, const ChainKernels& kernels, Chain chain,
                 Activate activate) {
  if (gated(a)) return compute_gated(a, call, kernels, chain, activate);
  std::byte* room = shared_workspace(call);
  const ReadRows x(a.x, room);
  std::optional<ReadRows> residual;
  if (a.residual) residual.emplace(a.residual, room);
  for_row_runs(a.y, product_of(a, x), [&](ChainProduct part, std::int64_t first) {
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
  p.segments = leaves::segments_of(a);
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
  if (a.d_weight_before)
    p.residual = a.d_weight_before.data<void>(), p.residual_row_stride = a.d_weight_before.stride(0);
  run_chain(call, p, kernels, chain, copies(a));
}

rlk_code compute(const LinearBwd& a, const Call& call, const ChainKernels& kernels, Chain chain, Activate) {
  if (const rlk_code code = leaves::check_segments(a, call); code != RLK_OK) return code;
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
  static Activate activate() { return Sum == Chain::fma64 ? activate_golden : swiglu::engine_for(I).forward; }
  static rlk_code run(const Args& a, const Call& call) {
    return compute(a, call, *chain_kernels<I>(), Sum, activate());
  }
  static rlk_verdict supports(const Args&, const rlk_request&) {
    return chain_kernels<I>() ? kAccept : refuse("this build lacks the instruction set");
  }
  static std::uint64_t workspace(const Args& a, const rlk_request& r) {
    const ChainKernels& kernels = *chain_kernels<I>();
    const std::size_t room = room_of(kernels, Sum);
    if constexpr (std::is_same_v<Args, Linear>)
      if (gated(a))
        return workspace_for(r.threads, GatedTiles::most(RowSet(a.x).rows, a.weight.dim(0) / 2),
                             line(room) + GatedTiles::kBytes, copies(a));
    return workspace_for(r.threads, most_tiles(a, kernels), room, copies(a));
  }
};

// The gradients of lm_head by linear's.
template <Isa I>
struct LmHeadTree {
  using Forms = Linears<I, Chain::fma32, LinearBwd>;
  static rlk_code run(const LmHeadBwd& a, const Call& call) { return Forms::run(leaves::as_linear(a), call); }
  static rlk_verdict supports(const LmHeadBwd& a, const rlk_request& r) {
    return Forms::supports(leaves::as_linear(a), r);
  }
  static std::uint64_t workspace(const LmHeadBwd& a, const rlk_request& r) {
    return Forms::workspace(leaves::as_linear(a), r);
  }
};

constexpr Facts kTree = pinned_facts(
    "fp32 FMA chains over eight leaves, joined as a tree; lanes over the columns", "fma32/tree8");
constexpr Facts kGolden = golden_facts("ascending fp64 FMA chain, one rounding");
// Behind lm_head's own: nobody gets other bits unasked.
constexpr Facts kLmHeadTree{
    .id = "",
    .doc = "the gradients of linear: eight leaves of the vocabulary, joined as a tree",
    .priority = 10,
    .arithmetic = "fma32/tree8",
    .dtypes = kFloats,
    .traits = kPinned};

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

extern const Levels lm_head_bwd_tree8;
constinit const Levels lm_head_bwd_tree8 = by_level([]<Isa I>() {
  using Forms = LmHeadTree<I>;
  return implement<LmHeadBwd, Forms::run, Forms::supports, Forms::workspace>(
      facts_at<"native.tree8", I>(kLmHeadTree));
});

}  // namespace rlk::native
