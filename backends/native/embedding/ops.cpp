// embedding and its gradient on the CPU: embed32 by instruction set, and golden in fp64.
//
// Bytes: the rows that tokens name are read and written once. The backward sorts the tokens by id, keeping their order, and
// gives each row of d_weight to one task a tile: d_out is read and d_weight written once.
#include <algorithm>
#include <cstring>

#include "arithmetic/embedding/bind.hpp"
#include "native/embedding/engine.hpp"
#include "rlk/backend.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using embed32::problem_of;
using embedding::Problem;

struct Sorted : embedding::Order {
  static std::uint64_t bytes(const EmbeddingBwd& a) {
    return 8 * static_cast<std::uint64_t>(a.weight.dim(0) + 2 + a.ids.numel());
  }
  Sorted(const Problem& p, const Call& call)
      : Order{reinterpret_cast<std::int64_t*>(workers::shared_workspace(call)), nullptr} {
    tokens = begin + p.vocab + 2;
    // Counted two places on, so that, while tokens are placed, begin[v + 1] is where the next one of v goes.
    std::fill_n(begin, p.vocab + 2, 0);
    for (std::int64_t t = 0; t < p.axes.rows; ++t)
      if (const std::int64_t v = p.gradient_row(t); v >= 0) ++begin[v + 2];
    for (std::int64_t v = 0; v <= p.vocab; ++v) begin[v + 1] += begin[v];
    for (std::int64_t t = 0; t < p.axes.rows; ++t)
      if (const std::int64_t v = p.gradient_row(t); v >= 0) tokens[begin[v + 1]++] = t;
  }
};

std::uint64_t workspace(const EmbeddingBwd& a, const rlk_request&) { return 64 + Sorted::bytes(a); }

void count_bad(const Problem& p) {
  if (!p.bad_count) return;
  std::int32_t count = 0;
  for (std::int64_t t = 0; t < p.axes.rows; ++t) count += p.bad(t);
  *p.bad_count = count;
}

template <Isa I>
rlk_code run(const Embedding& a, const Call& call) {
  const Problem p = problem_of(a);
  count_bad(p);
  constexpr std::int64_t kTokens = 16;  // enough of them to be worth a thread
  call.parallel_for((p.axes.rows + kTokens - 1) / kTokens, [&](std::int64_t task) {
    embedding::engine_for(I).forward(p, task * kTokens, std::min(p.axes.rows, (task + 1) * kTokens));
  });
  return RLK_OK;
}

// run(tokens by row, first row, last row, first column) for every tile of so many rows of d_weight and `tile` columns.
template <class Run>
void for_rows(const Problem& p, const Call& call, std::int64_t tile, Run run) {
  const Sorted sorted(p, call);
  constexpr std::int64_t kRows = 16;
  const std::int64_t tiles = (p.width + tile - 1) / tile, chunks = (p.vocab + kRows - 1) / kRows;
  call.parallel_for(chunks * tiles, [&](std::int64_t task) {
    const std::int64_t first = task / tiles * kRows;
    run(sorted, first, std::min(p.vocab, first + kRows), task % tiles * tile);
  });
}

template <Isa I>
rlk_code run_backward(const EmbeddingBwd& a, const Call& call) {
  const Problem p = problem_of(a);
  for_rows(p, call, embedding::kTile,
           [&](const embedding::Order& order, std::int64_t first, std::int64_t last, std::int64_t column) {
             embedding::engine_for(I).backward(p, order, first, last, column);
           });
  return RLK_OK;
}

// ---- golden

rlk_code run_golden(const Embedding& a, const Call& call) {
  const Problem p = problem_of(a);
  count_bad(p);
  call.parallel_for(p.axes.rows, [&](std::int64_t t) {
    const std::int64_t row = p.row(t);
    if (row < 0 || p.scale == 1) return embedding::engine_for(Isa::scalar).forward(p, t, t + 1);
    void* out = p.tokens.row(p.axes, t);
    for (std::int64_t i = 0; i < p.width; ++i)
      rows::store(p.weight.type, out, i,
                  double{rows::load(p.weight.type, p.weight.row(row), i)} * double{p.scale});
  });
  return RLK_OK;
}

void golden_gradient(const Problem& p, std::int64_t v, std::int64_t i, const std::int64_t* tokens,
                     std::int64_t count) {
  double sum = 0;
  for (std::int64_t t = 0; t < count; ++t)
    sum += double{rows::load(p.tokens.type, p.tokens.row(p.axes, tokens[t]), i)};
  const float* before = p.before.data ? static_cast<const float*>(p.before.row(v)) + i : nullptr;
  float* out = static_cast<float*>(p.weight.row(v)) + i;
  if (count == 0 && before) {
    if (before != out) std::memcpy(out, before, sizeof *out);  // as it lies
    return;
  }
  rows::store(p.weight.type, p.weight.row(v), i,
              (count == 0 ? 0.0 : sum * double{p.scale}) + (before ? double{*before} : 0.0));
}

rlk_code run_backward_golden(const EmbeddingBwd& a, const Call& call) {
  const Problem p = problem_of(a);
  for_rows(p, call, 1,
           [&](const embedding::Order& order, std::int64_t first, std::int64_t last, std::int64_t column) {
             for (std::int64_t v = first; v < last; ++v)
               golden_gradient(p, v, column, order.tokens + order.begin[v],
                               order.begin[v + 1] - order.begin[v]);
           });
  return RLK_OK;
}

constexpr std::uint32_t kIds = RLK_I32 | RLK_I64;
constexpr Facts kRows =
    pinned_facts("rows by token, gradients by row in the order of tokens", "embed32", kIds);
constexpr Facts kGolden = golden_facts("fp64, one rounding", kIds);

}  // namespace

extern const Levels embedding_rows, embedding_bwd_rows;
constinit const Levels embedding_rows =
    by_level([]<Isa I>() { return implement<Embedding, run<I>>(facts_at<"native.rows", I>(kRows)); });
constinit const Levels embedding_bwd_rows = by_level([]<Isa I>() {
  return implement<EmbeddingBwd, run_backward<I>, nullptr, workspace>(facts_at<"native.rows", I>(kRows));
});

extern const rlk_implementation embedding_golden, embedding_bwd_golden;
constinit const rlk_implementation embedding_golden = implement<Embedding, run_golden>(kGolden);
constinit const rlk_implementation embedding_bwd_golden =
    implement<EmbeddingBwd, run_backward_golden, nullptr, workspace>(kGolden);

}  // namespace rlk::native
