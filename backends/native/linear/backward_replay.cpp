// The gradients of linear, and of lm_head by linear's, arithmetic sm90/t25k16/tree8: what Hopper's tensor cores compute, bit for bit,
// on any processor; d_bias and d_residual are those of fma32/tree8, as there.
//
// A leaf of d_x, or a block of tokens of d_weight, is a product of lm_head's replay, which reads both operands along the depth. One of
// d_x's and both of d_weight's lie across it, so a task copies its rows and columns of a leaf, with the zeros between segments.
#include <array>

#include "arithmetic/linear/lm_head_gradients.hpp"
#include "arithmetic/linear/segments.hpp"
#include "native/linear/run.hpp"
#include "native/lm_head/float.hpp"
#include "native/lm_head/replay.hpp"

namespace rlk::native {
namespace {

constexpr std::int64_t kRows = 16, kCols = 64, kGroup = 16;
constexpr std::uint64_t kLeafBytes = kRows * kCols * sizeof(float);

std::int64_t tiles_for(std::int64_t rows, std::int64_t cols) {
  return ((rows + kRows - 1) / kRows) * ((cols + kCols - 1) / kCols);
}
std::int64_t whole(std::int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

// Element (i, k) of an operand of 16 bits lies at i * stride + k * step.
struct Across {
  const std::uint16_t* data = nullptr;
  std::int64_t stride = 0, step = 0;
};
Across along(const ReadRows& x) { return {static_cast<const std::uint16_t*>(x.data), x.stride, 1}; }
Across across(const ReadRows& x) { return {static_cast<const std::uint16_t*>(x.data), 1, x.stride}; }

struct Product {
  Across a, b;
  std::int64_t rows = 0, cols = 0, depth = 0;
  Float type = Float::bf16;
  leaves::Segments segments;  // of the depth: at least one
  int leaves = 0;
  bool in_order = false;  // their sums are added one after another, not as a tree
  void* out = nullptr;
  Float out_type = Float::f32;
  std::int64_t out_row_stride = 0;
  const void* residual = nullptr;  // fp32
  std::int64_t residual_row_stride = 0;

  // body(first number of a piece, its length, where it lies in the leaf); returns the leaf's length.
  template <class Body>
  std::int64_t for_pieces(std::int64_t leaf, Body body) const {
    std::int64_t at = 0;
    for (int i = 0; i < segments.count; ++i) {
      const std::int64_t begin = std::min(segments.length[i], leaf * segments.width[i]),
                         end = std::min(segments.length[i], (leaf + 1) * segments.width[i]);
      body(segments.start[i] + begin, end - begin, at);
      at += whole(end - begin);
    }
    return at;
  }
  std::int64_t longest() const {  // of a leaf
    std::int64_t n = 0;
    for (int i = 0; i < segments.count; ++i) n += whole(std::min(segments.length[i], segments.width[i]));
    return n;
  }
};

void one_segment(Product& p, std::int64_t width, std::int64_t length) {
  p.segments.count = 1, p.segments.length[0] = length, p.segments.width[0] = width;
}

std::uint64_t scratch_of(const Product& p, const ReplayKernels& kernels) {
  return line(kernels.scratch_bytes) + leaves::kLeaves * kLeafBytes +
         line(static_cast<std::uint64_t>((kRows + kCols) * p.longest() * 2));
}

// `n` lines of a leaf, each `length` long, zeros between its pieces.
void gather(const Product& p, const Across& from, std::int64_t first, std::int64_t n, std::int64_t leaf,
            std::int64_t length, std::uint16_t* to) {
  std::fill_n(to, n * length, std::uint16_t{0});
  p.for_pieces(leaf, [&](std::int64_t begin, std::int64_t count, std::int64_t at) {
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t k = 0; k < count; ++k)
        to[i * length + at + k] = from.data[(first + i) * from.stride + (begin + k) * from.step];
  });
}

void run_tile(const Product& p, const ReplayKernels& kernels, std::int64_t row, std::int64_t col,
              std::byte* scratch) {
  auto* const sums = reinterpret_cast<float*>(scratch + line(kernels.scratch_bytes));
  auto* const lines =
      reinterpret_cast<std::uint16_t*>(scratch + line(kernels.scratch_bytes) + leaves::kLeaves * kLeafBytes);
  ReplayProduct leaf;
  leaf.rows = std::min(kRows, p.rows - row), leaf.cols = std::min(kCols, p.cols - col);
  leaf.type = p.type, leaf.out_stride = kCols;
  const auto sum_of = [&](std::int64_t j, float* to) {
    const std::int64_t length = p.for_pieces(j, [](std::int64_t, std::int64_t, std::int64_t) {});
    gather(p, p.a, row, leaf.rows, j, length, lines);
    gather(p, p.b, col, leaf.cols, j, length, lines + leaf.rows * length);
    leaf.depth = leaf.hidden_stride = leaf.weight_stride = length;
    leaf.hidden = lines, leaf.weight = lines + leaf.rows * length;
    leaf.out = to;
    kernels.run(leaf, {0, leaf.rows, 0, leaf.cols}, scratch);
  };
  const auto add = [&](float* to, const float* more) {
    const DefaultFloatMode mode;
    for (std::int64_t i = 0; i < kRows * kCols; ++i) to[i] = to[i] + more[i];
  };
  constexpr std::int64_t kApart = kRows * kCols;
  std::fill_n(sums, leaves::kLeaves * kApart, 0.0f);
  for (std::int64_t j = 0; j < p.leaves; ++j) {
    float* const mine = sums + (p.in_order ? std::min<std::int64_t>(j, 1) : j) * kApart;
    sum_of(j, mine);
    if (p.in_order && j > 0) add(sums, mine);
  }
  for (int step = 1; !p.in_order && step < p.leaves; step *= 2)
    for (int j = 0; j < p.leaves; j += 2 * step) add(sums + j * kApart, sums + (j + step) * kApart);
  const DefaultFloatMode mode;
  for (std::int64_t i = 0; i < leaf.rows; ++i)
    for (std::int64_t j = 0; j < leaf.cols; ++j)
      finish_element(p.out, p.out_type, (row + i) * p.out_row_stride + col + j, sums[i * kCols + j], nullptr,
                     Float::f32, 0, p.residual, Float::f32, (row + i) * p.residual_row_stride + col + j);
}

void run_product(const Product& p, const Call& call, const ReplayKernels& kernels, std::uint64_t shared) {
  const std::int64_t row_tiles = (p.rows + kRows - 1) / kRows;
  run_tasks(call, tiles_for(p.rows, p.cols), scratch_of(p, kernels), shared,
            [&](std::int64_t index, std::byte* scratch) {
              run_tile(p, kernels, index % row_tiles * kRows, index / row_tiles * kCols, scratch);
            });
}

// d_x[m, k] = sum over n of d_y[m, n] * weight[n, k]; without the operands, for who asks about room
Product d_x_product(const LinearBwd& a, std::int64_t rows) {
  Product p;
  p.rows = rows, p.cols = a.weight.dim(1), p.depth = a.weight.dim(0), p.type = float_of(a.x.dtype());
  p.leaves = static_cast<int>(a.d_x_leaf_count);
  p.segments = leaves::segments_of(a);
  // Segments whose sizes are not known yet take no more than one of all, and a group each.
  const std::int64_t more = a.segments ? leaves::Segments::kMost * kGroup : 0;
  if (p.segments.count == 0)
    one_segment(p, leaves::width(a.n_total == 0 ? p.depth : a.n_total) + more, p.depth + more);
  if (a.d_x) p.out_type = float_of(a.d_x.dtype());
  return p;
}
// d_weight[n, k] = sum over m, ascending, of d_y[m, n] * x[m, k]
Product d_weight_product(const LinearBwd& a, std::int64_t rows) {
  Product p;
  p.rows = a.weight.dim(0), p.cols = a.weight.dim(1), p.depth = rows, p.type = float_of(a.x.dtype());
  p.leaves = static_cast<int>(std::max<std::int64_t>(1, (rows + kTokens - 1) / kTokens));
  p.in_order = true;
  one_segment(p, kTokens, rows);
  return p;
}

rlk_code run(const LinearBwd& a, const Call& call, const ReplayKernels& kernels, const ChainKernels& plain) {
  if (const rlk_code code = leaves::check_segments(a, call); code != RLK_OK) return code;
  std::byte* room = shared_workspace(call);
  const ReadRows d_y(a.d_y, room), x(a.x, room);
  if (a.d_x) {
    Product p = d_x_product(a, d_y.rows);
    p.b = {a.weight.data<std::uint16_t>(), 1, a.weight.stride(0)};
    for_row_runs(a.d_x, p, [&](Product part, std::int64_t first) {
      part.a = along(d_y);
      part.a.data += first * d_y.stride;
      run_product(part, call, kernels, copies(a));
    });
  }
  if (a.d_weight) {
    Product p = d_weight_product(a, d_y.rows);
    p.a = across(d_y), p.b = across(x);
    p.out = a.d_weight.data<void>(), p.out_type = float_of(a.d_weight.dtype());
    p.out_row_stride = a.d_weight.stride(0);
    if (a.d_weight_before)
      p.residual = a.d_weight_before.data<void>(), p.residual_row_stride = a.d_weight_before.stride(0);
    run_product(p, call, kernels, copies(a));
  }
  if (a.d_bias) bias_gradient(a, d_y, call, plain, Chain::fma32, copies(a));
  if (a.d_residual) residual_gradient(a, d_y, call, plain, Chain::fma32, copies(a));
  return RLK_OK;
}

template <Isa I>
struct Replays {
  static rlk_code run(const LinearBwd& a, const Call& call) {
    return native::run(a, call, *replay_kernels<I>(), *chain_kernels<I>());
  }
  static rlk_verdict supports(const LinearBwd& a, const rlk_request&) {
    if (!replay_kernels<I>() || !chain_kernels<I>()) return refuse("this build lacks the instruction set");
    if (a.d_y.dtype() != a.x.dtype())
      return refuse("the tensor core takes two operands of one 16-bit dtype, d_y is fp32", {},
                    "round d_y to x's dtype", 0);
    return kAccept;
  }
  static std::uint64_t workspace(const LinearBwd& a, const rlk_request& r) {
    const std::int64_t rows = RowSet(a.d_y).rows;
    const ReplayKernels& kernels = *replay_kernels<I>();
    const Product x = d_x_product(a, rows), weight = d_weight_product(a, rows);
    const std::uint64_t scratch = std::max({scratch_of(x, kernels), scratch_of(weight, kernels),
                                            std::uint64_t{chain_kernels<I>()->joined_scratch_bytes}});
    const std::int64_t tiles = std::max(
        {tiles_for(x.rows, x.cols), tiles_for(weight.rows, weight.cols), most_tiles(a, *chain_kernels<I>())});
    return workspace_for(r.threads, tiles, scratch, copies(a));
  }

