// policy_loss: from log-probabilities and advantages to a loss, by sequences; its gradient; and loss_reduce, the loss of
// totals that were gathered from many calls.
#include "registry/loss.hpp"

namespace rlk::registry {
namespace {

constexpr uint32_t kCounts = RLK_F32 | RLK_F64 | RLK_I32 | RLK_I64;
constexpr int64_t kTotals = 5, kMetrics = 6;

constexpr auto kReduction =
    attributes(choice("agg", "how tokens become a loss; constant: their sum by the denominator",
                      "token_mean|seq_mean_token_mean|seq_mean_token_sum|constant"),
               real("kl_coef", "weight of the KL estimates in the loss", 0),
               real("entropy_coef", "weight of the entropies, which the loss falls with", 0));
constexpr auto kAttributes = attributes(
    kReduction,
    choice("level", "whose ratio a token has: its own, or its sequence's, by the mean of the log-ratios",
           "token|sequence"),
    choice("form", "of a policy term", "clip|cispo|reinforce|soft_gate"),
    choice("advantages_per", "what an advantage belongs to", "token|sequence"),
    real("clip_low", "ratios are clipped at 1 - clip_low", 0.2),
    real("clip_high", "and at 1 + clip_high", 0.2),
    real("dual_clip", "where the advantage is negative, a term is at most -advantage * dual_clip; 0: not", 0),
    real("tau_positive", "temperature of soft_gate where the advantage is positive", 1),
    real("tau_negative", "and elsewhere", 1.05),
    real("clamp", "a token's log-ratios are held to +-clamp, with no gradient beyond", 20),
    real("sequence_clamp", "a sequence's log-ratio is at most this, with no gradient beyond", 10),
    choice("is_mode",
           "what the ratio of old to rollout does to a token: nothing; weighs it, at most is_high; weighs "
           "it, and removes it or makes its policy term 0 outside [is_low, is_high]",
           "none|truncate|mask|zero"),
    choice("is_level", "of a token; of a sequence, the product; or the geometric mean",
           "token|sequence|geometric"),
    real("is_low", "least weight that counts", 0), real("is_high", "most weight that counts", 2),
    choice("kl", "estimator of the divergence from ref, as in ratio_kl", "off|k1|k2|k3|k3_st"),
    real("d_clamp", "ref - logp is held to +-d_clamp, with no gradient beyond; 0: not", 20),
    real("kl_clamp", "an estimate is held to +-kl_clamp, with no gradient beyond; 0: not", 0));

// Of tokens: [T] with cu_seqlens, or [B, S].
constexpr Argument tokens(const char* name, const char* doc) {
  return read(name, doc).of(RLK_F32).rank(1, 2).rows(0);
}
constexpr Argument factors(const char* name, const char* doc) {
  return write(name, doc).of(kLogs).rank(1, 2).rows(0).optional();
}
constexpr Argument kDenominator =
    read("denominator", "[1]: what sums are divided by, over all calls and ranks; absent: this call's own")
        .of(kCounts)
        .rank(1)
        .optional()
        .no_gradient();
constexpr auto kScalars = arguments(
    write("loss", "[1]").of(kLogs).rank(1),
    write("metrics",
          "[7]: policy, kl, entropy as in the loss, active tokens, clipped share, active sequences, "
          "active tokens whose logp or old_logp is -inf")
        .of(kLogs)
        .rank(1)
        .optional());

constexpr auto kForward = arguments(
    tokens("logp", "log-probabilities under the policy: [T] with cu_seqlens, or [B, S]"),
    tokens("old_logp", "under the policy that ratios are to, as logp").no_gradient(),
    tokens("advantages", "as logp, or one a sequence [B]").no_gradient(),
    tokens("mask", "0: the token is not there; absent: all are").of(kMasks).optional().no_gradient(),
    read("cu_seqlens", "[B + 1]: sequence b is tokens [cu b, cu b + 1)")
        .of(kIntegers)
        .rank(1)
        .optional()
        .no_gradient(),
    tokens("rollout_logp", "under the policy that answered, as logp").optional().no_gradient(),
    tokens("ref_logp", "under the reference model, as logp").optional().no_gradient(),
    tokens("entropy", "of the policy's distribution, as logp").optional(), kDenominator, kScalars,
    write("totals", "[B, 5]: sums of policy terms, kl and entropy, active tokens, clipped tokens")
        .of(kLogs)
        .rank(2)
        .rows(0),
    factors("factor", "d loss / d logp, as logp").saved(),
    factors("entropy_factor", "d loss / d entropy, as logp").saved());
enum {
  kLogp = index_of(kForward, "logp"),
  kOld = index_of(kForward, "old_logp"),
  kAdvantages = index_of(kForward, "advantages"),
  kMask = index_of(kForward, "mask"),
  kBounds = index_of(kForward, "cu_seqlens"),
  kRollout = index_of(kForward, "rollout_logp"),
  kRef = index_of(kForward, "ref_logp"),
  kEntropy = index_of(kForward, "entropy"),
  kDivisor = index_of(kForward, "denominator"),
  kLoss = index_of(kForward, "loss"),
  kMetric = index_of(kForward, "metrics"),
  kTotal = index_of(kForward, "totals"),
  kFactor = index_of(kForward, "factor"),
  kEntropyFactor = index_of(kForward, "entropy_factor")
};

constexpr auto kBackward = arguments(read("d_loss", "[1]: gradient of loss").of(RLK_F32).rank(1),
                                     tokens("factor", "as the forward left it"),
                                     tokens("entropy_factor", "as the forward left it").optional(),
                                     write("d_logp", "as factor").of(kLogs).rank(1, 2).rows(0).optional(),
                                     write("d_entropy", "as factor").of(kLogs).rank(1, 2).rows(0).optional());
enum {
  kDLoss = index_of(kBackward, "d_loss"),
  kFactorB = index_of(kBackward, "factor"),
  kEntropyFactorB = index_of(kBackward, "entropy_factor"),
  kDLogp = index_of(kBackward, "d_logp"),
  kDEntropy = index_of(kBackward, "d_entropy")
};

constexpr auto kReduce = arguments(
    read("totals", "[B, 5] of all sequences, by ascending global index").of(RLK_F32).rank(2).no_gradient(),
    kDenominator, write("loss", "[1]").of(kLogs).rank(1),
    write("metrics", "[6]: the first six of policy_loss").of(kLogs).rank(1).optional());
enum {
  kAllTotals = index_of(kReduce, "totals"),
  kReduceDivisor = index_of(kReduce, "denominator"),
  kReduceLoss = index_of(kReduce, "loss"),
  kReduceMetrics = index_of(kReduce, "metrics")
};

int32_t check_reduction(const rlk_host* host, const char* op, const DLTensor* divisor,
                        const rlk_slot* attributes) {
  enum { kConstant = 3 };
  if (divisor && dim(divisor, 0) != 1)
    return fail(host, "{}: denominator has size {}, expected 1", op, dim(divisor, 0));
  if (!divisor && attributes[index_of(kReduction, "agg")].i == kConstant)
    return fail(host, "{}: agg is constant, denominator is absent", op);
  return check_options(host, op,
                       {{"kl_coef", attributes[index_of(kReduction, "kl_coef")].f, -1e6, 1e6},
                        {"entropy_coef", attributes[index_of(kReduction, "entropy_coef")].f, -1e6, 1e6}});
}

double option(const rlk_slot* attributes, int index) { return attributes[index].f; }

int32_t check_policy_options(const rlk_host* host, const char* op, const rlk_slot* a) {
#define RLK_OF(name) #name, option(a, index_of(kAttributes, #name))
  if (int32_t code = check_options(host, op,
                                   {{RLK_OF(clip_low), 0, 1},
                                    {RLK_OF(clip_high), 0, 1e6},
                                    {RLK_OF(dual_clip), 0, 1e6},
                                    {RLK_OF(tau_positive), 1e-6, kMostLog},
                                    {RLK_OF(tau_negative), 1e-6, kMostLog},
                                    {RLK_OF(clamp), 0, kMostLog},
                                    {RLK_OF(sequence_clamp), 0, kMostLog},
                                    {RLK_OF(is_low), 0, 1e30},
                                    {RLK_OF(is_high), 0, 1e30},
                                    {RLK_OF(d_clamp), 0, kMostLog},
                                    {RLK_OF(kl_clamp), 0, 1e30}}))
    return code;
#undef RLK_OF
  const double dual = option(a, index_of(kAttributes, "dual_clip")),
               low = option(a, index_of(kAttributes, "is_low")),
               high = option(a, index_of(kAttributes, "is_high"));
  if (dual != 0 && dual < 1) return fail(host, "{}: dual_clip is {}, it must be 0 or at least 1", op, dual);
  if (low > high) return fail(host, "{}: is_low is {}, is_high is {}", op, low, high);
  return RLK_OK;
}

int32_t check_sequences(const rlk_host* host, const char* op, const rlk_slot* s, int64_t& sequences) {
  const DLTensor *logp = s[kLogp].tensor, *bounds = s[kBounds].tensor;
  if (bounds && logp->ndim != 1)
    return fail(host, "{}: cu_seqlens is given, logp has rank {}, expected 1", op, logp->ndim);
  if (!bounds && logp->ndim != 2)
    return fail(host, "{}: cu_seqlens is absent, logp has rank {}, expected 2", op, logp->ndim);
  if (bounds && dim(bounds, 0) < 1) return fail(host, "{}: cu_seqlens has size 0, it holds B + 1 bounds", op);
  sequences = bounds ? dim(bounds, 0) - 1 : dim(logp, 0);
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "policy_loss";
  const rlk_slot* a = s + kForward.size();
  const DLTensor *logp = s[kLogp].tensor, *advantages = s[kAdvantages].tensor;
  int64_t sequences = 0;
  if (int32_t code = check_sequences(host, op, s, sequences)) return code;
  const bool by_sequence = a[index_of(kAttributes, "advantages_per")].i != 0;
  if (by_sequence && (advantages->ndim != 1 || dim(advantages, 0) != sequences))
    return fail(host, "{}: advantages_per is sequence, advantages has rank {} and size {}, expected [{}]", op,
                advantages->ndim, dim(advantages, 0), sequences);
  for (const auto& [i, name] : {std::pair{kOld, "old_logp"},
                                {kAdvantages, "advantages"},
                                {kMask, "mask"},
                                {kRollout, "rollout_logp"},
                                {kRef, "ref_logp"},
                                {kEntropy, "entropy"}})
    if (i != kAdvantages || !by_sequence)
      if (int32_t code = expect_shape(host, op, name, s[i].tensor, "logp", logp)) return code;
  if (int32_t code = check_reduction(host, op, s[kDivisor].tensor, a)) return code;
  if (int32_t code = check_policy_options(host, op, a)) return code;
  if (a[index_of(kAttributes, "is_mode")].i != 0 && !s[kRollout].tensor)
    return fail(host, "{}: is_mode is not none, rollout_logp is absent", op);
  if (a[index_of(kAttributes, "kl")].i != 0 && !s[kRef].tensor)
    return fail(host, "{}: kl is not off, ref_logp is absent", op);
  if (a[index_of(kAttributes, "entropy_coef")].f != 0 && !s[kEntropy].tensor)
    return fail(host, "{}: entropy_coef is {}, entropy is absent", op,
                a[index_of(kAttributes, "entropy_coef")].f);
  shapes[kLoss] = shape_of({1}, RLK_F32, DType::f32);
  shapes[kMetric] = shape_of({kMetrics + 1}, RLK_F32, DType::f32);
  shapes[kTotal] = shape_of({sequences, kTotals}, RLK_F32, DType::f32);
  shapes[kFactor] = shapes[kEntropyFactor] = like(logp, RLK_F32, DType::f32);
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "policy_loss_bwd";
  const DLTensor *factor = s[kFactorB].tensor, *entropy_factor = s[kEntropyFactorB].tensor;
  if (dim(s[kDLoss].tensor, 0) != 1)
    return fail(host, "{}: d_loss has size {}, expected 1", op, dim(s[kDLoss].tensor, 0));
  if (int32_t code = expect_shape(host, op, "entropy_factor", entropy_factor, "factor", factor)) return code;
  if (s[kDEntropy].tensor && !entropy_factor)
    return fail(host, "{}: d_entropy is asked for, entropy_factor is absent", op);
  shapes[kDLogp] = shapes[kDEntropy] = like(factor, RLK_F32, DType::f32);
  return RLK_OK;
}

int32_t infer_reduce(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "loss_reduce";
  if (dim(s[kAllTotals].tensor, 1) != kTotals)
    return fail(host, "{}: totals has {} columns, expected {}", op, dim(s[kAllTotals].tensor, 1), kTotals);
  if (int32_t code = check_reduction(host, op, s[kReduceDivisor].tensor, s + kReduce.size())) return code;
  shapes[kReduceLoss] = shape_of({1}, RLK_F32, DType::f32);
  shapes[kReduceMetrics] = shape_of({kMetrics}, RLK_F32, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema policy_loss_schema =
    Schema("policy_loss", "loss of a policy by its log-probabilities and advantages", kForward, kAttributes,
           infer)
        .gradient("policy_loss_bwd");
extern const rlk_op_schema policy_loss_bwd_schema =
    Schema("policy_loss_bwd", "gradient of policy_loss", kBackward, infer_bwd);
extern const rlk_op_schema loss_reduce_schema =
    Schema("loss_reduce", "loss of the gathered totals of policy_loss", kReduce, kReduction, infer_reduce);

}  // namespace rlk::registry
