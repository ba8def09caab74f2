// What each arithmetic id of linear and its gradients means, one output at a time: the page's rules as plain loops over
// numbers, independent of every kernel.
#include "registry/rule.hpp"

#include <optional>

#include "registry/exp32.hpp"
#include "registry/linear/geometry.hpp"
#include "registry/lm_head/chains.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using chains::Operands;

// The chain of a leaf, and of a block of tokens; none: fma64, which is one chain over all.
struct Id {
  chains::Chain chain = nullptr;
  bool halves_alone = false;  // takes 16-bit operands
  std::size_t group = 1;      // products that are summed as one
};
std::optional<Id> id_of(std::string_view arithmetic) {
  if (arithmetic == "fma64") return Id{};
  if (arithmetic == "fma32/tree8") return Id{chains::fma32};
  if (arithmetic == "amx/k32/tree8") return Id{chains::amx, true, 32};
  if (arithmetic == "avx512bf16/tree8") return Id{chains::pairs<2>, true, 2};
  if (arithmetic == "sm90/t25k16/tree8") return Id{chains::sm90, true, 16};
  return {};
}
bool takes(const Id& id, DType type) { return !id.halves_alone || type != DType::f32; }

// fp32 sums are exact in a double; fma64's is rounded once, by whoever stores it.
double by_leaves(const Id& id, const Operands& x, int64_t total, int64_t leaf_count) {
  if (!id.chain) return chains::fma64(x);
  return double{chains::tree(id.chain, x, static_cast<std::size_t>(leaves::width(total)), 0,
                             static_cast<std::size_t>(leaf_count))};
}
// Leaf j is leaf j of every segment, each filled with zeros to the groups of its chain.
double by_segments(const Id& id, const Operands& x, const leaves::Segments& s, int64_t leaf_count) {
  if (!id.chain) return chains::fma64(x);
  float sums[leaves::kLeaves] = {};
  for (int64_t j = 0; j < leaf_count; ++j) {
    std::vector<float> a, b;
    for (int i = 0; i < s.count; ++i) {
      const int64_t begin = s.start[i] + std::min(s.length[i], j * s.width[i]),
                    end = s.start[i] + std::min(s.length[i], (j + 1) * s.width[i]);
      a.insert(a.end(), x.a.begin() + begin, x.a.begin() + end);
      b.insert(b.end(), x.b.begin() + begin, x.b.begin() + end);
      const std::size_t filled = (a.size() + id.group - 1) / id.group * id.group;
      a.resize(filled), b.resize(filled);
    }
    sums[j] = id.chain({a, b, x.type}, 0, a.size());
  }
  for (int64_t step = 1; step < leaf_count; step *= 2)
    for (int64_t j = 0; j < leaf_count; j += 2 * step) sums[j] = sums[j] + sums[j + step];
  return double{sums[0]};
}
double by_tokens(const Id& id, const Operands& x) {
  return id.chain ? double{chains::blocks(id.chain, x, 4096)} : chains::fma64(x);
}

}  // namespace

// silu(gate) * up of what y's dtype holds, in fp32.
double swiglu_of(const Linear& a, double gate, double up) {
  const auto g = static_cast<float>(gate);
  float value = g == -INFINITY ? -0.0f : g / (1.0f + exp32(-g));
  if (a.roundings == Linear::Roundings::twice) value = static_cast<float>(round_to(a.y.dtype(), value));
  return double{value * static_cast<float>(up)};
}

bool linear_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const Linear*>(q.slots);
  const auto id = id_of(q.arithmetic);
  if (!id || !takes(*id, a.x.dtype())) return false;
  const bool gated = a.activation == Linear::Activation::swiglu;
  if (gated && !id->chain) return false;  // another exponential in fp64 may differ in its last bit
  const int64_t depth = a.weight.dim(1), columns = a.y.dim(-1), total = a.k_total ? a.k_total : depth;
  const gate_up::Layout rows(a.gate_up == Linear::GateUp::interleaved64, columns);
  Operands x{{}, {}, a.x.dtype()};
  Vectors inputs(q, a.x, depth, 1, depth), weights(q, a.weight, depth, 1, depth);
  for_elements(q, 4, [&](const DLTensor& y, int64_t i) {
    const DType type = dtype_of(y.dtype);
    x.a = inputs[i / columns];
    const auto sum = [&](int64_t n) {
      x.b = weights[n];
      const double value = by_leaves(*id, x, total, a.leaf_count);
      return a.bias ? add(type, value, load(a.bias.dtype(), a.bias->data, n)) : value;
    };
    const int64_t n = i % columns;
    if (gated) {
      const double gate = round_to(type, sum(rows.gate(n))), up = round_to(type, sum(rows.gate(n) + rows.up));
      return finish(y, i, swiglu_of(a, gate, up));
    }
    const double value = sum(n);
    finish(y, i, a.residual ? add(type, value, load(a.residual.dtype(), a.residual->data, i)) : value);
  });
  return true;
}

bool linear_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LinearBwd*>(q.slots);
  const auto id = id_of(q.arithmetic);
  if (!id || !takes(*id, a.x.dtype()) || !takes(*id, a.d_y.dtype())) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0), total = a.n_total ? a.n_total : columns;
  const int64_t rows = columns ? a.d_y.numel() / columns : depth ? a.x.numel() / depth : 0;
  Operands x{{}, {}, a.x.dtype()};
  leaves::Segments segments;
  if (a.segments)
    segments = leaves::segments_of(a.segments.data<int64_t>(), a.segments.dim(0), a.d_x_leaf_first,
                                   a.d_x_leaf_count);
  const auto onto = [](const In& before, double sum, int64_t i) {
    return before ? add(DType::f32, sum, load(DType::f32, before.data<char>(), i)) : sum;
  };
  Vectors d_y_rows(q, a.d_y, columns, 1, columns), weights(q, a.weight, 1, depth, columns),
      d_y_columns(q, a.d_y, 1, columns, rows), inputs(q, a.x, 1, depth, rows);
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    x.a = d_y_rows[i / depth], x.b = weights[i % depth];
    finish(out, i,
           a.segments ? by_segments(*id, x, segments, a.d_x_leaf_count)
                      : by_leaves(*id, x, total, a.d_x_leaf_count));
  });
  for_elements(q, 4, [&](const DLTensor& out, int64_t i) {
    x.a = d_y_columns[i / depth], x.b = inputs[i % depth];
    finish(out, i, onto(a.d_weight_before, by_tokens(*id, x), i));
  });
  // Sums with ones are plain fp32 beside matrix units.
  const Id plain = id->chain ? Id{chains::fma32} : Id{};
  const std::vector<float> ones(static_cast<std::size_t>(rows), 1.0f);
  for_elements(q, 5, [&](const DLTensor& out, int64_t i) {
    x.a = ones, x.b = d_y_columns[i];
    finish(out, i, onto(a.d_bias_before, by_tokens(plain, x), i));
  });
  for_elements(
      q, 6, [&](const DLTensor& out, int64_t i) { finish(out, i, 0 + load(a.d_y.dtype(), a.d_y->data, i)); });
  return true;
}

}  // namespace rlk::registry
