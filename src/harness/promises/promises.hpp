// The promises, a file each. Those of this header judge calls of one target; what it takes other processes to
// see is in isolation.hpp.
#pragma once

#include <string>
#include <vector>

#include "src/harness/trial.hpp"

namespace rlk::harness {

// accuracy.cpp: how far a call's results are from the truth.
void judge_accuracy(Trial& t, const Problem& p, const Outcome& out);

// equal_bits.cpp: whether they are what the declared arithmetic id means. True: they are, by its written rule.
bool judge_equal_bits(Trial& t, const Problem& p, const Outcome& out);
// What has no rule in the library is compared with the others that declare the same.
void compare_declared(std::vector<Target>& targets, std::vector<Failure>& failures, const Plan& plan);

// invariance.cpp: batch invariance, repeats, and immunity to the caller's floating-point mode. False when the target does
// not take the problem.
bool vary(Trial& t, const Problem& p, const Turn& turn);
// The order of additions, for every number of rows.
void judge_order(Trial& t, const Problem& p, const std::vector<std::string>& arguments);

// predicate.cpp: what supports() refused, tried all the same.
void try_refused(Trial& t, const Problem& p, const std::string& reason);

}  // namespace rlk::harness
