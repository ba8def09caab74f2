#include "src/text.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "rlk/printable.hpp"

namespace rlk {
namespace {

constexpr std::size_t kLongestQuote = 64;
constexpr std::size_t kLongestPath = 240;

// At most n bytes of a text's beginning or end, in whole characters.
std::string_view front(std::string_view text, std::size_t n) noexcept {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t next = at + first_character(text.substr(at)).bytes;
    if (next > n) break;
    at = next;
  }
  return text.substr(0, at);
}
std::string_view back(std::string_view text, std::size_t n) noexcept {
  while (text.size() > n) text.remove_prefix(first_character(text).bytes);
  return text;
}

// Optimal string alignment: insert, delete, replace and swap of neighbours cost one each.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        now[j] = std::min(now[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, now);
  }
  return last[b.size()];
}

bool few(const std::vector<std::string_view>& names) noexcept { return names.size() <= 24; }

}  // namespace

std::string quoted(std::string_view word) {
  const bool whole = word.size() <= kLongestQuote;
  return fmt::format("'{}{}'", printable(front(word, whole ? word.size() : kLongestQuote)),
                     whole ? "" : "...");
}

std::string quoted_path(std::string_view path) {
  if (path.size() <= kLongestPath) return fmt::format("'{}'", printable(path));
  return fmt::format("'{}...{}'", printable(front(path, kLongestPath / 4)),
                     printable(back(path, kLongestPath - kLongestPath / 4)));
}

std::string listed(std::vector<std::string_view> names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string_view nearest_name(std::string_view word, const std::vector<std::string_view>& names) {
  if (word.size() > kLongestQuote) return {};
  std::string_view best;
  std::size_t best_distance = 0;
  for (const std::string_view name : names) {
    const std::size_t distance = edit_distance(word, name);
    // One slip in three letters is a typo; more is another word.
    if (distance * 3 > std::max(word.size(), name.size()) + 1) continue;
    // Ties go to the first in alphabet, so that the answer does not depend on the order of tables.
    if (best.empty() || distance < best_distance || (distance == best_distance && name < best))
      best = name, best_distance = distance;
  }
  return best;
}

std::string unknown_name(std::string_view kind, std::string_view word,
                         const std::vector<std::string_view>& names) {
  const std::string_view near = nearest_name(word, names);
  const std::string begin = fmt::format("unknown {} {}", kind, quoted(word));
  if (near.empty()) return begin + "." + known_names(kind, names);
  return fmt::format("{}, did you mean '{}'?{}", begin, near, few(names) ? known_names(kind, names) : "");
}

std::string known_names(std::string_view kind, const std::vector<std::string_view>& names) {
  if (few(names)) return fmt::format("  Known {}s: {}", kind, listed(names));
  return fmt::format("  rlk-dispatch --list shows the {}s there are", kind);
}

bool glob_match(std::string_view glob, std::string_view name) noexcept {
  std::size_t g = 0, n = 0, star = std::string_view::npos, retry = 0;
  while (n < name.size()) {
    // '*' first: in a glob it is always the wildcard, whatever the name holds there.
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      retry = n;
    } else if (g < glob.size() && (glob[g] == name[n] || glob[g] == '?')) {
      ++g, ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++retry;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

std::string_view trimmed(std::string_view text) noexcept {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

}  // namespace rlk
