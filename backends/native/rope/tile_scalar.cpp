// The rope tile kernels in plain C++: any processor.
#include <cstring>
#include <type_traits>

#include "arithmetic/rope/math.hpp"
#include "native/rope/tile.hpp"

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
  template <class T>
  static void load_pairs(const T* p, V& even, V& odd) {
    even = load(p), odd = load(p + 1);
  }
  template <bool Stream, class T>
  static void store_pairs(T* p, V even, V odd) {
    store<Stream>(p, even), store<Stream>(p + 1, odd);
  }
  static V add(V a, V b) { return a + b; }
  static V mul(V a, V b) { return a * b; }
  static V fma(V a, V b, V c) { return __builtin_fmaf(a, b, c); }
  template <bool Stream>
  static void copy(void* to, const void* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  }
  static void fence() {}
};

#include "native/rope/tile.inl"

}  // namespace

constinit const Kernels kScalar{rotate_any, split_any};

}  // namespace rlk::native::rope
