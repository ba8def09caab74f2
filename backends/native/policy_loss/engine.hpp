// policy_loss on the CPU (arithmetic loss32/f64), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/policy_loss/policy.hpp"
#include "native/levels.hpp"

namespace rlk::native::policy_loss {

using loss32::PolicyProblem;

// A task is a sequence. `totals` leaves the sequence's totals, its tokens' slopes and activity where factors go, and the
// count of active tokens without a log-probability.
struct Engine {
  void (*totals)(const PolicyProblem& p, std::int64_t sequence, float* bad);
  void (*factors)(const PolicyProblem& p, std::int64_t sequence, double denominator);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::policy_loss
