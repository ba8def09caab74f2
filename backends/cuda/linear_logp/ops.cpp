// linear_logp and its gradients on Hopper:
//
//   cuda.sm90        sm90/t25k16/lse128/l8, backward .../tree8
//   cuda.sm90_fused  the same bits: logits of many rows stay in registers (tiles.h)
//
// A panel of logits at a time by what is fastest for lm_head's products there, which logp's portable kernels take up. A panel
// is a leaf of 2048 rows: the weight is read once for so many, and tiles of 128 x 256 fill the GPU nine times. logp's kernels
// are bound by their exponentials, so that a panel need not stay in L2.
#include "cuda/device.hpp"
#include "cuda/linear_logp/gradients.hpp"
#include "cuda/lm_head/views.hpp"

namespace rlk::cuda {
namespace {

using namespace linear_logp;

constexpr Limits kPanels{.rows = 2048, .cached = std::int64_t{160} << 20};

template <bool Fused>
rlk_code run(const LinearLogp& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  const Hopper kernels(call, Fused);
  return simt::finished(call, "linear_logp",
                        simt::linear_logp::forward(a, kernels.behind(), kernels, kPanels));
}
template <bool Fused>
rlk_code run(const LinearLogpBwd& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  return Gradients(a, call, Fused).run();
}

std::uint64_t workspace(const LinearLogp& a, const rlk_request&) {
  return Hopper::kOwn + simt::linear_logp::room_of(a, kPanels);
}
std::uint64_t workspace(const LinearLogpBwd& a, const rlk_request&) { return Gradients::bytes(a); }

// Products take rows of any stride, but none that is broadcast: neither TMA nor cuBLASLt does.
template <class Args>
rlk_verdict supports_rows(const Args& a, const rlk_request&) {
  const rlk_verdict v = lm_head::check_rows(a.hidden, 0);
  return v.code == RLK_OK ? lm_head::check_rows(a.weight, 1) : v;
}

rlk_verdict supports(const LinearLogpBwd& a, const rlk_request& request) {
  if (const rlk_verdict v = supports_rows(a, request); v.code != RLK_OK) return v;
  if (a.d_weight && a.d_weight_before)
    if (const rlk_verdict v = lm_head::check_rows(a.d_weight_before, LinearLogpBwd::Slot::d_weight_before);
        v.code != RLK_OK)
      return v;
  if (a.hidden.dim(0) == 0 || a.hidden.dim(1) == 0 || a.weight.dim(0) == 0) return refuse("an empty product");
  // The weight's gradient is copied by TMA where there are many rows, so it always is asked to be one that may be.
  return lm_head::check_aligned(lm_head::operand(a.hidden, true), lm_head::operand(a.weight, true));
}

template <bool Fused>
constexpr Facts facts(const char* arithmetic) {
  return {.id = Fused ? "cuda.sm90_fused" : "cuda.sm90",
          .doc = Fused ? "logits on Hopper's tensor cores, of many rows summed in registers"
                       : "a panel of lm_head's logits on Hopper's tensor cores at a time",
          .priority = Fused ? 290 : 300,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16 | RLK_F16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
          .device_type = kDLCUDA,
          .min_arch = 90,
          .max_arch = 90};
}

template <class Args, bool Fused>
constexpr rlk_code (*kRun)(const Args&, const Call&) = run<Fused>;
template <class Args>
constexpr std::uint64_t (*kWorkspace)(const Args&, const rlk_request&) = workspace;

template <bool Fused>
constexpr rlk_implementation kForward =
    implement<LinearLogp, kRun<LinearLogp, Fused>, supports_rows<LinearLogp>, kWorkspace<LinearLogp>>(
        facts<Fused>("sm90/t25k16/lse128/l8"));
template <bool Fused>
constexpr rlk_implementation kBackward =
    implement<LinearLogpBwd, kRun<LinearLogpBwd, Fused>, supports, kWorkspace<LinearLogpBwd>>(
        facts<Fused>("sm90/t25k16/lse128/l8/tree8"));

}  // namespace

extern const rlk_implementation linear_logp_sm90, linear_logp_bwd_sm90, linear_logp_sm90_fused,
    linear_logp_bwd_sm90_fused;
constinit const rlk_implementation linear_logp_sm90 = kForward<false>;
constinit const rlk_implementation linear_logp_bwd_sm90 = kBackward<false>;
constinit const rlk_implementation linear_logp_sm90_fused = kForward<true>;
constinit const rlk_implementation linear_logp_bwd_sm90_fused = kBackward<true>;

}  // namespace rlk::cuda
