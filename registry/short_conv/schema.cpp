// short_conv: a depthwise causal convolution over 2 to 4 tokens, then silu, and its gradients.
#include "registry/schema.hpp"

namespace rlk::registry {
namespace {

constexpr int64_t kLeastTaps = 2, kMostTaps = 4;

constexpr auto kInputs = arguments(
    read("x", "[B, T, D]").rank(3).rows(0).strided(),
    read("weight", "[D, W], oldest tap first, W from 2 to 4; x's dtype or fp32").rank(2),
    read("bias", "[D], x's dtype or fp32").rank(1).optional(),
    read("initial_state", "the W - 1 inputs before the first, oldest first [N, W - 1, D]; absent: zeros")
        .rank(3)
        .rows(0)
        .optional()
        .strided(),
    read("cu_seqlens", "[N + 1] bounds of packed sequences, B = 1")
        .of(RLK_I64)
        .rank(1)
        .optional()
        .no_gradient());
enum {
  kX = index_of(kInputs, "x"),
  kWeight = index_of(kInputs, "weight"),
  kBias = index_of(kInputs, "bias"),
  kInitial = index_of(kInputs, "initial_state"),
  kCuSeqlens = index_of(kInputs, "cu_seqlens")
};

constexpr auto kForward =
    arguments(saved(kInputs), write("y", "[B, T, D]").rank(3).rows(0).strided(),
              write("final_state", "the last W - 1 inputs, oldest first [N, W - 1, D]; may be initial_state")
                  .rank(3)
                  .rows(0)
                  .optional()
                  .strided());
enum { kY = index_of(kForward, "y"), kFinal = index_of(kForward, "final_state") };

// The inputs lie where the forward has them.
constexpr auto kBackward =
    arguments(kInputs, read("d_y", "gradient of y [B, T, D]").rank(3).rows(0).strided(),
              read("d_final_state", "gradient of final_state, x's dtype or fp32; absent: zeros")
                  .rank(3)
                  .rows(0)
                  .optional()
                  .strided(),
              write("d_x", "[B, T, D]").rank(3).rows(0).optional().strided(),
              write("d_weight", "[D, W]").rank(2).optional(), write("d_bias", "[D]").rank(1).optional(),
              write("d_initial_state", "[N, W - 1, D]").rank(3).rows(0).optional().strided());
enum {
  kDY = index_of(kBackward, "d_y"),
  kDFinal = index_of(kBackward, "d_final_state"),
  kDX = index_of(kBackward, "d_x"),
  kDWeight = index_of(kBackward, "d_weight"),
  kDBias = index_of(kBackward, "d_bias"),
  kDInitial = index_of(kBackward, "d_initial_state")
};

struct Sizes {
  int64_t batch, tokens, channels, taps, sequences;
};

int32_t expect(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
               std::initializer_list<int64_t> want) {
  int32_t i = 0;
  for (int64_t size : want) {
    if (t && dim(t, i) != size)
      return fail(host, "{}: {} has size {} in dimension {}, expected {}", op, name, dim(t, i), i, size);
    ++i;
  }
  return RLK_OK;
}

int32_t expect_dtype(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                     const DLTensor* x, bool or_fp32) {
  if (!t || dtype(t) == dtype(x) || (or_fp32 && dtype(t) == DType::f32)) return RLK_OK;
  return fail(host, "{}: {} is {}, x is {}: it takes x's dtype{}", op, name, name_of(dtype(t)),
              name_of(dtype(x)), or_fp32 ? " or fp32" : "");
}

int32_t check_inputs(const rlk_host* host, const char* op, const rlk_slot* s, Sizes& z) {
  const DLTensor *x = s[kX].tensor, *weight = s[kWeight].tensor, *cu = s[kCuSeqlens].tensor;
  z = {dim(x, 0), dim(x, 1), dim(x, 2), dim(weight, 1), cu ? dim(cu, 0) - 1 : dim(x, 0)};
  if (z.taps < kLeastTaps || z.taps > kMostTaps)
    return fail(host, "{}: weight has W={} taps, it must have from {} to {}", op, z.taps, kLeastTaps,
                kMostTaps);
  if (dim(weight, 0) != z.channels)
    return fail(host, "{}: weight has D={}, x has D={}", op, dim(weight, 0), z.channels);
  if (cu && z.batch != 1) return fail(host, "{}: cu_seqlens is given, B={} must be 1", op, z.batch);
  if (cu && z.sequences < 0) return fail(host, "{}: cu_seqlens is empty, it holds N + 1 bounds", op);
  if (int32_t code = expect(host, op, "bias", s[kBias].tensor, {z.channels})) return code;
  if (int32_t code =
          expect(host, op, "initial_state", s[kInitial].tensor, {z.sequences, z.taps - 1, z.channels}))
    return code;
  if (int32_t code = expect_dtype(host, op, "weight", weight, x, true)) return code;
  if (int32_t code = expect_dtype(host, op, "bias", s[kBias].tensor, x, true)) return code;
  return expect_dtype(host, op, "initial_state", s[kInitial].tensor, x, false);
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  Sizes z;
  if (int32_t code = check_inputs(host, "short_conv", s, z)) return code;
  const DType t = dtype(s[kX].tensor);
  shapes[kY] = like(s[kX].tensor, static_cast<uint32_t>(t), t);
  shapes[kFinal] = shape_of({z.sequences, z.taps - 1, z.channels}, static_cast<uint32_t>(t), t);
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "short_conv_bwd";
  Sizes z;
  if (int32_t code = check_inputs(host, op, s, z)) return code;
  const DLTensor *x = s[kX].tensor, *d_y = s[kDY].tensor, *d_final = s[kDFinal].tensor;
  if (int32_t code = expect(host, op, "d_y", d_y, {z.batch, z.tokens, z.channels})) return code;
  if (int32_t code = expect_dtype(host, op, "d_y", d_y, x, false)) return code;
  if (int32_t code = expect(host, op, "d_final_state", d_final, {z.sequences, z.taps - 1, z.channels}))
    return code;
  if (int32_t code = expect_dtype(host, op, "d_final_state", d_final, x, true)) return code;
  if (s[kDBias].tensor && !s[kBias].tensor) return fail(host, "{}: d_bias is asked for, bias is absent", op);
  const auto or_fp32 = [](const DLTensor* t) { return static_cast<uint32_t>(dtype(t)) | RLK_F32; };
  const DLTensor *weight = s[kWeight].tensor, *bias = s[kBias].tensor ? s[kBias].tensor : weight;
  shapes[kDX] = like(x, or_fp32(x), dtype(x));
  shapes[kDWeight] = like(weight, or_fp32(weight), dtype(weight));
  shapes[kDBias] = shape_of({z.channels}, or_fp32(bias), dtype(bias));
  shapes[kDInitial] = shape_of({z.sequences, z.taps - 1, z.channels}, or_fp32(x), dtype(x));
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema short_conv_schema =
    Schema("short_conv", "depthwise causal convolution over 2 to 4 tokens, then silu", kForward, infer)
        .gradient("short_conv_bwd")
        .may_alias("final_state=initial_state");
extern const rlk_op_schema short_conv_bwd_schema =
    Schema("short_conv_bwd", "gradients of short_conv", kBackward, infer_bwd);

}  // namespace rlk::registry
