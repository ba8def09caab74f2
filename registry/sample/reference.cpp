// sample and sample_verify on one thread: the integers and the token by their definition, which has no freedom, and
// log-probabilities in fp64.
#include "registry/sample/plain.hpp"
#include "registry/sample/shards.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

double log_probability(const sampling::PlainRow& r, float tau, bool kept) {
  if (r.token < 0) return NAN;
  double sum = 0;
  const auto distance = [&](std::size_t i) { return (double{r.z[i]} - double{r.most}) * double{tau}; };
  for (std::size_t i = 0; i < r.z.size(); ++i)
    if (r.z[i] != -INFINITY && (!kept || r.kept[i])) sum += std::exp(distance(i));
  return distance(static_cast<std::size_t>(r.token)) - std::log(sum);
}

}  // namespace

int32_t sample_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const rlk::Sample*>(slots);
  sampling::write_rows(a, [](const sampling::PlainRow& r, bool kept) {
    return kept ? log_probability(r, r.tau, true) : log_probability(r, r.raw_tau, false);
  });
  return RLK_OK;
}

// What was recorded is compared to the bit, so log-probabilities are those of the rule.
int32_t sample_verify_reference(const rlk_slot* slots, const rlk_host*) {
  sampling::write_status(*reinterpret_cast<const SampleVerify*>(slots));
  return RLK_OK;
}

// Partials are sums and scores of the rule.
int32_t sample_part_reference(const rlk_slot* slots, const rlk_host*) {
  sampling::write_parts(*reinterpret_cast<const SamplePart*>(slots));
  return RLK_OK;
}
int32_t sample_merge_reference(const rlk_slot* slots, const rlk_host*) {
  sampling::write_merged(*reinterpret_cast<const SampleMerge*>(slots));
  return RLK_OK;
}

}  // namespace rlk::registry
