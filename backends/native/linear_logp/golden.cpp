// linear_logp and its gradients in fp64: every product and sum ascending, logits rounded by logits_round alone. A row, or a
// column, of logits at a time.
#include "native/logp/golden.hpp"

#include <vector>

#include "arithmetic/logp/bind.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace logp;

// With the instruction where it is there: the C library's function rounds the same way, call by call.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#  define RLK_GOLDEN_FUSED __attribute__((target_clones("fma", "default")))
#else
#  define RLK_GOLDEN_FUSED
#endif
RLK_GOLDEN_FUSED double chain(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum = __builtin_fma(a[i], b[i], sum);
  return sum;
}

struct Dense {
  std::int64_t width;
  std::vector<double> x;
  template <class View>
  explicit Dense(const View& t) : width(t.dim(1)) {
    for (std::int64_t r = 0; r < t.dim(0); ++r)
      for (std::int64_t i = 0; i < width; ++i)
        x.push_back(
            double{rows::load(rows::type_of(t.dtype()), t.template data<char>(), r * t.stride(0) + i)});
  }
  const double* row(std::int64_t r) const { return x.data() + r * width; }
};

template <class Args>
struct Operands {
  Problem p;
  Dense hidden, weight;
  std::vector<double> bias;

  explicit Operands(const Args& a)
      : p(lse128::options_of(a, a.weight.dim(0))), hidden(a.hidden), weight(a.weight) {
    for (std::int64_t i = 0; a.bias && i < p.here; ++i)
      bias.push_back(double{rows::load(rows::type_of(a.bias.dtype()), a.bias.template data<char>(), i)});
  }
  double logit(std::int64_t row, std::int64_t c) const {
    const double z = round_to(p.round, chain(hidden.row(row), weight.row(c), hidden.width));
    return bias.empty() ? z : round_to(p.round, z + bias[static_cast<std::size_t>(c)]);
  }
  std::vector<double> logits(std::int64_t row) const {
    std::vector<double> z(static_cast<std::size_t>(p.here));
    for (std::int64_t c = 0; c < p.here; ++c) z[static_cast<std::size_t>(c)] = logit(row, c);
    return z;
  }
};

rlk_code run(const LinearLogp& a, const Call& call) {
  Operands x(a);
  lse128::add_results(x.p, a);
  call.parallel_for(x.p.rows, [&](std::int64_t row) {
    write_golden(x.p, row, x.p.left_out(row) ? golden_left_out(x.p) : golden_row(x.p, row, x.logits(row)));
  });
  if (a.bad_count) *a.bad_count.data<std::int32_t>() = count_bad(x.p);
  return RLK_OK;
}

// The logits' gradient, rounded as a tensor of theirs is.
double slope(const Operands<LinearLogpBwd>& x, const GoldenRow& r, std::int64_t row, double z,
             std::int64_t c) {
  return x.p.left_out(row) ? 0 : round_to(x.p.round, golden_gradient(x.p, row, r, z, c));
}

void put(const Out& t, std::int64_t row, std::int64_t i, double x) {
  rows::store(rows::type_of(t.dtype()), t.data<char>(), row * t.stride(0) + i, x);
}
// Added in fp32 to what was there before.
void put(const Out& t, const In& before, std::int64_t row, std::int64_t i, double x) {
  if (before) x = double{static_cast<float>(x) + before.data<float>()[row * before.stride(0) + i]};
  put(t, row, i, x);
}

void weight_row(const LinearLogpBwd& a, const Operands<LinearLogpBwd>& x, const std::vector<GoldenRow>& all,
                std::int64_t c) {
  std::vector<double> sum(static_cast<std::size_t>(x.weight.width));
  double bias = 0;
  for (std::int64_t row = 0; c < x.p.here && row < x.p.rows; ++row) {
    const double d = slope(x, all[static_cast<std::size_t>(row)], row, x.logit(row, c), c);
    bias += d;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = simt::fused(d, x.hidden.row(row)[i], sum[i]);
  }
  for (std::size_t i = 0; a.d_weight && i < sum.size(); ++i)
    put(a.d_weight, a.d_weight_before, c, static_cast<std::int64_t>(i), sum[i]);
  if (a.d_bias) put(a.d_bias, a.d_bias_before, c, 0, bias);
}

rlk_code run_backward(const LinearLogpBwd& a, const Call& call) {
  Operands x(a);
  lse128::add_cotangents(x.p, a);
  std::vector<GoldenRow> all(static_cast<std::size_t>(x.p.rows));
  call.parallel_for(x.p.rows, [&](std::int64_t row) {
    GoldenRow& r = all[static_cast<std::size_t>(row)];
    const std::vector<double> z = x.logits(row);
    if (const float* s = x.p.given) {
      r = {s[4 * row], s[4 * row + 1], s[4 * row + 2], s[4 * row + 3], golden_tau(x.p, row)};
    } else if (!x.p.left_out(row)) {
      r = golden_row(x.p, row, z);
    }
    std::vector<double> sum(static_cast<std::size_t>(x.weight.width));
    for (std::int64_t c = 0; a.d_hidden && c < x.p.here; ++c) {
      const double d = slope(x, r, row, z[static_cast<std::size_t>(c)], c);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = simt::fused(d, x.weight.row(c)[i], sum[i]);
    }
    for (std::size_t i = 0; a.d_hidden && i < sum.size(); ++i)
      put(a.d_hidden, row, static_cast<std::int64_t>(i), sum[i]);
  });
  if (a.d_weight || a.d_bias)
    call.parallel_for(a.weight.dim(0), [&](std::int64_t c) { weight_row(a, x, all, c); });
  return RLK_OK;
}

constexpr Facts kFacts = golden_facts("ascending fp64 sums, one rounding");

}  // namespace

extern const rlk_implementation linear_logp_golden, linear_logp_bwd_golden;
constinit const rlk_implementation linear_logp_golden = implement<LinearLogp, run>(kFacts);
constinit const rlk_implementation linear_logp_bwd_golden = implement<LinearLogpBwd, run_backward>(kFacts);

}  // namespace rlk::native
