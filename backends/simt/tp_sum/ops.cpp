// tp_sum on any GPU by the portable kernel: the bits of the native backend.
#include "arithmetic/tp_sum/bind.hpp"
#include "simt/linear/bind.hpp"
#include "simt/linear/launchers.hpp"
#include "simt/portable.hpp"
#include "simt/tp_sum/launchers.hpp"

namespace rlk::simt::tp_sum {
namespace {

rlk_code sum(const TpSum& a, const Call& call) {
  return finished(call, "tp_sum", run(rlk::tree8::problem_of(a), call.stream(), call.device().id));
}

// Column sums of d_y as linear has them.
linear::Product d_bias_product(const TpSumBwd& a) {
  linear::Product p;
  p.rows = 1, p.cols = a.d_y.dim(1), p.depth = a.d_y.dim(0), p.block = linear::kTokens;
  p.b = lm_head::operand(a.d_y, lm_head::every(1), lm_head::lines_of(a.d_y));
  lm_head::write_to(p, a.d_bias);
  return p;
}

rlk_code spread(const TpSumBwd& a, const Call& call) {
  static constexpr const char* op = "tp_sum_bwd";
  rlk_code code = finished(call, op, run(rlk::tree8::spread_of(a), call.stream(), call.device().id));
  if (code == RLK_OK && a.d_bias)
    code = finished(call, op, linear::run(d_bias_product(a), call.stream(), call.device().id));
  return code;
}

constexpr Facts kFacts = portable_facts("the top of the tree, in fp32", "tree8", RLK_F32);
constexpr Facts kSpread = portable_facts("copies, and fp32 chains over tokens", "tree8");

constexpr rlk_implementation kImplementations[] = {implement<TpSum, sum>(kFacts),
                                                   implement<TpSumBwd, spread>(kSpread)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::tp_sum
