// logp and its gradient as Hopper's special function units give them, on any processor: sm90/ex2/lse2048/l8. For proof: the
// exponential is some sixty integer operations.
//
// A leaf is summed tile by tile as the GPU's lanes hold it, 256 chains side by side.
#include <algorithm>
#include <array>

#include "arithmetic/logp/bind.hpp"
#include "arithmetic/logp/ex2.hpp"
#include "native/levels.hpp"
#include "native/logp/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using logp::Span;
using lse128::Problem;
using lse128::Scale;
using lse128::State;
using lse2048::kChains;
using lse2048::kTile;

// A logit as it goes into the rule, before softcap.
float rounded(const Problem& p, const Span& span, std::int64_t c) {
  return rows::round_to(p.round, rows::load(span.type, span.data, c - span.begin));
}

float sum_of(std::array<float, kChains>& v) {
  for (std::size_t n = kChains / 2; n > 0; n /= 2)
    for (std::size_t j = 0; j < n; ++j) v[j] = v[2 * j] + v[2 * j + 1];
  return v[0];
}

// Of `n` entries from column `begin` on.
State tile_of(const Problem& p, const Span& span, std::int64_t begin, std::int64_t n, Scale k) {
  std::array<float, kTile> z;
  std::array<float, kChains> sums{}, bent{};
  float most = lse128::none();
  const auto count = static_cast<std::size_t>(n);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t c = begin + static_cast<std::int64_t>(i);
    z[i] = p.kept(span.row, c) ? lse128::capped<float>(p, rounded(p, span, c)) : lse128::none();
    most = z[i] > most ? z[i] : most;
  }
  const float base = lse2048::base_of(most);
  for (std::size_t i = 0; i < count; ++i) {
    const float x = lse2048::exponent(z[i], base, k.c), e = lse2048::exp2_by_unit(x);
    float &sum = sums[i % kChains], &u = bent[i % kChains];
    sum = sum + e;
    u = simt::fused(e, lse2048::finite_exponent(x), u);
  }
  return lse2048::tile_of(most, sum_of(sums), sum_of(bent));
}

// The sum for the entropy costs little beside the exponential, and is always made.
State fold(const Problem& p, const Span& span, State all, bool) {
  const Scale given = p.scale(span.row), k = lse2048::counting(given);
  for (std::int64_t at = span.begin; at < span.end; at += kTile)
    all = lse2048::join(all, tile_of(p, span, at, std::min<std::int64_t>(kTile, span.end - at), k), k);
  return lse2048::counted(all, given);
}

void gradient(const Problem& p, const Span& span, const State& of_row, void* to, lse128::Type type,
              std::int64_t columns) {
  const lse2048::Slope k = lse2048::slope_of(p, span.row, of_row);
  for (std::int64_t c = span.begin; c < columns; ++c) {
    float d = 0;
    if (!k.nothing && c < span.end && p.kept(span.row, c)) {
      const float raw = rounded(p, span, c);
      d = lse2048::gradient(k, p.d_entropy != nullptr, lse128::capped<float>(p, raw),
                            c == p.column(span.row));
      d = lse128::through_cap<float>(p, d, raw);
    }
    rows::store(type, to, c - span.begin, d);
  }
}

// A row that lies in memory whole.
Span row_of(const Problem& p, std::int64_t row) {
  return {p.logits.row(row), p.logits.type, row, 0, p.left_out(row) ? 0 : p.here};
}
State reduced(const Problem& p, std::int64_t row) {
  State leaves[lse128::kLeaves];
  for (int j = 0; j < p.count; ++j) {
    Span leaf = row_of(p, row);
    leaf.begin = p.leaf_begin(j), leaf.end = p.leaf_end(j);
    leaf.data = static_cast<const std::byte*>(leaf.data) + leaf.begin * rows::size_of(leaf.type);
    leaves[j] = fold(p, leaf, lse128::nothing(), true);
  }
  return lse128::join_all(leaves, p.count, p.scale(row));
}

rlk_code run(const Logp& a, const Call& call) {
  const Problem p = lse128::problem_of(a);
  call.parallel_for(p.rows, [&](std::int64_t row) {
    if (p.left_out(row)) return lse128::write(p, row, lse128::left_out(p));
    const float z = logp::target_entry(p, row, p.logits.type, p.logits.row(row), p.column(row));
    lse128::write(p, row, {reduced(p, row), z, p.scale(row)});
  });
  if (p.bad_count) *p.bad_count = logp::count_bad(p);
  return RLK_OK;
}

rlk_code run(const LogpBwd& a, const Call& call) {
  const Problem p = lse128::problem_of(a);
  call.parallel_for(p.rows, [&](std::int64_t row) {
    const float* given = p.given ? p.given + row * lse128::kStats : nullptr;
    const State state = p.left_out(row) ? lse128::nothing()
                        : given         ? State{given[0], given[1], given[2]}
                                        : reduced(p, row);
    gradient(p, row_of(p, row), state, p.d_logits.row(row), p.d_logits.type, p.columns);
  });
  return RLK_OK;
}

constexpr Facts facts() {
  return {.id = "native.replay_sm90_ex2",
          .doc = "the bits of Hopper's special function units on any CPU",
          .priority = 20,
          .arithmetic = "sm90/ex2/lse2048/l8",
          .dtypes = kFloats,
          .traits = kPinned};
}
template <class Args>
constexpr rlk_code (*kRun)(const Args&, const Call&) = run;

}  // namespace

constinit const logp::Engine logp::kByUnit{kTile, fold, gradient};

extern const rlk_implementation logp_replay_ex2, logp_bwd_replay_ex2;
constinit const rlk_implementation logp_replay_ex2 = implement<Logp, kRun<Logp>>(facts());
constinit const rlk_implementation logp_bwd_replay_ex2 = implement<LogpBwd, kRun<LogpBwd>>(facts());

}  // namespace rlk::native
