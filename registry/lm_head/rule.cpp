// What each arithmetic id of lm_head means, one output at a time: the page's rules as plain loops over
// numbers, independent of every kernel.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "registry/op.hpp"
#include "registry/reference.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

// The two vectors an output is the product of, upcast exactly, and the dtype they came in.
struct Operands {
  std::vector<float> a, b;
  DType type = DType::f32;
};

// ---- fma64, fma32/kb1024, fma32/kb256

double chain64(const Operands& x) {
  double sum = 0;
  for (std::size_t k = 0; k < x.a.size(); ++k) sum = std::fma(double{x.a[k]}, double{x.b[k]}, sum);
  return sum;
}

float blocks_of(std::size_t length, const Operands& x) {
  float total = 0;
  for (std::size_t first = 0; first < x.a.size(); first += length) {
    float sum = 0;
    for (std::size_t k = first; k < std::min(x.a.size(), first + length); ++k)
      sum = std::fma(x.a[k], x.b[k], sum);
    total = first == 0 ? sum : total + sum;
  }
  return total;
}

// ---- amx/k32

float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }

float pairs_of_32(const Operands& x, std::size_t begin, std::size_t end) {
  const auto at = [end](const std::vector<float>& v, std::size_t k) { return k < end ? flush(v[k]) : 0; };
  float total = 0;
  for (std::size_t first = begin; first < end; first += 32) {
    float even = 0, odd = 0;
    for (std::size_t k = first; k < first + 32; k += 2) {
      even = flush(std::fma(at(x.a, k), at(x.b, k), even));
      odd = flush(std::fma(at(x.a, k + 1), at(x.b, k + 1), odd));
    }
    total = flush(total + flush(even + odd));
  }
  return total;
}

float matrix_unit(const Operands& x) {
  constexpr std::size_t kBlock = 4096;
  float total = 0;
  for (std::size_t first = 0; first < x.a.size(); first += kBlock) {
    const float sum = pairs_of_32(x, first, std::min(x.a.size(), first + kBlock));
    total = first == 0 ? sum : total + sum;
  }
  return total;
}

// ---- sm90/t25k16

// A finite number as significand * 2^(exponent - bits). Subnormals keep the least exponent, not normalised.
struct Number {
  int64_t significand = 0;
  int exponent = 0;
};
Number unpack(float x, int bits, int least) {
  int exponent = 0;
  std::frexp(x, &exponent);
  exponent = std::max(exponent - 1, least);
  return {static_cast<int64_t>(std::ldexp(double{x}, bits - exponent)), exponent};
}

// Towards zero; a magnitude from 2^128 on is infinite.
float truncate(double x) {
  if (std::fabs(x) >= 0x1p128)
    return std::copysign(std::numeric_limits<float>::infinity(), static_cast<float>(x));
  const auto nearest = static_cast<float>(x);
  return std::fabs(double{nearest}) > std::fabs(x) ? std::nextafter(nearest, 0.f) : nearest;
}

float group_of_16(float sum, const Operands& x, std::size_t begin, std::size_t end) {
  bool plus = std::isinf(sum) && sum > 0, minus = std::isinf(sum) && sum < 0, nan = std::isnan(sum);
  for (std::size_t k = begin; k < end; ++k) {
    const float product = x.a[k] * x.b[k];
    if (!std::isinf(x.a[k]) && !std::isinf(x.b[k]) && !std::isnan(product)) continue;
    nan |= std::isnan(product);
    (product > 0 ? plus : minus) |= std::isinf(product);
  }
  if (nan || (plus && minus)) return canonical(std::numeric_limits<float>::quiet_NaN());
  if (plus || minus) return std::copysign(std::numeric_limits<float>::infinity(), plus ? 1.f : -1.f);
  const int bits = x.type == DType::f16 ? 10 : 7, least = x.type == DType::f16 ? -14 : -126;
  Number terms[17];
  int fraction[17], largest = std::numeric_limits<int>::min(), count = 0;
  const auto join = [&](Number n, int f) {
    if (n.significand == 0) return;  // a zero takes no part in the largest exponent
    terms[count] = n, fraction[count++] = f;
    largest = std::max(largest, n.exponent);
  };
  join(unpack(sum, 23, -126), 23);
  for (std::size_t k = begin; k < end; ++k) {
    const Number a = unpack(x.a[k], bits, least), b = unpack(x.b[k], bits, least);
    join({a.significand * b.significand, a.exponent + b.exponent}, 2 * bits);
  }
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const int below = std::min(largest - terms[i].exponent, 62);
    const int64_t magnitude = std::abs(terms[i].significand) << (25 - fraction[i]) >> below;
    total += terms[i].significand < 0 ? -magnitude : magnitude;
  }
  return total == 0 ? 0.f : truncate(std::ldexp(static_cast<double>(total), largest - 25));
}

float tensor_core(const Operands& x, std::size_t begin, std::size_t end) {
  float sum = 0;
  for (std::size_t k = begin; k < end; k += 16) sum = group_of_16(sum, x, k, std::min(end, k + 16));
  return sum;
}

