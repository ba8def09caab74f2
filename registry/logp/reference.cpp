// logp, its gradient and the joining of shards in fp64.
#include "registry/reference.hpp"

#include "registry/logp/truth.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using namespace logp;

template <class Args>
std::vector<double> entries(const Args& a, const logp::Layout<Args>& call, int64_t row) {
  std::vector<double> z(static_cast<std::size_t>(call.here()), -INFINITY);
  for (int64_t c = 0; c < call.here(); ++c)
    if (call.kept(row, c)) z[static_cast<std::size_t>(c)] = call.entry(Rows(a.logits).get(row, c));
  return z;
}

template <class Args>
Truth truth_of(const Args& a, const logp::Layout<Args>& call, int64_t row) {
  if (call.target(row) != Target::token) return left_out(call.first());
  return Truth(entries(a, call, row), call.tau(row), call.column(row));
}

}  // namespace

int32_t logp_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const Logp*>(slots);
  const logp::Layout call(a, a.logits.dim(1));
  const int64_t rows = a.logits.dim(0);
  for (int64_t m = 0; m < rows; ++m) write_truth(a, m, truth_of(a, call, m));
  if (a.bad_count) Rows(a.bad_count).set(0, 0, static_cast<double>(call.bad(rows)));
  return RLK_OK;
}

int32_t logp_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LogpBwd*>(slots);
  const logp::Layout call(a, a.logits.dim(1));
  const Rows logits(a.logits), d_logits(a.d_logits);
  for (int64_t m = 0; m < a.logits.dim(0); ++m) {
    std::vector<double> d(static_cast<std::size_t>(a.logits.dim(1)));
    if (call.target(m) == Target::token) {
      Truth t = truth_of(a, call, m);
      if (a.stats) {
        const Rows stats(a.stats);
        t.most = stats.get(m, 0), t.sum = stats.get(m, 1), t.entropy_sum = stats.get(m, 2);
      }
      const double g = a.d_logp ? Rows(a.d_logp).get(0, m) : 0,
                   g_entropy = a.d_entropy ? Rows(a.d_entropy).get(0, m) : 0;
      for (int64_t c = 0; c < call.here(); ++c) {
        if (!call.kept(m, c)) continue;
        const double raw = logits.get(m, c), z = call.entry(raw);
        double slope = t.slope(z, c == call.column(m), g, g_entropy);
        if (call.cap() > 0 && !t.none()) {
          const double y =
              std::tanh((call.round() == DType::f64 ? raw : round_to(call.round(), raw)) / call.cap());
          slope *= 1 - y * y;
        }
        d[static_cast<std::size_t>(c)] = slope;
      }
    }
    for (int64_t c = 0; c < a.logits.dim(1); ++c) d_logits.set(m, c, d[static_cast<std::size_t>(c)]);
  }
  return RLK_OK;
}

int32_t logp_merge_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LogpMerge*>(slots);
  const Rows partials(a.partials);
  const int64_t parts = a.partials.dim(0), rows = a.partials.dim(1);
  for (int64_t m = 0; m < rows; ++m) {
    const double t =
        a.temperatures ? Rows(a.temperatures).get(0, m) : double{static_cast<float>(a.temperature)};
    Truth all(t > 0 && std::isfinite(t) ? 1 / t
                                        : 1);  // parts with entries are NaN where it is no temperature
    for (int64_t p = 0; p < parts; ++p) {
      Truth part(all.tau);
      const int64_t at = p * rows + m;
      part.most = partials.get(at, 0), part.sum = partials.get(at, 1);
      part.entropy_sum = partials.get(at, 2), part.target = partials.get(at, 3);
      all.join(part);
    }
    write_truth(a, m, all);
  }
  return RLK_OK;
}

}  // namespace rlk::registry
