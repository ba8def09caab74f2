// The KDA ops of a GPU backend on its launchers, compiled by the host compiler. A backend gives its Portable
// and the launchers: Backend::kDevice, kId and launchers().
#pragma once

#include <string>

#include "arithmetic/kda/bind.hpp"
#include "simt/kda/launchers.hpp"

namespace rlk::kda::gpu {

template <class Args>
rlk_verdict supports(const Args& a, const rlk_request&) {
  return check(a);
}

template <class Backend, class Args>
std::uint64_t forward_workspace(const Args& a, const rlk_request&) {
  return static_cast<std::uint64_t>(Backend::launchers().forward_bytes(problem_of(a)));
}
template <class Backend, class Args>
std::uint64_t backward_workspace(const Args& a, const rlk_request&) {
  return static_cast<std::uint64_t>(Backend::launchers().backward_bytes(problem_of(a)));
}
template <class Backend, class Args>
std::uint64_t gate_backward_workspace(const Args& a, const rlk_request&) {
  return static_cast<std::uint64_t>(Backend::launchers().gate_backward_bytes(gate_problem_of(a)));
}

inline rlk_code finished(const Call& call, const char* op, const char* error) {
  return error ? call.fail(RLK_BACKEND_ERROR, std::string(op) + ": " + error) : RLK_OK;
}

template <class Backend>
rlk_code run_forward(const KdaFwd& a, const Call& call) {
  return finished(
      call, "kda_fwd",
      Backend::launchers().forward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
template <class Backend>
rlk_code run_backward(const KdaBwd& a, const Call& call) {
  return finished(
      call, "kda_bwd",
      Backend::launchers().backward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
template <class Backend>
rlk_code run_decode(const KdaDecode& a, const Call& call) {
  return finished(call, "kda_decode",
                  Backend::launchers().decode(problem_of(a), nullptr, call.stream(), call.device().id));
}
template <class Backend>
rlk_code run_gate(const KdaGate& a, const Call& call) {
  return finished(call, "kda_gate",
                  Backend::launchers().gate(gate_problem_of(a), nullptr, call.stream(), call.device().id));
}
template <class Backend>
rlk_code run_gate_backward(const KdaGateBwd& a, const Call& call) {
  return finished(call, "kda_gate_bwd",
                  Backend::launchers().gate_backward(gate_problem_of(a), call.workspace().data(),
                                                     call.stream(), call.device().id));
}

template <class Backend>
constexpr Facts facts(const char* doc) {
  return {.id = Backend::kId,
          .doc = doc,
          .priority = 100,
          .arithmetic = "fma32/kda",
          .dtypes = RLK_F32 | RLK_BF16 | RLK_F16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
          .device_type = Backend::kDevice};
}

template <class Backend>
constexpr rlk_implementation forward() {
  return implement<KdaFwd, run_forward<Backend>, supports<KdaFwd>, forward_workspace<Backend, KdaFwd>>(
      facts<Backend>("chunks in fp32, one block per (sequence, head)"));
}
template <class Backend>
constexpr rlk_implementation backward() {
  return implement<KdaBwd, run_backward<Backend>, supports<KdaBwd>, backward_workspace<Backend, KdaBwd>>(
      facts<Backend>("chunks in fp32, one block per (sequence, head)"));
}
template <class Backend>
constexpr rlk_implementation decode() {
  return implement<KdaDecode, run_decode<Backend>, supports<KdaDecode>>(
      facts<Backend>("one token in fp32, the state read once and written once"));
}
template <class Backend>
constexpr rlk_implementation gate() {
  return implement<KdaGate, run_gate<Backend>, supports<KdaGate>>(facts<Backend>("the gate in fp32"));
}
template <class Backend>
constexpr rlk_implementation gate_backward() {
  return implement<KdaGateBwd, run_gate_backward<Backend>, supports<KdaGateBwd>,
                   gate_backward_workspace<Backend, KdaGateBwd>>(
      facts<Backend>("the gate's gradients in fp32, parameter sums in fp64"));
}

}  // namespace rlk::kda::gpu
