// <chain>/lse128/l8: lm_head's rule of that chain, then logp's; backward logp_bwd's, then lm_head_bwd's.
#include "registry/linear_logp/composed.hpp"
#include "registry/op.hpp"
#include "registry/reference.hpp"

namespace rlk::registry {

bool lm_head_rule(const RuleQuery& q);
bool lm_head_bwd_rule(const RuleQuery& q);
bool logp_rule(const RuleQuery& q);
bool logp_bwd_rule(const RuleQuery& q);

namespace {

constexpr std::string_view kRows = "lse128/l8";

// The chain of "<chain>/lse128/l8"; empty: it is another id.
std::string_view chain_of(std::string_view arithmetic) {
  if (!arithmetic.ends_with(kRows) || arithmetic.size() <= kRows.size()) return {};
  return arithmetic.substr(0, arithmetic.size() - kRows.size() - 1);
}

template <class Args>
bool write(bool (*rule)(const RuleQuery&), const Args& a, std::string_view arithmetic) {
  return rule({reinterpret_cast<const rlk_slot*>(&a), arithmetic, {}});
}

void clear_from(const Out& t, int64_t row) {
  for (int64_t i = row * (t.rank() == 2 ? t.dim(1) : 1); i < t.numel(); ++i)
    store(t.dtype(), t.data<char>(), i, 0);
}

}  // namespace

bool linear_logp_rule(const RuleQuery& q) {
  const std::string_view chain = chain_of(q.arithmetic);
  if (chain.empty()) return false;
  const auto& a = *reinterpret_cast<const LinearLogp*>(q.slots);
  const Composed call(a, DType::f32);
  return write(lm_head_rule, call.head(), chain) && write(logp_rule, call.rows(), kRows);
}

bool linear_logp_bwd_rule(const RuleQuery& q) {
  const std::string_view chain = chain_of(q.arithmetic);
  if (chain.empty()) return false;
  const auto& a = *reinterpret_cast<const LinearLogpBwd*>(q.slots);
  const Composed call(a, DType::f32);
  Tensor d_weight, d_bias;
  if (a.d_weight) d_weight = call.first(a.d_weight, call.here()), clear_from(a.d_weight, call.here());
  if (a.d_bias) d_bias = call.first(a.d_bias, call.here()), clear_from(a.d_bias, call.here());
  return write(lm_head_rule, call.head(), chain) && write(logp_bwd_rule, call.rows_bwd(), kRows) &&
         write(lm_head_bwd_rule,
               call.head_bwd(a.d_weight ? Out(d_weight) : Out(), a.d_bias ? Out(d_bias) : Out()), chain);
}

}  // namespace rlk::registry
