#include "src/check.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>
#include <string>

#include "rlk/tensor.hpp"
#include "src/failure.hpp"
#include "src/footprint.hpp"
#include "src/host.hpp"
#include "src/text.hpp"

namespace rlk {
namespace {

template <class... T>
Status bad(fmt::format_string<T...> format, T&&... values) {
  return {RLK_INVALID_ARGUMENT, fmt::format(format, std::forward<T>(values)...)};
}

// The number a caller wrote, which need not be one that the enumeration has: then even looking at it as one
// is undefined.
int32_t raw_device_type(const DLDevice& d) noexcept {
  int32_t type;
  static_assert(sizeof type == sizeof d.device_type);
  std::memcpy(&type, &d.device_type, sizeof type);
  return type;
}
bool known_device_type(int32_t type) noexcept {
  constexpr int32_t kKnown[] = {kDLCPU, kDLCUDA, kDLCUDAHost, kDLROCM, kDLROCMHost, kDLCUDAManaged};
  return std::find(std::begin(kKnown), std::end(kKnown), type) != std::end(kKnown);
}

Status check_sizes(const rlk_op_schema& op, const rlk_argument& a, const DLTensor& t) {
  int64_t bytes = size_of(dtype_of(t.dtype));
  bool empty = false;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0) return bad("{}: {} has size {} in dimension {}", op.name, a.name, t.shape[i], i);
    if (t.shape[i] == 0) empty = true;
  }
  for (int32_t i = 0; i < t.ndim && !empty; ++i)
    if (__builtin_mul_overflow(bytes, t.shape[i], &bytes))
      return bad("{}: {} is {}, more bytes than an address space has (2^63)", op.name, a.name, shape_text(t));
  return {};
}

// Strides: unit last stride; dense unless the argument is RLK_STRIDED; written elements must not share bytes.
Status check_strides(const rlk_op_schema& op, const rlk_argument& a, const DLTensor& t) {
  if (!t.strides || t.ndim == 0) return {};
  const In view(t);
  for (int32_t i = 0; i < t.ndim; ++i)
    if (t.shape[i] == 0) return {};
  const int32_t last = t.ndim - 1;
  if (t.shape[last] > 1 && t.strides[last] != 1)
    return bad("{}: {} has stride {} in its last dimension, which must be 1", op.name, a.name,
               t.strides[last]);
  if (!(a.flags & RLK_STRIDED) && !view.dense())
    return bad("{}: {} {} has strides [{}], this argument must be dense", op.name, a.name, shape_text(t),
               fmt::join(std::span(t.strides, static_cast<std::size_t>(t.ndim)), ", "));
  int64_t reach = size_of(dtype_of(t.dtype));
  for (int32_t i = 0; i < t.ndim; ++i) {
    int64_t part = 0;
    if (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &part) ||
        __builtin_mul_overflow(part, 8, &part) ||
        (part < 0 && __builtin_sub_overflow(int64_t{0}, part, &part)) ||
        __builtin_add_overflow(reach, part, &reach))
      return bad("{}: {} has stride {} in dimension {} of size {}: its reach overflows 64 bits", op.name,
                 a.name, t.strides[i], i, t.shape[i]);
  }
  if (a.role == RLK_READ) return {};
  // Dimensions from the smallest step to the largest, by insertion: there are at most eight.
  int32_t order[RLK_MAX_RANK];
  int32_t n = 0;
  for (int32_t i = 0; i < t.ndim && i < RLK_MAX_RANK; ++i) {
    if (t.shape[i] < 2) continue;
    int32_t at = n++;
    for (; at > 0 && std::abs(t.strides[order[at - 1]]) > std::abs(t.strides[i]); --at)
      order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t inner = 1;
  for (int32_t i = 0; i < n; ++i) {
    const int64_t step = std::abs(t.strides[order[i]]);
    if (step < inner)
      return bad(
          "{}: {} has stride {} in dimension {}, less than the {} elements inside: written elements would "
          "overlap",
          op.name, a.name, t.strides[order[i]], order[i], inner);
    inner = step * (t.shape[order[i]] - 1) + inner;
  }
  return {};
}

Status check_tensor(const rlk_op_schema& op, const rlk_argument& a, const DLTensor& t, CheckData data) {
  if (t.ndim < 0 || t.ndim > RLK_MAX_RANK || (t.ndim > 0 && !t.shape))
    return bad("{}: {} has rank {}{}, rlk takes up to {}", op.name, a.name, t.ndim,
               t.shape || t.ndim <= 0 ? "" : " and no shape", RLK_MAX_RANK);
  const DType type = dtype_of(t.dtype);
  if (!(static_cast<uint32_t>(type) & a.dtypes)) {
    if (type == DType::none)
      return bad("{}: {} has DLPack dtype code {}, {} bits, {} lanes, it takes {}", op.name, a.name,
                 t.dtype.code, t.dtype.bits, t.dtype.lanes, dtype_set_text(a.dtypes));
    return bad("{}: {} is {}, it takes {}", op.name, a.name, name_of(type), dtype_set_text(a.dtypes));
  }
  if (t.ndim < a.min_rank || t.ndim > a.max_rank) {
    if (a.min_rank == a.max_rank)
      return bad("{}: {} has rank {}, it takes rank {}", op.name, a.name, t.ndim, a.min_rank);
    return bad("{}: {} has rank {}, it takes rank {} to {}", op.name, a.name, t.ndim, a.min_rank, a.max_rank);
  }
  if (Status s = check_sizes(op, a, t); !s) return s;
  if (Status s = check_strides(op, a, t); !s) return s;
  if (data == CheckData::no || In(t).numel() == 0) return {};
  if (!t.data) return bad("{}: {} {} has null data", op.name, a.name, shape_text(t));
  const auto address = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
  const auto size = static_cast<uintptr_t>(size_of(type));
  if (address % size)
    return bad("{}: {} starts at an address that is {} past a multiple of its {}-byte elements", op.name,
               a.name, address % size, size);
  return {};
}

