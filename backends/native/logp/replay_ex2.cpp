// logp and its gradient as Hopper's special function units give them, on any processor: sm90/ex2/lse2048/l8. For proof: the
// exponential is some sixty integer operations.
//
// A leaf is summed tile by tile as the GPU's lanes hold it, 256 chains side by side.
#include <algorithm>
#include <array>
#include <vector>

#include "arithmetic/logp/bind.hpp"
#include "arithmetic/logp/ex2.hpp"
#include "native/levels.hpp"
#include "native/logp/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using lse128::Problem;
using lse128::Scale;
using lse128::State;
using lse2048::kChains;
using lse2048::kTile;

// A logit as it goes into the rule, before softcap.
float rounded(const Problem& p, std::int64_t row, std::int64_t c) {
  return rows::round_to(p.round, rows::load(p.logits.type, p.logits.row(row), c));
}

float sum_of(std::array<float, kChains>& v) {
  for (std::size_t n = kChains / 2; n > 0; n /= 2)
    for (std::size_t j = 0; j < n; ++j) v[j] = v[2 * j] + v[2 * j + 1];
  return v[0];
}

State tile_of(const Problem& p, std::int64_t row, std::int64_t begin, std::int64_t end, Scale k) {
  std::array<float, kTile> z;
  std::array<float, kChains> sums{}, bent{};
  float most = lse128::none();
  const auto n = static_cast<std::size_t>(end - begin);
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t c = begin + static_cast<std::int64_t>(i);
    z[i] = p.kept(row, c) ? lse128::capped<float>(p, rounded(p, row, c)) : lse128::none();
    most = z[i] > most ? z[i] : most;
  }
  const float base = lse2048::base_of(most);
  for (std::size_t i = 0; i < n; ++i) {
    const float x = lse2048::exponent(z[i], base, k.c), e = lse2048::exp2_by_unit(x);
    float &sum = sums[i % kChains], &u = bent[i % kChains];
    sum = sum + e;
    u = simt::fused(e, lse2048::finite_exponent(x), u);
  }
  return lse2048::tile_of(most, sum_of(sums), sum_of(bent));
}

State leaf_of(const Problem& p, std::int64_t row, int leaf) {
  const Scale given = p.scale(row), k = lse2048::counting(given);
  State all = lse128::nothing();
  const std::int64_t end = p.leaf_end(leaf);
  for (std::int64_t at = p.leaf_begin(leaf); at < end; at += kTile)
    all = lse2048::join(all, tile_of(p, row, at, std::min(end, at + kTile), k), k);
  return lse2048::counted(all, given);
}

State reduced(const Problem& p, std::int64_t row) {
  State leaves[lse128::kLeaves];
  for (int j = 0; j < p.count; ++j) leaves[j] = leaf_of(p, row, j);
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

void gradient_row(const Problem& p, std::int64_t row) {
  const float* given = p.given ? p.given + row * lse128::kStats : nullptr;
  const bool out = p.left_out(row);
  const State state = out ? lse128::nothing() : given ? State{given[0], given[1], given[2]} : reduced(p, row);
  const lse2048::Slope k = lse2048::slope_of(p, row, state);
  for (std::int64_t c = 0; c < p.columns; ++c) {
    float d = 0;
    if (!out && !k.nothing && c < p.here && p.kept(row, c)) {
      const float raw = rounded(p, row, c);
      d = lse2048::gradient(k, p.d_entropy != nullptr, lse128::capped<float>(p, raw), c == p.column(row));
      d = lse128::through_cap<float>(p, d, raw);
    }
    rows::store(p.d_logits.type, p.d_logits.row(row), c, d);
  }
}

rlk_code run(const LogpBwd& a, const Call& call) {
  const Problem p = lse128::problem_of(a);
  call.parallel_for(p.rows, [&](std::int64_t row) { gradient_row(p, row); });
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

extern const rlk_implementation logp_replay_ex2, logp_bwd_replay_ex2;
constinit const rlk_implementation logp_replay_ex2 = implement<Logp, kRun<Logp>>(facts());
constinit const rlk_implementation logp_bwd_replay_ex2 = implement<LogpBwd, kRun<LogpBwd>>(facts());

}  // namespace rlk::native
