// Tensors are DLPack views of anybody's memory. Here: the roles they take in a call (In, Out, InOut), and
// Tensor, a view that carries its own shape for callers whose framework does not hand out DLTensors.
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "rlk/plugin.h"

namespace rlk {

// One bit per element type, the same bits as in the schema tables.
enum class DType : uint32_t {
  none = 0,
  f16 = RLK_F16,
  bf16 = RLK_BF16,
  f32 = RLK_F32,
  f64 = RLK_F64,
  i32 = RLK_I32,
  i64 = RLK_I64,
  u8 = RLK_U8,
  boolean = RLK_BOOL,
  f8_e4m3 = RLK_F8_E4M3
};

constexpr DType dtype_of(DLDataType t) noexcept {
  if (t.lanes != 1) return DType::none;
  const unsigned key = unsigned{t.code} << 8 | t.bits;
  switch (key) {
    case unsigned{kDLFloat} << 8 | 16:
      return DType::f16;
    case unsigned{kDLBfloat} << 8 | 16:
      return DType::bf16;
    case unsigned{kDLFloat} << 8 | 32:
      return DType::f32;
    case unsigned{kDLFloat} << 8 | 64:
      return DType::f64;
    case unsigned{kDLInt} << 8 | 32:
      return DType::i32;
    case unsigned{kDLInt} << 8 | 64:
      return DType::i64;
    case unsigned{kDLUInt} << 8 | 8:
      return DType::u8;
    case 6u << 8 | 8:
      return DType::boolean;
    case 10u << 8 | 8:
      return DType::f8_e4m3;
    default:
      return DType::none;
  }
}

constexpr DLDataType dl_type(DType t) noexcept {
  switch (t) {
    case DType::f16:
      return {kDLFloat, 16, 1};
    case DType::bf16:
      return {kDLBfloat, 16, 1};
    case DType::f32:
      return {kDLFloat, 32, 1};
    case DType::f64:
      return {kDLFloat, 64, 1};
    case DType::i32:
      return {kDLInt, 32, 1};
    case DType::i64:
      return {kDLInt, 64, 1};
    case DType::u8:
      return {kDLUInt, 8, 1};
    case DType::boolean:
      return {6, 8, 1};
    case DType::f8_e4m3:
      return {10, 8, 1};
    default:
      return {0, 0, 0};
  }
}

constexpr int64_t size_of(DType t) noexcept { return dl_type(t).bits / 8; }

constexpr std::string_view name_of(DType t) noexcept {
  switch (t) {
    case DType::f16:
      return "fp16";
    case DType::bf16:
      return "bf16";
    case DType::f32:
      return "fp32";
    case DType::f64:
      return "fp64";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::u8:
      return "uint8";
    case DType::boolean:
      return "bool";
    case DType::f8_e4m3:
      return "fp8_e4m3";
    default:
      return "unknown dtype";
  }
}

// A DLTensor with room for its own shape and strides; copyable, never owns the memory it views.
class Tensor {
 public:
  Tensor() = default;
  // Strides are in elements; empty means dense rows. Throws std::invalid_argument for other than one stride a
  // dimension. More than RLK_MAX_RANK dimensions are refused by the call that takes the tensor.
  Tensor(void* data, std::span<const int64_t> shape, DType dtype, DLDevice device = {kDLCPU, 0},
         std::span<const int64_t> strides = {}) {
    dl_ = {data, device, static_cast<int32_t>(shape.size()), dl_type(dtype), nullptr, nullptr, 0};
    strided_ = !strides.empty();
    if (strided_ && strides.size() != shape.size())
      throw std::invalid_argument("rlk::Tensor has " + std::to_string(strides.size()) + " strides for " +
                                  std::to_string(shape.size()) + " dimensions");
    relink();
    if (shape.size() > RLK_MAX_RANK) return;
    int64_t step = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      shape_[i] = shape[i];
      strides_[i] = strided_ ? strides[i] : step;
      // Wraps where sizes are beyond all memory: the call that takes the tensor says so.
      (void)__builtin_mul_overflow(step, shape[i], &step);
    }
  }
  Tensor(void* data, std::initializer_list<int64_t> shape, DType dtype, DLDevice device = {kDLCPU, 0},
         std::initializer_list<int64_t> strides = {})
      : Tensor(data, std::span(shape.begin(), shape.size()), dtype, device,
               std::span(strides.begin(), strides.size())) {}
  Tensor(const Tensor& other)
      : dl_(other.dl_), shape_(other.shape_), strides_(other.strides_), strided_(other.strided_) {
    relink();
  }
  Tensor& operator=(const Tensor& other) {
    dl_ = other.dl_, shape_ = other.shape_, strides_ = other.strides_, strided_ = other.strided_;
    relink();
    return *this;
  }

