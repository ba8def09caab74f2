#include "words.hpp"

#include <algorithm>

namespace rlk::cli {
namespace {

// Insertions, deletions, replacements and swaps of neighbours.
std::size_t edits(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i)
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

}  // namespace

std::string meant(const std::string& word, const std::vector<std::string>& known) {
  constexpr std::size_t kLongest = 64;
  const std::string* best = nullptr;
  std::size_t least = 0;
  for (const std::string& name : known) {
    if (word.size() > kLongest) break;
    const std::size_t n = edits(word, name);
    // One slip in three letters is a typo; more is another word.
    if (n * 3 > std::max(word.size(), name.size()) + 1 || (best && n >= least)) continue;
    best = &name, least = n;
  }
  return best ? ", did you mean '" + *best + "'?" : "";
}

std::string unknown_word(const std::string& kind, const std::string& word,
                         const std::vector<std::string>& known) {
  const std::string near = meant(word, known);
  std::string text = "unknown " + kind + " '" + word + "'" + (near.empty() ? "." : near) + "  Known: ";
  for (const std::string& name : known) text += (&name == known.data() ? "" : ", ") + name;
  return text;
}

}  // namespace rlk::cli
