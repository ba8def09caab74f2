// logp, its gradient and the joining of shards on any GPU by the portable kernels: the bits of the native backend.
#include "arithmetic/logp/bind.hpp"
#include "simt/logp/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::logp {
namespace {

using lse128::merge_of;
using lse128::problem_of;

std::uint64_t states(const Logp& a, const rlk_request&) {
  return static_cast<std::uint64_t>(states_bytes(problem_of(a)));
}
std::uint64_t states_backward(const LogpBwd& a, const rlk_request&) {
  return a.stats ? 0 : static_cast<std::uint64_t>(states_bytes(problem_of(a)));
}

rlk_code forward(const Logp& a, const Call& call) {
  return finished(call, "logp",
                  run_forward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
rlk_code backward(const LogpBwd& a, const Call& call) {
  return finished(call, "logp_bwd",
                  run_backward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}
rlk_code merge(const LogpMerge& a, const Call& call) {
  return finished(call, "logp_merge", run_merge(merge_of(a), call.stream(), call.device().id));
}

constexpr Facts facts(const char* doc, std::uint32_t dtypes = kFloats) {
  return portable_facts(doc, "lse128/l8", dtypes);
}

constexpr rlk_implementation kImplementations[] = {
    implement<Logp, forward, nullptr, states>(facts("a block for each row and leaf")),
    implement<LogpBwd, backward, nullptr, states_backward>(facts("a thread for every four entries")),
    implement<LogpMerge, merge>(facts("a thread a row", RLK_F32)),
};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::logp
