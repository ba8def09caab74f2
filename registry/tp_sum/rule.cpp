// What the arithmetic ids of tp_sum mean, one output at a time: tree8 in fp32, fma64 in fp64.
#include <bit>

#include "registry/op.hpp"
#include "registry/reference.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

float tree(const float* x, int64_t count) {
  return count == 1 ? x[0] : tree(x, count / 2) + tree(x + count / 2, count / 2);
}

// To an already rounded sum, in fp32, which the truth does without.
double add(DType type, double sum, double more) {
  if (type == DType::f64) return sum + more;
  return double{static_cast<float>(round_to(type, sum)) + static_cast<float>(more)};
}

}  // namespace

bool tp_sum_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const bool golden = q.arithmetic == "fma64";
  if (!golden && q.arithmetic != "tree8") return false;
  const auto& a = *reinterpret_cast<const TpSum*>(q.slots);
  const DType type = a.y.dtype();
  const int64_t size = a.y.numel(), count = a.partials.dim(0);
  const auto* partials = a.partials.data<float>();
  const auto element = [&](int64_t i) {
    float x[8];
    double sum = 0;
    for (int64_t t = 0; t < count; ++t) sum += double{x[t] = partials[t * size + i]};
    if (!golden) sum = double{tree(x, count)};
    if (a.bias) sum = add(type, sum, load(a.bias.dtype(), a.bias->data, i % a.y.dim(1)));
    if (a.residual) sum = add(type, sum, load(a.residual.dtype(), a.residual->data, i));
    if (type == DType::f32 && std::isnan(sum))
      static_cast<float*>(a.y->data)[i] = std::bit_cast<float>(kCanonicalNan32);
    else
      store(type, a.y->data, i, sum);
  };
  if (q.sample.empty())
    for (int64_t i = 0; i < size; ++i) element(i);
  for (const Sample& s : q.sample)
    for (int64_t i : s.elements) element(i);
  return true;
}

}  // namespace rlk::registry
