// tp_sum: the partial sums of linear, joined by the top of its tree, and what linear adds to a whole sum; and its gradients.
#include "registry/schema.hpp"

namespace rlk::registry {
namespace {

constexpr int kMost = 8;  // partial sums

constexpr auto kSlice = attributes(integer("row_first", "the first of the rows that are summed", 0),
                                   integer("row_count", "how many they are; -1: all from there on", -1));

constexpr Argument partial(const char* name, const char* doc) {
  return read(name, doc).of(RLK_F32).rank(2).rows(0).optional().strided();
}
constexpr auto kOthers = arguments(
    partial("p1",
            "the second of 2, 4 or 8 partial sums in tensors of their own [M, N]: partials is the first"),
    partial("p2", "likewise"), partial("p3", "likewise"), partial("p4", "likewise"),
    partial("p5", "likewise"), partial("p6", "likewise"), partial("p7", "likewise"));

constexpr auto kArguments = arguments(
    read("partials", "[T, M, N], T = 1, 2, 4 or 8, in the order of the leaves; or the first alone [M, N]")
        .of(RLK_F32)
        .rank(2, 3)
        .rows(1)
        .saved()
        .strided(),
    read("bias", "[N], added after the sum is rounded; y's dtype").rank(1).optional(),
    read("residual", "added last [M, N]; y's dtype").rank(2).rows(0).optional().strided(),
    write("y", "[M, N]").rank(2).rows(0).strided(), kOthers);
enum {
  kPartials = index_of(kArguments, "partials"),
  kBias = index_of(kArguments, "bias"),
  kResidual = index_of(kArguments, "residual"),
  kY = index_of(kArguments, "y"),
  kP1 = index_of(kArguments, "p1")
};

constexpr Argument gradient(const char* name) {
  return write(name, "that of p1 and so on").of(RLK_F32).rank(2).rows(0).optional().strided();
}
constexpr auto kBackward = arguments(
    read("d_y", "gradient of y [M, N]").rank(2).rows(0).strided(),
    read("partials", "as in the forward; of it only the shape is read")
        .of(RLK_F32)
        .rank(2, 3)
        .rows(1)
        .strided(),
    write("d_partials", "d_y, T times; the shape of partials")
        .of(RLK_F32)
        .rank(2, 3)
        .rows(1)
        .optional()
        .strided(),
    gradient("d_p1"), gradient("d_p2"), gradient("d_p3"), gradient("d_p4"), gradient("d_p5"),
    gradient("d_p6"), gradient("d_p7"), write("d_bias", "column sums of d_y [N]").rank(1).optional(),
    write("d_residual", "d_y in the residual's dtype [M, N]").rank(2).rows(0).optional().strided());
enum {
  kDY = index_of(kBackward, "d_y"),
  kPartialsB = index_of(kBackward, "partials"),
  kDPartials = index_of(kBackward, "d_partials"),
  kDP1 = index_of(kBackward, "d_p1"),
  kDBias = index_of(kBackward, "d_bias"),
  kDResidual = index_of(kBackward, "d_residual")
};

// Finds how many of the M rows of partials are summed.
int32_t check_slice(const rlk_host* host, const char* op, const rlk_slot* a, int64_t m, int64_t& rows) {
  const int64_t first = a[0].i, count = a[1].i;
  if (first < 0 || first > m) return fail(host, "{}: row_first is {}, partials have {} rows", op, first, m);
  if (count < -1 || count > m - first)
    return fail(host, "{}: row_count is {}, from row_first={} on partials have {} rows", op, count, first,
                m - first);
  rows = count < 0 ? m - first : count;
  return RLK_OK;
}

// Those that follow one another from p1 on, of the shape of partials.
int32_t check_others(const rlk_host* host, const char* op, const DLTensor* partials, const rlk_slot* p1,
                     int64_t& t) {
  static constexpr const char* kNames[] = {"p1", "p2", "p3", "p4", "p5", "p6", "p7"};
  const bool stacked = partials->ndim == 3;
  t = stacked ? dim(partials, 0) : 1;
  for (int i = 0; i + 1 < kMost; ++i) {
    const DLTensor* p = p1[i].tensor;
    if (!p) continue;
    if (stacked)
      return fail(host, "{}: {} is given beside partials of rank 3, which hold every sum", op, kNames[i]);
    if (t != i + 1) return fail(host, "{}: {} is given without {}", op, kNames[i], kNames[t - 1]);
    if (dim(p, 0) != dim(partials, 0) || dim(p, 1) != dim(partials, 1))
      return fail(host, "{}: {} is [{}, {}], partials is [{}, {}]", op, kNames[i], dim(p, 0), dim(p, 1),
                  dim(partials, 0), dim(partials, 1));
    ++t;
  }
  if (t != 1 && t != 2 && t != 4 && t != 8)
    return fail(host, "{}: partials has T={}, it must be 1, 2, 4 or 8", op, t);
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "tp_sum";
  const DLTensor *partials = s[kPartials].tensor, *bias = s[kBias].tensor, *residual = s[kResidual].tensor;
  const int64_t n = dim(partials, -1);
  int64_t t = 0, m = 0;
  if (int32_t code = check_others(host, op, partials, s + kP1, t)) return code;
  if (int32_t code = check_slice(host, op, s + kArguments.size(), dim(partials, -2), m)) return code;
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

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "tp_sum_bwd";
  const DLTensor *d_y = s[kDY].tensor, *partials = s[kPartialsB].tensor;
  const int64_t whole = dim(partials, -2), n = dim(partials, -1);
  int64_t m = 0;
  if (int32_t code = check_slice(host, op, s + kBackward.size(), whole, m)) return code;
  if (const int64_t t = partials->ndim == 3 ? dim(partials, 0) : 1; t != 1 && t != 2 && t != 4 && t != 8)
    return fail(host, "{}: partials has T={}, it must be 1, 2, 4 or 8", op, t);
  if (dim(d_y, 0) != m || dim(d_y, 1) != n)
    return fail(host, "{}: d_y is [{}, {}], partials give [{}, {}]", op, dim(d_y, 0), dim(d_y, 1), m, n);
  shapes[kDPartials] = like(partials, RLK_F32, DType::f32);
  for (int i = 0; i + 1 < kMost; ++i) {
    if (s[kDP1 + i].tensor && partials->ndim == 3)
      return fail(host, "{}: d_p{} is asked for, partials of rank 3 hold every sum", op, i + 1);
    shapes[kDP1 + i] = shape_of({whole, n}, RLK_F32, DType::f32);
  }
  const uint32_t dtypes = static_cast<uint32_t>(dtype(d_y)) | RLK_F32;
  shapes[kDBias] = shape_of({n}, dtypes, dtype(d_y));
  shapes[kDResidual] = shape_of({m, n}, dtypes, dtype(d_y));
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema tp_sum_schema =
    Schema("tp_sum", "partial sums of linear, joined as its tree does (+ bias) (+ residual)", kArguments,
           kSlice, infer)
        .gradient("tp_sum_bwd");
extern const rlk_op_schema tp_sum_bwd_schema =
    Schema("tp_sum_bwd", "gradients of tp_sum", kBackward, kSlice, infer_bwd);

}  // namespace rlk::registry
