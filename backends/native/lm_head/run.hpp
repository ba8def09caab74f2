// How lm_head and its backward become chain products: any leading shape as rows, tiles over workers.
#pragma once

#include <cstring>

#include "native/levels.hpp"
#include "native/lm_head/chain.hpp"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {

using namespace workers;

// A [..., width] tensor as rows. `even`: one stride leads from each row to the next.
struct RowSet {
  std::int64_t rows = 1, width = 0, stride = 0, bytes = 0;
  bool even = true;

  template <bool W>
  explicit RowSet(const View<W>& t) : width(t.dim(-1)), bytes(size_of(t.dtype())) {
    const std::int32_t last = t.rank() - 1;
    stride = width;
    bool first = true;
    std::int64_t next = 0;  // stride that would continue the rows seen so far
    for (std::int32_t i = last - 1; i >= 0; --i) {
      rows = product(rows, t.dim(i));
      if (t.dim(i) == 1) continue;
      if (first)
        stride = t.stride(i);
      else if (t.stride(i) != next)
        even = false;
      next = product(t.stride(i), t.dim(i));
      first = false;
    }
  }
  // Modulo 2^64, for a tensor without elements may have sizes beyond that.
  static std::int64_t product(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
  bool empty() const { return rows == 0 || width == 0; }
  std::uint64_t copy_bytes() const {
    return even || empty() ? 0 : line(static_cast<std::uint64_t>(rows * width * bytes));
  }
};

// Elements from the start of t to its row number `row`, whatever the leading strides.
template <bool W>
std::int64_t row_offset(const View<W>& t, std::int64_t row) {
  std::int64_t at = 0;
  for (std::int32_t i = t.rank() - 2; i >= 0; --i) {
    at += row % t.dim(i) * t.stride(i);
    row /= t.dim(i);
  }
  return at;
}

// Rows of a read argument that one stride can walk: the tensor itself, or a dense copy in the workspace.
struct ReadRows {
  const void* data = nullptr;
  Float type = Float::f32;
  std::int64_t rows = 0, width = 0, stride = 0;

  ReadRows(const In& t, std::byte*& room) : type(float_of(t.dtype())) {
    const RowSet set(t);
    rows = set.rows, width = set.width, stride = set.stride;
    data = t.data<std::byte>();
    if (set.even) return;
    auto* copy = room;
    for (std::int64_t r = 0; r < rows && !set.empty(); ++r)
      std::memcpy(copy + r * width * set.bytes, t.data<std::byte>() + row_offset(t, r) * set.bytes,
                  static_cast<std::size_t>(width * set.bytes));
    room += set.copy_bytes();
    data = copy;
    stride = width;
  }
  const void* row(std::int64_t i) const {
    return static_cast<const std::byte*>(data) + i * stride * bytes_of(type);
  }
  MatrixView matrix() const { return {data, type, stride, 1}; }
  MatrixView transposed() const { return {data, type, 1, stride}; }
};

enum class Chain { fma32, fma32_kb256, fma64 };

// Runs a product whose result rows are those of `out`: at once when one stride walks them, else one run of
// rows at a time. Which one never changes a bit.
//   run(Product part, std::int64_t first_row)
template <class Product, class Run>
void for_row_runs(const Out& out, const Product& whole, Run&& run) {
  const RowSet set(out);
  if (set.empty()) return;
  if (set.even) {
    Product p = whole;
    p.out = out.data<std::byte>();
    p.out_row_stride = set.stride;
    run(p, 0);
    return;
  }
  const std::int64_t inner = out.dim(-2);
  for (std::int64_t first = 0; first < set.rows; first += inner) {
    Product p = whole;
    p.rows = inner;
    p.out = out.data<std::byte>() + row_offset(out, first) * set.bytes;
    p.out_row_stride = out.stride(-2);
    run(p, first);
  }
}

// All tiles of one product over the workers.
inline void run_chain(const Call& call, ChainProduct p, const ChainKernels& kernels, Chain chain,
                      std::uint64_t shared) {
  if (p.rows == 0 || p.cols == 0) return;
  const auto run = chain == Chain::fma64 ? kernels.fma64 : kernels.fma32;
  if (chain == Chain::fma32_kb256) p.block = 256;
  const ChainPlan plan = plan_chain(p, kernels, workers_for(call.threads(), std::int64_t{1} << 30));
  const bool joins = chain != Chain::fma64 && p.joins();
  const std::size_t room = joins ? kernels.joined_scratch_bytes : kernels.scratch_bytes;
  run_tasks(call, plan.tile_count(), room, shared,
            [&](std::int64_t index, std::byte* scratch) { run(p, plan.tile(p, index), scratch); });
}

// ---- lm_head

inline std::uint64_t forward_copies(const LmHead& a) { return RowSet(a.hidden).copy_bytes(); }
inline std::int64_t most_tiles(const LmHead& a, const ChainKernels& kernels) {
  return most_tiles(RowSet(a.hidden).rows, a.weight.dim(0), kernels);
}

inline rlk_code run_forward(const LmHead& a, const Call& call, const ChainKernels& kernels, Chain chain) {
  std::byte* room = shared_workspace(call);
  const ReadRows hidden(a.hidden, room);
  ChainProduct p;
  p.rows = hidden.rows, p.cols = a.weight.dim(0), p.depth = hidden.width;
  p.a = hidden.matrix();
  p.b = {a.weight.data<void>(), float_of(a.weight.dtype()), 1, a.weight.stride(0)};
  p.out_type = float_of(a.out.dtype());
  if (a.bias)
    p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype()), p.bias_stride = a.bias.stride(0);
  for_row_runs(a.out, p, [&](ChainProduct part, std::int64_t first) {
    part.a.data = hidden.row(first);
    run_chain(call, part, kernels, chain, forward_copies(a));
  });
  return RLK_OK;
}

