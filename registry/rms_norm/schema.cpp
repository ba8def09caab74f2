// rms_norm: y = a / rms(a) * weight with a = x, or x + residual; and its gradients.
#include "registry/schema.hpp"

#include <utility>

namespace rlk::registry {
namespace {

constexpr int64_t kMostColumns = 65536;

constexpr auto kAttributes = attributes(
    real("eps", "added to the mean of squares", 1e-6),
    flag("weight_offset", "weights are stored less one: 1 + weight multiplies"),
    choice("cast", "where the normalised value is rounded to x's dtype: after the weight, or before it too",
           "end|early"),
    choice("gate_act", "what the gate goes through", "silu|sigmoid"));
enum {
  kEps = index_of(kAttributes, "eps"),
  kOffset = index_of(kAttributes, "weight_offset"),
  kCast = index_of(kAttributes, "cast")
};

constexpr auto kForward = arguments(
    read("x", "[..., H]").rows().saved().strided(),
    read("weight", "[H], x's dtype or fp32; absent: ones").rank(1).optional().saved(),
    read("residual", "added to x first [..., H], x's dtype or fp32").rows().optional().saved().strided(),
    read("gate", "[..., H]: gate_act of it multiplies the result").rows().optional().saved().strided(),
    write("y", "[..., H]").rows().strided(),
    write("sum", "x + residual in residual's dtype: what is normalised").rows().optional().saved().strided(),
    write("rstd", "1 / rms of every row [..., 1]").of(RLK_F32 | RLK_F64).rows().optional().saved());
enum {
  kX = index_of(kForward, "x"),
  kWeight = index_of(kForward, "weight"),
  kResidual = index_of(kForward, "residual"),
  kGate = index_of(kForward, "gate"),
  kY = index_of(kForward, "y"),
  kSum = index_of(kForward, "sum"),
  kRstd = index_of(kForward, "rstd")
};

constexpr auto kBackward = arguments(
    read("d_y", "gradient of y [..., H]").rows().strided(),
    read("x", "x of the forward, or its sum [..., H]; d_y's dtype or, without residual, fp32")
        .rows()
        .strided(),
    read("weight", "as in the forward [H]").rank(1).optional(),
    read("gate", "as in the forward [..., H]").rows().optional().strided(),
    read("rstd", "as the forward left it [..., 1]; absent: computed again").of(RLK_F32).rows().optional(),
    read("d_sum", "gradient of sum, added to the result [..., H]").rows().optional().strided(),
    read("residual", "as in the forward [..., H]").rows().optional().strided(),
    read("sum", "as the forward left it [..., H]; absent: computed again").rows().optional().strided(),
    write("d_x", "of x, and of residual [..., H]").rows().optional().strided(),
    write("d_residual", "of residual: d_x in a dtype of its own [..., H]").rows().optional().strided(),
    write("d_weight", "[H]").rank(1).optional(),
    write("d_gate", "of gate [..., H]").rows().optional().strided());
enum {
  kDY = index_of(kBackward, "d_y"),
  kA = index_of(kBackward, "x"),
  kWeightB = index_of(kBackward, "weight"),
  kGateB = index_of(kBackward, "gate"),
  kRstdB = index_of(kBackward, "rstd"),
  kDSum = index_of(kBackward, "d_sum"),
  kResidualB = index_of(kBackward, "residual"),
  kSumB = index_of(kBackward, "sum"),
  kDX = index_of(kBackward, "d_x"),
  kDResidual = index_of(kBackward, "d_residual"),
  kDWeight = index_of(kBackward, "d_weight"),
  kDGate = index_of(kBackward, "d_gate")
};

// t has the shape of x, but `width` columns.
int32_t expect_rows(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                    const char* base, const DLTensor* x, int64_t width) {
  if (!t) return RLK_OK;
  if (t->ndim != x->ndim)
    return fail(host, "{}: {} has rank {}, {} has rank {}", op, name, t->ndim, base, x->ndim);
  for (int32_t i = 0; i < x->ndim; ++i) {
    const int64_t want = i + 1 < x->ndim ? dim(x, i) : width;
    if (dim(t, i) != want)
      return fail(host, "{}: {} has size {} in dimension {}, expected {} as {} has [..., {}]", op, name,
                  dim(t, i), i, want, base, dim(x, -1));
  }
  return RLK_OK;
}

int32_t expect_dtype(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                     const char* base, const DLTensor* x, bool or_fp32) {
  if (!t || dtype(t) == dtype(x) || (or_fp32 && dtype(t) == DType::f32)) return RLK_OK;
  return fail(host, "{}: {} is {}, {} is {}: it takes {}'s dtype{}", op, name, name_of(dtype(t)), base,
              name_of(dtype(x)), base, or_fp32 ? " or fp32" : "");
}

int32_t check_common(const rlk_host* host, const char* op, const DLTensor* x, const char* base,
                     const DLTensor* weight, const DLTensor* gate, const rlk_slot* attributes) {
  const int64_t h = dim(x, -1);
  if (h < 1 || h > kMostColumns)
    return fail(host, "{}: {} has H={}, it must be from 1 to {}", op, base, h, kMostColumns);
  if (weight && dim(weight, 0) != h)
    return fail(host, "{}: weight has H={}, {} has H={}", op, dim(weight, 0), base, h);
  if (int32_t code = expect_dtype(host, op, "weight", weight, base, x, true)) return code;
  if (int32_t code = expect_rows(host, op, "gate", gate, base, x, h)) return code;
  if (int32_t code = expect_dtype(host, op, "gate", gate, base, x, false)) return code;
  if (!weight && attributes[kOffset].i) return fail(host, "{}: weight_offset is 1, but weight is absent", op);
  if (gate && attributes[kCast].i) return fail(host, "{}: gate is given, cast must be end, not early", op);
  const double eps = attributes[kEps].f;
  if (!(eps >= 0 && eps <= 1e30)) return fail(host, "{}: eps is {}, it must be from 0 to 1e30", op, eps);
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "rms_norm";
  const DLTensor *x = s[kX].tensor, *residual = s[kResidual].tensor;
  if (int32_t code = check_common(host, op, x, "x", s[kWeight].tensor, s[kGate].tensor, s + kForward.size()))
    return code;
  if (int32_t code = expect_rows(host, op, "residual", residual, "x", x, dim(x, -1))) return code;
  if (int32_t code = expect_dtype(host, op, "residual", residual, "x", x, true)) return code;
  if (s[kSum].tensor && !residual) return fail(host, "{}: sum is asked for, residual is absent", op);
  shapes[kY] = like(x, static_cast<uint32_t>(dtype(x)), dtype(x));
  shapes[kSum] = residual ? like(residual, static_cast<uint32_t>(dtype(residual)), dtype(residual))
                          : like(x, static_cast<uint32_t>(dtype(x)), dtype(x));
  shapes[kRstd] = with_last(x, 1, RLK_F32, DType::f32);
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "rms_norm_bwd";
  const DLTensor *d_y = s[kDY].tensor, *a = s[kA].tensor, *weight = s[kWeightB].tensor,
                 *gate = s[kGateB].tensor, *residual = s[kResidualB].tensor, *sum = s[kSumB].tensor;
  const int64_t h = dim(d_y, -1);
  if (int32_t code = check_common(host, op, d_y, "d_y", weight, gate, s + kBackward.size())) return code;
  if (int32_t code = expect_rows(host, op, "x", a, "d_y", d_y, h)) return code;
  if (int32_t code = expect_dtype(host, op, "x", a, "d_y", d_y, !residual)) return code;
  for (const auto& [name, t] : {std::pair{"residual", residual}, std::pair{"sum", sum}}) {
    if (int32_t code = expect_rows(host, op, name, t, "d_y", d_y, h)) return code;
    if (int32_t code = expect_dtype(host, op, name, t, "d_y", d_y, true)) return code;
  }
  if (residual && sum && dtype(residual) != dtype(sum))
    return fail(host, "{}: sum is {}, residual is {}: sum has residual's dtype", op, name_of(dtype(sum)),
                name_of(dtype(residual)));
  if (int32_t code = expect_rows(host, op, "rstd", s[kRstdB].tensor, "d_y", d_y, 1)) return code;
  if (int32_t code = expect_rows(host, op, "d_sum", s[kDSum].tensor, "d_y", d_y, h)) return code;
  if (int32_t code = expect_dtype(host, op, "d_sum", s[kDSum].tensor, "d_y", d_y, true)) return code;
  if (s[kDWeight].tensor && !weight) return fail(host, "{}: d_weight is asked for, weight is absent", op);
  if (s[kDGate].tensor && !gate) return fail(host, "{}: d_gate is asked for, gate is absent", op);
  const uint32_t dtypes = static_cast<uint32_t>(dtype(d_y)) | RLK_F32;
  shapes[kDX] = like(d_y, dtypes, dtype(d_y));
  shapes[kDResidual] = like(d_y, dtypes, dtype(residual ? residual : sum ? sum : a));
  shapes[kDWeight] = shape_of({h}, dtypes, weight ? dtype(weight) : dtype(d_y));
  shapes[kDGate] = like(d_y, dtypes, dtype(d_y));
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema rms_norm_schema =
    Schema("rms_norm", "root-mean-square norm of x, or of x + residual", kForward, kAttributes, infer)
        .gradient("rms_norm_bwd");
extern const rlk_op_schema rms_norm_bwd_schema =
    Schema("rms_norm_bwd", "gradients of rms_norm", kBackward, kAttributes, infer_bwd);

}  // namespace rlk::registry
