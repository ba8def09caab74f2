// tp_sum_bwd on the CPU: copies of d_y, and its column sums by linear's chains over tokens, an implementation per instruction
// set.
//
// Bytes: d_y is read once for every partial sum, whose gradient is written once.
#include "arithmetic/tp_sum/bind.hpp"
#include "native/linear/run.hpp"

namespace rlk::native {
namespace {

using tree8::Spread;

void copy_line(const rows::Tensor& from, std::int64_t row, const rows::Tensor& to, std::int64_t to_row,
               std::int64_t width) {
  const void* source = tree8::line(from, row);
  void* out = tree8::line(to, to_row);
  for (std::int64_t i = 0; i < width; ++i) rows::store(to.type, out, i, rows::load(from.type, source, i));
}
void clear_line(const rows::Tensor& to, std::int64_t row, std::int64_t width) {
  if (width > 0)
    std::memset(tree8::line(to, row), 0, static_cast<std::size_t>(width * rows::size_of(to.type)));
}

void spread(const Spread& p, const Call& call) {
  call.parallel_for(p.results > 0 ? p.rows : 0, [&](std::int64_t row) {
    for (int t = 0; t < p.results; ++t)
      if (p.summed(row))
        copy_line(p.d_y, row - p.first, p.d_partials[t], row, p.width);
      else
        clear_line(p.d_partials[t], row, p.width);
  });
  call.parallel_for(p.d_residual ? p.count : 0,
                    [&](std::int64_t row) { copy_line(p.d_y, row, p.d_residual, row, p.width); });
}

template <Isa I, Chain Sum>
struct Spreads {
  static rlk_code run(const TpSumBwd& a, const Call& call) {
    spread(tree8::spread_of(a), call);
    if (!a.d_bias) return RLK_OK;
    std::byte* room = shared_workspace(call);
    const ReadRows d_y(a.d_y, room);  // of rank 2: no copy
    ChainProduct p;
    p.rows = 1, p.cols = d_y.width, p.depth = d_y.rows, p.block = kTokens;
    p.a = {&kOne, Float::f32, 0, 0};
    p.b = d_y.matrix();
    p.out = a.d_bias.data<void>(), p.out_type = float_of(a.d_bias.dtype()), p.out_row_stride = d_y.width;
    run_chain(call, p, *chain_kernels<I>(), Sum, 0);
    return RLK_OK;
  }
  static rlk_verdict supports(const TpSumBwd&, const rlk_request&) {
    return chain_kernels<I>() ? kAccept : refuse("this build lacks the instruction set");
  }
  static std::uint64_t workspace(const TpSumBwd& a, const rlk_request& r) {
    const ChainKernels& kernels = *chain_kernels<I>();
    return workspace_for(r.threads, most_tiles(1, a.d_y.dim(1), kernels), kernels.joined_scratch_bytes);
  }
};

template <Family F, Chain Sum>
constexpr Levels levels(const Facts& facts) {
  return by_level([&]<Isa I>() {
    using Forms = Spreads<I, Sum>;
    return implement<TpSumBwd, Forms::run, Forms::supports, Forms::workspace>(facts_at<F, I>(facts));
  });
}

}  // namespace

extern const Levels tp_sum_bwd_tiles, tp_sum_bwd_golden;
constinit const Levels tp_sum_bwd_tiles =
    levels<"native.tiles", Chain::fma32>(pinned_facts("copies, and fp32 chains over tokens", "tree8"));
constinit const Levels tp_sum_bwd_golden =
    levels<"native.golden", Chain::fma64>(golden_facts("copies, and an fp64 chain over tokens"));

}  // namespace rlk::native
