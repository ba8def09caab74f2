// Small words about words: quoting what a user wrote, listing what exists, and "did you mean".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace rlk {

// 'word', with control and non-ASCII bytes as \xNN and long words cut: a message must not carry them to a
// terminal.
std::string quoted(std::string_view word);

// "a, b, c": sorted, each name once.
std::string listed(std::vector<std::string_view> names);

// The nearest of the names by edit distance (a swap counts once); empty when none is near.
std::string_view nearest_name(std::string_view word, const std::vector<std::string_view>& names);

// "unknown op 'lm_hed', did you mean 'lm_head'?  Known ops: ..." for any kind of name.
std::string unknown_name(std::string_view kind, std::string_view word,
                         const std::vector<std::string_view>& names);

// Whether a name matches a glob of '*' and '?'.
bool glob_match(std::string_view glob, std::string_view name) noexcept;

std::string_view trimmed(std::string_view text) noexcept;

}  // namespace rlk
