// linear and its gradients by chains (native/lm_head/chain.hpp), an implementation per instruction set:
//
//   native                       fma32/tree8        fp32: eight leaves along the depth, joined as a tree; lanes over the columns
//   native.golden                fma64              fp64, one rounding
//   native.avx512bf16            avx512bf16/tree8   the same leaves by VDPBF16PS (native/lm_head/pairs.hpp)
//   native.replay_avx512bf16     avx512bf16/tree8   its bits on any other processor
//   native.tree8                 fma32/tree8        lm_head's gradients by the same rule, for who asks for them
//
// lm_head's gradients by pairs are linear's of the same names.
#include <optional>

#include "arithmetic/linear/lm_head_gradients.hpp"
#include "arithmetic/linear/segments.hpp"
#include "native/linear/gate.hpp"
#include "native/lm_head/pairs.hpp"

namespace rlk::native {
namespace {

// How the sums of products are made. Those with ones are plain fp32 beside pairs.
enum class Sum { fma32, fma64, pairs };

struct Engine {
  const ChainKernels& products;
  const ChainKernels& plain;
  Chain chain;
  Activate activate;

  std::size_t room() const {
    return chain == Chain::fma64 ? products.scratch_bytes
                                 : std::max(products.joined_scratch_bytes, plain.joined_scratch_bytes);
  }
};

void cut(ChainProduct& p, std::int64_t total, std::int64_t leaves) {
  p.block = leaves::width(total == 0 ? p.depth : total);
  p.leaves = static_cast<int>(leaves);
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
void run_gated_tile(const Linear& a, const ChainProduct& whole, const ChainTile& tile, const Engine& engine,
                    std::byte* scratch) {
  const auto run = engine.chain == Chain::fma64 ? engine.products.fma64 : engine.products.fma32;
  const auto bytes = [](const void* data, std::int64_t elements, Float type) {
    return data ? static_cast<const std::byte*>(data) + elements * bytes_of(type) : nullptr;
  };
  std::byte* const products = scratch + line(engine.room());
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
      .activate(engine.activate);
}

rlk_code compute_gated(const Linear& a, const Call& call, const Engine& engine) {
  std::byte* room = shared_workspace(call);
  const ReadRows x(a.x, room);
  const std::uint64_t scratch = line(engine.room()) + GatedTiles::kBytes;
  for_row_runs(a.y, product_of(a, x), [&](ChainProduct part, std::int64_t first) {
    part.a.data = x.row(first);
    const std::int64_t workers = workers_for(call.threads(), std::int64_t{1} << 30);
    const GatedTiles tiles(part.rows, part.cols / 2, workers > 1 ? 4 * workers : 1);
    run_tasks(call, tiles.count(), scratch, copies(a), [&](std::int64_t index, std::byte* mine) {
      run_gated_tile(a, part, tiles.tile(index), engine, mine);
    });
  });
  return RLK_OK;
}

rlk_code compute(const Linear& a, const Call& call, const Engine& engine) {
  if (gated(a)) return compute_gated(a, call, engine);
  std::byte* room = shared_workspace(call);
  const ReadRows x(a.x, room);
  std::optional<ReadRows> residual;
  if (a.residual) residual.emplace(a.residual, room);
  for_row_runs(a.y, product_of(a, x), [&](ChainProduct part, std::int64_t first) {
    part.a.data = x.row(first);
    if (residual) add_residual(part, *residual, first);
    run_chain(call, part, engine.products, engine.chain, copies(a));
  });
  return RLK_OK;
}

// d_x[m, k] = sum over n of d_y[m, n] * weight[n, k]
void input_gradient(const LinearBwd& a, const ReadRows& d_y, const Call& call, const Engine& engine) {
  ChainProduct p;
  p.rows = d_y.rows, p.cols = a.weight.dim(1), p.depth = d_y.width;
  p.a = d_y.matrix();
  p.b = {a.weight.data<void>(), float_of(a.weight.dtype()), a.weight.stride(0), 1};
  p.out_type = float_of(a.d_x.dtype());
  cut(p, a.n_total, a.d_x_leaf_count);
  p.segments = leaves::segments_of(a);
  for_row_runs(a.d_x, p, [&](ChainProduct part, std::int64_t first) {
    part.a.data = d_y.row(first);
    run_chain(call, part, engine.products, engine.chain, copies(a));
  });
}

// d_weight[n, k] = sum over m, ascending, of d_y[m, n] * x[m, k]
void weight_gradient(const LinearBwd& a, const ReadRows& d_y, const ReadRows& x, const Call& call,
                     const Engine& engine) {
  ChainProduct p;
  p.rows = d_y.width, p.cols = x.width, p.depth = d_y.rows, p.block = kTokens;
  p.a = d_y.transposed();
  p.b = x.matrix();
  p.out = a.d_weight.data<void>(), p.out_type = float_of(a.d_weight.dtype());
  p.out_row_stride = a.d_weight.stride(0);
  if (a.d_weight_before)
    p.residual = a.d_weight_before.data<void>(), p.residual_row_stride = a.d_weight_before.stride(0);
  run_chain(call, p, engine.products, engine.chain, copies(a));
}

rlk_code compute(const LinearBwd& a, const Call& call, const Engine& engine) {
  if (const rlk_code code = leaves::check_segments(a, call); code != RLK_OK) return code;
  std::byte* room = shared_workspace(call);
  const ReadRows d_y(a.d_y, room), x(a.x, room);
  if (a.d_x) input_gradient(a, d_y, call, engine);
  if (a.d_weight) weight_gradient(a, d_y, x, call, engine);
  if (a.d_bias) bias_gradient(a, d_y, call, engine.plain, engine.chain, copies(a));
  if (a.d_residual) residual_gradient(a, d_y, call, engine.plain, engine.chain, copies(a));
  return RLK_OK;
}

template <Isa I, Sum S, class Args>
struct Linears {
  static constexpr bool kPairs = S == Sum::pairs;
  static Engine engine() {
    return {kPairs ? *pair_kernels<I>() : *chain_kernels<I>(), *chain_kernels<I>(),
            S == Sum::fma64 ? Chain::fma64 : Chain::fma32,
            S == Sum::fma64 ? activate_golden : swiglu::engine_for(I).forward};
  }
  static rlk_code run(const Args& a, const Call& call) { return compute(a, call, engine()); }
  static rlk_verdict supports(const Args& a, const rlk_request&) {
    if (!chain_kernels<I>() || (kPairs && !pair_kernels<I>()))
      return refuse("this build lacks the instruction set");
    if constexpr (kPairs) {
      if (I == Isa::avx512 && pairs_refusal()) return refuse(pairs_refusal());
      if constexpr (std::is_same_v<Args, LinearBwd>)
        if (a.d_y.dtype() != a.x.dtype())
          return refuse("the instruction takes two operands in bf16, d_y is fp32", {},
                        "round d_y to x's dtype", 0);
    }
    return kAccept;
  }
  static std::uint64_t workspace(const Args& a, const rlk_request& r) {
    const std::size_t room = engine().room();
    if constexpr (std::is_same_v<Args, Linear>)
      if (gated(a))
        return workspace_for(r.threads, GatedTiles::most(RowSet(a.x).rows, a.weight.dim(0) / 2),
                             line(room) + GatedTiles::kBytes, copies(a));
    return workspace_for(r.threads, most_tiles(a, *chain_kernels<I>()), room, copies(a));
  }
};

// The gradients of lm_head by linear's.
template <Isa I, Sum S>
struct LmHeadTree {
  using Forms = Linears<I, S, LinearBwd>;
  static rlk_code run(const LmHeadBwd& a, const Call& call) { return Forms::run(leaves::as_linear(a), call); }
  static rlk_verdict supports(const LmHeadBwd& a, const rlk_request& r) {
    return Forms::supports(leaves::as_linear(a), r);
  }
  static std::uint64_t workspace(const LmHeadBwd& a, const rlk_request& r) {
    return Forms::workspace(leaves::as_linear(a), r);
  }
  static constexpr rlk_implementation of(const Facts& facts) {
    return implement<LmHeadBwd, run, supports, workspace>(facts);
  }
};

constexpr Facts kTree = pinned_facts(
    "fp32 FMA chains over eight leaves, joined as a tree; lanes over the columns", "fma32/tree8");
constexpr Facts kGolden = golden_facts("ascending fp64 FMA chain, one rounding");
constexpr Facts kPairs =
                    pair_facts("VDPBF16PS chains over eight leaves, joined as a tree", "avx512bf16/tree8"),
                kReplay = pair_replay_facts("avx512bf16/tree8");
// Behind lm_head's own: nobody gets other bits unasked.
constexpr Facts kLmHeadTree{
    .id = "",
    .doc = "the gradients of linear: eight leaves of the vocabulary, joined as a tree",
    .priority = 10,
    .arithmetic = "fma32/tree8",
    .dtypes = kFloats,
    .traits = kPinned};

template <Isa I, Sum S, class Args>
constexpr rlk_implementation linears(const Facts& facts) {
  using Forms = Linears<I, S, Args>;
  return implement<Args, Forms::run, Forms::supports, Forms::workspace>(facts);
}
template <Family F, Sum S, class Args>
constexpr Levels levels(const Facts& facts) {
  return by_level([&]<Isa I>() { return linears<I, S, Args>(facts_at<F, I>(facts)); });
}
template <Isa I, class Args>
constexpr rlk_implementation replay() {
  return linears<I, Sum::pairs, Args>(facts_at<"native.replay_avx512bf16", I>(kReplay));
}

}  // namespace

extern const Levels linear_tree, linear_golden, linear_bwd_tree, linear_bwd_golden;
constinit const Levels linear_tree = levels<"native", Sum::fma32, Linear>(kTree);
constinit const Levels linear_golden = levels<"native.golden", Sum::fma64, Linear>(kGolden);
constinit const Levels linear_bwd_tree = levels<"native", Sum::fma32, LinearBwd>(kTree);
constinit const Levels linear_bwd_golden = levels<"native.golden", Sum::fma64, LinearBwd>(kGolden);

extern const rlk_implementation linear_avx512bf16, linear_replay_avx512bf16_avx2,
    linear_replay_avx512bf16_scalar, linear_bwd_avx512bf16, linear_bwd_replay_avx512bf16_avx2,
    linear_bwd_replay_avx512bf16_scalar;
constinit const rlk_implementation linear_avx512bf16 = linears<Isa::avx512, Sum::pairs, Linear>(kPairs);
constinit const rlk_implementation linear_bwd_avx512bf16 =
    linears<Isa::avx512, Sum::pairs, LinearBwd>(kPairs);
constinit const rlk_implementation linear_replay_avx512bf16_avx2 = replay<Isa::avx2, Linear>();
constinit const rlk_implementation linear_replay_avx512bf16_scalar = replay<Isa::scalar, Linear>();
constinit const rlk_implementation linear_bwd_replay_avx512bf16_avx2 = replay<Isa::avx2, LinearBwd>();
constinit const rlk_implementation linear_bwd_replay_avx512bf16_scalar = replay<Isa::scalar, LinearBwd>();

extern const Levels lm_head_bwd_tree8;
constinit const Levels lm_head_bwd_tree8 =
    by_level([]<Isa I>() { return LmHeadTree<I, Sum::fma32>::of(facts_at<"native.tree8", I>(kLmHeadTree)); });

extern const rlk_implementation lm_head_bwd_avx512bf16, lm_head_bwd_replay_avx512bf16_avx2,
    lm_head_bwd_replay_avx512bf16_scalar;
constinit const rlk_implementation lm_head_bwd_avx512bf16 = LmHeadTree<Isa::avx512, Sum::pairs>::of(kPairs);
constinit const rlk_implementation lm_head_bwd_replay_avx512bf16_avx2 =
    LmHeadTree<Isa::avx2, Sum::pairs>::of(facts_at<"native.replay_avx512bf16", Isa::avx2>(kReplay));
constinit const rlk_implementation lm_head_bwd_replay_avx512bf16_scalar =
    LmHeadTree<Isa::scalar, Sum::pairs>::of(facts_at<"native.replay_avx512bf16", Isa::scalar>(kReplay));

}  // namespace rlk::native
