// lm_head, arithmetic sm90/t25k16: what a Hopper tensor core computes, bit for bit, on any processor. The
// bias is added to the rounded product and rounded again, as everywhere.
#include "lm_head_replay.hpp"
#include "lm_head_run.hpp"

namespace rlk::native {
namespace {

std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
  return workspace_for(r.threads, std::int64_t{1} << 30, replay_kernels_best().scratch_bytes,
                       forward_copies(a));
}

struct Replay : ReplayProduct {
  std::int64_t out_row_stride = 0;
};

rlk_code run(const LmHead& a, const Call& call) {
  const ReplayKernels& kernels = replay_kernels_best();
  std::byte* room = shared_workspace(call);
  const ReadRows hidden(a.hidden, room);
  Replay p;
  p.rows = hidden.rows, p.cols = a.weight.dim(0), p.depth = hidden.width, p.type = hidden.type;
  p.hidden = static_cast<const std::uint16_t*>(hidden.data), p.hidden_stride = hidden.stride;
  p.weight = a.weight.data<std::uint16_t>(), p.weight_stride = a.weight.stride(0);
  p.out_type = element(a.out.dtype());
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = element(a.bias.dtype());
  struct Context {
    const Call& call;
    const ReplayKernels& kernels;
    std::uint64_t shared;
  } context{call, kernels, forward_copies(a)};
  for_row_runs<Replay>(
      a.out, p,
      [](const Replay& part, std::int64_t first, void* raw) {
        const auto& c = *static_cast<Context*>(raw);
        ReplayProduct q = part;
        q.hidden += first * q.hidden_stride;
        q.out_stride = part.out_row_stride;
        if (q.rows == 0 || q.cols == 0) return;
        // 16 rows by 64 columns: long enough to reuse what is unpacked, small enough to share out.
        constexpr std::int64_t kRows = 16, kCols = 64;
        const std::int64_t row_tiles = (q.rows + kRows - 1) / kRows, col_tiles = (q.cols + kCols - 1) / kCols;
        run_tasks(c.call, row_tiles * col_tiles, c.kernels.scratch_bytes, c.shared,
                  [&](std::int64_t index, std::byte* scratch) {
                    const std::int64_t row = index % row_tiles * kRows, col = index / row_tiles * kCols;
                    c.kernels.run(q, {row, std::min(row + kRows, q.rows), col, std::min(col + kCols, q.cols)},
                                  scratch);
                  });
      },
      &context);
  return RLK_OK;
}

}  // namespace

extern const rlk_implementation lm_head_replay_sm90;
const rlk_implementation lm_head_replay_sm90 =
    implement<LmHead, run, nullptr, workspace>({.id = "native.replay_sm90",
                                                .doc = "a Hopper tensor core's bits on the CPU",
                                                .priority = 10,
                                                .arithmetic = "sm90/t25k16",
                                                .dtypes = RLK_BF16 | RLK_F16,
                                                .traits = kPinned});

}  // namespace rlk::native
