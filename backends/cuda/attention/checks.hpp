// What attention, attention_part and attention_bwd on Hopper ask of a call alike, and what their implementations have in common.
#pragma once

#include <cstdint>

#include "arithmetic/attention/problem.hpp"
#include "cuda/device.hpp"

namespace rlk::cuda::attention {

// Positions are of 32 bits, and so are a grid's blocks.
inline constexpr std::int64_t kMost = std::int64_t{1} << 30;

// Whether every row [.., width] starts on `bytes`.
template <class View>
bool aligned(const View& v, std::int64_t bytes) {
  if (v.numel() == 0) return true;
  const std::int64_t size = size_of(v.dtype());
  if (reinterpret_cast<std::uintptr_t>(v.template data<char>()) % static_cast<std::uintptr_t>(bytes) != 0)
    return false;
  for (std::int32_t i = 0; i + 1 < v.rank(); ++i)
    if (v.dim(i) > 1 && v.stride(i) * size % bytes != 0) return false;
  return true;
}

// The split, and rows of q, k and v.
template <int S, class Args>
rlk_verdict check_inputs(const Args& a) {
  if (a.split != S)
    return refuse("split is {0}, this arithmetic has {1}", {a.split, S},
                  "set split, or take another arithmetic");
  if constexpr (requires { a.prefix_of; })
    if (a.k.dtype() == DType::f8_e4m3 && a.prefix_of)
      return refuse("prefix_of beside an fp8 cache", {}, "bring keys and values in q's dtype");
  if (!aligned(a.q, 16) || !aligned(a.k, 16) || !aligned(a.v, 16))
    return refuse("rows of q, k or v that do not start on 16 bytes", {}, "align every row to 16 bytes");
  return kAccept;
}
template <class Args>
rlk_verdict check_sizes(const Args& a, const attn128::Problem& p) {
  if (p.room > kMost || p.queries > kMost / p.group)
    return refuse("{0} keys, {1} queries of {2} heads each: more than 2^30", {p.room, p.queries, p.group});
  const std::int64_t rows = a.q.dim(-1) == 0 ? 0 : a.q.numel() / a.q.dim(-1);
  if (rows > kMost || p.sequences * p.heads > kMost)
    return refuse("q has {0} rows in {1} sequences, the grid has 2^30", {rows, p.sequences});
  return kAccept;
}

// Unit: by the special function units' ex2, else by the library's own exp2, which is by name.
template <bool Unit>
constexpr Facts facts(const char* id, const char* doc, const char* arithmetic) {
  return {.id = id,
          .doc = Unit ? doc : "the same with weights by the library's own exp2: slower",
          .priority = Unit ? 300 : 250,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16 | RLK_F16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
          .device_type = kDLCUDA,
          .min_arch = 90,
          .max_arch = 90};
}

}  // namespace rlk::cuda::attention
