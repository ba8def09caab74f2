// Factors of an fp8 cache's heads, k_scale and v_scale: as arguments of ops that read or write one, and one by one.
#pragma once

#include "registry/schema.hpp"

namespace rlk::registry {

constexpr Argument factors(const char* name, const char* doc) {
  return read(name, doc).of(RLK_F32).rank(1).optional().no_gradient();
}

// `t` are the factors of a cache [.., Hkv, D], which may be absent.
inline int32_t check_factors(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                             const char* cache_name, const DLTensor* cache) {
  if (!t) return RLK_OK;
  if (!cache) return fail(host, "{}: {} is given, {} is absent", op, name, cache_name);
  if (dtype(cache) != DType::f8_e4m3)
    return fail(host, "{}: {} is given, {} is {}, not {}", op, name, cache_name, name_of(dtype(cache)),
                name_of(DType::f8_e4m3));
  if (const int64_t size = dim(t, 0); size != 1 && size != dim(cache, -2))
    return fail(host, "{}: {} has size {}, it takes 1 or Hkv={}", op, name, size, dim(cache, -2));
  return RLK_OK;
}

// A head's factor, 1 where there is none.
inline float factor_of(const In& factors, int64_t head) {
  if (!factors) return 1;
  return factors.data<float>()[factors.dim(0) > 1 ? head * factors.stride(0) : 0];
}

}  // namespace rlk::registry
