// Trials in processes of their own: what is tested there may crash, hang or exit, and is blamed for it; what
// was found before is kept, and the next process goes on behind it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "src/harness/record.hpp"
#include "src/harness/target.hpp"

namespace rlk::harness {

// The trials of targets of one op and dtype, `seconds` each, one after another in one process, which computes what they
// are judged by once. How many were tried: the command has no implementation of the next one, or does not end in
// child_main().
std::size_t try_in_children(const Plan& plan, std::span<Target* const> targets, double seconds,
                            std::span<Record> records);

// Words that tell a child the plan: "seed=1" and so on, and the plugins that this process has loaded.
std::vector<std::string> words_for(const Plan& plan);

}  // namespace rlk::harness
