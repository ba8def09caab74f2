// linear_logp and its gradients on Hopper:
//
//   cuda.sm90       sm90/t25k16/lse128/l8, backward .../tree8
//   cuda.sm90_ex2   sm90/t25k16/ex2/lse2048/l8, backward .../tree8; on request, as logp's implementation of this name
//
// A panel of logits at a time by what is fastest for lm_head's products there, which logp's kernels take up: the portable ones,
// or those by the special function units' exponential. A panel is a leaf of 2048 rows: the weight is read once for so many, and
// tiles of 128 x 256 fill the GPU nine times. The portable kernels are bound by their exponentials, so that a panel need not
// stay in L2.
#include "cuda/device.hpp"
#include "cuda/linear_logp/gradients.hpp"
#include "cuda/lm_head/views.hpp"

namespace rlk::cuda {
namespace {

using namespace linear_logp;

constexpr Limits panels(By by) {
  return {.rows = 2048, .cached = std::int64_t{160} << 20, .tile = tile_of(by)};
}

template <By B>
rlk_code run(const LinearLogp& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  const Hopper kernels(call, B);
  return simt::finished(call, "linear_logp",
                        simt::linear_logp::forward(a, kernels.behind(), kernels, panels(B)));
}
template <By B>
rlk_code run_backward(const LinearLogpBwd& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  return Gradients(a, call, B).run();
}

template <By B>
std::uint64_t workspace(const LinearLogp& a, const rlk_request&) {
  return Hopper::kOwn + simt::linear_logp::room_of(a, panels(B));
}
template <By B>
std::uint64_t workspace_backward(const LinearLogpBwd& a, const rlk_request&) {
  return Gradients::bytes(a, B);
}

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

constexpr Facts facts(const char* id, const char* doc, std::int32_t priority, const char* arithmetic) {
  return {.id = id,
          .doc = doc,
          .priority = priority,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16 | RLK_F16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
          .device_type = kDLCUDA,
          .min_arch = 90,
          .max_arch = 90};
}

constexpr Facts portable(const char* arithmetic) {
  return facts("cuda.sm90", "a panel of lm_head's logits on Hopper's tensor cores at a time", 300,
               arithmetic);
}
// Below the portable kernels, as logp's: what is not asked for has sample's bits.
constexpr Facts by_unit(const char* arithmetic) {
  return facts("cuda.sm90_ex2", "the same with exponentials by the special function units", 90, arithmetic);
}

template <By B>
constexpr rlk_implementation forward(const Facts& f) {
  return implement<LinearLogp, run<B>, supports_rows<LinearLogp>, workspace<B>>(f);
}
template <By B>
constexpr rlk_implementation backward(const Facts& f) {
  return implement<LinearLogpBwd, run_backward<B>, supports, workspace_backward<B>>(f);
}

}  // namespace

extern const rlk_implementation linear_logp_sm90, linear_logp_bwd_sm90, linear_logp_sm90_ex2,
    linear_logp_bwd_sm90_ex2;
constinit const rlk_implementation linear_logp_sm90 =
    forward<By::portable>(portable("sm90/t25k16/lse128/l8"));
constinit const rlk_implementation linear_logp_bwd_sm90 =
    backward<By::portable>(portable("sm90/t25k16/lse128/l8/tree8"));
constinit const rlk_implementation linear_logp_sm90_ex2 =
    forward<By::unit>(by_unit("sm90/t25k16/ex2/lse2048/l8"));
constinit const rlk_implementation linear_logp_bwd_sm90_ex2 =
    backward<By::unit>(by_unit("sm90/t25k16/ex2/lse2048/l8/tree8"));

}  // namespace rlk::cuda
