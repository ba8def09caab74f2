// What the arithmetic ids of tp_sum mean, one output at a time: tree8 in fp32, fma64 in fp64.
#include "registry/rule.hpp"

#include <vector>

#include "registry/lm_head/chains.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

float tree(const float* x, int64_t count) {
  return count == 1 ? x[0] : tree(x, count / 2) + tree(x + count / 2, count / 2);
}

}  // namespace

bool tp_sum_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const bool golden = q.arithmetic == "fma64";
  if (!golden && q.arithmetic != "tree8") return false;
  const auto& a = *reinterpret_cast<const TpSum*>(q.slots);
  const DType type = a.y.dtype();
  const int64_t width = a.y.dim(1);
  std::vector<const float*> partials;
  const bool stacked = a.partials.rank() == 3;
  partials.reserve(8);
  for (int64_t t = 0; t < (stacked ? a.partials.dim(0) : 1); ++t)
    partials.push_back(a.partials.data<float>() + t * a.partials.dim(-2) * width);
  for (const In& p : {a.p1, a.p2, a.p3, a.p4, a.p5, a.p6, a.p7})
    if (p) partials.push_back(p.data<float>());
  const auto count = static_cast<int64_t>(partials.size());
  for_elements(q, 3, [&](const DLTensor& y, int64_t i) {
    float x[8];
    double sum = 0;
    for (int64_t t = 0; t < count; ++t)
      sum += double{x[t] = partials[static_cast<std::size_t>(t)][a.row_first * width + i]};
    if (!golden) sum = double{tree(x, count)};
    if (a.bias) sum = add(type, sum, load(a.bias.dtype(), a.bias->data, i % width));
    if (a.residual) sum = add(type, sum, load(a.residual.dtype(), a.residual->data, i));
    finish(y, i, sum);
  });
  return true;
}

bool tp_sum_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const bool golden = q.arithmetic == "fma64";
  if (!golden && q.arithmetic != "tree8") return false;
  const auto& a = *reinterpret_cast<const TpSumBwd*>(q.slots);
  const int64_t rows = a.partials.dim(-2), width = a.partials.dim(-1), summed = a.d_y.dim(0);
  const auto d_y = [&](int64_t i) { return load(a.d_y.dtype(), a.d_y.data<char>(), i); };
  for (std::size_t argument = 2; argument <= 9; ++argument)  // d_partials, d_p1 and so on
    for_elements(q, argument, [&](const DLTensor& out, int64_t i) {
      const int64_t row = i / width % rows - a.row_first;
      finish(out, i, row < 0 || row >= summed ? 0.0 : d_y(row * width + i % width));
    });
  for_elements(q, 10, [&](const DLTensor& d_bias, int64_t i) {
    const std::vector<float> ones(static_cast<std::size_t>(summed), 1.0f);
    std::vector<float> column(static_cast<std::size_t>(summed));
    for (int64_t m = 0; m < summed; ++m)
      column[static_cast<std::size_t>(m)] = static_cast<float>(d_y(m * width + i));
    const chains::Operands x{ones, column, a.d_y.dtype()};
    finish(d_bias, i, golden ? chains::fma64(x) : double{chains::blocks(chains::fma32, x, 4096)});
  });
  for_elements(q, 11, [&](const DLTensor& d_residual, int64_t i) { finish(d_residual, i, d_y(i)); });
  return true;
}

}  // namespace rlk::registry
