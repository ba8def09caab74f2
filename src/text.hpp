// Small words about words: quoting what a user wrote, listing what exists, and "did you mean".
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace rlk {

// 'word' as printable.hpp shows it, and a long one cut: a message must not carry a caller's bytes to a
// terminal.
std::string quoted(std::string_view word);
// The same for a path, of which more is kept: the beginning, and the end with the file's name.
std::string quoted_path(std::string_view path);

// The words between separators: for (std::string_view word : split("a,b", ',')). Nothing for an empty list,
// and nothing behind a separator at its end.
class Split {
 public:
  class Iterator {
   public:
    Iterator(std::string_view rest, char separator) noexcept : rest_(rest), separator_(separator) {}
    std::string_view operator*() const noexcept { return rest_.substr(0, rest_.find(separator_)); }
    Iterator& operator++() noexcept {
      const std::size_t end = rest_.find(separator_);
      rest_ = end == rest_.npos ? std::string_view() : rest_.substr(end + 1);
      return *this;
    }
    // Only the end is ever compared with.
    bool operator!=(const Iterator&) const noexcept { return !rest_.empty(); }

   private:
    std::string_view rest_;
    char separator_;
  };
  Split(std::string_view list, char separator) noexcept : list_(list), separator_(separator) {}
  Iterator begin() const noexcept { return {list_, separator_}; }
  Iterator end() const noexcept { return {{}, separator_}; }

 private:
  std::string_view list_;
  char separator_;
};
inline Split split(std::string_view list, char separator) noexcept { return {list, separator}; }

// "a, b, c": sorted, each name once.
std::string listed(std::vector<std::string_view> names);

// The nearest of the names by edit distance (a swap counts once); empty when none is near.
std::string_view nearest_name(std::string_view word, const std::vector<std::string_view>& names);

// "unknown op 'lm_hed', did you mean 'lm_head'?" for any kind of name, and the known ones where they are few.
std::string unknown_name(std::string_view kind, std::string_view word,
                         const std::vector<std::string_view>& names);

// "  Known levels: a, b", or where to find them if there are too many for a message.
std::string known_names(std::string_view kind, const std::vector<std::string_view>& names);

// Whether a name matches a glob of '*' and '?'.
bool glob_match(std::string_view glob, std::string_view name) noexcept;

std::string_view trimmed(std::string_view text) noexcept;

}  // namespace rlk
