// What each arithmetic id of linear and its gradients means, one output at a time: the page's rules as plain loops over
// numbers, independent of every kernel.
#include <bit>
#include <optional>

#include "registry/linear/geometry.hpp"
#include "registry/lm_head/chains.hpp"
#include "registry/op.hpp"
#include "registry/reference.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using chains::Operands;

// The chain of a leaf, and of a block of tokens; none: fma64, which is one chain over all.
struct Id {
  chains::Chain chain = nullptr;
  bool halves_alone = false;  // takes 16-bit operands
};
std::optional<Id> id_of(std::string_view arithmetic) {
  if (arithmetic == "fma64") return Id{};
  if (arithmetic == "fma32/tree8") return Id{chains::fma32};
  if (arithmetic == "amx/k32/tree8") return Id{chains::amx, true};
  if (arithmetic == "sm90/t25k16/tree8") return Id{chains::sm90, true};
  return {};
}
bool takes(const Id& id, DType type) { return !id.halves_alone || type != DType::f32; }

// fp32 sums are exact in a double; fma64's is rounded once, by whoever stores it.
double by_leaves(const Id& id, const Operands& x, int64_t total, int64_t leaf_count) {
  if (!id.chain) return chains::fma64(x);
  return double{chains::tree(id.chain, x, static_cast<std::size_t>(leaves::width(total)), 0,
                             static_cast<std::size_t>(leaf_count))};
}
double by_tokens(const Id& id, const Operands& x) {
  return id.chain ? double{chains::blocks(id.chain, x, 4096)} : chains::fma64(x);
}

// What is added to a rounded sum: exact in fp32 but for its one rounding, which the truth does without.
double add(DType type, double sum, double more) {
  if (type == DType::f64) return sum + more;
  return double{static_cast<float>(round_to(type, sum)) + static_cast<float>(more)};
}

void finish(const DLTensor& out, int64_t element, double value) {
  const DType type = dtype_of(out.dtype);
  if (type == DType::f32 && std::isnan(value))
    static_cast<float*>(out.data)[element] = std::bit_cast<float>(kCanonicalNan32);
  else
    store(type, out.data, element, value);
}

// `count` elements of a dense tensor from `first` on, `step` apart.
void read(const In& t, int64_t first, int64_t step, int64_t count, std::vector<float>& to) {
  to.resize(static_cast<std::size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    to[static_cast<std::size_t>(i)] = static_cast<float>(load(t.dtype(), t.data<char>(), first + i * step));
}

// Calls body(tensor, element) for every wanted element of result `argument`.
template <class Body>
void for_elements(const RuleQuery& q, std::size_t argument, Body body) {
  const DLTensor* t = q.slots[argument].tensor;
  if (!t) return;
  if (q.sample.empty())
    for (int64_t i = 0, n = In(t).numel(); i < n; ++i) body(*t, i);
  for (const Sample& s : q.sample)
    if (s.argument == argument)
      for (int64_t i : s.elements) body(*t, i);
}

}  // namespace

bool linear_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const Linear*>(q.slots);
  const auto id = id_of(q.arithmetic);
  if (!id || !takes(*id, a.x.dtype())) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0), total = a.k_total ? a.k_total : depth;
  Operands x{{}, {}, a.x.dtype()};
  for_elements(q, 4, [&](const DLTensor& y, int64_t i) {
    const int64_t n = i % columns;
    const DType type = dtype_of(y.dtype);
    read(a.x, i / columns * depth, 1, depth, x.a);
    read(a.weight, n * depth, 1, depth, x.b);
    double value = by_leaves(*id, x, total, a.leaf_count);
    if (a.bias) value = add(type, value, load(a.bias.dtype(), a.bias->data, n));
    if (a.residual) value = add(type, value, load(a.residual.dtype(), a.residual->data, i));
    finish(y, i, value);
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
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    read(a.d_y, i / depth * columns, 1, columns, x.a);
    read(a.weight, i % depth, depth, columns, x.b);
    finish(out, i, by_leaves(*id, x, total, a.d_x_leaf_count));
  });
  for_elements(q, 4, [&](const DLTensor& out, int64_t i) {
    read(a.d_y, i / depth, columns, rows, x.a);
    read(a.x, i % depth, depth, rows, x.b);
    finish(out, i, by_tokens(*id, x));
  });
  // Sums with ones are plain fp32 beside matrix units.
  const Id plain = id->chain ? Id{chains::fma32} : Id{};
  for_elements(q, 5, [&](const DLTensor& out, int64_t i) {
    read(a.d_y, i, columns, rows, x.b);
    x.a.assign(x.b.size(), 1.0f);
    finish(out, i, by_tokens(plain, x));
  });
  for_elements(
      q, 6, [&](const DLTensor& out, int64_t i) { finish(out, i, 0 + load(a.d_y.dtype(), a.d_y->data, i)); });
  return true;
}

}  // namespace rlk::registry