// ---- lm_head_bwd

inline std::uint64_t backward_copies(const LmHeadBwd& a) {
  return RowSet(a.d_out).copy_bytes() + RowSet(a.hidden).copy_bytes();
}

// Of any of the gradients.
inline std::int64_t most_tiles(const LmHeadBwd& a, const ChainKernels& kernels) {
  const std::int64_t vocab = a.weight.dim(0), width = a.weight.dim(1);
  return std::max({most_tiles(RowSet(a.d_out).rows, width, kernels), most_tiles(vocab, width, kernels),
                   most_tiles(1, vocab, kernels)});
}

// A column of ones, read with stride 0: the column sums of d_out are a product with it.
inline constexpr float kOne = 1.0f;

// d_bias[v] = sum over m, ascending, of 1 * d_out[m, v]
inline void bias_gradient(const LmHeadBwd& a, const Call& call, const ReadRows& d_out,
                          const ChainKernels& kernels, Chain chain, std::uint64_t shared) {
  ChainProduct p;
  p.rows = 1, p.cols = d_out.width, p.depth = d_out.rows;
  p.a = {&kOne, Float::f32, 0, 0};
  p.b = d_out.matrix();
  p.out = a.d_bias.data<void>(), p.out_type = float_of(a.d_bias.dtype()), p.out_row_stride = d_out.width;
  run_chain(call, p, kernels, chain, shared);
}

inline rlk_code run_backward(const LmHeadBwd& a, const Call& call, const ChainKernels& kernels, Chain chain) {
  std::byte* room = shared_workspace(call);
  const ReadRows d_out(a.d_out, room), hidden(a.hidden, room);
  const std::uint64_t shared = backward_copies(a);
  if (a.d_hidden) {
    ChainProduct p;  // d_hidden[m, k] = sum over v of d_out[m, v] * weight[v, k]
    p.rows = d_out.rows, p.cols = a.weight.dim(1), p.depth = d_out.width;
    p.a = d_out.matrix();
    p.b = {a.weight.data<void>(), float_of(a.weight.dtype()), a.weight.stride(0), 1};
    p.out_type = float_of(a.d_hidden.dtype());
    for_row_runs(a.d_hidden, p, [&](ChainProduct part, std::int64_t first) {
      part.a.data = d_out.row(first);
      run_chain(call, part, kernels, chain, shared);
    });
  }
  if (a.d_weight) {
    ChainProduct p;  // d_weight[v, k] = sum over m, ascending, of d_out[m, v] * hidden[m, k]
    p.rows = d_out.width, p.cols = hidden.width, p.depth = d_out.rows;
    p.a = d_out.transposed();
    p.b = hidden.matrix();
    p.out = a.d_weight.data<void>(), p.out_type = float_of(a.d_weight.dtype()),
    p.out_row_stride = a.d_weight.stride(0);
    run_chain(call, p, kernels, chain, shared);
  }
  if (a.d_bias) bias_gradient(a, call, d_out, kernels, chain, shared);
  return RLK_OK;
}

// Null where the build lacks them; that the machine runs them is the dispatcher's to ask.
template <Isa I>
const ChainKernels* chain_kernels() {
  if constexpr (I == Isa::avx512) return chain_kernels_avx512();
  if constexpr (I == Isa::avx2) return chain_kernels_avx2();
  return &chain_kernels_scalar();
}

// The four functions of an instruction set's implementation pair.
template <const ChainKernels* (*Kernels)(), Chain Sum>
struct LmHeadChain {
  static constexpr const char* kMissing = "this build lacks the instruction set";
  static rlk_verdict supports(const LmHead&, const rlk_request&) {
    return Kernels() ? kAccept : refuse(kMissing);
  }
  static rlk_verdict supports_bwd(const LmHeadBwd&, const rlk_request&) {
    return Kernels() ? kAccept : refuse(kMissing);
  }
  static std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
    return workspace_for(r.threads, most_tiles(a, *Kernels()), Kernels()->scratch_bytes, forward_copies(a));
  }
  static std::uint64_t workspace_bwd(const LmHeadBwd& a, const rlk_request& r) {
    return workspace_for(r.threads, most_tiles(a, *Kernels()), Kernels()->scratch_bytes, backward_copies(a));
  }
  static rlk_code run(const LmHead& a, const Call& call) { return run_forward(a, call, *Kernels(), Sum); }
  static rlk_code run_bwd(const LmHeadBwd& a, const Call& call) {
    return run_backward(a, call, *Kernels(), Sum);
  }
};

}  // namespace rlk::native
