// linear_logp and its gradients on the CPU (composed.hpp), an implementation per chain of lm_head and instruction set:
//
//   native                    fma32/kb1024/lse128/l8
//   native.kb256              fma32/kb256/lse128/l8
//   native.amx                amx/k32/lse128/l8
//   native.replay_amx         the same on other processors
//   native.avx512bf16         avx512bf16/kb1024/lse128/l8
//   native.replay_avx512bf16  the same on other processors
//   native.replay_sm90        sm90/t25k16/lse128/l8
//   native.replay_sm90_ex2    sm90/t25k16/ex2/lse2048/l8
//
// The gradients' ids end in /tree8: their products are linear_bwd's.
#include "native/linear_logp/composed.hpp"

namespace rlk::native {

extern const Levels lm_head_fma32, lm_head_kb256, linear_bwd_tree, lm_head_replay_amx, linear_bwd_replay_amx;
extern const rlk_implementation lm_head_amx, linear_bwd_amx, lm_head_replay_sm90_avx512,
    lm_head_replay_sm90_scalar, linear_bwd_replay_sm90_avx512, linear_bwd_replay_sm90_scalar,
    lm_head_avx512bf16, lm_head_replay_avx512bf16_avx2, lm_head_replay_avx512bf16_scalar,
    linear_bwd_avx512bf16, linear_bwd_replay_avx512bf16_avx2, linear_bwd_replay_avx512bf16_scalar;

namespace {

using Get = const rlk_implementation& (*)();

template <const Levels* All, Isa I>
const rlk_implementation& at_level() {
  return (*All)[static_cast<std::size_t>(I)];
}
template <const rlk_implementation* Only>
const rlk_implementation& only() {
  return *Only;
}

// What lm_head, or linear_bwd, says to these operands; its arguments are not ours.
template <class Args>
rlk_verdict verdict(const rlk_implementation& head, const Args& call, const rlk_request& r) {
  if (!head.supports) return kAccept;
  rlk_verdict v = head.supports(reinterpret_cast<const rlk_slot*>(&call), &r);
  v.argument = -1;
  return v;
}

template <const logp::Engine& Rows, Get Head, Get Gradients = nullptr, bool Narrows = false>
struct FormsBy {
  static linear_logp::Products products() { return {Head(), Gradients(), Narrows}; }
  static rlk_verdict supports(const LinearLogp& a, const rlk_request& r) {
    return verdict(Head(), LmHead{.hidden = a.hidden, .weight = a.weight}, r);
  }
  static std::uint64_t workspace(const LinearLogp& a, const rlk_request& r) {
    return linear_logp::workspace(a, Rows, Head(), r);
  }
  static rlk_code run(const LinearLogp& a, const Call& call) {
    return linear_logp::run(a, call, Rows, Head());
  }
  static rlk_verdict supports_bwd(const LinearLogpBwd& a, const rlk_request& r) {
    const rlk_verdict v = verdict(Head(), LmHead{.hidden = a.hidden, .weight = a.weight}, r);
    if (v.code != RLK_OK) return v;
    const linear_logp::BackwardCut cut(a);
    std::int64_t shape[] = {a.hidden.dim(0), 0};
    const DLTensor d_logits{nullptr, {kDLCPU, 0}, 2, dl_type(products().slope(cut)), shape, nullptr, 0};
    LinearBwd b{.d_y = d_logits, .x = a.hidden, .weight = a.weight};
    b.d_weight_before = a.d_weight_before, b.d_bias_before = a.d_bias_before;
    return verdict(Gradients(), b, r);
  }
  static std::uint64_t workspace_bwd(const LinearLogpBwd& a, const rlk_request& r) {
    return linear_logp::workspace(a, Rows, products(), r);
  }
  static rlk_code run_bwd(const LinearLogpBwd& a, const Call& call) {
    return linear_logp::run(a, call, Rows, products());
  }

