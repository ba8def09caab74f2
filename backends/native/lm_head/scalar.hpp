// One number as the lanes of a chain product (chain_kernels.hpp), for any processor.
#pragma once

#include "arithmetic/fma.hpp"
#include "native/lm_head/chain.hpp"

namespace rlk::native {
namespace {

template <class T>
struct ScalarLanes {
  using Scalar = T;
  using Vec = T;
  static constexpr int kLanes = 1;
  static constexpr int kVecs = 4;
  static constexpr int kRows = 2;
  static constexpr int kTile = 1;
  static constexpr int kDirectRows = 0;
  static constexpr int kLaneRows = 0;

  static Vec zero() { return 0; }
  static Vec load(const T* p) { return *p; }
  static Vec broadcast(const T* p) { return *p; }
  static void store(T* p, Vec v) { *p = v; }
  static Vec fma(Vec a, Vec b, Vec c) { return simt::fused(a, b, c); }
  static Vec add(Vec a, Vec b) { return a + b; }

  static void upcast_run(const void* src, Float type, std::int64_t count, T* dst) {
    for (std::int64_t i = 0; i < count; ++i) dst[i] = load_element(src, type, i);
  }
  static std::int64_t pack_tile(const char* const* columns, Float type, std::int64_t k, std::int64_t count,
                                T* dst, std::int64_t dst_stride) {
    for (std::int64_t i = 0; i < count; ++i) dst[i * dst_stride] = load_element(columns[0], type, k + i);
    return count;
  }
  static std::int64_t store_row(const ChainProduct&, void*, std::int64_t, std::int64_t, const T*,
                                const void*) {
    return 0;
  }
};

}  // namespace
}  // namespace rlk::native
