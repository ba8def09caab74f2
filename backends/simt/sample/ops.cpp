// sample and sample_verify on any GPU by the portable kernels: the tokens of the native backend.
#include "arithmetic/sample/bind.hpp"
#include "simt/portable.hpp"
#include "simt/sample/launchers.hpp"

namespace rlk::simt::sample {
namespace {

using sampling::problem_of;

// Args is Sample or SampleVerify.
template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request&) {
  return static_cast<std::uint64_t>(workspace_bytes(problem_of(a)));
}
rlk_code draw(const Sample& a, const Call& call) {
  return finished(call, "sample",
                  run(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
rlk_code verify(const SampleVerify& a, const Call& call) {
  return finished(call, "sample_verify",
                  run(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}

rlk_code part(const SamplePart& a, const Call& call) {
  return finished(call, "sample_part", run_part(problem_of(a), call.stream(), call.device().id));
}
rlk_code merge(const SampleMerge& a, const Call& call) {
  return finished(call, "sample_merge", run_merge(problem_of(a), call.stream(), call.device().id));
}

constexpr Facts kFacts =
    portable_facts("a block a row, of few rows eight; integer histograms", "sample/philox-g1");
constexpr Facts kMergeFacts =
    portable_facts("a block a row adds the bins of all parts", "sample/philox-g1", RLK_I64);

constexpr rlk_implementation kImplementations[] = {
    implement<Sample, draw, nullptr, workspace<Sample>>(kFacts),
    implement<SampleVerify, verify, nullptr, workspace<SampleVerify>>(kFacts),
    implement<SamplePart, part>(kFacts), implement<SampleMerge, merge>(kMergeFacts)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::sample
