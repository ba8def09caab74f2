// linear on any GPU by the portable chains: the bits of the native backend. Also lm_head's gradients by the same rule.
#include "arithmetic/linear/lm_head_gradients.hpp"
#include "simt/linear/bind.hpp"
#include "simt/linear/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::linear {
namespace {

rlk_code start(const Product& p, const char* op, const Call& call) {
  return finished(call, op, run(p, call.stream(), call.device().id));
}

rlk_code forward(const Linear& a, const Call& call) { return start(forward_product(a), "linear", call); }
rlk_code backward(const LinearBwd& a, const Call& call) {
  static constexpr const char* op = "linear_bwd";
  rlk_code code = leaves::check_segments(a, call);
  if (code == RLK_OK && a.d_x) code = start(d_x_product(a), op, call);
  if (code == RLK_OK && a.d_weight) code = start(d_weight_product(a), op, call);
  if (code == RLK_OK && a.d_bias) code = start(d_bias_product(a), op, call);
  if (code == RLK_OK && a.d_residual) code = start(d_residual_product(a), op, call);
  return code;
}

rlk_code head_backward(const LmHeadBwd& a, const Call& call) { return backward(leaves::as_linear(a), call); }

constexpr Facts kFacts = portable_facts("fp32 FMA chains over eight leaves, joined as a tree", "fma32/tree8");
// Behind lm_head's own: nobody gets other bits unasked.
constexpr Facts kHead = [] {
  Facts f = kFacts;
  f.priority = 0;
  return f;
}();

constexpr rlk_implementation kImplementations[] = {implement<Linear, forward>(kFacts),
                                                   implement<LinearBwd, backward>(kFacts),
                                                   implement<LmHeadBwd, head_backward>(kHead)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::linear
