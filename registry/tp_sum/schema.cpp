// tp_sum: the partial sums of linear, joined by the top of its tree, and what linear adds to a whole sum.
#include "registry/schema.hpp"

namespace rlk::registry {
namespace {

constexpr auto kArguments =
    arguments(read("partials", "[T, M, N], T = 1, 2, 4 or 8: in the order of the leaves")
                  .of(RLK_F32)
                  .rank(3)
                  .rows(1)
                  .strided(),
              read("bias", "[N], added after the sum is rounded; y's dtype").rank(1).optional(),
              read("residual", "added last [M, N]; y's dtype").rank(2).rows(0).optional().strided(),
              write("y", "[M, N]").rank(2).rows(0).strided());
enum {
  kPartials = index_of(kArguments, "partials"),
  kBias = index_of(kArguments, "bias"),
  kResidual = index_of(kArguments, "residual"),
  kY = index_of(kArguments, "y")
};

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "tp_sum";
  const DLTensor *partials = s[kPartials].tensor, *bias = s[kBias].tensor, *residual = s[kResidual].tensor;
  const int64_t t = dim(partials, 0), m = dim(partials, 1), n = dim(partials, 2);
  if (t != 1 && t != 2 && t != 4 && t != 8)
    return fail(host, "{}: partials has T={}, it must be 1, 2, 4 or 8", op, t);
  if (bias && dim(bias, 0) != n)
    return fail(host, "{}: bias has N={}, partials has N={}", op, dim(bias, 0), n);
  if (residual && (dim(residual, 0) != m || dim(residual, 1) != n))
    return fail(host, "{}: residual is [{}, {}], partials are [{}, {}]", op, dim(residual, 0),
                dim(residual, 1), m, n);
  if (bias && residual && dtype(bias) != dtype(residual))
    return fail(host, "{}: bias is {}, residual is {}: both take y's dtype", op, name_of(dtype(bias)),
                name_of(dtype(residual)));
  const DLTensor* added = residual ? residual : bias;
  shapes[kY] = added ? shape_of({m, n}, static_cast<uint32_t>(dtype(added)), dtype(added))
                     : shape_of({m, n}, kFloats, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema tp_sum_schema = Schema(
    "tp_sum", "partial sums of linear, joined as its tree does (+ bias) (+ residual)", kArguments, infer);

}  // namespace rlk::registry
