// The arithmetic of the rope ops, once for host and device. Arithmetic id "rope32".
//
// A pair (a, b) of one head with table entries (c1, s1) for a and (c2, s2) for b, all converted to fp32
// exactly:
//
//   forward     ya = fma(a, c1, -(b * s1))     yb = fma(b, c2, a * s2)
//   transposed  ya = fma(a, c1,   b * s2 )     yb = fma(b, c2, -(a * s1))
//
// The inner product is rounded once to fp32, the fma once; the result is rounded once to the output type
// (nearest even, NaN stored as the canonical pattern). With a half-width table c2 = c1 and s2 = s1. Dims
// outside the rotary range are copied bit for bit. A table row outside the table counts as NaN; one that is
// negative, where these are allowed, as (1, 0).
#pragma once

#include <cmath>

#include "arithmetic/half.hpp"
#include "registry/rope/geometry.hpp"

namespace rlk::rotary {

// The four factors of a pair: ya = fma(a, c1, b * m1), yb = fma(b, c2, a * m2). Negation is exact, so the
// sign of the sine may be folded into m1 and m2 without changing a bit.
struct Turn {
  float c1, m1, c2, m2;
};

RLK_HD Turn turn(float c1, float s1, float c2, float s2, bool transpose) {
  return transpose ? Turn{c1, s2, c2, -s1} : Turn{c1, -s1, c2, s2};
}

// By the angle zero: finite values stay as they are.
RLK_HD Turn no_turn(bool transpose) { return turn(1, 0, 1, 0, transpose); }

RLK_HD float fma_of_product(float x, float c, float y, float m) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(x, c, __fmul_rn(y, m));
#else
  return __builtin_fmaf(x, c, y * m);
#endif
}

RLK_HD void rotate(const Turn& t, float a, float b, float& ya, float& yb) {
  ya = fma_of_product(a, t.c1, b, t.m1);
  yb = fma_of_product(b, t.c2, a, t.m2);
}

RLK_HD std::int64_t integer_at(const Integers& v, std::int64_t i) {
  return v.wide ? static_cast<const std::int64_t*>(v.data)[i] : static_cast<const std::int32_t*>(v.data)[i];
}

RLK_HD int axis_of(const Rows& rows, int pair) {
  return static_cast<int>(rows.axis_bits[pair / 16] >> (pair % 16 * 2) & 3u);
}

// Table row of token (batch, token) for positions of one axis. Sequences are found by bisection, empty ones
// included: the last sequence that starts at or before the token owns it. Tokens behind the last sequence use
// position 0.
RLK_HD std::int64_t row_of(const Rows& rows, std::int64_t tokens, std::int64_t batch, std::int64_t token,
                           int axis = 0) {
  if (rows.positions.data != nullptr) {
    return integer_at(rows.positions,
                      axis * rows.position_axis + batch * rows.position_batch + token * rows.position_token);
  }
  std::int64_t sequence = batch, local = token, length = tokens;
  if (rows.cu_seqlens.data != nullptr) {
    std::int64_t low = 0, high = rows.sequences;  // the answer is in [low, high)
    while (low + 1 < high) {
      const std::int64_t middle = (low + high) / 2;
      (integer_at(rows.cu_seqlens, middle * rows.cu_stride) / rows.cp_size <= token ? low : high) = middle;
    }
    if (rows.sequences == 0) return 0;
    const std::int64_t begin = integer_at(rows.cu_seqlens, low * rows.cu_stride) / rows.cp_size;
    const std::int64_t end = integer_at(rows.cu_seqlens, (low + 1) * rows.cu_stride) / rows.cp_size;
    if (token >= end || token < begin) return 0;
    sequence = low;
    local = token - begin;
    length = end - begin;
  }
  if (rows.cp_size > 1) {  // a rank holds one chunk of the front half and its mirror image of the back half
    const std::int64_t half = length / 2;
    local = local < half ? local + rows.cp_rank * half
                         : local - half + (2 * rows.cp_size - rows.cp_rank - 1) * half;
  }
  if (rows.starts.data != nullptr) local += integer_at(rows.starts, sequence * rows.start_stride);
  return local;
}

RLK_HD float table_value(const void* base, Float type, std::int64_t i) {
  switch (type) {
    case Float::f32:
      return static_cast<const float*>(base)[i];
    case Float::bf16:
      return simt::to_float(static_cast<const simt::bf16*>(base)[i]);
    default:
      return simt::to_float(static_cast<const simt::fp16*>(base)[i]);
  }
}

}  // namespace rlk::rotary
