// linear_logp: logp of lm_head's logits, which are never a tensor; and its gradients.
#include "registry/logp/schema.hpp"

namespace rlk::registry {
namespace {

using namespace logp;

constexpr auto kOperands =
    arguments(read("hidden", "activations [N, K]").rank(2).rows(0).saved().strided(),
              read("weight", "[V, K], as checkpoints store it").rank(2).saved().strided(),
              read("bias", "[V], added after the product is rounded").rank(1).optional().saved());
constexpr auto kForward = arguments(kOperands, kRowInputs, kRowResults);
enum {
  kHidden = index_of(kForward, "hidden"),
  kWeight = index_of(kForward, "weight"),
  kBias = index_of(kForward, "bias")
};

constexpr auto kBackward = arguments(
    kOperands, kRowInputs,
    read("stats", "as the forward or logp_merge left them [N, 4]; absent: computed again")
        .of(RLK_F32)
        .rank(2)
        .rows(0)
        .optional(),
    kRowCotangents, write("d_hidden", "[N, K]").rank(2).rows(0).optional().strided(),
    write("d_weight", "[V, K]").rank(2).optional().strided(), write("d_bias", "[V]").rank(1).optional(),
    so_far("d_weight_before", "[V, K] fp32, to which d_weight is added; may be its memory").rank(2).strided(),
    so_far("d_bias_before", "[V] fp32, to which d_bias is added; may be its memory").rank(1));
enum {
  kDHidden = index_of(kBackward, "d_hidden"),
  kDWeight = index_of(kBackward, "d_weight"),
  kDBias = index_of(kBackward, "d_bias"),
  kWeightBefore = index_of(kBackward, "d_weight_before"),
  kBiasBefore = index_of(kBackward, "d_bias_before")
};

// Operands, rows and vocabulary of either direction; `attributes` are those of the call.
int32_t check(const rlk_host* host, const char* op, const auto& table, const rlk_slot* s, Vocabulary& v) {
  const DLTensor *hidden = s[kHidden].tensor, *weight = s[kWeight].tensor, *bias = s[kBias].tensor;
  if (dtype(weight) != dtype(hidden))
    return fail(host, "{}: weight is {}, hidden is {}", op, name_of(dtype(weight)), name_of(dtype(hidden)));
  if (dim(weight, 1) != dim(hidden, 1))
    return fail(host, "{}: hidden has K={}, weight has K={}", op, dim(hidden, 1), dim(weight, 1));
  if (bias && dim(bias, 0) != dim(weight, 0))
    return fail(host, "{}: bias has V={}, weight has V={}", op, dim(bias, 0), dim(weight, 0));
  if (bias && dtype(bias) != dtype(hidden))
    return fail(host, "{}: bias is {}, hidden is {}", op, name_of(dtype(bias)), name_of(dtype(hidden)));
  const rlk_slot* attributes = s + table.size();
  constexpr DType kRounds[] = {DType::f32, DType::bf16, DType::f16};
  const DType round = kRounds[attributes[index_of(kRowAttributes, "logits_round")].i];
  if (round != DType::f32 && round != dtype(hidden))
    return fail(host, "{}: logits_round is {}, hidden is {}: logits are in hidden's dtype or fp32", op,
                name_of(round), name_of(dtype(hidden)));
  if (int32_t code = check_vocabulary(host, op, attributes, "weight", dim(weight, 0), v)) return code;
  return check_rows(host, op, "hidden", dim(hidden, 0), RowInputs::of(table, s), v);
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "linear_logp";
  Vocabulary v;
  if (int32_t code = check(host, op, kForward, s, v)) return code;
  return row_results(host, op, kForward, s, v, dim(s[kHidden].tensor, 0), shapes);
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "linear_logp_bwd";
  const DLTensor *hidden = s[kHidden].tensor, *weight = s[kWeight].tensor;
  Vocabulary v;
  if (int32_t code = check(host, op, kBackward, s, v)) return code;
  if (int32_t code = check_cotangents(
          host, op, "hidden", dim(hidden, 0), v, s[index_of(kBackward, "stats")].tensor,
          s[index_of(kBackward, "d_logp")].tensor, s[index_of(kBackward, "d_entropy")].tensor))
    return code;
  const uint32_t dtypes = static_cast<uint32_t>(dtype(hidden)) | RLK_F32;
  // A part's share of the sum over the vocabulary is joined in fp32.
  const bool partial = s[kBackward.size() + index_of(kRowAttributes, "leaf_count")].i != kLeaves;
  shapes[kDHidden] = partial ? like(hidden, RLK_F32, DType::f32) : like(hidden, dtypes, dtype(hidden));
  // Sums that go on from call to call stay in fp32.
  const auto gradient = [&](std::initializer_list<int64_t> dims, const DLTensor* before) {
    return before ? shape_of(dims, RLK_F32, DType::f32) : shape_of(dims, dtypes, dtype(hidden));
  };
  const DLTensor *weight_before = s[kWeightBefore].tensor, *bias_before = s[kBiasBefore].tensor;
  shapes[kDWeight] = gradient({dim(weight, 0), dim(weight, 1)}, weight_before);
  shapes[kDBias] = gradient({dim(weight, 0)}, bias_before);
  if (int32_t code = check_before(host, op, "d_weight_before", weight_before, shapes[kDWeight])) return code;
  return check_before(host, op, "d_bias_before", bias_before, shapes[kDBias]);
}

}  // namespace

extern const rlk_op_schema linear_logp_schema =
    Schema("linear_logp", "logp of lm_head's logits without a tensor of them", kForward, kRowAttributes,
           infer)
        .gradient("linear_logp_bwd");
extern const rlk_op_schema linear_logp_bwd_schema =
    Schema("linear_logp_bwd", "gradients of linear_logp with respect to hidden, weight and bias", kBackward,
           kRowAttributes, infer_bwd)
        .may_alias("d_weight=d_weight_before,d_bias=d_bias_before");

}  // namespace rlk::registry
