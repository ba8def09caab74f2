// lm_head, arithmetic sm90/t25k16: what a Hopper tensor core computes, bit for bit, on any processor. The
// bias is added to the rounded product and rounded again, as everywhere.
#include "native/lm_head/replay.hpp"

#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

// Tiles of 16 rows by 64 columns: long enough to reuse what is unpacked, small enough to share out.
constexpr std::int64_t kRows = 16, kCols = 64;
constexpr std::int64_t tiles_for(std::int64_t rows, std::int64_t cols) {
  return ((rows + kRows - 1) / kRows) * ((cols + kCols - 1) / kCols);
}

template <Isa I>
std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
  return workspace_for(r.threads, tiles_for(RowSet(a.hidden).rows, a.weight.dim(0)),
                       replay_kernels<I>()->scratch_bytes, forward_copies(a));
}
template <Isa I>
rlk_verdict supports(const LmHead&, const rlk_request&) {
  return replay_kernels<I>() ? kAccept : refuse("this build lacks the instruction set");
}

struct Replay : ReplayProduct {
  std::int64_t out_row_stride = 0;
};

rlk_code run(const LmHead& a, const Call& call, const ReplayKernels& kernels) {
  std::byte* room = shared_workspace(call);
  const ReadRows hidden(a.hidden, room);
  Replay p;
  p.rows = hidden.rows, p.cols = a.weight.dim(0), p.depth = hidden.width, p.type = hidden.type;
  p.hidden = static_cast<const std::uint16_t*>(hidden.data), p.hidden_stride = hidden.stride;
  p.weight = a.weight.data<std::uint16_t>(), p.weight_stride = a.weight.stride(0);
  p.out_type = float_of(a.out.dtype());
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype());
  for_row_runs(a.out, p, [&](const Replay& part, std::int64_t first) {
    ReplayProduct q = part;
    q.hidden += first * q.hidden_stride;
    q.out_stride = part.out_row_stride;
    if (q.rows == 0 || q.cols == 0) return;
    const std::int64_t row_tiles = (q.rows + kRows - 1) / kRows;
    run_tasks(call, tiles_for(q.rows, q.cols), kernels.scratch_bytes, forward_copies(a),
              [&](std::int64_t index, std::byte* scratch) {
                const std::int64_t row = index % row_tiles * kRows, col = index / row_tiles * kCols;
                kernels.run(q, {row, std::min(row + kRows, q.rows), col, std::min(col + kCols, q.cols)},
                            scratch);
              });
  });
  return RLK_OK;
}

template <Isa I>
rlk_code run(const LmHead& a, const Call& call) {
  return run(a, call, *replay_kernels<I>());
}

template <Isa I>
constexpr rlk_implementation replay() {
  return implement<LmHead, run<I>, supports<I>, workspace<I>>(
      facts_at<"native.replay_sm90", I>({.id = "",
                                         .doc = "a Hopper tensor core's bits on the CPU",
                                         .priority = 10,
                                         .arithmetic = "sm90/t25k16",
                                         .dtypes = RLK_BF16 | RLK_F16,
                                         .traits = kPinned}));
}

}  // namespace

extern const rlk_implementation lm_head_replay_sm90_scalar, lm_head_replay_sm90_avx512;
constinit const rlk_implementation lm_head_replay_sm90_scalar = replay<Isa::scalar>();
constinit const rlk_implementation lm_head_replay_sm90_avx512 = replay<Isa::avx512>();

}  // namespace rlk::native
