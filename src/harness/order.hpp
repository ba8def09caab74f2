// How an implementation adds, recovered from its outputs alone, in the manner of FPRev: among K ones, a huge
// value at i and its negative at j swallow exactly the ones that meet them before each other, so the sum that
// comes out counts the leaves outside the smallest subtree that holds both. Those counts over many pairs are
// the tree.
#pragma once

#include "rlk/harness.hpp"
#include "src/harness/execute.hpp"

namespace rlk::harness {

// One tree hash per number of rows; nothing when the case is no order probe.
std::optional<Order> probe_order(const Problem& p, const std::vector<std::string>& arguments,
                                 const Subject& subject);

}  // namespace rlk::harness
