// The rope tile kernel in plain C++: any processor.
#include <cstring>

#include "../simt/rope_math.hpp"
#include "rope_tile.hpp"

namespace rlk::native::rope {
namespace {

struct Isa {
  using V = float;
  static constexpr int kWidth = 1;
  template <class T>
  static V load(const T* p) {
    return simt::to_float(*p);
  }
  template <bool Stream, class T>
  static void store(T* p, V v) {
    *p = simt::from_float<T>(v);
  }
  static V add(V a, V b) { return a + b; }
  static V mul(V a, V b) { return a * b; }
  static V fma(V a, V b, V c) { return __builtin_fmaf(a, b, c); }
  static void deinterleave(V v0, V v1, V& a, V& b) { a = v0, b = v1; }
  static void interleave(V a, V b, V& v0, V& v1) { v0 = a, v1 = b; }
  template <bool Stream>
  static void copy(void* to, const void* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  }
  static void fence() {}
};

#include "rope_tile.inl"

}  // namespace

void tile_scalar(const rlk::rotary::Geometry& g, const Tile& tile) { rotate_any(g, tile); }
void kv_tile_scalar(const rlk::rotary::KvGeometry& g, const Tile& tile, bool backward) {
  split_any(g, tile, backward);
}

}  // namespace rlk::native::rope
