// <chain>/lse128/l8: lm_head's rule of that chain, then logp's. Backward <chain>/lse128/l8/tree8: logp_bwd's rule on those logits,
// then linear_bwd's. sm90/t25k16/ex2/lse2048/l8 and its backward: likewise, of sm90/t25k16 and sm90/ex2/lse2048/l8.
#include "registry/rule.hpp"

#include <string>

#include "registry/linear_logp/composed.hpp"

namespace rlk::registry {

bool lm_head_rule(const RuleQuery& q);
bool linear_bwd_rule(const RuleQuery& q);
bool logp_rule(const RuleQuery& q);
bool logp_bwd_rule(const RuleQuery& q);

namespace {

constexpr std::string_view kTree = "/tree8";

// What stands before `end`, which is the end of an id; empty: it is another id's.
std::string_view before(std::string_view arithmetic, std::string_view end) {
  if (!arithmetic.ends_with(end)) return {};
  return arithmetic.substr(0, arithmetic.size() - end.size());
}
// lm_head's id and logp's of "<chain>/<rows>"; empty: it is none of those.
struct Parts {
  std::string_view chain, rows;
};
Parts parts_of(std::string_view arithmetic) {
  if (const std::string_view chain = before(arithmetic, "/ex2/lse2048/l8"); chain == "sm90/t25k16")
    return {chain, "sm90/ex2/lse2048/l8"};  // Hopper's name stands once
  return {before(arithmetic, "/lse128/l8"), "lse128/l8"};
}
// linear_bwd's id of it, whose leaves have no blocks inside.
std::string tree_of(std::string_view chain) {
  return std::string(chain.substr(0, chain.find("/kb"))).append(kTree);
}

template <class Args>
bool write(bool (*rule)(const RuleQuery&), const Args& a, std::string_view arithmetic) {
  return rule({reinterpret_cast<const rlk_slot*>(&a), arithmetic, {}});
}

// Rows of a gradient that belong to no entry: +0, added to what they were before.
void clear_from(const Out& t, const In& before, int64_t row) {
  for (int64_t i = !t ? 0 : row * (t.rank() == 2 ? t.dim(1) : 1); t && i < t.numel(); ++i)
    finish(*t.get(), i, before ? add(DType::f32, 0, load(DType::f32, before.data<char>(), i)) : 0.0);
}

}  // namespace

bool linear_logp_rule(const RuleQuery& q) {
  const auto [chain, rows] = parts_of(q.arithmetic);
  if (chain.empty()) return false;
  const auto& a = *reinterpret_cast<const LinearLogp*>(q.slots);
  const Composed call(a, DType::f32);
  return write(lm_head_rule, call.head(), chain) && write(logp_rule, call.rows(), rows);
}

bool linear_logp_bwd_rule(const RuleQuery& q) {
  const auto [chain, rows] = parts_of(before(q.arithmetic, kTree));
  if (chain.empty()) return false;
  const auto& a = *reinterpret_cast<const LinearLogpBwd*>(q.slots);
  // A matrix unit takes two operands of one 16-bit dtype.
  const Composed call(a, DType::f32, !chain.starts_with("fma32/"));
  clear_from(a.d_weight, a.d_weight_before, call.here());
  clear_from(a.d_bias, a.d_bias_before, call.here());
  return write(lm_head_rule, call.head(), chain) && write(logp_bwd_rule, call.rows_bwd(), rows) &&
         write(linear_bwd_rule, call.product_bwd(), tree_of(chain));
}

}  // namespace rlk::registry
