// logp, its gradient and the joining of shards on the CPU: lse128/l8 by instruction set.
//
// Bytes: the logits once; by the gradient, without stats, once more, and d_logits once. Per entry about 22 vector
// operations of an exponential and 3 of the tree.
#include "arithmetic/logp/bind.hpp"
#include "native/logp/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using logp::Engine;
using logp::engine_for;
using logp::Problem;
using logp::Span;
using logp::State;

constexpr std::int64_t kEach = 1 << 15;  // entries that are worth a task

// With few rows workers share them leaf by leaf, else each has rows of its own.
struct Work {
  bool by_leaf;
  std::int64_t units, each;  // rows or leaves of them; of a task

  Work(const Problem& p, std::int32_t threads) {
    const std::int64_t workers = workers::workers_for(threads, std::int64_t{1} << 30);
    by_leaf = p.rows < 8 * workers && p.here > kEach;
    units = by_leaf ? p.rows * p.count : p.rows;
    const std::int64_t entries = std::max<std::int64_t>(1, by_leaf ? p.leaf : p.here);
    each = std::clamp<std::int64_t>(units / (4 * workers), 1, std::max<std::int64_t>(1, 8 * kEach / entries));
    each = std::max(each, kEach / entries);
    each = std::max<std::int64_t>(each, 1);
  }
  std::int64_t tasks() const { return (units + each - 1) / each; }
  std::uint64_t bytes() const { return by_leaf ? static_cast<std::uint64_t>(units) * sizeof(State) : 0; }
};

State fold_leaf(const Problem& p, const Engine& engine, std::int64_t row, int leaf, bool bends) {
  const std::int64_t begin = p.leaf_begin(leaf);
  const auto* data = static_cast<const std::byte*>(p.logits.row(row)) + begin * rows::size_of(p.logits.type);
  return engine.fold(p, {data, p.logits.type, row, begin, p.leaf_end(leaf)}, lse128::nothing(), bends);
}

// finish(row, state) for every row that is not left out.
template <class Finish>
void reduce(const Problem& p, const Engine& engine, const Call& call, bool bends, Finish finish) {
  const Work work(p, call.threads());
  auto* states = reinterpret_cast<State*>(workers::shared_workspace(call));
  workers::run_tasks(call, work.tasks(), 0, work.bytes(), [&](std::int64_t task, std::byte*) {
    const std::int64_t last = std::min(work.units, (task + 1) * work.each);
    for (std::int64_t unit = task * work.each; unit < last; ++unit) {
      const std::int64_t row = work.by_leaf ? unit / p.count : unit;
      if (p.left_out(row)) continue;
      if (work.by_leaf) {
        states[unit] = fold_leaf(p, engine, row, static_cast<int>(unit % p.count), bends);
        continue;
      }
      State leaves[lse128::kLeaves];
      for (int j = 0; j < p.count; ++j) leaves[j] = fold_leaf(p, engine, row, j, bends);
      finish(row, lse128::join_all(leaves, p.count, p.scale(row)));
    }
  });
  if (!work.by_leaf) return;
  for (std::int64_t row = 0; row < p.rows; ++row)
    if (!p.left_out(row)) finish(row, lse128::join_all(states + row * p.count, p.count, p.scale(row)));
}

template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request& r) {
  const Work work(lse128::problem_of(a), r.threads);
  return workers::workspace_for(r.threads, work.tasks(), 0, work.bytes());
}

template <Isa I>
rlk_code run(const Logp& a, const Call& call) {
  const Problem p = lse128::problem_of(a);
  reduce(p, engine_for(I), call, p.entropy || p.stats, [&](std::int64_t row, const State& state) {
    const float z = logp::target_entry(p, row, p.logits.type, p.logits.row(row), p.column(row));
    lse128::write(p, row, {state, z, p.scale(row)});
  });
  for (std::int64_t row = 0; row < p.rows; ++row)
    if (p.left_out(row)) lse128::write(p, row, lse128::left_out(p));
  if (p.bad_count) *p.bad_count = logp::count_bad(p);
  return RLK_OK;
}

void gradient_row(const Problem& p, const Engine& engine, std::int64_t row, const State& state) {
  const Span span{p.logits.row(row), p.logits.type, row, 0, p.left_out(row) ? 0 : p.here};
  engine.gradient(p, span, state, p.d_logits.row(row), p.d_logits.type, p.columns);
}

template <Isa I>
rlk_code run_backward(const LogpBwd& a, const Call& call) {
  const Problem p = lse128::problem_of(a);
  constexpr const Engine& engine = engine_for(I);
  if (!p.given) {
    reduce(p, engine, call, p.d_entropy != nullptr,
           [&](std::int64_t row, const State& state) { gradient_row(p, engine, row, state); });
    for (std::int64_t row = 0; row < p.rows; ++row)
      if (p.left_out(row)) gradient_row(p, engine, row, lse128::nothing());
    return RLK_OK;
  }
  const std::int64_t each = std::max<std::int64_t>(1, kEach / std::max<std::int64_t>(1, p.columns));
  workers::run_tasks(call, (p.rows + each - 1) / each, 0, 0, [&](std::int64_t task, std::byte*) {
    for (std::int64_t row = task * each; row < std::min(p.rows, (task + 1) * each); ++row) {
      const float* s = p.given + row * lse128::kStats;
      gradient_row(p, engine, row, {s[0], s[1], s[2]});
    }
  });
  return RLK_OK;
}

rlk_code run_merge(const LogpMerge& a, const Call& call) {
  const lse128::Merge m = lse128::merge_of(a);
  call.parallel_for((m.p.rows + 255) / 256, [&](std::int64_t block) {
    for (std::int64_t row = 256 * block; row < std::min(m.p.rows, 256 * (block + 1)); ++row)
      lse128::write(m.p, row, lse128::merged(m, row));
  });
  return RLK_OK;
}

}  // namespace

extern const Levels logp_tiles, logp_bwd_tiles;
constinit const Levels logp_tiles = by_level([]<Isa I>() {
  return implement<Logp, run<I>, nullptr, workspace<Logp>>(facts_at<"native.tiles", I>(
      pinned_facts("tiles of 128 entries in cache, the logits read once", "lse128/l8")));
});
constinit const Levels logp_bwd_tiles = by_level([]<Isa I>() {
  return implement<LogpBwd, run_backward<I>, nullptr, workspace<LogpBwd>>(
      facts_at<"native.tiles", I>(pinned_facts("tiles of 128 entries in cache", "lse128/l8")));
});
extern const rlk_implementation logp_merge_rows;
constinit const rlk_implementation logp_merge_rows =
    implement<LogpMerge, run_merge>({.id = "native.rows",
                                     .doc = "shards pairwise, a row at a time",
                                     .priority = 100,
                                     .arithmetic = "lse128/l8",
                                     .dtypes = RLK_F32,
                                     .traits = kPinned});

}  // namespace rlk::native
