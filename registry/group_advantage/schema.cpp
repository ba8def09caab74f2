// group_advantage: rewards of the answers to one prompt, centred and scaled within their group.
#include "registry/loss.hpp"

namespace rlk::registry {
namespace {

constexpr auto kAttributes =
    attributes(choice("center", "what is subtracted: the group's mean, the mean of the others, nothing",
                      "mean|leave_one_out|none"),
               choice("scale", "what is divided by: the deviation of the group, by n or by n - 1, or nothing",
                      "population_std|sample_std|none"),
               real("eps", "keeps the divisor from 0", 1e-6),
               choice("eps_use", "eps is added to the deviation, or is the least divisor", "add|clamp_min"),
               choice("singleton", "a group of one: advantage 0, or its reward as it is", "zero|raw"));

constexpr auto kArguments =
    arguments(read("rewards", "[B]").of(RLK_F32).rank(1).no_gradient(),
              read("group_offsets", "[groups + 1]: group g is rewards [offset g, offset g + 1)")
                  .of(kIntegers)
                  .rank(1)
                  .no_gradient(),
              write("advantages", "[B]").of(kLogs).rank(1));
enum {
  kRewards = index_of(kArguments, "rewards"),
  kOffsets = index_of(kArguments, "group_offsets"),
  kAdvantages = index_of(kArguments, "advantages")
};

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "group_advantage";
  const rlk_slot* attributes = s + kArguments.size();
  if (dim(s[kOffsets].tensor, 0) < 1)
    return fail(host, "{}: group_offsets has size 0, it holds groups + 1 offsets", op);
  if (int32_t code = check_options(host, op, {{"eps", attributes[index_of(kAttributes, "eps")].f, 0, 1e30}}))
    return code;
  shapes[kAdvantages] = like(s[kRewards].tensor, RLK_F32, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema group_advantage_schema =
    Schema("group_advantage", "rewards relative to their group's", kArguments, kAttributes, infer);

}  // namespace rlk::registry
