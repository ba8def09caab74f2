#include <utility>

#include "src/harness/promises/promises.hpp"

namespace rlk::harness {

void judge_returns(Trial& t) { t.record().tried(Promise::returns); }

Failure did_not_return(const Entry& target, const Plan& plan, const Step& at, std::string how) {
  Failure f = failure_of(target, plan, Promise::returns, std::move(how));
  f.case_name = at.case_name;
  f.shape = at.shape;
  f.transform = at.transform;
  return f;
}

}  // namespace rlk::harness
