// tp_sum on any GPU by the portable kernel: the bits of the native backend.
#include "arithmetic/tp_sum/bind.hpp"
#include "simt/portable.hpp"
#include "simt/tp_sum/launchers.hpp"

namespace rlk::simt::tp_sum {
namespace {

rlk_code sum(const TpSum& a, const Call& call) {
  return finished(call, "tp_sum", run(rlk::tree8::problem_of(a), call.stream(), call.device().id));
}

constexpr Facts kFacts{.id = kId,
                       .doc = "the top of the tree, in fp32",
                       .priority = 100,
                       .arithmetic = "tree8",
                       .dtypes = RLK_F32,
                       .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
                       .device_type = kDevice};

constexpr rlk_implementation kImplementations[] = {implement<TpSum, sum>(kFacts)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::tp_sum
