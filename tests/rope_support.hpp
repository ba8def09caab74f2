// Shared by the rope tests: tensors that own their memory, the engines under test, a float64 reference
// written from the formula alone, and the element check of the numerics contract.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "arithmetic/half.hpp"
#include "registry/rope/geometry.hpp"
#include "rope_golden.hpp"

namespace ropetest {

using rlk::Float;
using rlk::rotary::Attributes;
using rlk::rotary::Geometry;
using rlk::rotary::Tensors;
using Shape = std::vector<std::int64_t>;

inline std::int64_t elements(const Shape& shape) {
  std::int64_t n = 1;
  for (auto s : shape) n *= s;
  return n;
}

// 64-byte aligned memory, so that a copy of a tensor has the alignment of the original.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const AlignedAllocator&) const { return true; }
};

// A DLPack tensor with its own memory: contiguous, or with room between rows (`strides` in elements). The
// memory is exactly as large as needed and filled with NaN patterns (0xff), so an unwritten element shows.
struct Tensor {
  Shape shape, strides;
  std::vector<std::uint8_t, AlignedAllocator<std::uint8_t>> memory;
  DLTensor view{};
  std::size_t offset = 0;

  Tensor() = default;
  Tensor(DLDataType type, Shape shape_, Shape strides_ = {}, std::size_t offset_ = 0)
      : shape(std::move(shape_)), strides(std::move(strides_)), offset(offset_) {
    if (strides.empty()) {
      strides.assign(shape.size(), 1);
      for (int i = int(shape.size()) - 2; i >= 0; --i)
        strides[std::size_t(i)] = strides[std::size_t(i) + 1] * shape[std::size_t(i) + 1];
    }
    std::int64_t last = 0;
    bool empty = false;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      last += (shape[i] - 1) * strides[i];
      empty = empty || shape[i] == 0;
    }
    memory.assign(offset + (empty ? 0 : std::size_t(last + 1)) * (type.bits / 8u), 0xff);
    view.dtype = type;
    view.device = {kDLCPU, 0};
    view.ndim = int(shape.size());
  }
  const DLTensor* dl() {
    view.data = memory.data();
    view.byte_offset = offset;
    view.shape = shape.data();
    view.strides = strides.data();
    return &view;
  }
  std::uint8_t* at(std::int64_t flat) {
    std::int64_t where = 0;
    for (int i = int(shape.size()) - 1; i >= 0; --i) {
      where += flat % shape[std::size_t(i)] * strides[std::size_t(i)];
      flat /= shape[std::size_t(i)];
    }
    dl();
    return static_cast<std::uint8_t*>(view.data) + offset + where * (view.dtype.bits / 8);
  }
  std::int64_t size() const { return elements(shape); }

  void set(std::int64_t flat, double v) {
    using namespace rlk::simt;
    std::uint8_t* p = at(flat);
    const auto put = [&](auto x) { std::memcpy(p, &x, sizeof x); };
    if (view.dtype.code == kDLInt) return view.dtype.bits == 64 ? put(std::int64_t(v)) : put(std::int32_t(v));
    if (view.dtype.bits == 64) return put(v);
    if (view.dtype.bits == 32) return put(float(v));
    if (view.dtype.code == kDLBfloat) return put(from_float<bf16>(float(v)));
    put(from_float<fp16>(float(v)));
  }
  double get(std::int64_t flat) {
    using namespace rlk::simt;
    const std::uint8_t* p = at(flat);
    const auto take = [&](auto x) {
      std::memcpy(&x, p, sizeof x);
      return x;
    };
    if (view.dtype.code == kDLInt)
      return view.dtype.bits == 64 ? double(take(std::int64_t{})) : take(std::int32_t{});
    if (view.dtype.bits == 64) return take(double{});
    if (view.dtype.bits == 32) return take(float{});
    if (view.dtype.code == kDLBfloat) return to_float(take(bf16{}));
    return to_float(take(fp16{}));
  }
  std::uint32_t bits(std::int64_t flat) {
    std::uint32_t v = 0;
    std::memcpy(&v, at(flat), view.dtype.bits / 8u);
    return v;
  }
  Tensor& fill(const std::vector<double>& values) {
    REQUIRE(std::int64_t(values.size()) == size());
    for (std::int64_t i = 0; i < size(); ++i) set(i, values[std::size_t(i)]);
    return *this;
  }
  Tensor& random(std::uint64_t seed, double low = -2, double high = 2) {
    std::mt19937_64 generator(seed);
    for (std::int64_t i = 0; i < size(); ++i)
      set(i, low + (high - low) * double(generator() >> 11) * 0x1p-53);
    return *this;
  }
  std::vector<double> values() {
    std::vector<double> v(memory.size() == 0 ? 0 : static_cast<std::size_t>(size()));
    for (std::int64_t i = 0; i < size(); ++i) v[std::size_t(i)] = get(i);
    return v;
  }
};