Status check_device(const rlk_op_schema& op, const rlk_argument& a, const DLTensor& t, DLDevice& device,
                    const char*& owner) {
  if (const int32_t type = raw_device_type(t.device); !known_device_type(type))
    return bad("{}: {} is on DLPack device type {}, rlk knows cpu, cuda and hip", op.name, a.name, type);
  const DLDevice d = normal(t.device);
  if (a.flags & RLK_HOST) {
    if (d.device_type == kDLCPU) return {};
    return bad("{}: {} is on {}:{}, it must be in CPU memory", op.name, a.name, device_name(d.device_type),
               d.device_id);
  }
  if (!owner) {
    device = d;
    owner = a.name;
  } else if (d.device_type != device.device_type || d.device_id != device.device_id) {
    return bad("{}: {} is on {}:{}, {} is on {}:{}", op.name, a.name, device_name(d.device_type), d.device_id,
               owner, device_name(device.device_type), device.device_id);
  }
  return {};
}

Status check_attribute(const rlk_op_schema& op, const rlk_attribute& a, rlk_slot slot) {
  if (a.type == RLK_FLAG && slot.i != 0 && slot.i != 1)
    return bad("{}: {} is {}, a flag is 0 or 1", op.name, a.name, slot.i);
  if (a.type == RLK_CHOICE) {
    const auto words = std::count(a.choices, a.choices + std::char_traits<char>::length(a.choices), '|') + 1;
    if (slot.i < 0 || slot.i >= words)
      return bad("{}: {} is choice {}, there are {}: {}", op.name, a.name, slot.i, words, a.choices);
  }
  return {};
}

Status check_result(const rlk_op_schema& op, const rlk_argument& a, const DLTensor& t,
                    const rlk_shape& want) {
  const bool same = t.ndim == want.ndim && std::equal(t.shape, t.shape + t.ndim, want.dim);
  if (!same)
    return bad("{}: {} is {}, expected [{}]", op.name, a.name, shape_text(t),
               fmt::join(std::span(want.dim, static_cast<std::size_t>(want.ndim)), ", "));
  if (!(static_cast<uint32_t>(dtype_of(t.dtype)) & want.dtypes))
    return bad("{}: {} is {}, expected {}", op.name, a.name, name_of(dtype_of(t.dtype)),
               dtype_set_text(want.dtypes));
  return {};
}

}  // namespace

const char* device_name(int32_t type) noexcept {
  switch (type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return "cuda";
    case kDLROCM:
      return "hip";
    default:
      return "device";
  }
}

std::string shape_text(const DLTensor& t) {
  return fmt::format(
      "[{}]",
      fmt::join(std::span<const int64_t>(t.shape, t.ndim > 0 ? static_cast<std::size_t>(t.ndim) : 0), ", "));
}

std::string dtype_set_text(uint32_t set) {
  std::string text;
  for (uint32_t bit = 1; bit < RLK_ALL_DTYPES; bit <<= 1)
    if (set & bit) text += (text.empty() ? "" : ", ") + std::string(name_of(static_cast<DType>(bit)));
  return text;
}

bool may_alias(const rlk_op_schema& op, uint32_t a, uint32_t b) noexcept {
  for (const std::string_view pair : split(op.may_alias ? op.may_alias : "", ',')) {
    const auto equal = pair.find('=');
    const std::string_view x = pair.substr(0, equal), y = equal == pair.npos ? "" : pair.substr(equal + 1);
    if ((x == op.arguments[a].name && y == op.arguments[b].name) ||
        (x == op.arguments[b].name && y == op.arguments[a].name))
      return true;
  }
  return false;
}

ShapesOnly::ShapesOnly(const rlk_op_schema& op, const rlk_slot* slots) {
  std::copy(slots, slots + op.num_arguments + op.num_attributes, slots_);
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    if (!(op.arguments[i].flags & RLK_HOST) || !slots[i].tensor) continue;
    hosts_[i] = *slots[i].tensor;
    hosts_[i].data = nullptr;
    hosts_[i].byte_offset = 0;
    slots_[i].tensor = &hosts_[i];
  }
}

