// attention_part on Hopper: what the kernel takes, and the way from the typed arguments to it; an implementation for every split.
#include "arithmetic/attention/bind.hpp"
#include "cuda/attention/checks.hpp"
#include "cuda/attention/sm90.h"
#include "cuda/device.hpp"

namespace rlk::cuda {
namespace {

using attention::aligned, attention::kMost;
using attn128::Problem;
using attn128::problem_of;

template <int S>
rlk_verdict supports(const AttentionPart& a, const rlk_request&) {
  if (const rlk_verdict v = attention::check_inputs<S>(a); v.code != RLK_OK) return v;
  const auto partials = reinterpret_cast<std::intptr_t>(a.partials.data<char>());
  if (!aligned(a.partials, 8))
    return refuse("partials starts {0} bytes behind a multiple of {1}", {partials % 8, 8},
                  "align partials to 8 bytes");
  const Problem p = problem_of(a);
  if (const rlk_verdict v = attention::check_sizes(a, p); v.code != RLK_OK) return v;
  if (p.splits() > attention::kMostSplits)
    return refuse("there is room for {0} splits of keys, the grid has {1}",
                  {p.splits(), attention::kMostSplits});
  if (p.window > kMost) return refuse("window is {0}, the kernel has {1}", {p.window, kMost});
  return kAccept;
}

template <int S>
rlk_code run(const AttentionPart& a, const Call& call) {
  if (a.split != S) return call.fail(RLK_UNSUPPORTED, "attention_part: split is not this implementation's");
  const DeviceGuard guard(call.device().id);
  if (guard.error() != cudaSuccess) return check(call, "attention_part", guard.error());
  return check(call, "attention_part", attention::launch_part(problem_of(a), stream_of(call)));
}

template <int S>
constexpr rlk_implementation with_split(const char* id, const char* arithmetic) {
  return implement<AttentionPart, run<S>, supports<S>>(attention::facts<true>(
      id, "TMA and wgmma; 64 or 128 rows and a split share a tile of 128 keys", arithmetic));
}

}  // namespace

extern const rlk_implementation attention_part_sm90_ex2_s1024, attention_part_sm90_ex2_s512,
    attention_part_sm90_ex2_s2048, attention_part_sm90_ex2_s4096, attention_part_sm90_ex2_snone;
constinit const rlk_implementation attention_part_sm90_ex2_s1024 =
    with_split<1024>("cuda.sm90_ex2_s1024", "sm90/t25k16/ex2/h8/attn128/s1024");
constinit const rlk_implementation attention_part_sm90_ex2_s512 =
    with_split<512>("cuda.sm90_ex2_s512", "sm90/t25k16/ex2/h8/attn128/s512");
constinit const rlk_implementation attention_part_sm90_ex2_s2048 =
    with_split<2048>("cuda.sm90_ex2_s2048", "sm90/t25k16/ex2/h8/attn128/s2048");
constinit const rlk_implementation attention_part_sm90_ex2_s4096 =
    with_split<4096>("cuda.sm90_ex2_s4096", "sm90/t25k16/ex2/h8/attn128/s4096");
constinit const rlk_implementation attention_part_sm90_ex2_snone =
    with_split<0>("cuda.sm90_ex2_snone", "sm90/t25k16/ex2/h8/attn128/snone");

}  // namespace rlk::cuda
