// What a user's word may have been meant to be.
#pragma once

#include <string>
#include <vector>

namespace rlk::cli {

// ", did you mean 'golden'?", of the nearest of the known words; empty when none is near.
std::string meant(const std::string& word, const std::vector<std::string>& known);

// "unknown policy 'goldn', did you mean 'golden'?  Known: standard, strict, golden"
std::string unknown_word(const std::string& kind, const std::string& word,
                         const std::vector<std::string>& known);

}  // namespace rlk::cli
