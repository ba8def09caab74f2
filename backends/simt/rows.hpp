// Rows of tensors as a GPU thread sees them: single elements, or packs of eight neighbours that are moved by 16 bytes where
// they lie on 16 bytes.
#pragma once

#include <type_traits>

#include "arithmetic/rows.hpp"
#include "simt/simt.hpp"

namespace rlk::rows {

inline constexpr int kPack = 8;

// How many of a pack's elements a row of `width` has from `i` on.
__device__ __forceinline__ int pack_at(std::int64_t i, std::int64_t width) {
  const std::int64_t n = width - i;
  return n >= kPack ? kPack : n > 0 ? static_cast<int>(n) : 0;
}

// In place of an element's type: whatever the tensor has, decided as the kernel runs.
struct Any {
  std::uint32_t largest;
};
// bf16 in rows of whole packs that lie on 16 bytes: nothing is decided.
struct Whole {
  std::uint16_t bits;
};
inline bool lies_whole(const Axes& axes, const Tensor& t) {
  bool whole = t.type == Type::bf16 && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i < axes.count; ++i) whole = whole && t.stride[i] % kPack == 0;
  return whole || !t;
}

// Calls f(T{}) with what its kernel is to be compiled for: bf16 where all tensors are of that type, else Any.
template <class F>
void for_type(bool all_bf16, F f) {
  if (all_bf16)
    f(bf16{});
  else
    f(Any{});
}
// Whether all tensors that are there have this type.
template <class... Tensors>
bool all_of(Type type, const Tensors&... tensors) {
  return ((!tensors || tensors.type == type) && ...);
}

// Sixteen bytes of a tensor. A pack is one of them, or two in fp32.
struct alignas(16) Bytes16 {
  std::uint32_t word[4];
};

// A pack as it lies in memory.
template <class T>
struct Raw {
  Bytes16 part[sizeof(T) == 2 ? 1 : 2];  // two for fp32, and for what may be
};

__device__ __forceinline__ bool whole(const void* at, int n) {
  return n == kPack && reinterpret_cast<std::uintptr_t>(at) % sizeof(Bytes16) == 0;
}

// Packs at the end of a row, and of rows that start anywhere: out of line, since they are many copies of rare code.
RLK_DEVICE_CALL Raw<bf16> fetch_halves(const std::uint16_t* from, int n) {
  Raw<bf16> raw;
#pragma unroll
  for (int k = 0; k < kPack; k += 2) {
    const std::uint32_t low = k < n ? from[k] : 0, high = k + 1 < n ? from[k + 1] : 0;
    raw.part[0].word[k / 2] = low | high << 16;
  }
  return raw;
}
RLK_DEVICE_CALL Raw<float> fetch_words(const std::uint32_t* from, int n) {
  Raw<float> raw;
#pragma unroll
  for (int k = 0; k < kPack; ++k) raw.part[k / 4].word[k % 4] = k < n ? from[k] : 0;
  return raw;
}
RLK_DEVICE_CALL void put_halves(std::uint16_t* to, int n, Bytes16 bytes) {
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < n) to[k] = static_cast<std::uint16_t>(bytes.word[k / 2] >> 16 * (k % 2));
}
RLK_DEVICE_CALL void put_words(std::uint32_t* to, int n, Raw<float> raw) {
#pragma unroll
  for (int k = 0; k < kPack; ++k)
    if (k < n) to[k] = raw.part[k / 4].word[k % 4];
}

__device__ __forceinline__ void fetch(const std::uint16_t* from, int n, Bytes16* to) {
  to[0] = whole(from, n) ? *reinterpret_cast<const Bytes16*>(from) : fetch_halves(from, n).part[0];
}
__device__ __forceinline__ void fetch(const std::uint32_t* from, int n, Bytes16* to) {
  if (whole(from, n)) {
    to[0] = reinterpret_cast<const Bytes16*>(from)[0];
    to[1] = reinterpret_cast<const Bytes16*>(from)[1];
  } else {
    const Raw<float> raw = fetch_words(from, n);
    to[0] = raw.part[0], to[1] = raw.part[1];
  }
}

