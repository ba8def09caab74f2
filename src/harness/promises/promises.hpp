// The promises, a file each: what judges it, and what it takes to try it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/harness/elsewhere.hpp"
#include "src/harness/trial.hpp"

namespace rlk::harness {

// accuracy.cpp: how far a call's results are from the truth.
void judge_accuracy(Trial& t, const Problem& p, const Outcome& out);

// equal_bits.cpp: whether they are what the declared arithmetic id means. True: they are, by its written rule.
bool judge_equal_bits(Trial& t, const Problem& p, const Outcome& out);
// What has no rule in the library is compared with the others that declare the same.
void compare_declared(std::vector<Target>& targets, std::vector<Failure>& failures, const Plan& plan);

// purity.cpp: whether only results were written, and nothing beside them.
void judge_purity(Trial& t, const Problem& p, const std::string& transform, const Outcome& out);

// batch_invariance.cpp: the first element of a result that differs, of rows that the variant and the call share.
std::optional<Difference> first_change_of_a_row(const Variant& v, std::size_t result, const Outcome& base,
                                                const Outcome& out);
// The order of additions, for every number of rows.
void judge_order(Trial& t, const Problem& p, const std::vector<std::string>& arguments);

// repeats.cpp: the call once more, after others.
void judge_again(Trial& t, const Problem& p, const std::string& transform);
std::vector<Elsewhere> other_processes();

// strict.cpp: processes whose variables change what libraries compute. The caller's floating-point mode is a transform.
std::vector<Elsewhere> hostile_processes(const Plan& plan);
// The variables one by one: for what refuses strict calls under some of them, which is its right.
std::vector<Elsewhere> each_hostile();
bool refused_all_hostile(const Target& t);
// All hostile variables also means those that this backend's file names.
Elsewhere with_own_variables(Elsewhere where, const Backend& backend);

// predicate.cpp: whether what supports() accepts runs. False: nothing to compare.
bool judge_predicate(Trial& t, const Problem& p, const std::string& transform, const Outcome& out);
// What it refused, tried all the same.
void try_refused(Trial& t, const Problem& p, const std::string& reason);

// returns.cpp: a call came back, or its process did not.
void judge_returns(Trial& t);
Failure did_not_return(const Entry& target, const Plan& plan, const Step& at, std::string how);

}  // namespace rlk::harness