  static constexpr rlk_implementation forward(const Facts& f) {
    return implement<LinearLogp, run, supports, workspace>(f);
  }
  static constexpr rlk_implementation backward(const Facts& f) {
    return implement<LinearLogpBwd, run_bwd, supports_bwd, workspace_bwd>(f);
  }
};
// With logp's tiles of an instruction set.
template <Isa I, Get Head, Get Gradients = nullptr, bool Narrows = false>
using Forms = FormsBy<logp::engine_for(I), Head, Gradients, Narrows>;

constexpr Facts facts(const char* id, const char* arithmetic, std::int32_t priority, const char* doc) {
  return {.id = id,
          .doc = doc,
          .priority = priority,
          .arithmetic = arithmetic,
          .dtypes = kFloats,
          .traits = kPinned};
}
constexpr const char kPanels[] = "a panel of lm_head's logits at a time",
                     kBlocks[] = "the same by chains in blocks of 256",
                     kUnit[] = "a panel of lm_head's logits on Intel's matrix unit at a time",
                     kByPairs[] = "a panel of lm_head's logits by VDPBF16PS at a time";
constexpr Facts kFma32 = facts("", "fma32/kb1024/lse128/l8", 100, kPanels),
                kFma32Bwd = facts("", "fma32/kb1024/lse128/l8/tree8", 100, kPanels),
                kKb256 = facts("", "fma32/kb256/lse128/l8", 20, kBlocks),
                kKb256Bwd = facts("", "fma32/kb256/lse128/l8/tree8", 20, kBlocks);
constexpr Facts kAmx = amx_facts(kUnit, "amx/k32/lse128/l8"),
                kAmxBwd = amx_facts(kUnit, "amx/k32/lse128/l8/tree8");
constexpr Facts kPairs = pair_facts(kByPairs, "avx512bf16/kb1024/lse128/l8"),
                kPairsBwd = pair_facts(kByPairs, "avx512bf16/kb1024/lse128/l8/tree8");
constexpr Facts kPairReplay = pair_replay_facts("avx512bf16/kb1024/lse128/l8"),
                kPairReplayBwd = pair_replay_facts("avx512bf16/kb1024/lse128/l8/tree8");
constexpr Facts replay_facts(const char* arithmetic, std::int32_t priority, const char* doc) {
  return {.id = "",
          .doc = doc,
          .priority = priority,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16 | RLK_F16,
          .traits = kPinned};
}
constexpr const char kCore[] = "a Hopper tensor core's products on the CPU",
                     kCoreAndUnit[] = "the same, and the bits of Hopper's special function units";
constexpr Facts kReplay = replay_facts("sm90/t25k16/lse128/l8", 10, kCore),
                kReplayBwd = replay_facts("sm90/t25k16/lse128/l8/tree8", 10, kCore),
                kReplayEx2 = replay_facts("sm90/t25k16/ex2/lse2048/l8", 10, kCoreAndUnit),
                kReplayEx2Bwd = replay_facts("sm90/t25k16/ex2/lse2048/l8/tree8", 10, kCoreAndUnit);

}  // namespace

extern const Levels linear_logp_fma32, linear_logp_kb256, linear_logp_bwd_fma32, linear_logp_bwd_kb256;
constinit const Levels linear_logp_fma32 = by_level(
    []<Isa I>() { return Forms<I, at_level<&lm_head_fma32, I>>::forward(facts_at<"native", I>(kFma32)); });
constinit const Levels linear_logp_kb256 = by_level([]<Isa I>() {
  return Forms<I, at_level<&lm_head_kb256, I>>::forward(facts_at<"native.kb256", I>(kKb256));
});
constinit const Levels linear_logp_bwd_fma32 = by_level([]<Isa I>() {
  return Forms<I, at_level<&lm_head_fma32, I>, at_level<&linear_bwd_tree, I>>::backward(
      facts_at<"native", I>(kFma32Bwd));
});
constinit const Levels linear_logp_bwd_kb256 = by_level([]<Isa I>() {
  return Forms<I, at_level<&lm_head_kb256, I>, at_level<&linear_bwd_tree, I>>::backward(
      facts_at<"native.kb256", I>(kKb256Bwd));
});

extern const rlk_implementation linear_logp_amx, linear_logp_bwd_amx, linear_logp_replay_sm90_scalar,
    linear_logp_replay_sm90_avx512, linear_logp_bwd_replay_sm90_scalar, linear_logp_bwd_replay_sm90_avx512;
constinit const rlk_implementation linear_logp_amx = Forms<Isa::avx512, only<&lm_head_amx>>::forward(kAmx);
constinit const rlk_implementation linear_logp_bwd_amx =
    Forms<Isa::avx512, only<&lm_head_amx>, only<&linear_bwd_amx>, true>::backward(kAmxBwd);
constinit const rlk_implementation linear_logp_replay_sm90_scalar =
    Forms<Isa::scalar, only<&lm_head_replay_sm90_scalar>>::forward(
        facts_at<"native.replay_sm90", Isa::scalar>(kReplay));
constinit const rlk_implementation linear_logp_replay_sm90_avx512 =
    Forms<Isa::avx512, only<&lm_head_replay_sm90_avx512>>::forward(
        facts_at<"native.replay_sm90", Isa::avx512>(kReplay));

constinit const rlk_implementation linear_logp_bwd_replay_sm90_scalar =
    Forms<Isa::scalar, only<&lm_head_replay_sm90_scalar>, only<&linear_bwd_replay_sm90_scalar>,
          true>::backward(facts_at<"native.replay_sm90", Isa::scalar>(kReplayBwd));
constinit const rlk_implementation linear_logp_bwd_replay_sm90_avx512 =
    Forms<Isa::avx512, only<&lm_head_replay_sm90_avx512>, only<&linear_bwd_replay_sm90_avx512>,
          true>::backward(facts_at<"native.replay_sm90", Isa::avx512>(kReplayBwd));

// The product's vectors by instruction set; logp's part has one form.
template <Get Head, Get Gradients = nullptr>
using ByUnit = FormsBy<logp::kByUnit, Head, Gradients, true>;
extern const rlk_implementation linear_logp_replay_ex2_scalar, linear_logp_replay_ex2_avx512,
    linear_logp_bwd_replay_ex2_scalar, linear_logp_bwd_replay_ex2_avx512;
constinit const rlk_implementation linear_logp_replay_ex2_scalar =
    ByUnit<only<&lm_head_replay_sm90_scalar>>::forward(
        facts_at<"native.replay_sm90_ex2", Isa::scalar>(kReplayEx2));
constinit const rlk_implementation linear_logp_replay_ex2_avx512 =
    ByUnit<only<&lm_head_replay_sm90_avx512>>::forward(
        facts_at<"native.replay_sm90_ex2", Isa::avx512>(kReplayEx2));
constinit const rlk_implementation linear_logp_bwd_replay_ex2_scalar =
    ByUnit<only<&lm_head_replay_sm90_scalar>, only<&linear_bwd_replay_sm90_scalar>>::backward(
        facts_at<"native.replay_sm90_ex2", Isa::scalar>(kReplayEx2Bwd));
constinit const rlk_implementation linear_logp_bwd_replay_ex2_avx512 =
    ByUnit<only<&lm_head_replay_sm90_avx512>, only<&linear_bwd_replay_sm90_avx512>>::backward(
        facts_at<"native.replay_sm90_ex2", Isa::avx512>(kReplayEx2Bwd));

constexpr Facts kAmxReplay = amx_replay_facts("amx/k32/lse128/l8"),
                kAmxReplayBwd = amx_replay_facts("amx/k32/lse128/l8/tree8");
extern const Levels linear_logp_replay_amx, linear_logp_bwd_replay_amx;
constinit const Levels linear_logp_replay_amx = by_level([]<Isa I>() {
  return Forms<I, at_level<&lm_head_replay_amx, I>>::forward(facts_at<"native.replay_amx", I>(kAmxReplay));
});
constinit const Levels linear_logp_bwd_replay_amx = by_level([]<Isa I>() {
  return Forms<I, at_level<&lm_head_replay_amx, I>, at_level<&linear_bwd_replay_amx, I>, true>::backward(
      facts_at<"native.replay_amx", I>(kAmxReplayBwd));
});

extern const rlk_implementation linear_logp_avx512bf16, linear_logp_bwd_avx512bf16,
    linear_logp_replay_avx512bf16_avx2, linear_logp_replay_avx512bf16_scalar,
    linear_logp_bwd_replay_avx512bf16_avx2, linear_logp_bwd_replay_avx512bf16_scalar;
constinit const rlk_implementation linear_logp_avx512bf16 =
    Forms<Isa::avx512, only<&lm_head_avx512bf16>>::forward(kPairs);
constinit const rlk_implementation linear_logp_bwd_avx512bf16 =
    Forms<Isa::avx512, only<&lm_head_avx512bf16>, only<&linear_bwd_avx512bf16>, true>::backward(kPairsBwd);
constinit const rlk_implementation linear_logp_replay_avx512bf16_avx2 =
    Forms<Isa::avx2, only<&lm_head_replay_avx512bf16_avx2>>::forward(
        facts_at<"native.replay_avx512bf16", Isa::avx2>(kPairReplay));
constinit const rlk_implementation linear_logp_replay_avx512bf16_scalar =
    Forms<Isa::scalar, only<&lm_head_replay_avx512bf16_scalar>>::forward(
        facts_at<"native.replay_avx512bf16", Isa::scalar>(kPairReplay));
constinit const rlk_implementation linear_logp_bwd_replay_avx512bf16_avx2 =
    Forms<Isa::avx2, only<&lm_head_replay_avx512bf16_avx2>, only<&linear_bwd_replay_avx512bf16_avx2>,
          true>::backward(facts_at<"native.replay_avx512bf16", Isa::avx2>(kPairReplayBwd));
constinit const rlk_implementation linear_logp_bwd_replay_avx512bf16_scalar =
    Forms<Isa::scalar, only<&lm_head_replay_avx512bf16_scalar>, only<&linear_bwd_replay_avx512bf16_scalar>,
          true>::backward(facts_at<"native.replay_avx512bf16", Isa::scalar>(kPairReplayBwd));

}  // namespace rlk::native