template <class T>
__device__ __forceinline__ void unpack(const Bytes16* from, float (&v)[kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    if constexpr (sizeof(T) == 4)
      v[k] = simt::bits_float(from[k / 4].word[k % 4]);
    else
      v[k] = simt::to_float(T{static_cast<std::uint16_t>(from[0].word[k / 2] >> 16 * (k % 2))});
  }
}
template <>
__device__ __forceinline__ void unpack<bf16>(const Bytes16* from, float (&v)[kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const std::uint32_t word = from[0].word[k / 2];
    v[k] = simt::bits_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
}

// Two elements as they lie in memory.
template <class T>
__device__ __forceinline__ std::uint32_t pair_of(float low, float high) {
#if defined(__CUDA_ARCH__)
  std::uint32_t pair;
  if constexpr (__is_same(T, bf16))
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return simt::from_float<T>(low).bits | static_cast<std::uint32_t>(simt::from_float<T>(high).bits) << 16;
#endif
}

// The larger of each of two pairs of bf16, NaN where either is.
__device__ __forceinline__ std::uint32_t larger_pair(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint32_t pair;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#else
  const auto larger = [](float x, float y) { return simt::float_bits(y > x || y != y ? y : x); };
  const std::uint32_t low = larger(simt::bits_float(a << 16), simt::bits_float(b << 16));
  return low >> 16 |
         (larger(simt::bits_float(a & 0xffff0000u), simt::bits_float(b & 0xffff0000u)) & 0xffff0000u);
#endif
}

__device__ __forceinline__ void put_raw(std::uint16_t* to, int n, const Bytes16* from) {
  if (whole(to, n))
    *reinterpret_cast<Bytes16*>(to) = *from;
  else
    put_halves(to, n, *from);
}
__device__ __forceinline__ void put_raw(std::uint32_t* to, int n, const Bytes16* from) {
  if (whole(to, n)) {
    reinterpret_cast<Bytes16*>(to)[0] = from[0];
    reinterpret_cast<Bytes16*>(to)[1] = from[1];
  } else {
    put_words(to, n, Raw<float>{from[0], from[1]});
  }
}

template <class T>
__device__ __forceinline__ void put(void* row, std::int64_t i, int n, const float (&v)[kPack]) {
  Raw<T> raw;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      raw.part[k / 4].word[k % 4] = simt::float_bits(simt::from_float<float>(v[k]));
    put_raw(static_cast<std::uint32_t*>(row) + i, n, raw.part);
  } else {
#pragma unroll
    for (int k = 0; k < kPack; k += 2) raw.part[0].word[k / 2] = pair_of<T>(v[k], v[k + 1]);
    put_raw(static_cast<std::uint16_t*>(row) + i, n, raw.part);
  }
}

// The same for a row whose type is known to the call alone.
template <class T>
__device__ __forceinline__ Raw<T> fetch_pack(Type type, const void* row, std::int64_t i, int n) {
  Raw<T> raw{};
  if (n == 0) return raw;
  if constexpr (__is_same(T, Whole)) {
    raw.part[0] = *reinterpret_cast<const Bytes16*>(static_cast<const std::uint16_t*>(row) + i);
    return raw;
  }
  if constexpr (__is_same(T, Any)) {
    if (type == Type::f32) {
      fetch(static_cast<const std::uint32_t*>(row) + i, n, raw.part);
      return raw;
    }
  }
  fetch(static_cast<const std::uint16_t*>(row) + i, n, raw.part);
  return raw;
}
template <class T>
__device__ __forceinline__ void unpack(Type type, const Raw<T>& raw, float (&v)[kPack]) {
  if constexpr (__is_same(T, Any)) {
    if (type == Type::f32)
      unpack<float>(raw.part, v);
    else if (type == Type::bf16)
      unpack<bf16>(raw.part, v);
    else
      unpack<fp16>(raw.part, v);
  } else {
    unpack<std::conditional_t<__is_same(T, Whole), bf16, T>>(raw.part, v);
  }
}
template <class T>
__device__ __forceinline__ void get_pack(Type type, const void* data, std::int64_t i, int n,
                                         float (&v)[kPack]) {
  unpack<T>(type, fetch_pack<T>(type, data, i, n), v);
}
template <class T>
__device__ __forceinline__ void put_pack(Type type, void* data, std::int64_t i, int n,
                                         const float (&v)[kPack]) {
  if constexpr (__is_same(T, Whole)) {
    Bytes16 raw;
#pragma unroll
    for (int k = 0; k < kPack; k += 2) raw.word[k / 2] = pair_of<bf16>(v[k], v[k + 1]);
    if (n > 0) *reinterpret_cast<Bytes16*>(static_cast<std::uint16_t*>(data) + i) = raw;
  } else if constexpr (!__is_same(T, Any))
    put<T>(data, i, n, v);
  else if (type == Type::f32)
    put<float>(data, i, n, v);
  else if (type == Type::bf16)
    put<bf16>(data, i, n, v);
  else
    put<fp16>(data, i, n, v);
}

