// linear, arithmetic sm90/t25k16/tree8: what Hopper's tensor cores compute, bit for bit, on any processor. A leaf is a
// product of lm_head's replay over its part of the depth; the leaves' sums are joined here.
#include "native/lm_head/replay.hpp"

#include <optional>

#include "native/linear/gate.hpp"
#include "native/lm_head/float.hpp"
#include "native/lm_head/run.hpp"
#include "registry/linear/geometry.hpp"

namespace rlk::native {
namespace {

// Rows and columns of a task: long enough to reuse what is unpacked, small enough to share out.
constexpr std::int64_t kRows = 16, kCols = 64;
constexpr std::int64_t tiles_for(std::int64_t rows, std::int64_t cols) {
  return ((rows + kRows - 1) / kRows) * ((cols + kCols - 1) / kCols);
}
constexpr std::uint64_t kLeafBytes = kRows * kCols * sizeof(float);

std::uint64_t scratch_of(const ReplayKernels& kernels) {
  return line(kernels.scratch_bytes) + leaves::kLeaves * kLeafBytes + 2 * kLeafBytes;
}

struct Product {
  ReplayProduct leaf;  // of the whole depth; `out` is fp32 scratch
  std::int64_t rows = 0, width = 0;
  int leaves = 0;
  void* out = nullptr;
  Float out_type = Float::f32;
  std::int64_t out_row_stride = 0;
  const void* bias = nullptr;
  Float bias_type = Float::f32;
  const void* residual = nullptr;
  Float residual_type = Float::f32;
  std::int64_t residual_row_stride = 0;
};

// The pairwise tree over `count` leaves' sums of one element, the leaves kRows * kCols apart.
float tree(const float* sums, int count) {
  if (count == 1) return *sums;
  return tree(sums, count / 2) + tree(sums + count / 2 * kRows * kCols, count / 2);
}

void run_tile(const Product& p, const ReplayKernels& kernels, std::int64_t row, std::int64_t col,
              std::byte* scratch) {
  auto* const sums = reinterpret_cast<float*>(scratch + line(kernels.scratch_bytes));
  ReplayProduct leaf = p.leaf;
  leaf.rows = std::min(kRows, p.rows - row), leaf.cols = std::min(kCols, p.leaf.cols - col);
  leaf.out_stride = kCols;
  for (int i = 0; i < p.leaves; ++i) {
    const std::int64_t from = std::min(p.leaf.depth, i * p.width);
    leaf.depth = std::min(p.leaf.depth, (i + 1) * p.width) - from;
    leaf.hidden = p.leaf.hidden + row * leaf.hidden_stride + from;
    leaf.weight = p.leaf.weight + col * leaf.weight_stride + from;
    leaf.out = sums + i * kRows * kCols;
    kernels.run(leaf, {0, leaf.rows, 0, leaf.cols}, scratch);
  }
  const DefaultFloatMode mode;
  for (std::int64_t i = 0; i < leaf.rows; ++i)
    for (std::int64_t j = 0; j < leaf.cols; ++j)
      finish_element(p.out, p.out_type, (row + i) * p.out_row_stride + col + j,
                     tree(sums + i * kCols + j, p.leaves), p.bias, p.bias_type, col + j, p.residual,
                     p.residual_type, (row + i) * p.residual_row_stride + col + j);
}

// Both products of a tile to scratch, and their swiglu to y.
void run_gated_tile(const Linear& a, const Product& whole, const ReplayKernels& kernels, Activate activate,
                    std::int64_t row, std::int64_t col, std::byte* scratch) {
  auto* const products = scratch + line(kernels.scratch_bytes) + leaves::kLeaves * kLeafBytes;
  const std::int64_t size = bytes_of(whole.out_type), columns = std::min(kCols, whole.leaf.cols / 2 - col);
  Product p = whole;
  p.rows = std::min(kRows, whole.rows - row);
  p.leaf.hidden = whole.leaf.hidden + row * whole.leaf.hidden_stride;
  p.out_row_stride = 2 * columns;
  for_products(a, {row, row + p.rows, col, col + columns},
               [&](std::int64_t from, std::int64_t count, std::int64_t at) {
                 p.leaf.weight = whole.leaf.weight + from * whole.leaf.weight_stride, p.leaf.cols = count;
                 if (whole.bias)
                   p.bias = static_cast<const std::byte*>(whole.bias) + from * bytes_of(whole.bias_type);
                 p.out = products + at * size;
                 for (std::int64_t j = 0; j < count; j += kCols) run_tile(p, kernels, 0, j, scratch);
               });
  const DefaultFloatMode mode;
  GatedRows{p.out_type,
            p.rows,
            columns,
            interleaved(a) ? gate_up::kRun : columns,
            products,
            2 * columns,
            static_cast<std::byte*>(whole.out) + (row * whole.out_row_stride + col) * size,
            whole.out_row_stride,
            a.roundings == Linear::Roundings::twice}
      .activate(activate);
}

rlk_code run(const Linear& a, const Call& call, const ReplayKernels& kernels, Activate activate) {
  std::byte* room = shared_workspace(call);
  const ReadRows x(a.x, room);
  std::optional<ReadRows> residual;
  if (a.residual) residual.emplace(a.residual, room);
  Product p;
  p.rows = x.rows, p.leaves = static_cast<int>(a.leaf_count);
  p.width = leaves::width(a.k_total == 0 ? x.width : a.k_total);
  p.leaf.cols = a.weight.dim(0), p.leaf.depth = x.width, p.leaf.type = x.type;
  p.leaf.hidden_stride = x.stride;
  p.leaf.weight = a.weight.data<std::uint16_t>(), p.leaf.weight_stride = a.weight.stride(0);
  p.out_type = float_of(a.y.dtype());
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype());
  for_row_runs(a.y, p, [&](Product part, std::int64_t first) {
    part.leaf.hidden = static_cast<const std::uint16_t*>(x.row(first));
    if (residual)
      part.residual = residual->row(first), part.residual_type = residual->type,
      part.residual_row_stride = residual->stride;
    const std::int64_t row_tiles = (part.rows + kRows - 1) / kRows;
    const std::int64_t cols = gated(a) ? part.leaf.cols / 2 : part.leaf.cols;
    run_tasks(call, tiles_for(part.rows, cols), scratch_of(kernels), copies(a),
              [&](std::int64_t index, std::byte* scratch) {
                const std::int64_t row = index % row_tiles * kRows, col = index / row_tiles * kCols;
                if (gated(a)) return run_gated_tile(a, part, kernels, activate, row, col, scratch);
                run_tile(part, kernels, row, col, scratch);
              });
  });
  return RLK_OK;
}

template <Isa I>
struct Replays {
  static rlk_code run(const Linear& a, const Call& call) {
    return native::run(a, call, *replay_kernels<I>(), swiglu::engine_for(I).forward);
  }
  static rlk_verdict supports(const Linear&, const rlk_request&) {
    return replay_kernels<I>() ? kAccept : refuse("this build lacks the instruction set");
  }
  static std::uint64_t workspace(const Linear& a, const rlk_request& r) {
    return workspace_for(r.threads, tiles_for(RowSet(a.x).rows, a.weight.dim(0)),
                         scratch_of(*replay_kernels<I>()), copies(a));
  }
};

template <Isa I>
constexpr rlk_implementation replay() {
  using Forms = Replays<I>;
  return implement<Linear, Forms::run, Forms::supports, Forms::workspace>(
      facts_at<"native.replay_sm90", I>({.id = "",
                                         .doc = "Hopper tensor cores' bits on the CPU, eight leaves",
                                         .priority = 10,
                                         .arithmetic = "sm90/t25k16/tree8",
                                         .dtypes = RLK_BF16 | RLK_F16,
                                         .traits = kPinned}));
}

}  // namespace

extern const rlk_implementation linear_replay_sm90_scalar, linear_replay_sm90_avx512;
constinit const rlk_implementation linear_replay_sm90_scalar = replay<Isa::scalar>();
constinit const rlk_implementation linear_replay_sm90_avx512 = replay<Isa::avx512>();

}  // namespace rlk::native
