// KDA on a GPU by the portable kernels: every option, any GPU, the bits of the native backend.
#include "arithmetic/kda/bind.hpp"
#include "simt/kda/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::kda {
namespace {

using namespace rlk::kda;

template <class Args>
rlk_verdict supports(const Args& a, const rlk_request&) {
  return check(a);
}

// The kernels read and write the cache by fours.
rlk_verdict supports_step(const KdaStep& a, const rlk_request&) {
  const States cache = states_of(a.cache);
  if (reinterpret_cast<std::uintptr_t>(cache.data) % 16 != 0 || cache.row % 4 != 0 || cache.head % 4 != 0)
    return refuse("a cache that does not begin at multiples of 16 bytes", {}, "align it and its strides");
  return check(a);
}

std::uint64_t forward_bytes(const KdaFwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(forward_workspace(problem_of(a)));
}
std::uint64_t backward_bytes(const KdaBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(backward_workspace(problem_of(a)));
}
std::uint64_t step_bytes(const KdaStep& a, const rlk_request&) {
  return static_cast<std::uint64_t>(step_workspace(step_of(a)));
}
std::uint64_t gate_backward_bytes(const KdaGateBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(gate_backward_workspace(gate_problem_of(a)));
}

rlk_code forward(const KdaFwd& a, const Call& call) {
  return finished(call, "kda_fwd",
                  run_forward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
rlk_code backward(const KdaBwd& a, const Call& call) {
  return finished(call, "kda_bwd",
                  run_backward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
rlk_code decode(const KdaDecode& a, const Call& call) {
  return finished(call, "kda_decode", run_decode(problem_of(a), call.stream(), call.device().id));
}
rlk_code step(const KdaStep& a, const Call& call) {
  return finished(call, "kda_step",
                  run_step(step_of(a), call.workspace().data(), call.stream(), call.device().id));
}
rlk_code gate(const KdaGate& a, const Call& call) {
  return finished(call, "kda_gate", run_gate(gate_problem_of(a), call.stream(), call.device().id));
}
rlk_code gate_backward(const KdaGateBwd& a, const Call& call) {
  return finished(
      call, "kda_gate_bwd",
      run_gate_backward(gate_problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}

constexpr Facts facts(const char* doc) {
  return {.id = kId,
          .doc = doc,
          .priority = 100,
          .arithmetic = "fma32/kda",
          .dtypes = RLK_F32 | RLK_BF16 | RLK_F16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
          .device_type = kDevice};
}

constexpr rlk_implementation kImplementations[] = {
    implement<KdaFwd, forward, supports<KdaFwd>, forward_bytes>(
        facts("chunks in fp32, one block per (sequence, head)")),
    implement<KdaBwd, backward, supports<KdaBwd>, backward_bytes>(
        facts("chunks in fp32, one block per (sequence, head)")),
    implement<KdaDecode, decode, supports<KdaDecode>>(
        facts("one token in fp32, the state read once and written once")),
    implement<KdaStep, step, supports_step, step_bytes>(
        facts("rows of the open chunk in fp32, one block per (sequence, head)")),
    implement<KdaGate, gate, supports<KdaGate>>(facts("the gate in fp32")),
    implement<KdaGateBwd, gate_backward, supports<KdaGateBwd>, gate_backward_bytes>(
        facts("the gate's gradients in fp32, parameter sums in fp64")),
};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::kda