void ShapesOnly::without_results(const rlk_op_schema& op) {
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (op.arguments[i].role == RLK_WRITE) slots_[i].tensor = nullptr;
}

Status infer_shapes(const rlk_op_schema& op, const rlk_slot* slots, rlk_shape* shapes) {
  if (!op.infer) return {};
  if (const int32_t code = op.infer(slots, shapes, &host())) {
    if (is_code(code)) return failure(code);
    return {RLK_BACKEND_ERROR, fmt::format("{}: its infer returned {}, which is no rlk_code", op.name, code)};
  }
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (op.arguments[i].role != RLK_READ && (shapes[i].ndim < 0 || shapes[i].ndim > RLK_MAX_RANK))
      return {RLK_BACKEND_ERROR, fmt::format("{}: its infer gave {} rank {}, 0 to {} are possible", op.name,
                                             op.arguments[i].name, shapes[i].ndim, RLK_MAX_RANK)};
  return {};
}

Status check_call(const rlk_op_schema& op, const rlk_slot* slots, CheckData data, DLDevice& device) {
  const char* owner = nullptr;
  device = {kDLCPU, 0};
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    const rlk_argument& a = op.arguments[i];
    const DLTensor* t = slots[i].tensor;
    if (!t) {
      if ((a.flags & RLK_OPTIONAL) || (data == CheckData::no && a.role == RLK_WRITE)) continue;
      return bad("{}: {} is missing", op.name, a.name);
    }
    if (Status s = check_tensor(op, a, *t, data); !s) return s;
    if (Status s = check_device(op, a, *t, device, owner); !s) return s;
  }
  for (uint32_t i = 0; i < op.num_attributes; ++i)
    if (Status s = check_attribute(op, op.attributes[i], slots[op.num_arguments + i]); !s) return s;
  if (!op.infer) return {};
  rlk_shape shapes
      [RLK_MAX_SLOTS];  // as many as there are arguments are cleared: all would cost more than the checks
  std::fill_n(shapes, op.num_arguments, rlk_shape{});
  if (Status s = infer_shapes(op, slots, shapes); !s) return s;
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (op.arguments[i].role != RLK_READ && slots[i].tensor && shapes[i].dtypes)
      if (Status s = check_result(op, op.arguments[i], *slots[i].tensor, shapes[i]); !s) return s;
  return {};
}

Status check_view(const DLTensor& t, std::string_view who) {
  if (!t.data) return bad("{} has null data", who);
  if (t.ndim < 0 || t.ndim > RLK_MAX_RANK)
    return bad("{} has rank {}, rlk takes up to {}", who, t.ndim, RLK_MAX_RANK);
  if (t.ndim > 0 && !t.shape) return bad("{} has rank {} and no shape", who, t.ndim);
  const int64_t element = (int64_t{t.dtype.bits} * t.dtype.lanes + 7) / 8;
  if (element == 0) return bad("{} has DLPack dtype code {} of no bytes", who, t.dtype.code);
  for (int32_t i = 0; i < t.ndim; ++i)
    if (t.shape[i] < 0) return bad("{} has size {} in dimension {}", who, t.shape[i], i);
  for (int32_t i = 0; i < t.ndim; ++i)
    if (t.shape[i] == 0) return {};
  int64_t reach = element, dense = element;  // bytes
  for (int32_t i = t.ndim; i-- > 0;) {
    int64_t step = dense, part = 0;
    if ((t.strides && __builtin_mul_overflow(t.strides[i], element, &step)) ||
        __builtin_mul_overflow(t.shape[i] - 1, step, &part) ||
        (part < 0 && __builtin_sub_overflow(int64_t{0}, part, &part)) ||
        __builtin_add_overflow(reach, part, &reach) ||
        (!t.strides && __builtin_mul_overflow(dense, t.shape[i], &dense)))
      return bad("{} has size {} in dimension {}: its reach overflows 64 bits", who, t.shape[i], i);
  }
  return {};
}

Status check_overlap(const rlk_op_schema& op, const rlk_slot* slots) {
  Footprint footprints[RLK_MAX_SLOTS];
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (slots[i].tensor) footprints[i] = Footprint(*slots[i].tensor);
  for (uint32_t w = 0; w < op.num_arguments; ++w) {
    if (!slots[w].tensor || op.arguments[w].role == RLK_READ) continue;
    for (uint32_t other = 0; other < op.num_arguments; ++other) {
      if (other == w || !slots[other].tensor || !footprints[w].meets(footprints[other])) continue;
      if (op.arguments[other].role != RLK_READ && other < w) continue;  // said once
      const bool same =
          footprints[w].low() == footprints[other].low() && footprints[w].high() == footprints[other].high();
      const bool layout = same && same_layout(*slots[w].tensor, *slots[other].tensor);
      if (layout && may_alias(op, w, other)) continue;
      return {RLK_OVERLAP, fmt::format("{}: {} is written and overlaps {}{}", op.name, op.arguments[w].name,
                                       op.arguments[other].name,
                                       !same    ? ""
                                       : layout ? " (the very same bytes)"
                                                : " (the very same bytes, in another order)")};
    }
  }
  return {};
}

}  // namespace rlk
