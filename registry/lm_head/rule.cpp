// What each arithmetic id of lm_head means, one output at a time: the page's rules as plain loops over
// numbers, independent of every kernel.
#include "registry/rule.hpp"

#include <algorithm>
#include <optional>

#include "registry/lm_head/chains.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {

bool linear_bwd_rule(const RuleQuery& query);

namespace {

using chains::Operands;

float four_ranges(const Operands& x) {
  const std::size_t k = x.a.size(), length = 64 * ((k + 255) / 256);
  const auto range = [&](std::size_t i) {
    return chains::sm90(x, std::min(k, i * length), std::min(k, (i + 1) * length));
  };
  return ((range(0) + range(1)) + range(2)) + range(3);
}

enum class Id { fma64, fma32, fma32_256, amx, pairs, sm90, sm90_ranges };
std::optional<Id> id_of(std::string_view arithmetic) {
  if (arithmetic == "fma64") return Id::fma64;
  if (arithmetic == "fma32/kb1024") return Id::fma32;
  if (arithmetic == "fma32/kb256") return Id::fma32_256;
  if (arithmetic == "amx/k32") return Id::amx;
  if (arithmetic == "avx512bf16/kb1024") return Id::pairs;
  if (arithmetic == "sm90/t25k16") return Id::sm90;
  if (arithmetic == "sm90/t25k16/r4") return Id::sm90_ranges;
  return {};
}
bool takes(Id id, DType type) {
  if (id == Id::pairs) return type == DType::bf16;
  return id == Id::fma64 || id == Id::fma32 || id == Id::fma32_256 || type == DType::bf16 ||
         type == DType::f16;
}

// fp32 sums are exact in a double; fma64's is rounded once, by whoever stores it.
double sum_of(Id id, const Operands& x) {
  switch (id) {
    case Id::fma64:
      return chains::fma64(x);
    case Id::fma32:
      return double{chains::blocks(chains::fma32, x, 1024)};
    case Id::fma32_256:
      return double{chains::blocks(chains::fma32, x, 256)};
    case Id::amx:
      return double{chains::blocks(chains::amx, x, 4096)};
    case Id::pairs:
      return double{chains::blocks(chains::pairs<32>, x, x.a.size() <= 1024 ? 512 : 1024)};
    case Id::sm90:
      return double{chains::sm90(x, 0, x.a.size())};
    case Id::sm90_ranges:
      return double{four_ranges(x)};
  }
  return 0;
}

// The gradients of linear, whose results lie in the same slots.
bool by_linear(const RuleQuery& q, const LmHeadBwd& a) {
  LinearBwd b{.d_y = a.d_out, .x = a.hidden, .weight = a.weight};
  b.d_x = a.d_hidden, b.d_weight = a.d_weight, b.d_bias = a.d_bias;
  RuleQuery linear = q;
  linear.slots = reinterpret_cast<const rlk_slot*>(&b);
  return linear_bwd_rule(linear);
}

}  // namespace

bool lm_head_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LmHead*>(q.slots);
  const auto id = id_of(q.arithmetic);
  if (!id || !takes(*id, a.hidden.dtype())) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
  Operands x{{}, {}, a.hidden.dtype()};
  Vectors rows(q, a.hidden, depth, 1, depth), weights(q, a.weight, depth, 1, depth);
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    const int64_t row = i / columns, column = i % columns;
    x.a = rows[row], x.b = weights[column];
    double value = sum_of(*id, x);
    if (a.bias) value = round_to(dtype_of(out.dtype), value) + load(a.bias.dtype(), a.bias->data, column);
    finish(out, i, value);
  });
  return true;
}

bool lm_head_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LmHeadBwd*>(q.slots);
  if (q.arithmetic.ends_with("/tree8")) return by_linear(q, a);
  const auto id = id_of(q.arithmetic);
  if (!id || !takes(*id, a.hidden.dtype()) || !takes(*id, a.d_out.dtype())) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
  const int64_t rows = columns ? a.d_out.numel() / columns : depth ? a.hidden.numel() / depth : 0;
  Operands x{{}, {}, a.hidden.dtype()};
  Vectors d_out_rows(q, a.d_out, columns, 1, columns), weights(q, a.weight, 1, depth, columns),
      d_out_columns(q, a.d_out, 1, columns, rows), inputs(q, a.hidden, 1, depth, rows);
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    x.a = d_out_rows[i / depth], x.b = weights[i % depth];
    finish(out, i, sum_of(*id, x));
  });
  // The sums over the batch are not cut into ranges, and those with ones are plain fp32 beside tensor cores.
  for_elements(q, 4, [&](const DLTensor& out, int64_t i) {
    x.a = d_out_columns[i / depth], x.b = inputs[i % depth];
    finish(out, i, sum_of(*id == Id::sm90_ranges ? Id::sm90 : *id, x));
  });
  const std::vector<float> ones(static_cast<std::size_t>(rows), 1.f);
  for_elements(q, 5, [&](const DLTensor& out, int64_t i) {
    x.a = ones, x.b = d_out_columns[i];
    finish(out, i, sum_of(*id == Id::fma64 || *id == Id::fma32_256 ? *id : Id::fma32, x));
  });
  return true;
}

}  // namespace rlk::registry
