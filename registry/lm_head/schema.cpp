// lm_head: logits[..., V] = hidden[..., K] * weight[V, K]^T (+ bias[V]), and its gradients.
#include "registry/schema.hpp"

namespace rlk::registry {
namespace {

constexpr auto kArguments =
    arguments(read("hidden", "activations [..., K]").rows().saved().strided(),
              read("weight", "[V, K], as checkpoints store it").rank(2).saved().strided(),
              read("bias", "[V], added after the product is rounded").rank(1).optional(),
              write("out", "logits [..., V], in hidden's dtype or fp32").rows().strided());
enum {
  kHidden = index_of(kArguments, "hidden"),
  kWeight = index_of(kArguments, "weight"),
  kBias = index_of(kArguments, "bias"),
  kOut = index_of(kArguments, "out")
};

// What hidden and weight must share; the message says when they only fit the other way round.
int32_t check_product(const DLTensor* hidden, const DLTensor* weight, const char* op, const rlk_host* host) {
  if (dtype(weight) != dtype(hidden))
    return fail(host, "{}: weight is {}, hidden is {}", op, name_of(dtype(weight)), name_of(dtype(hidden)));
  const int64_t k = dim(hidden, -1);
  if (dim(weight, 1) == k) return RLK_OK;
  if (dim(weight, 0) == k)
    return fail(
        host,
        "{}: hidden has K={}, weight has K={}: weight [{}, {}] fits only as [K, V], this op takes [V, K]", op,
        k, dim(weight, 1), dim(weight, 0), dim(weight, 1));
  return fail(host, "{}: hidden has K={}, weight has K={}", op, k, dim(weight, 1));
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor *hidden = s[kHidden].tensor, *weight = s[kWeight].tensor, *bias = s[kBias].tensor;
  if (int32_t code = check_product(hidden, weight, "lm_head", host)) return code;
  const int64_t v = dim(weight, 0);
  if (bias && dim(bias, 0) != v)
    return fail(host, "lm_head: bias has V={}, weight has V={}", dim(bias, 0), v);
  if (bias && dtype(bias) != dtype(hidden))
    return fail(host, "lm_head: bias is {}, hidden is {}", name_of(dtype(bias)), name_of(dtype(hidden)));
  shapes[kOut] = with_last(hidden, v, static_cast<uint32_t>(dtype(hidden)) | RLK_F32, dtype(hidden));
  return RLK_OK;
}

constexpr auto kBwdArguments =
    arguments(read("d_out", "gradient of the logits [..., V]").rows().strided(),
              read("hidden", "as in the forward [..., K]").rows().strided(),
              read("weight", "as in the forward [V, K]").rank(2).strided(),
              write("d_hidden", "d_out * weight [..., K]").rows().optional().strided(),
              write("d_weight", "d_out^T * hidden [V, K]").rank(2).optional().strided(),
              write("d_bias", "column sums of d_out [V]").rank(1).optional());
enum {
  kDOut = index_of(kBwdArguments, "d_out"),
  kHiddenB = index_of(kBwdArguments, "hidden"),
  kWeightB = index_of(kBwdArguments, "weight"),
  kDHidden = index_of(kBwdArguments, "d_hidden"),
  kDWeight = index_of(kBwdArguments, "d_weight"),
  kDBias = index_of(kBwdArguments, "d_bias")
};

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor *d_out = s[kDOut].tensor, *hidden = s[kHiddenB].tensor, *weight = s[kWeightB].tensor;
  if (int32_t code = check_product(hidden, weight, "lm_head_bwd", host)) return code;
  const int64_t v = dim(weight, 0), k = dim(weight, 1);
  if (dim(d_out, -1) != v)
    return fail(host, "lm_head_bwd: d_out has V={}, weight has V={}", dim(d_out, -1), v);
  if (d_out->ndim != hidden->ndim)
    return fail(host, "lm_head_bwd: d_out has rank {}, hidden has rank {}", d_out->ndim, hidden->ndim);
  for (int32_t i = 0; i + 1 < hidden->ndim; ++i)
    if (dim(d_out, i) != dim(hidden, i))
      return fail(host, "lm_head_bwd: d_out has size {} in dimension {}, hidden has {}", dim(d_out, i), i,
                  dim(hidden, i));
  if (dtype(d_out) != dtype(hidden) && dtype(d_out) != DType::f32)
    return fail(host, "lm_head_bwd: d_out is {}, hidden is {}: d_out takes hidden's dtype or fp32",
                name_of(dtype(d_out)), name_of(dtype(hidden)));
  const uint32_t dtypes = static_cast<uint32_t>(dtype(hidden)) | RLK_F32;
  shapes[kDHidden] = like(hidden, dtypes, dtype(hidden));
  shapes[kDWeight] = shape_of({v, k}, dtypes, dtype(hidden));
  shapes[kDBias] = shape_of({v}, dtypes, dtype(hidden));
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema lm_head_schema =
    Schema("lm_head", "logits = hidden * weight^T (+ bias)", kArguments, infer).gradient("lm_head_bwd");
extern const rlk_op_schema lm_head_bwd_schema = Schema(
    "lm_head_bwd", "gradients of lm_head with respect to hidden, weight and bias", kBwdArguments, infer_bwd);

}  // namespace rlk::registry
