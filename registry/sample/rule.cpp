// sample/philox-g1 as the page has it, in plain loops, independent of every kernel.
#include "registry/op.hpp"
#include "registry/sample/plain.hpp"
#include "registry/sample/shards.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

constexpr std::string_view kArithmetic = "sample/philox-g1";

}  // namespace

bool sample_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != kArithmetic) return false;
  sampling::write_rows(
      *reinterpret_cast<const rlk::Sample*>(q.slots),
      [](const sampling::PlainRow& r, bool kept) { return canonical(kept ? r.logp() : r.logp_raw()); });
  return true;
}

bool sample_verify_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != kArithmetic) return false;
  sampling::write_status(*reinterpret_cast<const SampleVerify*>(q.slots));
  return true;
}

bool sample_part_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != kArithmetic) return false;
  sampling::write_parts(*reinterpret_cast<const SamplePart*>(q.slots));
  return true;
}

bool sample_merge_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (q.arithmetic != kArithmetic) return false;
  sampling::write_merged(*reinterpret_cast<const SampleMerge*>(q.slots));
  return true;
}

}  // namespace rlk::registry
