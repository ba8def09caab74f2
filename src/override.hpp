// RLK_BACKEND and everything else that speaks its grammar: parsing into rules, and finding the rule for an
// op.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rlk/status.hpp"
#include "src/text.hpp"

namespace rlk {

// The names a spec may mention, for checks and suggestions.
struct KnownNames {
  std::vector<std::string_view> ops;                                   // with aliases
  std::vector<std::pair<std::string_view, std::string_view>> aliases;  // alias, the op it stands for
  std::vector<std::string_view> backends;                              // every known backend, loaded or not
  std::vector<std::string_view> implementations;                       // of the loaded backends
};

// Whether a word names an implementation: its id, or the family of its id: "native.golden" stands for
// native.golden.avx2 and its brothers on other instruction sets.
bool names_implementation(std::string_view word, std::string_view id) noexcept;

struct ChainItem {
  enum Kind { backend, implementation, exclude, automatic } kind;
  std::string name;  // backend or implementation id; empty for automatic
};

struct OverrideRule {
  std::string selector;  // op name or glob; "*" when the rule had no "="
  std::string device;    // "cuda", "cpu", "hip"; empty: any
  std::vector<ChainItem> chain;
  std::string text;  // the rule as written
  std::size_t column = 1;
};

class Override {
 public:
  // A wrong spec is kept with its error, which every resolution under it returns. source names it in
  // messages: "RLK_BACKEND", "scope", "call argument". std::bad_alloc is thrown: a spec that could not be read
  // for want of memory is not a wrong one, and the next call reads it again.
  static Override parse(std::string_view spec, std::string_view source, const KnownNames& names);

  const Status& error() const noexcept { return error_; }
  const std::vector<OverrideRule>& rules() const noexcept { return rules_; }
  std::string_view text() const noexcept { return text_; }
  // The most specific rule for an op (not an alias) on a device: exact name, longest glob, "*"; with a device
  // before without. Textual order never decides.
  const OverrideRule* find(std::string_view op, std::string_view device) const noexcept;

 private:
  std::string text_;
  std::vector<OverrideRule> rules_;
  Status error_;
};

}  // namespace rlk