inline DLDataType type_of(Float f) {
  return f == Float::f32    ? DLDataType{kDLFloat, 32, 1}
         : f == Float::bf16 ? DLDataType{kDLBfloat, 16, 1}
                            : DLDataType{kDLFloat, 16, 1};
}
inline constexpr DLDataType kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1};

inline bool same_bits(Tensor& a, Tensor& b) {
  if (a.shape != b.shape) return false;
  for (std::int64_t i = 0; i < a.size(); ++i) {
    if (a.bits(i) != b.bits(i)) return false;
  }
  return true;
}

// Spacing of the output type at v.
inline double ulp(Float type, double v) {
  const int digits = type == Float::f32 ? 24 : type == Float::bf16 ? 8 : 11;
  const int smallest = type == Float::f16 ? -14 : -126;
  const double magnitude = std::fabs(v);
  const int exponent = magnitude == 0 ? smallest : std::max(smallest, std::ilogb(magnitude));
  return std::ldexp(1.0, exponent - digits + 1);
}

// Counts elements farther from `want` than 1 ulp plus 2^-20 of their pair's magnitude, before or after the
// turn, whichever is larger. `partner` gives the index of the element that shares a pair with element i, or i
// itself outside the rotary range, where the match must be exact. `before` gives the magnitude of element i's
// pair before the turn; without it the result's alone counts.
using Magnitude = std::function<double(std::int64_t)>;
inline int outside(Tensor& got, const std::vector<double>& want, Float type,
                   const std::function<std::int64_t(std::int64_t)>& partner, const Magnitude& before = {}) {
  int bad = 0;
  for (std::int64_t i = 0; i < got.size(); ++i) {
    const double w = want[std::size_t(i)], value = got.get(i);
    const auto mate = partner(i);
    const double after = std::hypot(w, want[std::size_t(mate)]);
    const double pair = before ? std::max(after, before(i)) : after;
    const double bound = mate == i ? 0 : ulp(type, w) + 0x1p-20 * pair;
    if (!(std::fabs(value - w) <= bound)) ++bad;
  }
  return bad;
}

inline std::function<std::int64_t(std::int64_t)> partner_of(std::int64_t dim, std::int64_t rotary,
                                                            std::int64_t offset, bool adjacent) {
  return [=](std::int64_t i) {
    const std::int64_t d = i % dim - offset;
    if (d < 0 || d >= rotary) return i;
    if (adjacent) return i + (d % 2 == 0 ? 1 : -1);
    return d < rotary / 2 ? i + rotary / 2 : i - rotary / 2;
  };
}

// What a rotation is made of besides the tensor that turns.
struct Setting {
  Attributes attributes;
  Tensor cos, sin, positions, starts, cu_seqlens;

  Tensors tensors() {
    Tensors t;
    t.cos = cos.dl();
    t.sin = sin.dl();
    if (!positions.shape.empty()) t.positions = positions.dl();
    if (!starts.shape.empty()) t.starts = starts.dl();
    if (!cu_seqlens.shape.empty()) t.cu_seqlens = cu_seqlens.dl();
    return t;
  }
};

// Everything that can run a Geometry on this machine.
struct Engine {
  std::string name;
  std::function<void(const Geometry&)> run;
};
const std::vector<Engine>& engines();

// Runs every engine on NaN-filled outputs and demands equal bits; leaves the result in `out` and `k_out`.
// `tensors` must already name out (and k_out).
std::string run_all(const Attributes& attributes, Tensors tensors, Tensor& out, Tensor* k_out = nullptr);

// Runs the key-value split of these slots on every engine and demands the bits that are in the results
// already.
void check_kv(const rlk_slot* slots, bool backward, Tensor& first, Tensor& second);

}  // namespace ropetest
