// linear: y[..., N] = x[..., K] * weight[N, K]^T (+ bias[N]) (+ residual[..., N]), whole or a part of it, or swiglu of that; and
// its gradients.
#include "registry/schema.hpp"

#include "registry/linear/geometry.hpp"

namespace rlk::registry {
namespace {

constexpr auto kAttributes = attributes(
    integer("leaf_first", "the first of the leaves of k_total that x and weight hold", 0),
    integer("leaf_count", "how many they hold: 8 is the whole, 1, 2 and 4 give a partial sum", 8),
    integer("k_total", "the whole K, of which this call has its leaves; 0: K of x", 0),
    choice("activation", "swiglu: weight has the rows of gate and up, y is swiglu of the two products",
           "none|swiglu"),
    choice("gate_up", "where they lie: all of gate first, or 64 rows of each in turn",
           "stacked|interleaved64"),
    choice("roundings", "of swiglu: the product; or silu(gate) too", "once|twice"));
enum { kActivation = index_of(kAttributes, "activation"), kGateUp = index_of(kAttributes, "gate_up") };

constexpr auto kForward = arguments(
    read("x", "activations [..., K]").rows().saved().strided(),
    read("weight", "[N, K], as checkpoints store it").rank(2).saved().strided(),
    read("bias", "[N], added after the product is rounded; x's dtype, or fp32 with y in fp32")
        .rank(1)
        .optional(),
    read("residual", "added last [..., N]; x's dtype, or fp32 with y in fp32").rows().optional().strided(),
    write("y", "[..., N], or [..., N / 2] of swiglu, in x's dtype or fp32; a partial sum is fp32")
        .rows()
        .strided());
enum {
  kX = index_of(kForward, "x"),
  kWeight = index_of(kForward, "weight"),
  kBias = index_of(kForward, "bias"),
  kResidual = index_of(kForward, "residual"),
  kY = index_of(kForward, "y")
};

constexpr auto kBackwardAttributes = attributes(
    integer("d_x_leaf_first", "the first of the leaves of n_total that d_y and weight hold", 0),
    integer("d_x_leaf_count", "how many they hold: 8 is the whole, 1, 2 and 4 make d_x a partial sum", 8),
    integer("n_total", "the whole N, of which this call has its leaves; 0: N of d_y", 0),
    choice("activation", "the forward's: swiglu is refused, its gradients are those of linear and of swiglu",
           "none|swiglu"));
constexpr auto kActivationB = index_of(kBackwardAttributes, "activation");

constexpr auto kBackward = arguments(
    read("d_y", "gradient of y [..., N]; x's dtype or fp32").rows().strided(),
    read("x", "as in the forward [..., K]").rows().strided(),
    read("weight", "as in the forward [N, K]").rank(2).strided(),
    write("d_x", "d_y * weight [..., K]; a partial sum is fp32").rows().optional().strided(),
    write("d_weight", "d_y^T * x [N, K]").rank(2).optional().strided(),
    write("d_bias", "column sums of d_y [N]").rank(1).optional(),
    write("d_residual", "d_y in the residual's dtype [..., N]").rows().optional().strided(),
    so_far("d_weight_before", "[N, K] fp32, to which d_weight is added; may be its memory").rank(2).strided(),
    so_far("d_bias_before", "[N] fp32, to which d_bias is added; may be its memory").rank(1),
    read("segments", "sizes along the whole N of projections that are fused in weight; absent: one")
        .of(RLK_I64)
        .rank(1)
        .optional()
        .no_gradient()
        .on_host());
enum {
  kDY = index_of(kBackward, "d_y"),
  kXB = index_of(kBackward, "x"),
  kWeightB = index_of(kBackward, "weight"),
  kDX = index_of(kBackward, "d_x"),
  kDWeight = index_of(kBackward, "d_weight"),
  kDBias = index_of(kBackward, "d_bias"),
  kDResidual = index_of(kBackward, "d_residual"),
  kWeightBefore = index_of(kBackward, "d_weight_before"),
  kBiasBefore = index_of(kBackward, "d_bias_before"),
  kSegments = index_of(kBackward, "segments")
};

// The dimensions of `t` but the last are those of x.
int32_t expect_rows(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                    const DLTensor* x) {
  if (t->ndim != x->ndim) return fail(host, "{}: {} has rank {}, x has rank {}", op, name, t->ndim, x->ndim);
  for (int32_t i = 0; i + 1 < x->ndim; ++i)
    if (dim(t, i) != dim(x, i))
      return fail(host, "{}: {} has size {} in dimension {}, x has {}", op, name, dim(t, i), i, dim(x, i));
  return RLK_OK;
}

int32_t expect_dtype(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                     const DLTensor* x) {
  if (dtype(t) == dtype(x) || dtype(t) == DType::f32) return RLK_OK;
  return fail(host, "{}: {} is {}, x is {}: it takes x's dtype or fp32", op, name, name_of(dtype(t)),
              name_of(dtype(x)));
}

int32_t check_product(const rlk_host* host, const char* op, const DLTensor* x, const DLTensor* weight) {
  if (dtype(weight) != dtype(x))
    return fail(host, "{}: weight is {}, x is {}", op, name_of(dtype(weight)), name_of(dtype(x)));
  const int64_t k = dim(x, -1);
  if (dim(weight, 1) == k) return RLK_OK;
  if (dim(weight, 0) == k)
    return fail(host,
                "{}: x has K={}, weight has K={}: weight [{}, {}] fits only as [K, N], this op takes [N, K]",
                op, k, dim(weight, 1), dim(weight, 0), dim(weight, 1));
  return fail(host, "{}: x has K={}, weight has K={}", op, k, dim(weight, 1));
}

// `length` is what the call holds of `total`, which is its name's `dimension`. The three attributes lie in a row.
int32_t check_leaves(const rlk_host* host, const char* op, const rlk_attribute* names, const rlk_slot* a,
                     const char* dimension, int64_t length, bool& partial, bool segments = false) {
  const int64_t first = a[0].i, count = a[1].i, total = a[2].i;
  if (count != 1 && count != 2 && count != 4 && count != 8)
    return fail(host, "{}: {} is {}, it must be 1, 2, 4 or 8", op, names[1].name, count);
  if (first < 0 || first >= leaves::kLeaves || first % count)
    return fail(host, "{}: {} is {}, with {}={} it must be a multiple of that from 0 to {}", op,
                names[0].name, first, names[1].name, count, leaves::kLeaves - count);
  if (total < 0 || total > leaves::kMost)
    return fail(host, "{}: {} is {}, it must be from 0 to 2^53", op, names[2].name, total);
  if (length > leaves::kMost)
    return fail(host, "{}: {} is {}, it must be at most 2^53", op, dimension, length);
  partial = count != leaves::kLeaves;
  if ((!partial && total == 0) || segments) return RLK_OK;
  if (const int64_t held = leaves::length(total, first, count); held != length)
    return fail(host, "{}: {}={}, but leaves {} to {} of {}={} have {}", op, dimension, length, first,
                first + count - 1, names[2].name, total, held);
  return RLK_OK;
}

// Finds the columns of y. `a`: the attributes.
int32_t check_activation(const rlk_host* host, const char* op, const rlk_slot* a, bool partial, bool residual,
                         int64_t n, int64_t& columns) {
  columns = n;
  if (a[kActivation].i == 0) return RLK_OK;
  if (partial)
    return fail(host, "{}: activation is swiglu with leaf_count={}: only a whole sum is activated", op,
                a[index_of(kAttributes, "leaf_count")].i);
  if (residual)
    return fail(host, "{}: residual is given with activation=swiglu: it would be added behind the activation",
                op);
  const int64_t multiple = a[kGateUp].i == 0 ? 2 : 2 * gate_up::kRun;
  if (n % multiple)
    return fail(host, "{}: weight has N={}, activation=swiglu with gate_up={} takes a multiple of {}", op, n,
                a[kGateUp].i == 0 ? "stacked" : "interleaved64", multiple);
  columns = n / 2;
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "linear";
  const DLTensor *x = s[kX].tensor, *weight = s[kWeight].tensor, *bias = s[kBias].tensor,
                 *residual = s[kResidual].tensor;
  if (int32_t code = check_product(host, op, x, weight)) return code;
  const int64_t n = dim(weight, 0);
  bool partial = false, wide = false;
  if (int32_t code =
          check_leaves(host, op, kAttributes.data(), s + kForward.size(), "K", dim(x, -1), partial))
    return code;
  if (bias) {
    if (partial)
      return fail(host, "{}: bias is given with leaf_count={}: tp_sum adds it to the whole sum", op,
                  s[kForward.size() + 1].i);
    if (dim(bias, 0) != n) return fail(host, "{}: bias has N={}, weight has N={}", op, dim(bias, 0), n);
    if (int32_t code = expect_dtype(host, op, "bias", bias, x)) return code;
    wide = dtype(bias) == DType::f32;
  }
  if (residual) {
    if (partial)
      return fail(host, "{}: residual is given with leaf_count={}: tp_sum adds it to the whole sum", op,
                  s[kForward.size() + 1].i);
    if (int32_t code = expect_rows(host, op, "residual", residual, x)) return code;
    if (dim(residual, -1) != n)
      return fail(host, "{}: residual has N={}, weight has N={}", op, dim(residual, -1), n);
    if (int32_t code = expect_dtype(host, op, "residual", residual, x)) return code;
    wide |= dtype(residual) == DType::f32;
  }
  int64_t columns = 0;
  if (int32_t code =
          check_activation(host, op, s + kForward.size(), partial, residual != nullptr, n, columns))
    return code;
  const DType least = partial || wide ? DType::f32 : dtype(x);
  shapes[kY] = with_last(x, columns, static_cast<uint32_t>(least) | RLK_F32, least);
  return RLK_OK;
}

// Leaves of every segment are held, which add up to N.
int32_t check_segments(const rlk_host* host, const char* op, const DLTensor* segments, const rlk_slot* a,
                       int64_t n) {
  const int64_t count = dim(segments, 0), whole = a[2].i ? a[2].i : n;
  if (count < 1 || count > leaves::Segments::kMost)
    return fail(host, "{}: segments has {} sizes, it must have 1 to {}", op, count, leaves::Segments::kMost);
  if (!segments->data) return RLK_OK;  // only shapes are asked for
  const auto* sizes =
      reinterpret_cast<const int64_t*>(static_cast<const char*>(segments->data) + segments->byte_offset);
  int64_t sum = 0, held = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] < 0 || sizes[i] > whole - sum)
      return fail(host, "{}: segments[{}] is {}, of n_total={} there are {} left", op, i, sizes[i], whole,
                  whole - sum);
    sum += sizes[i];
    held += leaves::length(sizes[i], a[0].i, a[1].i);
  }
  if (sum != whole) return fail(host, "{}: segments add up to {}, n_total is {}", op, sum, whole);
  if (held != n)
    return fail(host, "{}: N={}, but leaves {} to {} of the segments have {}", op, n, a[0].i,
                a[0].i + a[1].i - 1, held);
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "linear_bwd";
  const DLTensor *d_y = s[kDY].tensor, *x = s[kXB].tensor, *weight = s[kWeightB].tensor;
  if (s[kBackward.size() + kActivationB].i != 0)
    return fail(
        host, "{}: activation is swiglu, whose gradients are taken in two: of linear without it, then swiglu",
        op);
  if (int32_t code = check_product(host, op, x, weight)) return code;
  const int64_t n = dim(weight, 0), k = dim(weight, 1);
  if (dim(d_y, -1) != n) return fail(host, "{}: d_y has N={}, weight has N={}", op, dim(d_y, -1), n);
  if (int32_t code = expect_rows(host, op, "d_y", d_y, x)) return code;
  if (int32_t code = expect_dtype(host, op, "d_y", d_y, x)) return code;
  bool partial = false;
  if (int32_t code = check_leaves(host, op, kBackwardAttributes.data(), s + kBackward.size(), "N", n, partial,
                                  s[kSegments].tensor))
    return code;
  if (s[kSegments].tensor)
    if (int32_t code = check_segments(host, op, s[kSegments].tensor, s + kBackward.size(), n)) return code;
  const uint32_t dtypes = static_cast<uint32_t>(dtype(x)) | RLK_F32;
  const DType least = partial ? DType::f32 : dtype(x);
  shapes[kDX] = like(x, static_cast<uint32_t>(least) | RLK_F32, least);
  // Sums that go on from call to call stay in fp32.
  const auto gradient = [&](std::initializer_list<int64_t> dims, const DLTensor* before) {
    return before ? shape_of(dims, RLK_F32, DType::f32) : shape_of(dims, dtypes, dtype(x));
  };
  shapes[kDWeight] = gradient({n, k}, s[kWeightBefore].tensor);
  shapes[kDBias] = gradient({n}, s[kBiasBefore].tensor);
  shapes[kDResidual] = like(d_y, dtypes, dtype(x));
  if (int32_t code = check_before(host, op, "d_weight_before", s[kWeightBefore].tensor, shapes[kDWeight]))
    return code;
  return check_before(host, op, "d_bias_before", s[kBiasBefore].tensor, shapes[kDBias]);
}

}  // namespace

extern const rlk_op_schema linear_schema =
    Schema("linear", "y = x * weight^T (+ bias) (+ residual), or a partial sum of it, or swiglu of it",
           kForward, kAttributes, infer)
        .gradient("linear_bwd");
extern const rlk_op_schema linear_bwd_schema =
    Schema("linear_bwd", "gradients of linear", kBackward, kBackwardAttributes, infer_bwd)
        .may_alias("d_weight=d_weight_before,d_bias=d_bias_before");

}  // namespace rlk::registry