  const DLTensor& dl() const noexcept { return dl_; }
  DLTensor& dl() noexcept { return dl_; }

 private:
  void relink() noexcept {
    dl_.shape = shape_.data();
    dl_.strides = strided_ ? strides_.data() : nullptr;
  }
  DLTensor dl_{};
  std::array<int64_t, RLK_MAX_RANK> shape_{}, strides_{};
  bool strided_ = false;
};

// The three roles. All are one pointer wide: a typed argument struct is laid out as the slots of plugin.h.
// What they point to must live until the call returns.
template <bool Writable>
class View {
 public:
  constexpr View() noexcept = default;
  constexpr View(const DLTensor& t) noexcept : t_(&t) {}
  constexpr View(const DLTensor* t) noexcept : t_(t) {}
  View(const Tensor& t) noexcept : t_(&t.dl()) {}
  View(const Tensor&& t) noexcept
      : t_(&t.dl()) {}  // lives to the end of the full expression: fine for one call
  // Such a tensor is gone when the arguments that it is assigned to are used.
  template <class T>
    requires std::same_as<T, Tensor>
  View& operator=(T&&) = delete;

  constexpr explicit operator bool() const noexcept { return t_ != nullptr; }
  constexpr const DLTensor* get() const noexcept { return t_; }
  constexpr const DLTensor* operator->() const noexcept { return t_; }

  // Below: for kernels, which run only after the schema's checks.
  template <class T>
  auto data() const noexcept {
    using P = std::conditional_t<Writable, T, const T>;
    return t_ ? reinterpret_cast<P*>(static_cast<char*>(t_->data) + t_->byte_offset)
              : static_cast<P*>(nullptr);
  }
  int32_t rank() const noexcept { return t_->ndim; }
  DType dtype() const noexcept { return dtype_of(t_->dtype); }
  int64_t dim(int32_t i) const noexcept { return t_->shape[i < 0 ? i + t_->ndim : i]; }
  // Products are unsigned: a tensor without elements may have other sizes that overflow.
  int64_t numel() const noexcept {
    uint64_t n = 1;
    for (int32_t i = 0; i < t_->ndim; ++i) n *= static_cast<uint64_t>(t_->shape[i]);
    return static_cast<int64_t>(n);
  }
  // In elements, computed when the tensor says "dense".
  int64_t stride(int32_t i) const noexcept {
    if (i < 0) i += t_->ndim;
    if (t_->strides) return t_->strides[i];
    uint64_t step = 1;
    for (int32_t j = t_->ndim - 1; j > i; --j) step *= static_cast<uint64_t>(t_->shape[j]);
    return static_cast<int64_t>(step);
  }
  bool dense() const noexcept {
    uint64_t step = 1;
    for (int32_t j = t_->ndim - 1; j >= 0; --j) {
      if (t_->shape[j] != 1 && stride(j) != static_cast<int64_t>(step)) return false;
      step *= static_cast<uint64_t>(t_->shape[j]);
    }
    return true;
  }

 private:
  const DLTensor* t_ = nullptr;
};

using In = View<false>;
using Out = View<true>;
struct InOut : View<true> {
  using View::View;
  template <class T>
    requires std::same_as<T, Tensor>
  InOut& operator=(T&&) = delete;
};

// A flag attribute, eight bytes like every slot.
struct Flag {
  int64_t value = 0;
  constexpr Flag(bool b = false) noexcept : value(b) {}
  constexpr operator bool() const noexcept { return value != 0; }
};

}  // namespace rlk
