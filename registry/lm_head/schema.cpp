// lm_head: logits[..., V] = hidden[..., K] * weight[V, K]^T (+ bias[V]), and its gradients.
#include "registry/schema.hpp"

namespace rlk::registry {
namespace {

enum { kHidden, kWeight, kBias, kOut };
constexpr rlk_argument kArguments[] = {
    {"hidden", "activations [..., K]", RLK_READ, kFloats, 1, RLK_MAX_RANK, -2, RLK_SAVED | RLK_STRIDED},
    {"weight", "[V, K], as checkpoints store it", RLK_READ, kFloats, 2, 2, -1, RLK_SAVED | RLK_STRIDED},
    {"bias", "[V], added after the product is rounded", RLK_READ, kFloats, 1, 1, -1, RLK_OPTIONAL},
    {"out", "logits [..., V], in hidden's dtype or fp32", RLK_WRITE, kFloats | RLK_F64, 1, RLK_MAX_RANK, -2,
     RLK_STRIDED},
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

enum { kDOut, kHiddenB, kWeightB, kDHidden, kDWeight, kDBias };
constexpr rlk_argument kBwdArguments[] = {
    {"d_out", "gradient of the logits [..., V]", RLK_READ, kFloats, 1, RLK_MAX_RANK, -2, RLK_STRIDED},
    {"hidden", "as in the forward [..., K]", RLK_READ, kFloats, 1, RLK_MAX_RANK, -2, RLK_STRIDED},
    {"weight", "as in the forward [V, K]", RLK_READ, kFloats, 2, 2, -1, RLK_STRIDED},
    {"d_hidden", "d_out * weight [..., K]", RLK_WRITE, kFloats | RLK_F64, 1, RLK_MAX_RANK, -2,
     RLK_OPTIONAL | RLK_STRIDED},
    {"d_weight", "d_out^T * hidden [V, K]", RLK_WRITE, kFloats | RLK_F64, 2, 2, -1,
     RLK_OPTIONAL | RLK_STRIDED},
    {"d_bias", "column sums of d_out [V]", RLK_WRITE, kFloats | RLK_F64, 1, 1, -1, RLK_OPTIONAL},
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

extern const rlk_op_schema lm_head_schema = {.struct_size = sizeof(rlk_op_schema),
                                             .version = 1,
                                             .name = "lm_head",
                                             .aliases = "",
                                             .doc = "logits = hidden * weight^T (+ bias)",
                                             .arguments = kArguments,
                                             .num_arguments = std::size(kArguments),
                                             .attributes = nullptr,
                                             .num_attributes = 0,
                                             .backward = "lm_head_bwd",
                                             .saves = "hidden,weight",
                                             .infer = infer,
                                             .may_alias = ""};

extern const rlk_op_schema lm_head_bwd_schema = {
    .struct_size = sizeof(rlk_op_schema),
    .version = 1,
    .name = "lm_head_bwd",
    .aliases = "",
    .doc = "gradients of lm_head with respect to hidden, weight and bias",
    .arguments = kBwdArguments,
    .num_arguments = std::size(kBwdArguments),
    .attributes = nullptr,
    .num_attributes = 0,
    .backward = nullptr,
    .saves = "",
    .infer = infer_bwd,
    .may_alias = ""};

}  // namespace rlk::registry