  static rlk_code run(const LmHeadBwd& a, const Call& call) { return run(leaves::as_linear(a), call); }
  static rlk_verdict supports(const LmHeadBwd& a, const rlk_request& r) {
    return supports(leaves::as_linear(a), r);
  }
  static std::uint64_t workspace(const LmHeadBwd& a, const rlk_request& r) {
    return workspace(leaves::as_linear(a), r);
  }
};

template <class Args, Family F, Isa I>
constexpr rlk_implementation replay() {
  using Forms = Replays<I>;
  constexpr rlk_code (*kRun)(const Args&, const Call&) = Forms::run;
  constexpr rlk_verdict (*kSupports)(const Args&, const rlk_request&) = Forms::supports;
  constexpr std::uint64_t (*kRoom)(const Args&, const rlk_request&) = Forms::workspace;
  return implement<Args, kRun, kSupports, kRoom>(
      facts_at<F, I>({.id = "",
                      .doc = "Hopper tensor cores' bits on the CPU, eight leaves",
                      .priority = 5,
                      .arithmetic = "sm90/t25k16/tree8",
                      .dtypes = RLK_BF16 | RLK_F16,
                      .traits = kPinned}));
}

}  // namespace

extern const rlk_implementation linear_bwd_replay_sm90_scalar, linear_bwd_replay_sm90_avx512;
constinit const rlk_implementation linear_bwd_replay_sm90_scalar =
    replay<LinearBwd, "native.replay_sm90", Isa::scalar>();
constinit const rlk_implementation linear_bwd_replay_sm90_avx512 =
    replay<LinearBwd, "native.replay_sm90", Isa::avx512>();

extern const rlk_implementation lm_head_bwd_replay_sm90_scalar, lm_head_bwd_replay_sm90_avx512;
constinit const rlk_implementation lm_head_bwd_replay_sm90_scalar =
    replay<LmHeadBwd, "native.replay_sm90_tree8", Isa::scalar>();
constinit const rlk_implementation lm_head_bwd_replay_sm90_avx512 =
    replay<LmHeadBwd, "native.replay_sm90_tree8", Isa::avx512>();

}  // namespace rlk::native
