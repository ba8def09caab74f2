// logp, its gradient and the joining of shards in fp64, one rounding of every result.
#include "native/logp/golden.hpp"

#include <vector>

#include "arithmetic/logp/bind.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace logp;

std::vector<double> entries(const Problem& p, std::int64_t row) {
  std::vector<double> z(static_cast<std::size_t>(p.here));
  for (std::int64_t c = 0; c < p.here; ++c)
    z[static_cast<std::size_t>(c)] =
        round_to(p.round, double{rows::load(p.logits.type, p.logits.row(row), c)});
  return z;
}

rlk_code run(const Logp& a, const Call& call) {
  const Problem p = lse128::problem_of(a);
  call.parallel_for(p.rows, [&](std::int64_t row) {
    write_golden(p, row, p.left_out(row) ? golden_left_out(p) : golden_row(p, row, entries(p, row)));
  });
  if (p.bad_count) *p.bad_count = count_bad(p);
  return RLK_OK;
}

void gradient_row(const Problem& p, std::int64_t row) {
  const bool out = p.left_out(row);
  const std::vector<double> z = out ? std::vector<double>() : entries(p, row);
  GoldenRow r = out ? golden_left_out(p) : golden_row(p, row, z);
  if (const float* s = p.given) r.most = s[4 * row], r.sum = s[4 * row + 1], r.entropy_sum = s[4 * row + 2];
  for (std::int64_t c = 0; c < p.columns; ++c)
    rows::store(p.d_logits.type, p.d_logits.row(row), c,
                out || c >= p.here ? 0 : golden_gradient(p, row, r, z[static_cast<std::size_t>(c)], c));
}

rlk_code run_backward(const LogpBwd& a, const Call& call) {
  const Problem p = lse128::problem_of(a);
  call.parallel_for(p.rows, [&](std::int64_t row) { gradient_row(p, row); });
  return RLK_OK;
}

// Joins b, of the same row, to a.
void join(GoldenRow& a, const GoldenRow& b) {
  if (b.target != -__builtin_inf()) a.target = b.target;
  if (b.none()) return;
  if (a.none()) {
    a.most = b.most, a.sum = b.sum, a.entropy_sum = b.entropy_sum;
    return;
  }
  const double top = b.most > a.most ? b.most : a.most;
  double sum = 0, entropy_sum = 0;
  for (const GoldenRow* r : {static_cast<const GoldenRow*>(&a), &b}) {
    const double d = (r->most - top) * a.tau, by = simt::exp<double>(d);
    sum += r->sum * by;
    if (by != 0) entropy_sum += simt::fused(r->sum, d, r->entropy_sum) * by;
  }
  a.most = top, a.sum = sum, a.entropy_sum = entropy_sum;
}

rlk_code run_merge(const LogpMerge& a, const Call&) {
  const lse128::Merge m = lse128::merge_of(a);
  for (std::int64_t row = 0; row < m.p.rows; ++row) {
    GoldenRow all;
    all.tau = golden_tau(m.p, row);
    if (all.tau != all.tau)
      all.tau = 1;  // parts with entries are NaN by now, others are of a row that is left out
    for (int i = 0; i < m.parts; ++i) {
      const float* s = m.partials + (i * m.p.rows + row) * lse128::kStats;
      join(all, {s[0], s[1], s[2], s[3], all.tau});
    }
    write_golden(m.p, row, all);
  }
  return RLK_OK;
}

constexpr const char* kDoc = "ascending fp64 sums, one rounding";

}  // namespace

extern const rlk_implementation logp_golden, logp_bwd_golden, logp_merge_golden;
constinit const rlk_implementation logp_golden = implement<Logp, run>(golden_facts(kDoc));
constinit const rlk_implementation logp_bwd_golden = implement<LogpBwd, run_backward>(golden_facts(kDoc));
constinit const rlk_implementation logp_merge_golden =
    implement<LogpMerge, run_merge>(golden_facts(kDoc, RLK_F32));

}  // namespace rlk::native
