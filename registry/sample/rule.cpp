// sample/philox-g1, and the same with log-probabilities by sm90/ex2/lse2048/l8, as the page has them, in plain loops, independent
// of every kernel.
#include "registry/logp/lse2048.hpp"
#include "registry/op.hpp"
#include "registry/sample/plain.hpp"
#include "registry/sample/shards.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

constexpr std::string_view kArithmetic = "sample/philox-g1";

// How an id sums for log-probabilities; null: it is none of ours.
sampling::Reduce sums_of(std::string_view arithmetic) {
  if (arithmetic == "sample/philox-g1/ex2/lse2048/l8") return lse2048::reduce;
  return arithmetic == kArithmetic ? lse128::reduce : nullptr;
}

}  // namespace

bool sample_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const sampling::Reduce reduce = sums_of(q.arithmetic);
  if (!reduce) return false;
  sampling::write_rows(
      *reinterpret_cast<const rlk::Sample*>(q.slots),
      [](const sampling::PlainRow& r, bool kept) { return canonical(kept ? r.logp() : r.logp_raw()); },
      reduce);
  return true;
}

bool sample_verify_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const sampling::Reduce reduce = sums_of(q.arithmetic);
  if (!reduce) return false;
  sampling::write_status(*reinterpret_cast<const SampleVerify*>(q.slots), reduce);
  return true;
}

bool sample_part_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const sampling::Reduce reduce = sums_of(q.arithmetic);
  if (!reduce) return false;
  sampling::write_parts(*reinterpret_cast<const SamplePart*>(q.slots), reduce);
  return true;
}

// Leaves are joined alike by either id.
bool sample_merge_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != kArithmetic) return false;
  sampling::write_merged(*reinterpret_cast<const SampleMerge*>(q.slots));
  return true;
}

}  // namespace rlk::registry
