// linear_logp and its gradients on any GPU by the portable kernels of lm_head and logp: the bits of the native backend.
#include "simt/linear/launchers.hpp"
#include "simt/linear_logp/run.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::linear_logp {
namespace {

struct Started {
  void* stream;
  int device;
  const char* product(const Product& p) const {
    return p.rows == 0 || p.cols == 0 ? nullptr : linear::run(p, stream, device);
  }
  const char* fold(const Problem& p, const Panel& panel, State* states, float* targets) const {
    return logp::run_fold(p, panel, states, targets, stream, device);
  }
  const char* finish(const Problem& p, State* states, const float* targets) const {
    return logp::run_finish(p, states, targets, stream, device);
  }
  const char* count_bad(const Problem& p) const { return logp::run_count(p, stream, device); }
  const char* gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                       const State* states) const {
    return logp::run_gradient(p, panel, to, columns, states, stream, device);
  }
};
Started started(const Call& call) { return {call.stream(), call.device().id}; }

rlk_code run(const LinearLogp& a, const Call& call) {
  return finished(call, "linear_logp", forward(a, call.workspace().data(), started(call)));
}
rlk_code run_backward(const LinearLogpBwd& a, const Call& call) {
  return finished(call, "linear_logp_bwd", backward(a, call.workspace().data(), started(call)));
}
template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request&) {
  return room_of(a);
}

constexpr Facts kFacts = portable_facts("a panel of lm_head's logits at a time", "fma32/kb1024/lse128/l8");

constexpr rlk_implementation kImplementations[] = {
    implement<LinearLogp, run, nullptr, workspace<LinearLogp>>(kFacts),
    implement<LinearLogpBwd, run_backward, nullptr, workspace<LinearLogpBwd>>(kFacts)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::linear_logp
