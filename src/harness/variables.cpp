#include "src/harness/variables.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>

namespace rlk::harness {
namespace {

bool starts(char c) { return (c >= 'A' && c <= 'Z') || c == '_'; }
bool continues(char c) { return starts(c) || (c >= '0' && c <= '9'); }

bool spared(const std::string& name) {
  static const std::set<std::string> kNames{"PATH", "HOME", "TMPDIR", "USER", "SHELL", "TERM"};
  return kNames.count(name) || name.starts_with("LD_") || name.starts_with("RLK_") ||
         name.starts_with("GLIBC_") || name.starts_with("_");
}

}  // namespace

std::vector<std::string> variables_in(const std::string& file) {
  constexpr std::size_t kShortest = 3, kLongest = 64, kMost = 500;
  std::ifstream in(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::set<std::string> names;
  for (std::size_t at = 0; at < bytes.size() && names.size() < kMost;) {
    const std::size_t end = std::min(bytes.find('\0', at), bytes.size());
    const std::string text = bytes.substr(at, std::min(end - at, kLongest + 1));
    at = end + 1;
    if (text.size() < kShortest || text.size() > kLongest || !starts(text[0])) continue;
    if (std::all_of(text.begin(), text.end(), continues) && !spared(text)) names.insert(text);
  }
  return {names.begin(), names.end()};
}

}  // namespace rlk::harness
