// attention on Hopper: what the kernel takes, and the way from the typed arguments to it; an implementation for every split.
#include "cuda/attention/sm90.h"

#include "arithmetic/attention/bind.hpp"
#include "cuda/attention/checks.hpp"
#include "cuda/device.hpp"

namespace rlk::cuda {
namespace {

using attention::aligned;
using attn128::Problem;
using attn128::problem_of;

template <int S>
rlk_verdict supports(const Attention& a, const rlk_request&) {
  if (const rlk_verdict v = attention::check_inputs<S>(a); v.code != RLK_OK) return v;
  if (!aligned(a.out, a.out.dtype() == DType::f32 ? 8 : 4))
    return refuse("rows of out that do not start on two elements", {}, "align every row to two elements");
  const Problem p = problem_of(a);
  if (const rlk_verdict v = attention::check_sizes(a, p); v.code != RLK_OK) return v;
  if (const std::int64_t parts = attention::latent_parts(p); parts > attention::kMostParts)
    return refuse("D={0}: sums of splits are {1} floats, the workspace holds {2}",
                  {p.width, parts, attention::kMostParts}, "bring fewer queries in a call");
  return kAccept;
}

std::uint64_t workspace(const Attention& a, const rlk_request&) {
  return static_cast<std::uint64_t>(attention::workspace_bytes(problem_of(a)));
}

template <int S>
rlk_code run(const Attention& a, const Call& call) {
  if (a.split != S) return call.fail(RLK_UNSUPPORTED, "attention: split is not this implementation's");
  const DeviceGuard guard(call.device().id);
  if (guard.error() != cudaSuccess) return check(call, "attention", guard.error());
  return check(call, "attention",
               attention::launch_forward(problem_of(a), call.workspace().data(), stream_of(call)));
}

template <int S>
constexpr rlk_implementation with_split(const char* id, const char* arithmetic) {
  return implement<Attention, run<S>, supports<S>, workspace>(
      attention::facts<true>(id, "TMA, wgmma or mma; 8 to 192 rows share a tile of 128 keys", arithmetic));
}

}  // namespace

extern const rlk_implementation attention_sm90_ex2_s1024, attention_sm90_ex2_s512, attention_sm90_ex2_s2048,
    attention_sm90_ex2_s4096, attention_sm90_ex2_snone;
constinit const rlk_implementation attention_sm90_ex2_s1024 =
    with_split<1024>("cuda.sm90_ex2_s1024", "sm90/t25k16/ex2/h8/attn128/s1024");
constinit const rlk_implementation attention_sm90_ex2_s512 =
    with_split<512>("cuda.sm90_ex2_s512", "sm90/t25k16/ex2/h8/attn128/s512");
constinit const rlk_implementation attention_sm90_ex2_s2048 =
    with_split<2048>("cuda.sm90_ex2_s2048", "sm90/t25k16/ex2/h8/attn128/s2048");
constinit const rlk_implementation attention_sm90_ex2_s4096 =
    with_split<4096>("cuda.sm90_ex2_s4096", "sm90/t25k16/ex2/h8/attn128/s4096");
constinit const rlk_implementation attention_sm90_ex2_snone =
    with_split<0>("cuda.sm90_ex2_snone", "sm90/t25k16/ex2/h8/attn128/snone");

}  // namespace rlk::cuda
