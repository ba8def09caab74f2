// attention_bwd on Hopper: what the kernels take, and the way from the typed arguments to them; an implementation for each
// exponential.
#include <algorithm>

#include "arithmetic/attention/bind.hpp"
#include "cuda/attention/bwd.h"
#include "cuda/attention/checks.hpp"
#include "cuda/device.hpp"

namespace rlk::cuda {
namespace {

using attention::aligned;
using attn128::Backward;
using attn128::backward_of;

rlk_verdict supports(const AttentionBwd& a, const rlk_request&) {
  if (a.d_out.dtype() != a.q.dtype())
    return refuse("d_out is fp32, tensor cores take it in q's dtype", {}, "round d_out to q's dtype");
  const Backward g = backward_of(a);
  const attn128::Problem& p = g.p;
  if (std::max(p.width, p.value_width) > attention::kMostBackwardWidth)
    return refuse("D={0}, Dv={1}: tiles are cut for widths up to {2}",
                  {p.width, p.value_width, attention::kMostBackwardWidth});
  if ((p.group & (p.group - 1)) == 0 && p.group > attention::kMostGroup)
    return refuse("{0} heads share a key, a thread joins {1}", {p.group, attention::kMostGroup});
  if (!aligned(a.q, 16) || !aligned(a.k, 16) || !aligned(a.v, 16) || !aligned(a.d_out, 16))
    return refuse("rows of q, k, v or d_out that do not start on 16 bytes", {},
                  "align every row to 16 bytes");
  const auto on_four = [](const auto& t) { return !t || aligned(t, t.dtype() == DType::f32 ? 16 : 8); };
  if (!on_four(a.out) || !on_four(a.d_q) || !on_four(a.d_k) || !on_four(a.d_v))
    return refuse("rows of out, d_q, d_k or d_v that do not start on four elements", {},
                  "align every row to four elements");
  // A grid has a block for eight rows of q, or for four channels of 256 threads.
  using attention::kMost;
  const auto rows = [](const auto& t) { return t.numel() / t.dim(-1); };
  if (rows(a.q) > kMost || rows(a.k) > kMost || p.sequences * g.all_heads() > kMost)
    return refuse("q has {0} rows, k has {1}, in {2} sequences: more than 2^30",
                  {rows(a.q), rows(a.k), p.sequences});
  return kAccept;
}

std::uint64_t workspace(const AttentionBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(attention::backward_workspace_bytes(backward_of(a)));
}

template <bool Unit>
rlk_code run(const AttentionBwd& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  if (guard.error() != cudaSuccess) return check(call, "attention_bwd", guard.error());
  return check(call, "attention_bwd",
               attention::launch_backward<Unit>(backward_of(a), call.workspace().data(), stream_of(call)));
}

template <bool Unit>
constexpr rlk_implementation by(const char* id, const char* arithmetic) {
  return implement<AttentionBwd, run<Unit>, supports, workspace>(
      attention::facts<Unit>(id, "wgmma, a block takes 128 keys or queries after another", arithmetic));
}

}  // namespace

extern const rlk_implementation attention_bwd_sm90, attention_bwd_sm90_ex2;
constinit const rlk_implementation attention_bwd_sm90 = by<false>("cuda.sm90", "sm90/t25k16/attn128");
constinit const rlk_implementation attention_bwd_sm90_ex2 =
    by<true>("cuda.sm90_ex2", "sm90/t25k16/ex2/attn128");

}  // namespace rlk::cuda
