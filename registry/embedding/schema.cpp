// embedding: out[...] = weight[id] (* scale), whole or a shard of the vocabulary; and its gradient.
#include "registry/schema.hpp"

namespace rlk::registry {
namespace {

constexpr auto kShared =
    attributes(real("scale", "factor on every row; 1 copies", 1),
               integer("padding_idx", "an id whose row gets no gradient; -1: none", -1),
               integer("vocab_start", "the id of weight's first row; ids outside weight give +0", 0));
constexpr auto kAttributes = attributes(
    kShared,
    integer("vocab", "ids below this are tokens; 0: those that weight has rows for, and all before", 0));

constexpr Argument ids() {
  return read("ids", "token ids [...]").of(kIntegers).rank(1, 7).rows(0).no_gradient();
}
constexpr Argument tokens(Argument a) { return a.rank(2, RLK_MAX_RANK).rows(0).strided(); }

constexpr auto kForward =
    arguments(ids().saved(), read("weight", "[V, H]").rank(2).saved().strided(),
              tokens(write("out", "[..., H], in weight's dtype")),
              write("bad_count", "how many ids are no token [1]").of(RLK_I32).rank(1).optional());
enum {
  kIds = index_of(kForward, "ids"),
  kWeight = index_of(kForward, "weight"),
  kOut = index_of(kForward, "out"),
  kBadCount = index_of(kForward, "bad_count")
};

constexpr auto kBackward = arguments(
    ids(), tokens(read("d_out", "gradient of out [..., H]; weight's dtype or fp32")),
    read("weight", "as in the forward [V, H]: of it only shape and dtype are read").rank(2).strided(),
    write("d_weight", "[V, H]; rows without tokens are +0").rank(2).strided(),
    read("d_weight_before", "[V, H] fp32, to which d_weight is added; may be its memory")
        .of(RLK_F32)
        .rank(2)
        .optional()
        .no_gradient()
        .strided());
enum {
  kIdsB = index_of(kBackward, "ids"),
  kDOut = index_of(kBackward, "d_out"),
  kWeightB = index_of(kBackward, "weight"),
  kDWeight = index_of(kBackward, "d_weight"),
  kBefore = index_of(kBackward, "d_weight_before")
};

int32_t check_attributes(const rlk_host* host, const char* op, const rlk_slot* a) {
  const double scale = a[index_of(kShared, "scale")].f;
  if (!(scale >= -1e30 && scale <= 1e30))
    return fail(host, "{}: scale is {}, it must be from -1e30 to 1e30", op, scale);
  const int64_t padding = a[index_of(kShared, "padding_idx")].i,
                start = a[index_of(kShared, "vocab_start")].i;
  if (padding < -1) return fail(host, "{}: padding_idx is {}, it must be an id, or -1", op, padding);
  if (start < 0) return fail(host, "{}: vocab_start is {}, it must be 0 or more", op, start);
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor *ids = s[kIds].tensor, *weight = s[kWeight].tensor;
  if (int32_t code = check_attributes(host, "embedding", s + kForward.size())) return code;
  if (const int64_t vocab = s[kForward.size() + index_of(kAttributes, "vocab")].i; vocab < 0)
    return fail(host, "embedding: vocab is {}, it must be 0 or more", vocab);
  rlk_shape& out = shapes[kOut];
  out = {ids->ndim + 1, static_cast<uint32_t>(dtype(weight)), static_cast<uint32_t>(dtype(weight)), {}};
  for (int32_t i = 0; i < ids->ndim; ++i) out.dim[i] = dim(ids, i);
  out.dim[ids->ndim] = dim(weight, 1);
  shapes[kBadCount] = shape_of({1}, RLK_I32, DType::i32);
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "embedding_bwd";
  const DLTensor *ids = s[kIdsB].tensor, *d_out = s[kDOut].tensor, *weight = s[kWeightB].tensor,
                 *before = s[kBefore].tensor;
  if (int32_t code = check_attributes(host, op, s + kBackward.size())) return code;
  if (d_out->ndim != ids->ndim + 1)
    return fail(host, "{}: d_out has rank {}, ids has rank {}: d_out has one dimension more", op, d_out->ndim,
                ids->ndim);
  for (int32_t i = 0; i < ids->ndim; ++i)
    if (dim(d_out, i) != dim(ids, i))
      return fail(host, "{}: d_out has size {} in dimension {}, ids has {}", op, dim(d_out, i), i,
                  dim(ids, i));
  if (dim(d_out, -1) != dim(weight, 1))
    return fail(host, "{}: d_out has H={}, weight has H={}", op, dim(d_out, -1), dim(weight, 1));
  if (dtype(d_out) != dtype(weight) && dtype(d_out) != DType::f32)
    return fail(host, "{}: d_out is {}, weight is {}: d_out takes weight's dtype or fp32", op,
                name_of(dtype(d_out)), name_of(dtype(weight)));
  for (int32_t i = 0; before && i < 2; ++i)
    if (dim(before, i) != dim(weight, i))
      return fail(host, "{}: d_weight_before has size {} in dimension {}, weight has {}", op, dim(before, i),
                  i, dim(weight, i));
  // A sum that goes on from call to call stays in fp32.
  shapes[kDWeight] = before ? shape_of({dim(weight, 0), dim(weight, 1)}, RLK_F32, DType::f32)
                            : shape_of({dim(weight, 0), dim(weight, 1)},
                                       static_cast<uint32_t>(dtype(weight)) | RLK_F32, dtype(weight));
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema embedding_schema =
    Schema("embedding", "rows of weight by token ids", kForward, kAttributes, infer)
        .gradient("embedding_bwd");
extern const rlk_op_schema embedding_bwd_schema =
    Schema("embedding_bwd", "gradient of embedding with respect to weight, in a fixed order", kBackward,
           kShared, infer_bwd)
        .may_alias("d_weight=d_weight_before");

}  // namespace rlk::registry
