#include "allowance.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "registry/attention/gradients.hpp"
#include "registry/linear_logp/composed.hpp"
#include "registry/reference.hpp"
#include "registry/short_conv/plain.hpp"
#include "rlk/ops.hpp"
#include "src/host.hpp"

namespace differential {
namespace {

using rlk::registry::Bound;
using Inputs = std::vector<Array>;
using Scale = std::vector<double>;

constexpr double kHalfUlp = 0x1p-24;  // of fp32, relative

// Dense operands of the reference.
struct Operands {
  std::vector<Array> arrays;  // by argument
  std::vector<rlk::Tensor> views;
  std::vector<rlk_slot> slots;

  Operands(const Call& call, const Inputs& inputs) {
    const rlk_op_schema& s = call.schema();
    arrays.resize(s.num_arguments), views.resize(s.num_arguments), slots.resize(s.num_arguments);
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      const Argument& a = call.arguments[i];
      if (!a.present) continue;
      const rlk_argument& schema = s.arguments[i];
      Array& array = arrays[i];
      if (schema.role == RLK_WRITE) {
        array = Array(a.shape, schema.dtypes & RLK_F64 ? DType::f64 : a.dtype);
        std::fill(array.bytes.begin(), array.bytes.end(), std::byte{0xff});
      } else {
        array = inputs[i];
      }
      views[i] = rlk::Tensor(array.bytes.data(), std::span(array.shape), array.dtype);
      slots[i].tensor = &views[i].dl();
    }
    slots.insert(slots.end(), call.attributes.begin(), call.attributes.end());
  }
};

std::size_t at(const Call& call, std::string_view argument) {
  return static_cast<std::size_t>(&call.argument(argument) - call.arguments.data());
}

template <class Change>
Array changed(const Array& a, Change change) {
  Array out = a;
  for (int64_t i = 0; i < out.count(); ++i)
    rlk::registry::store(out.dtype, out.bytes.data(), i, change(a[i]));
  return out;
}

Scale magnitudes(const Array& a) {
  Scale out(static_cast<std::size_t>(a.count()));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::fabs(a[static_cast<int64_t>(i)]);
  return out;
}

double norm(const Array& a, int64_t first, int64_t count) {
  double squares = 0;
  for (int64_t i = first; i < first + count; ++i) squares += a[i] * a[i];
  return std::sqrt(squares);
}

// ---- sums of products

Inputs positive(Inputs inputs) {
  for (Array& a : inputs)
    if (is_floating(a)) a = changed(a, [](double x) { return std::fabs(x); });
  return inputs;
}

// The sums of magnitudes.
Scale of_products(const Call& call, const Inputs& inputs, std::size_t result) {
  return magnitudes(reference(call, positive(inputs)).results[result]);
}

template <class Args>
void compute(const char* op, const Args& a) {
  rlk::registry::find(op)->reference(reinterpret_cast<const rlk_slot*>(&a), &rlk::host());
}

// Those of lm_head's backward, of the gradient that the logits have.
Scale of_composed(const Call& call, const Inputs& inputs, std::size_t result) {
  using Args = rlk::LinearLogpBwd;
  const Operands as_given(call, inputs);
  Operands sums(call, positive(inputs));
  const Args &given = *reinterpret_cast<const Args*>(as_given.slots.data()),
             &to_sum = *reinterpret_cast<const Args*>(sums.slots.data());
  const rlk::registry::Composed composed(given, DType::f64), magnitude(to_sum, DType::f64);
  compute("lm_head", composed.head());
  const rlk::LogpBwd rows = composed.rows_bwd();
  compute("logp_bwd", rows);
  const int64_t entries = given.hidden.dim(0) * composed.here();
  const rlk::LinearBwd back = magnitude.product_bwd();
  for (int64_t i = 0; i < entries; ++i) {
    const double d = rlk::registry::load(rows.d_logits.dtype(), rows.d_logits.data<void>(), i);
    rlk::registry::store(back.d_y.dtype(), const_cast<void*>(back.d_y.data<void>()), i, std::fabs(d));
  }
  compute("linear_bwd", back);
  return magnitudes(sums.arrays[result]);
}

// Those of attention's gradients.
Scale of_pairs(const Call& call, const Inputs& inputs, std::size_t result) {
  Operands sums(call, inputs);
  rlk::registry::attention::attention_bwd_magnitudes(sums.slots.data(), &rlk::host());
  return magnitudes(sums.arrays[result]);
}

// ---- short_conv

// A channel's gradients with each term's magnitude in place of the term; z and g are what they are.
struct TermsOfRows {
  using Number = double;
  static double times_slope(double d, double z) {
    const double s = 1 / (1 + std::exp(-z)), slope = s * (1 + z * (1 - s));
    return std::isnan(slope) ? d : d * slope;
  }
  struct Sum {
    double total = 0;
    void add(double x, double y, int64_t) { total += std::fabs(x * y); }
    double value() const { return total; }
  };
  static void set(const rlk::Out& t, int64_t row, int64_t i, double x) {
    if (t) rlk::registry::Rows(t).set(row, i, x);
  }
};

// Those of d_weight and d_bias: fma chains over rows, whose terms cancel.
Scale of_rows(const Call& call, const Inputs& inputs, std::size_t result) {
  Operands sums(call, inputs);
  rlk::registry::short_conv::backward<TermsOfRows>(
      *reinterpret_cast<const rlk::ShortConvBwd*>(sums.slots.data()));
  return magnitudes(sums.arrays[result]);
}

// ---- gradients that are sums of terms, one a cotangent

Scale of_terms(const Call& call, const Inputs& inputs, std::size_t result) {
  Scale sum(static_cast<std::size_t>(inputs[at(call, "logp")].count()));
  for (const char* cotangent : {"d_ratio", "d_kl"}) {
    if (!call.argument(cotangent).present) continue;
    Inputs alone = inputs;
    for (const char* other : {"d_ratio", "d_kl"})
      if (other != cotangent && call.argument(other).present)
        alone[at(call, other)] = changed(alone[at(call, other)], [](double) { return 0.0; });
    const Scale term = magnitudes(reference(call, alone).results[result]);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += term[i];
  }
  return sum;
}

// d_out up times the gate's slope, which is a difference where it is near 0.
Scale of_slope(const Call& call, const Inputs& inputs, const Array& truth) {
  const Array &gate = inputs[at(call, "gate")], &d_out = inputs[at(call, "d_out")];
  const bool packed = !call.argument("up").present;
  const Array& up = packed ? gate : inputs[at(call, "up")];
  const int64_t width = gate.shape.back(), step = up.shape.back(), first = packed ? width / 2 : 0;
  Scale scale = magnitudes(truth);
  for (int64_t i = 0; i < d_out.count(); ++i) {
    const int64_t row = i / d_out.shape.back(), column = i % d_out.shape.back();
    double& here = scale[static_cast<std::size_t>(row * width + column)];
    here = std::max(here, std::fabs(d_out[i] * up[row * step + first + column]));
  }
  return scale;
}

// ---- kda

// The gradient of a normalised row x r is r (d - h (h . d)), of d = d_h and h = x r. d's part along h falls out: its rounding,
// half an ulp of |d| by the difference and K + 3 of them by the dot product of K terms and by h, does not.
double rounding_of_projection(const Call& call, const Inputs& inputs, const char* from,
                              const char* gradient) {
  const int64_t width = call.argument(from).shape.back();
  Call plain = call;
  plain.set("qk_l2norm", 0);
  Inputs normalised = inputs;
  for (const char* name : {"q", "k"}) {
    Array& x = normalised[at(call, name)];
    for (int64_t row = 0; row < x.count(); row += width) {
      const double r = 1 / std::sqrt(norm(x, row, width) * norm(x, row, width) + 1e-6);
      for (int64_t i = row; i < row + width; ++i) rlk::registry::store(x.dtype, x.bytes.data(), i, x[i] * r);
    }
  }
  const Array& x = inputs[at(call, from)];
  const Array d = reference(plain, normalised).results[at(call, gradient)];
  double squares = 0;
  for (int64_t row = 0; row < d.count(); row += width) {
    const double length = norm(x, row, width);
    squares += std::pow(norm(d, row, width), 2) / (length * length + 1e-6);
  }
  return static_cast<double>(width + 4) * kHalfUlp *
         std::sqrt(squares / static_cast<double>(std::max<int64_t>(1, d.count())));
}

// d_a_log and d_dt_bias add a term for each token: the error of a sum is that of its terms, independent of one another, so it
// is measured by the root of their squares where they cancel.
Scale of_parameter(const Call& call, const Inputs& inputs, std::string_view name, const Array& truth) {
  Call with_terms = call;
  with_terms.write("d_g", DType::f32);
  Argument& d_g = with_terms.argument("d_g");
  d_g.shape = call.argument("g").shape;
  const Array terms = reference(with_terms, inputs).results[at(call, "d_g")];
  const Array& g = inputs[at(call, "g")];
  const Array& bias = inputs[at(call, "dt_bias")];
  const int64_t heads = g.shape[g.shape.size() - 2], width = g.shape.back(), channels = heads * width;
  const bool softplus = call.attribute("gate") == 1, of_rate = name == "d_a_log";
  Scale squares(static_cast<std::size_t>(truth.count()));
  for (int64_t i = 0; i < terms.count(); ++i) {
    const int64_t channel = i % channels;
    const double x = g[i] + (call.argument("dt_bias").present ? bias[channel] : 0);
    // By e^a_log: softplus' own value over its slope, and by the chain rule for the bounded gate.
    const double slope = !of_rate ? 1 : softplus ? std::log1p(std::exp(x)) * (1 + std::exp(-x)) : x;
    squares[static_cast<std::size_t>(of_rate ? channel / width : channel)] += std::pow(terms[i] * slope, 2);
  }
  for (std::size_t i = 0; i < squares.size(); ++i)
    squares[i] = std::max({0.01, std::sqrt(squares[i]), std::fabs(truth[static_cast<int64_t>(i)])});
  return squares;
}

// ---- rope

double largest(const Inputs& inputs) {
  double most = 0;
  for (const Array& input : inputs)
    for (int64_t i = 0; is_floating(input) && i < input.count(); ++i)
      most = std::max(most, std::fabs(input[i]));
  return most;
}

double furthest_position(const Call& call, const Inputs& inputs) {
  double most = 0;
  for (const Array& input : inputs)
    for (int64_t i = 0; !input.bytes.empty() && !is_floating(input) && i < input.count(); ++i)
      most = std::max(most, std::fabs(input[i]));
  for (const rlk_slot& a : call.attributes)
    if (std::abs(a.i) < int64_t{1} << 32) most = std::max(most, std::fabs(static_cast<double>(a.i)));
  return most;
}

constexpr double kShortConvTerm = 0.3;

bool is_sum_over_rows(std::string_view op, std::string_view result) {
  return op == "short_conv_bwd" && (result == "d_weight" || result == "d_bias");
}

// By what errors are measured. Sums may cancel: the errors of products are relative to the sums of magnitudes, a rotation's to
// the larger of what goes in and what comes out, KDA's to no less than a hundredth of a value, and short_conv's rows, which may be
// narrow, to what their terms mostly are, since a slope of silu is zero between -1 and -2.
Scale scale_of(const Call& call, const Inputs& inputs, std::size_t result, const Array& truth) {
  const std::string_view op = call.schema().name, name = call.schema().arguments[result].name;
  if (op == "linear_logp_bwd") return of_composed(call, inputs, result);
  if (op.starts_with("lm_head") || op.starts_with("linear") || op.starts_with("tp_sum") ||
      op == "embedding_bwd")
    return of_products(call, inputs, result);
  if (op == "attention_bwd" && name != "d_sinks") return of_pairs(call, inputs, result);
  if (op == "swiglu_bwd" && name == "d_gate") return of_slope(call, inputs, truth);
  if (is_sum_over_rows(op, name)) return of_rows(call, inputs, result);
  if (op == "ratio_kl_bwd") return of_terms(call, inputs, result);
  if (op == "kda_bwd" && (name == "d_a_log" || name == "d_dt_bias"))
    return of_parameter(call, inputs, name, truth);
  double floor = op.starts_with("kda_") && !op.starts_with("kda_gate") ? 0.01 : 0;
  if (op.starts_with("short_conv")) floor = kShortConvTerm;
  if (op.starts_with("rope") && op != "rope_tables") floor = largest(inputs);
  Scale scale = magnitudes(truth);
  for (double& x : scale) x = std::max(floor, x);
  return scale;
}

// The op's bound, and what it leaves out: a bias or residual is added to the rounded product, so its sum is rounded once more;
// an angle is off by the rounding of its frequency, which grows with the position.
Bound bound_of(const Call& call, const Inputs& inputs, std::size_t result, DType dtype,
               std::string_view arithmetic) {
  const std::string_view op = call.schema().name, name = call.schema().arguments[result].name;
  Bound bound = call.op->bound({name, call.arguments[0].dtype, dtype, arithmetic, call.reduction});
  if (op == "lm_head" && call.argument("bias").present) bound.value *= 4;
  if (op == "linear" || op == "tp_sum")
    for (const char* added : {"bias", "residual"})
      if (call.argument(added).present)
        bound.value += dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
  // swiglu of rounded products: its slopes are below 1.1, and silu of a sum of magnitudes is above half of it.
  if (op == "linear" && call.attribute("activation"))
    bound.value = 5 * (bound.value + (dtype == DType::bf16  ? 0x1p-8
                                      : dtype == DType::f16 ? 0x1p-11
                                                            : 0x1p-24));
  if (op == "rope_tables") bound.value = std::max(bound.value, 0x1p-50 * furthest_position(call, inputs));
  // Of the sums of magnitudes: P and dS are rounded to v's dtype, the result to its own, the rest is fp32's.
  if (op == "attention_bwd" && name != "d_sinks") {
    const DType type = call.arguments[0].dtype;
    const double half_ulp = type == DType::bf16 ? 0x1p-8 : type == DType::f16 ? 0x1p-11 : 0;
    bound.value = 2e-5 + half_ulp * (dtype == type ? 2 : 1);
  }
  // A chain of 128 fmas is off by sqrt(128) roundings of its terms' magnitudes or less, where the roundings are independent;
  // a term is off by what its slope is.
  if (is_sum_over_rows(op, name)) {
    bound.absolute += bound.value * kShortConvTerm;
    bound.value = 16 * kHalfUlp;
  }
  if (op == "kda_bwd" && call.attribute("qk_l2norm") && (name == "d_q" || name == "d_k"))
    bound.absolute = rounding_of_projection(call, inputs, name == "d_q" ? "q" : "k", name.data());
  return bound;
}

}  // namespace

bool is_floating(const Array& a) {
  return !a.bytes.empty() &&
         (a.dtype == DType::f16 || a.dtype == DType::bf16 || a.dtype == DType::f32 || a.dtype == DType::f64);
}

Truth reference(const Call& call, const std::vector<Array>& inputs) {
  Operands o(call, inputs);
  const int32_t code = call.op->reference(o.slots.data(), &rlk::host());
  return {code, std::move(o.arrays)};
}

Allowance allowance(const Call& call, const std::vector<Array>& inputs, std::size_t result,
                    const Array& truth, DType dtype, std::string_view arithmetic) {
  return {bound_of(call, inputs, result, dtype, arithmetic), scale_of(call, inputs, result, truth)};
}

}  // namespace differential