float four_ranges(const Operands& x) {
  const std::size_t k = x.a.size(), length = 64 * ((k + 255) / 256);
  const auto range = [&](std::size_t i) {
    return tensor_core(x, std::min(k, i * length), std::min(k, (i + 1) * length));
  };
  return ((range(0) + range(1)) + range(2)) + range(3);
}

// ---- from an id to a sum

enum class Id { fma64, fma32, fma32_256, amx, sm90, sm90_ranges };
std::optional<Id> id_of(std::string_view arithmetic) {
  if (arithmetic == "fma64") return Id::fma64;
  if (arithmetic == "fma32/kb1024") return Id::fma32;
  if (arithmetic == "fma32/kb256") return Id::fma32_256;
  if (arithmetic == "amx/k32") return Id::amx;
  if (arithmetic == "sm90/t25k16") return Id::sm90;
  if (arithmetic == "sm90/t25k16/r4") return Id::sm90_ranges;
  return {};
}
bool takes(Id id, DType type) {
  return id == Id::fma64 || id == Id::fma32 || id == Id::fma32_256 || type == DType::bf16 ||
         type == DType::f16;
}

// fp32 sums are exact in a double; fma64's is rounded once, by whoever stores it.
double sum_of(Id id, const Operands& x) {
  switch (id) {
    case Id::fma64:
      return chain64(x);
    case Id::fma32:
      return double{blocks_of(1024, x)};
    case Id::fma32_256:
      return double{blocks_of(256, x)};
    case Id::amx:
      return double{matrix_unit(x)};
    case Id::sm90:
      return double{tensor_core(x, 0, x.a.size())};
    case Id::sm90_ranges:
      return double{four_ranges(x)};
  }
  return 0;
}

void finish(const DLTensor& out, int64_t element, double value) {
  const DType type = dtype_of(out.dtype);
  if (type == DType::f32 && std::isnan(value))
    static_cast<float*>(out.data)[element] = std::bit_cast<float>(kCanonicalNan32);
  else
    store(type, out.data, element, value);
}

// `count` elements of a dense tensor from `first` on, `step` apart.
void read(const DLTensor& t, int64_t first, int64_t step, int64_t count, std::vector<float>& to) {
  to.resize(static_cast<std::size_t>(count));
  const DType type = dtype_of(t.dtype);
  for (int64_t i = 0; i < count; ++i)
    to[static_cast<std::size_t>(i)] = static_cast<float>(load(type, t.data, first + i * step));
}

int64_t elements(const DLTensor& t) { return In(t).numel(); }

// Calls body(tensor, element) for every wanted element of result `argument`.
template <class Body>
void for_elements(const RuleQuery& q, std::size_t argument, Body body) {
  const DLTensor* t = q.slots[argument].tensor;
  if (!t) return;
  if (q.sample.empty())
    for (int64_t i = 0, n = elements(*t); i < n; ++i) body(*t, i);
  for (const Sample& s : q.sample)
    if (s.argument == argument)
      for (int64_t i : s.elements) body(*t, i);
}

}  // namespace

bool lm_head_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LmHead*>(q.slots);
  const auto id = id_of(q.arithmetic);
  if (!id || !takes(*id, a.hidden.dtype())) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
  Operands x{{}, {}, a.hidden.dtype()};
  int64_t held = -1;
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    const int64_t row = i / columns, column = i % columns;
    if (row != held) read(*a.hidden.get(), row * depth, 1, depth, x.a);
    held = row;
    read(*a.weight.get(), column * depth, 1, depth, x.b);
    double value = sum_of(*id, x);
    if (a.bias) value = round_to(dtype_of(out.dtype), value) + load(a.bias.dtype(), a.bias->data, column);
    finish(out, i, value);
  });
  return true;
}

bool lm_head_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LmHeadBwd*>(q.slots);
  const auto id = id_of(q.arithmetic);
  if (!id || !takes(*id, a.hidden.dtype()) || !takes(*id, a.d_out.dtype())) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
  const int64_t rows = columns ? a.d_out.numel() / columns : depth ? a.hidden.numel() / depth : 0;
  Operands x{{}, {}, a.hidden.dtype()};
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    read(*a.d_out.get(), i / depth * columns, 1, columns, x.a);
    read(*a.weight.get(), i % depth, depth, columns, x.b);
    finish(out, i, sum_of(*id, x));
  });
  // The sums over the batch are not cut into ranges, and those with ones are plain fp32 beside tensor cores.
  for_elements(q, 4, [&](const DLTensor& out, int64_t i) {
    read(*a.d_out.get(), i / depth, columns, rows, x.a);
    read(*a.hidden.get(), i % depth, depth, rows, x.b);
    finish(out, i, sum_of(*id == Id::sm90_ranges ? Id::sm90 : *id, x));
  });
  for_elements(q, 5, [&](const DLTensor& out, int64_t i) {
    read(*a.d_out.get(), i, columns, rows, x.b);
    x.a.assign(x.b.size(), 1.f);
    finish(out, i, sum_of(*id == Id::fma64 || *id == Id::fma32_256 ? *id : Id::fma32, x));
  });
  return true;
}

}  // namespace rlk::registry
