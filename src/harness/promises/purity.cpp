#include "src/harness/promises/promises.hpp"

namespace rlk::harness {

// execute() has watched the memory.
void judge_purity(Trial& t, const Problem& p, const std::string& transform, const Outcome& out) {
  t.record().tried(Promise::purity);
  if (!out.broken.empty()) t.fail(Promise::purity, p, transform, {}, nullptr, out.broken);
}

}  // namespace rlk::harness
