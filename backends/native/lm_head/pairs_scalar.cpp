// VDPBF16PS in plain numbers: what its other forms must agree with.
#define RLK_ISA
#include "native/lm_head/chain_kernels.hpp"
#include "native/lm_head/pairs.hpp"

namespace rlk::native {
namespace {

struct PairLanes {
  using Scalar = float;
  using Vec = float;
  static constexpr int kLanes = 1;
  static constexpr int kVecs = 4;
  static constexpr int kRows = 2;
  static constexpr int kTile = 1;
  static constexpr int kDirectRows = 0;
  static constexpr int kLaneRows = 0;

  static Vec zero() { return 0; }
  static Vec load(const float* p) { return *p; }
  static Vec broadcast(const float* p) { return *p; }
  static void store(float* p, Vec v) { *p = v; }
  static Vec fma(Vec a, Vec b, Vec c) {
    return pair_step(std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b), c);
  }
  static Vec add(Vec a, Vec b) { return a + b; }

  static void upcast_run(const void* src, Float type, std::int64_t count, float* dst) {
    for (std::int64_t i = 0; i < count; ++i) dst[i] = load_element(src, type, i);
  }
  static std::int64_t pack_tile(const char* const* columns, Float type, std::int64_t k, std::int64_t count,
                                float* dst, std::int64_t dst_stride) {
    for (std::int64_t i = 0; i < count; ++i) dst[i * dst_stride] = load_element(columns[0], type, k + i);
    return count;
  }
  static std::int64_t store_row(const ChainProduct&, void*, std::int64_t, std::int64_t, const float*,
                                const void*) {
    return 0;
  }
};

}  // namespace

const ChainKernels& pair_kernels_scalar() {
  static constexpr ChainKernels kernels = kernels_of<PairLanes>("scalar", 4);
  return kernels;
}

}  // namespace rlk::native