// What fetch_pack gave, into a row of the same type.
template <class T>
__device__ __forceinline__ void put_raw_pack(Type type, void* row, std::int64_t i, int n, const Raw<T>& raw) {
  if constexpr (__is_same(T, Any)) {
    if (type == Type::f32) return put_raw(static_cast<std::uint32_t*>(row) + i, n, raw.part);
  }
  put_raw(static_cast<std::uint16_t*>(row) + i, n, raw.part);
}

// A pack as a tensor of this type holds it.
template <class T>
__device__ __forceinline__ void round_pack(Type type, float (&v)[kPack]) {
  const Type known = __is_same(T, bf16) || __is_same(T, Whole) ? Type::bf16 : type;
  if (known == Type::f32) return;
#pragma unroll
  for (int k = 0; k < kPack; ++k) v[k] = round_to(known, v[k]);
}

// How a kernel is compiled to find rows: of one stride; of two axes and fewer than 2^31 rows, as the heads of tokens are; or of
// any. Divisions by 64 bits are some hundred instructions each, which crowd a kernel even where they are not executed.
enum class Walk { line, grid, any };
inline Walk walk_of(const Axes& axes) {
  if (axes.count == 1) return Walk::line;
  return axes.count == 2 && axes.rows < std::int64_t{1} << 31 ? Walk::grid : Walk::any;
}
// Calls f<Walk>() with what these axes allow.
template <class F>
void for_walk(const Axes& axes, F f) {
  switch (walk_of(axes)) {
    case Walk::line:
      return f.template operator()<Walk::line>();
    case Walk::grid:
      return f.template operator()<Walk::grid>();
    case Walk::any:
      return f.template operator()<Walk::any>();
  }
}
template <Walk By>
__device__ __forceinline__ std::int64_t offset_of(const Axes& axes, const Tensor& t, std::int64_t row) {
  if constexpr (By == Walk::line) {
    return row * t.stride[0];
  } else if constexpr (By == Walk::grid) {
    const auto r = static_cast<std::uint32_t>(row), n = static_cast<std::uint32_t>(axes.size[1]);
    return std::int64_t{r / n} * t.stride[0] + std::int64_t{r % n} * t.stride[1];
  } else {
    return t.offset(axes, row);
  }
}

// A tensor's row, or one that is absent.
struct RowOf {
  void* data;
  Type type;
  __device__ RowOf(void* row, Type of) : data(row), type(of) {}
  __device__ RowOf(const Axes& axes, const Tensor& t, std::int64_t row)
      : data(t ? t.row(axes, row) : nullptr), type(t.type) {}
  __device__ explicit operator bool() const { return data != nullptr; }
  __device__ float get(std::int64_t i) const { return load(type, data, i); }
  __device__ void set(std::int64_t i, float x) const { store(type, data, i, x); }

  template <class T>
  __device__ __forceinline__ Raw<T> fetch(std::int64_t i, int n) const {
    return fetch_pack<T>(type, data, i, n);
  }
  template <class T>
  __device__ __forceinline__ void unpack(const Raw<T>& raw, float (&v)[kPack]) const {
    rows::unpack<T>(type, raw, v);
  }
  template <class T>
  __device__ __forceinline__ void get(std::int64_t i, int n, float (&v)[kPack]) const {
    get_pack<T>(type, data, i, n, v);
  }
  // A whole pack as it lies there.
  template <class T>
  __device__ __forceinline__ void put(std::int64_t i, const Raw<T>& raw) const {
    static_assert(__is_same(T, Whole));
    *reinterpret_cast<Bytes16*>(static_cast<std::uint16_t*>(data) + i) = raw.part[0];
  }
  template <class T>
  __device__ __forceinline__ void set(std::int64_t i, int n, const float (&v)[kPack]) const {
    put_pack<T>(type, data, i, n, v);
  }
};
template <Walk By>
__device__ __forceinline__ RowOf row_of(const Axes& axes, const Tensor& t, std::int64_t row) {
  return {t ? static_cast<char*>(t.data) + offset_of<By>(axes, t, row) * size_of(t.type) : nullptr, t.type};
}

}  // namespace rlk::rows
