// sample and its relatives on Hopper with log-probabilities by the special function units' exponential:
//
//   cuda.sm90_ex2   sample/philox-g1/ex2/lse2048/l8: tokens, counts and sets of sample/philox-g1, log-probabilities of
//                   sm90/ex2/lse2048/l8. sample_merge joins the parts of either id.
#include "cuda/sample/sm90_ex2.h"

#include "arithmetic/sample/bind.hpp"
#include "cuda/device.hpp"
#include "cuda/logp/sm90_ex2.h"
#include "simt/portable.hpp"
#include "simt/sample/launchers.hpp"

namespace rlk::cuda {
namespace {

using sampling::Problem;
using sampling::problem_of;

struct OnDevice {
  void* stream;
  int device;
  const char* draw(const Problem& p, void* workspace) const {
    return simt::sample::run(p, workspace, stream, device);
  }
  const char* part(const Problem& p) const { return simt::sample::run_part(p, stream, device); }
  const char* note(const Problem& p, const sample::Sums& sums) const {
    return sample::run_note(p, sums, stream, device);
  }
  const char* fold(const lse128::Problem& p, lse128::State* states) const {
    return logp::run_fold(p, simt::logp::whole(p), p.count, states, nullptr, stream, device);
  }
  const char* finish(const Problem& p, const sample::Sums& sums) const {
    return sample::run_finish(p, sums, stream, device);
  }
};

std::int64_t drawing(const Problem& p) { return p.partials ? 0 : simt::sample::workspace_bytes(p); }

template <class Args>
rlk_code run(const Args& a, const Call& call) {
  const Problem p = problem_of(a);
  const sample::Sums sums(p, drawing(p), call.workspace().data());
  return simt::finished(call, Args::kName, sample::run(p, sums, OnDevice{call.stream(), call.device().id}));
}
template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request&) {
  const Problem p = problem_of(a);
  return sample::workspace_bytes(p, drawing(p));
}

// Below the portable kernels, as logp's.
constexpr Facts kFacts{.id = "cuda.sm90_ex2",
                       .doc = "the portable kernels' tokens, sums by the special function units",
                       .priority = 90,
                       .arithmetic = "sample/philox-g1/ex2/lse2048/l8",
                       .dtypes = kFloats,
                       .traits = kPinned | RLK_CAPTURE_SAFE,
                       .device_type = kDLCUDA,
                       .min_arch = 90,
                       .max_arch = 90};

}  // namespace

extern const rlk_implementation sample_sm90_ex2, sample_verify_sm90_ex2, sample_part_sm90_ex2;
constinit const rlk_implementation sample_sm90_ex2 =
    implement<Sample, run<Sample>, nullptr, workspace<Sample>>(kFacts);
constinit const rlk_implementation sample_verify_sm90_ex2 =
    implement<SampleVerify, run<SampleVerify>, nullptr, workspace<SampleVerify>>(kFacts);
constinit const rlk_implementation sample_part_sm90_ex2 =
    implement<SamplePart, run<SamplePart>, nullptr, workspace<SamplePart>>(kFacts);

}  // namespace rlk::cuda
