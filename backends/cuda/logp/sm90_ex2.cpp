// logp and its gradient on Hopper by the special function units' exponential: sm90/ex2/lse2048/l8.
#include "cuda/logp/sm90_ex2.h"

#include "arithmetic/logp/bind.hpp"
#include "cuda/device.hpp"
#include "simt/portable.hpp"

namespace rlk::cuda {
namespace {

using lse128::problem_of;

std::uint64_t workspace(const Logp& a, const rlk_request&) {
  return static_cast<std::uint64_t>(simt::logp::states_bytes(problem_of(a)));
}
std::uint64_t workspace(const LogpBwd& a, const rlk_request&) {
  return a.stats ? 0 : static_cast<std::uint64_t>(simt::logp::states_bytes(problem_of(a)));
}

// Sums of the leaves, then what logp's portable kernels make of them.
lse128::State* states_of(const Call& call) {
  return reinterpret_cast<lse128::State*>(call.workspace().data());
}
const char* forward(const lse128::Problem& p, const Call& call) {
  if (const char* error = logp::run_fold(p, simt::logp::whole(p), p.count, states_of(call), nullptr,
                                         call.stream(), call.device().id))
    return error;
  return simt::logp::run_finish(p, states_of(call), nullptr, call.stream(), call.device().id);
}
rlk_code run(const Logp& a, const Call& call) {
  return simt::finished(call, "logp", forward(problem_of(a), call));
}
rlk_code run(const LogpBwd& a, const Call& call) {
  const lse128::Problem p = problem_of(a);
  const char* error = p.given ? nullptr : forward(p, call);
  if (error == nullptr)
    error = logp::run_gradient(p, simt::logp::whole(p), p.d_logits, p.columns, states_of(call), call.stream(),
                               call.device().id);
  return simt::finished(call, "logp_bwd", error);
}

// Below the portable kernels: what linear_logp and sample give unasked has lse128/l8's bits, and logp is to have theirs.
constexpr Facts facts(const char* doc) {
  return {.id = "cuda.sm90_ex2",
          .doc = doc,
          .priority = 90,
          .arithmetic = "sm90/ex2/lse2048/l8",
          .dtypes = kFloats,
          .traits = kPinned | RLK_CAPTURE_SAFE,
          .device_type = kDLCUDA,
          .min_arch = 90,
          .max_arch = 90};
}
template <class Args>
constexpr rlk_code (*kRun)(const Args&, const Call&) = run;
template <class Args>
constexpr std::uint64_t (*kWorkspace)(const Args&, const rlk_request&) = workspace;

}  // namespace

extern const rlk_implementation logp_sm90_ex2, logp_bwd_sm90_ex2;
constinit const rlk_implementation logp_sm90_ex2 = implement<Logp, kRun<Logp>, nullptr, kWorkspace<Logp>>(
    facts("a warp for each row and leaf, exponentials by the special function units"));
constinit const rlk_implementation logp_bwd_sm90_ex2 =
    implement<LogpBwd, kRun<LogpBwd>, nullptr, kWorkspace<LogpBwd>>(
        facts("32 entries a thread, exponentials by the special function units"));

}  // namespace rlk::cuda
