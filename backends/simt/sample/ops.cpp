// sample and sample_verify on any GPU by the portable kernels: the tokens of the native backend.
#include "arithmetic/sample/bind.hpp"
#include "simt/portable.hpp"
#include "simt/sample/launchers.hpp"

namespace rlk::simt::sample {
namespace {

using sampling::problem_of;

rlk_code draw(const Sample& a, const Call& call) {
  return finished(call, "sample", run(problem_of(a), call.stream(), call.device().id));
}
rlk_code verify(const SampleVerify& a, const Call& call) {
  return finished(call, "sample_verify", run(problem_of(a), call.stream(), call.device().id));
}

rlk_code part(const SamplePart& a, const Call& call) {
  return finished(call, "sample_part", run_part(problem_of(a), call.stream(), call.device().id));
}
rlk_code merge(const SampleMerge& a, const Call& call) {
  return finished(call, "sample_merge", run_merge(problem_of(a), call.stream(), call.device().id));
}

constexpr Facts kFacts = portable_facts("a block a row, integer histograms", "sample/philox-g1");
constexpr Facts kMergeFacts =
    portable_facts("a block a row adds the bins of all parts", "sample/philox-g1", RLK_I64);

constexpr rlk_implementation kImplementations[] = {
    implement<Sample, draw>(kFacts), implement<SampleVerify, verify>(kFacts),
    implement<SamplePart, part>(kFacts), implement<SampleMerge, merge>(kMergeFacts)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::sample
