// ratio_kl: the importance ratio and the KL estimate of every token; and their gradient.
#include "registry/loss.hpp"

namespace rlk::registry {
namespace {

constexpr auto kAttributes =
    attributes(real("clamp", "log-ratios are held to +-clamp, with no gradient beyond", 20),
               choice("estimator", "of the divergence from ref; k3_st: the value of k3, the gradient of k2",
                      "k1|k2|k3|k3_st", "k3"),
               real("d_clamp", "ref - logp is held to +-d_clamp, with no gradient beyond; 0: not", 20),
               real("kl_clamp", "an estimate is held to +-kl_clamp, with no gradient beyond; 0: not", 0));
enum {
  kClamp = index_of(kAttributes, "clamp"),
  kDClamp = index_of(kAttributes, "d_clamp"),
  kKlClamp = index_of(kAttributes, "kl_clamp")
};

constexpr auto kTokens =
    arguments(read("logp", "log-probabilities under the policy, of any shape").of(RLK_F32).rows(0).saved(),
              read("old_logp", "under the policy that the ratio is to, as logp")
                  .of(RLK_F32)
                  .rows(0)
                  .no_gradient()
                  .saved(),
              read("ref_logp", "under the reference model, as logp")
                  .of(RLK_F32)
                  .rows(0)
                  .optional()
                  .no_gradient()
                  .saved(),
              read("mask", "0: the token is not there; absent: all are")
                  .of(kMasks)
                  .rows(0)
                  .optional()
                  .no_gradient()
                  .saved());
enum {
  kLogp = index_of(kTokens, "logp"),
  kOld = index_of(kTokens, "old_logp"),
  kRef = index_of(kTokens, "ref_logp"),
  kMask = index_of(kTokens, "mask")
};

constexpr auto kForward =
    arguments(kTokens, write("ratio", "exp(logp - old_logp), 1 where masked").of(kLogs).rows(0),
              write("kl", "the estimate, 0 where masked").of(kLogs).rows(0).optional());
enum { kRatio = index_of(kForward, "ratio"), kKl = index_of(kForward, "kl") };

constexpr auto kBackward =
    arguments(kTokens, read("d_ratio", "gradient of ratio").of(RLK_F32).rows(0).optional(),
              read("d_kl", "gradient of kl").of(RLK_F32).rows(0).optional(),
              write("d_logp", "as logp").of(kLogs).rows(0));
enum {
  kDRatio = index_of(kBackward, "d_ratio"),
  kDKl = index_of(kBackward, "d_kl"),
  kDLogp = index_of(kBackward, "d_logp")
};

int32_t check(const rlk_host* host, const char* op, const rlk_slot* s, const rlk_slot* attributes) {
  const DLTensor* logp = s[kLogp].tensor;
  for (const auto& [i, name] : {std::pair{kOld, "old_logp"}, {kRef, "ref_logp"}, {kMask, "mask"}})
    if (int32_t code = expect_shape(host, op, name, s[i].tensor, "logp", logp)) return code;
  return check_options(host, op,
                       {{"clamp", attributes[kClamp].f, 0, kMostLog},
                        {"d_clamp", attributes[kDClamp].f, 0, kMostLog},
                        {"kl_clamp", attributes[kKlClamp].f, 0, 1e30}});
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "ratio_kl";
  if (int32_t code = check(host, op, s, s + kForward.size())) return code;
  if (s[kKl].tensor && !s[kRef].tensor) return fail(host, "{}: kl is asked for, ref_logp is absent", op);
  shapes[kRatio] = shapes[kKl] = like(s[kLogp].tensor, RLK_F32, DType::f32);
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "ratio_kl_bwd";
  const DLTensor* logp = s[kLogp].tensor;
  if (int32_t code = check(host, op, s, s + kBackward.size())) return code;
  if (int32_t code = expect_shape(host, op, "d_ratio", s[kDRatio].tensor, "logp", logp)) return code;
  if (int32_t code = expect_shape(host, op, "d_kl", s[kDKl].tensor, "logp", logp)) return code;
  if (s[kDKl].tensor && !s[kRef].tensor) return fail(host, "{}: d_kl is given, ref_logp is absent", op);
  shapes[kDLogp] = like(logp, RLK_F32, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema ratio_kl_schema =
    Schema("ratio_kl", "importance ratio and KL estimate of every token", kForward, kAttributes, infer)
        .gradient("ratio_kl_bwd");
extern const rlk_op_schema ratio_kl_bwd_schema =
    Schema("ratio_kl_bwd", "gradient of ratio_kl", kBackward, kAttributes, infer_bwd);

}  // namespace rlk::registry
