// What each arithmetic id of linear and its gradients means, one output at a time: the page's rules as plain loops over
// numbers, independent of every kernel.
#include <bit>

#include "registry/linear/geometry.hpp"
#include "registry/op.hpp"
#include "registry/reference.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using Numbers = std::vector<float>;

double chain64(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t k = 0; k < a.size(); ++k) sum = std::fma(double{a[k]}, double{b[k]}, sum);
  return sum;
}

float chain32(const Numbers& a, const Numbers& b, int64_t from, int64_t to) {
  float sum = 0;
  for (int64_t k = from; k < to; ++k)
    sum = std::fma(a[static_cast<std::size_t>(k)], b[static_cast<std::size_t>(k)], sum);
  return sum;
}

// Leaves [first, first + count) of `total`; the numbers are theirs alone.
struct Leaves {
  int64_t total, first, count;
};
float tree(const Numbers& a, const Numbers& b, const Leaves& l) {
  if (l.count > 1) {
    const int64_t half = l.count / 2;
    const float left = tree(a, b, {l.total, l.first, half});
    const auto held = leaves::length(l.total, l.first, half);
    const float right = tree(Numbers(a.begin() + held, a.end()), Numbers(b.begin() + held, b.end()),
                             {l.total, l.first + half, half});
    return left + right;
  }
  return chain32(a, b, 0, leaves::length(l.total, l.first, 1));
}

float blocks_of_4096(const Numbers& a, const Numbers& b) {
  const auto length = static_cast<int64_t>(a.size());
  float total = 0;
  for (int64_t first = 0; first < length; first += 4096) {
    const float sum = chain32(a, b, first, std::min(length, first + 4096));
    total = first == 0 ? sum : total + sum;
  }
  return total;
}

enum class Id { fma64, fma32_tree8, none };
Id id_of(std::string_view arithmetic) {
  return arithmetic == "fma64" ? Id::fma64 : arithmetic == "fma32/tree8" ? Id::fma32_tree8 : Id::none;
}

// fp32 sums are exact in a double; fma64's is rounded once, by whoever stores it.
double by_leaves(Id id, const Numbers& a, const Numbers& b, const Leaves& l) {
  return id == Id::fma64 ? chain64(a, b) : double{tree(a, b, l)};
}
double by_rows(Id id, const Numbers& a, const Numbers& b) {
  return id == Id::fma64 ? chain64(a, b) : double{blocks_of_4096(a, b)};
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
Numbers numbers(const In& t, int64_t first, int64_t step, int64_t count) {
  Numbers all(static_cast<std::size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    all[static_cast<std::size_t>(i)] = static_cast<float>(load(t.dtype(), t.data<char>(), first + i * step));
  return all;
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
  const Id id = id_of(q.arithmetic);
  if (id == Id::none) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
  const Leaves l{a.k_total ? a.k_total : depth, a.leaf_first, a.leaf_count};
  for_elements(q, 4, [&](const DLTensor& y, int64_t i) {
    const int64_t n = i % columns;
    const DType type = dtype_of(y.dtype);
    double value =
        by_leaves(id, numbers(a.x, i / columns * depth, 1, depth), numbers(a.weight, n * depth, 1, depth), l);
    if (a.bias) value = add(type, value, load(a.bias.dtype(), a.bias->data, n));
    if (a.residual) value = add(type, value, load(a.residual.dtype(), a.residual->data, i));
    finish(y, i, value);
  });
  return true;
}

bool linear_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LinearBwd*>(q.slots);
  const Id id = id_of(q.arithmetic);
  if (id == Id::none) return false;
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
  const int64_t rows = columns ? a.d_y.numel() / columns : depth ? a.x.numel() / depth : 0;
  const Leaves l{a.n_total ? a.n_total : columns, a.d_x_leaf_first, a.d_x_leaf_count};
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    finish(out, i,
           by_leaves(id, numbers(a.d_y, i / depth * columns, 1, columns),
                     numbers(a.weight, i % depth, depth, columns), l));
  });
  for_elements(q, 4, [&](const DLTensor& out, int64_t i) {
    finish(out, i,
           by_rows(id, numbers(a.d_y, i / depth, columns, rows), numbers(a.x, i % depth, depth, rows)));
  });
  for_elements(q, 5, [&](const DLTensor& out, int64_t i) {
    finish(out, i,
           by_rows(id, Numbers(static_cast<std::size_t>(rows), 1.0f), numbers(a.d_y, i, columns, rows)));
  });
  for_elements(
      q, 6, [&](const DLTensor& out, int64_t i) { finish(out, i, 0 + load(a.d_y.dtype(), a.d_y->data, i)); });
  return true;
}

}  // namespace rlk::registry
