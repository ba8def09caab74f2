// lm_head, bf16, by pairs (pairs.hpp), arithmetic avx512bf16/kb1024:
//
//   native.avx512bf16               the instruction, where the processor has it
//   native.replay_avx512bf16.*      its bits on any other
//
// hidden is copied to dense rows, filled with zeros. The weight is read as it lies where its rows need no filling;
// else a few rows at a time are copied beside the worker's tiles.
#include "native/lm_head/pairs.hpp"

#include <cstring>

#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

constexpr std::int64_t kStrip = 64;  // rows of the weight that are copied at a time

struct PairPlan {
  std::int64_t rows, cols, filled;
  bool in_place;
  std::uint64_t shared, scratch;

  PairPlan(const LmHead& a, const ChainKernels& kernels)
      : rows(RowSet(a.hidden).rows),
        cols(a.weight.dim(0)),
        filled(pair_depth(a.weight.dim(1))),
        in_place(filled == a.weight.dim(1)),
        shared(line(static_cast<std::uint64_t>(2 * rows * filled))),
        scratch(line(kernels.scratch_bytes) +
                (in_place ? 0 : static_cast<std::uint64_t>(2 * kStrip * filled))) {}
};

// Rows of pairs, zeros behind them.
void fill_rows(const std::byte* from, std::int64_t stride, std::int64_t rows, std::int64_t depth,
               std::int64_t filled, std::byte* to) {
  for (std::int64_t i = 0; i < rows; ++i, from += 2 * stride, to += 2 * filled) {
    if (depth != 0) std::memcpy(to, from, static_cast<std::size_t>(2 * depth));
    std::memset(to + 2 * depth, 0, static_cast<std::size_t>(2 * (filled - depth)));
  }
}

// A tile by strips of the weight, each copied first.
void run_strips(const ChainProduct& p, const ChainTile& tile, const LmHead& a, const PairPlan& plan,
                const ChainKernels& kernels, std::byte* scratch) {
  std::byte* strip = scratch + line(kernels.scratch_bytes);
  for (std::int64_t col = tile.col_begin; col < tile.col_end; col += kStrip) {
    const std::int64_t count = std::min(kStrip, tile.col_end - col), stride = a.weight.stride(0);
    fill_rows(a.weight.data<std::byte>() + 2 * col * stride, stride, count, a.weight.dim(1), plan.filled,
              strip);
    ChainProduct part = p;
    part.cols = count;
    part.b.data = strip, part.b.col_stride = plan.filled;
    part.out = static_cast<std::byte*>(p.out) + col * bytes_of(p.out_type);
    if (p.bias)
      part.bias = static_cast<const std::byte*>(p.bias) + col * p.bias_stride * bytes_of(p.bias_type);
    kernels.fma32(part, {tile.row_begin, tile.row_end, 0, count}, scratch);
  }
}

rlk_code run(const LmHead& a, const Call& call, const ChainKernels& kernels) {
  const PairPlan plan(a, kernels);
  if (plan.rows == 0 || plan.cols == 0) return RLK_OK;
  std::byte* hidden = shared_workspace(call);
  const std::int64_t depth = a.weight.dim(1);
  run_tasks(call, (plan.rows + 15) / 16, plan.scratch, plan.shared, [&](std::int64_t task, std::byte*) {
    for (std::int64_t i = 16 * task; i < std::min(plan.rows, 16 * task + 16); ++i)
      fill_rows(a.hidden.data<std::byte>() + 2 * row_offset(a.hidden, i), 0, 1, depth, plan.filled,
                hidden + 2 * i * plan.filled);
  });
  ChainProduct p;
  p.rows = plan.rows, p.cols = plan.cols, p.depth = plan.filled, p.block = pair_block(depth);
  p.a = {hidden, Float::bf16, plan.filled, 1};
  p.b = {a.weight.data<void>(), Float::bf16, 1, a.weight.stride(0)};
  p.out_type = float_of(a.out.dtype());
  if (a.bias)
    p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype()), p.bias_stride = a.bias.stride(0);
  for_row_runs(a.out, p, [&](ChainProduct part, std::int64_t first) {
    part.a.data = hidden + 2 * first * plan.filled;
    const ChainPlan tiles = plan_chain(part, kernels, workers_for(call.threads(), std::int64_t{1} << 30));
    run_tasks(call, tiles.tile_count(), plan.scratch, plan.shared,
              [&](std::int64_t index, std::byte* scratch) {
                const ChainTile tile = tiles.tile(part, index);
                if (plan.in_place) return kernels.fma32(part, tile, scratch);
                run_strips(part, tile, a, plan, kernels, scratch);
              });
  });
  return RLK_OK;
}

template <Isa I>
struct Pairs {
  static rlk_verdict supports(const LmHead&, const rlk_request&) {
    if (I == Isa::avx512 && pairs_refusal()) return refuse(pairs_refusal());
    return pair_kernels<I>() ? kAccept : refuse("this build lacks the instruction set");
  }
  static std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
    const PairPlan plan(a, *pair_kernels<I>());
    return workspace_for(
        r.threads, std::max(most_tiles(plan.rows, plan.cols, *pair_kernels<I>()), (plan.rows + 15) / 16),
        plan.scratch, plan.shared);
  }
  static rlk_code run(const LmHead& a, const Call& call) { return native::run(a, call, *pair_kernels<I>()); }
  static constexpr rlk_implementation of(const Facts& facts) {
    return implement<LmHead, run, supports, workspace>(facts);
  }
};

constexpr Facts kReplay{.id = "",
                        .doc = "what AVX512-BF16 adds, on any CPU",
                        .priority = 10,
                        .arithmetic = "avx512bf16/kb1024",
                        .dtypes = RLK_BF16,
                        .traits = kPinned};

}  // namespace

extern const rlk_implementation lm_head_avx512bf16, lm_head_replay_avx512bf16_avx2,
    lm_head_replay_avx512bf16_scalar;
constinit const rlk_implementation lm_head_avx512bf16 =
    Pairs<Isa::avx512>::of({.id = "native.avx512bf16",
                            .doc = "VDPBF16PS chains, lanes over the columns",
                            .priority = 205,
                            .arithmetic = "avx512bf16/kb1024",
                            .dtypes = RLK_BF16,
                            .traits = kPinned,
                            .min_arch = RLK_CPU_AVX512BF16});
constinit const rlk_implementation lm_head_replay_avx512bf16_avx2 =
    Pairs<Isa::avx2>::of(facts_at<"native.replay_avx512bf16", Isa::avx2>(kReplay));
constinit const rlk_implementation lm_head_replay_avx512bf16_scalar =
    Pairs<Isa::scalar>::of(facts_at<"native.replay_avx512bf16", Isa::scalar>(kReplay));

}  // namespace rlk::native
