// The table itself, made from ops.def.
#include "registry/op.hpp"

namespace rlk::registry {

#define RLK_OP(name)                                                \
  extern const rlk_op_schema name##_schema;                         \
  int32_t name##_reference(const rlk_slot* slots, const rlk_host*); \
  void name##_cases(const CaseSink& sink);                          \
  Bound name##_bound(const BoundQuery& query);
#include "registry/ops.def"
#undef RLK_OP

#define RLK_RULE(name) bool name##_rule(const RuleQuery& query);
#include "registry/rules.def"
#undef RLK_RULE

namespace {

using Rule = bool (*)(const RuleQuery&);
constexpr Rule rule_of(std::string_view op) {
#define RLK_RULE(name) \
  if (op == #name) return name##_rule;
#include "registry/rules.def"
#undef RLK_RULE
  return nullptr;
}

const Op kOps[] = {
#define RLK_OP(name) {&name##_schema, name##_reference, name##_cases, name##_bound, rule_of(#name)},
#include "registry/ops.def"
#undef RLK_OP
};

}  // namespace

std::span<const Op> ops() { return kOps; }

const Op* find(std::string_view name) {
  for (const Op& op : kOps)
    if (name == op.schema->name) return &op;
  return nullptr;
}

}  // namespace rlk::registry
