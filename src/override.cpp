#include "src/override.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <tuple>

namespace rlk {
namespace {

constexpr std::size_t kLongestSpec = 4096;

// A device as a user writes it. Selectors name devices, not backends: hip is where AMD GPUs are.
constexpr std::string_view kDevices[] = {"cpu", "cuda", "hip"};

bool is_glob(std::string_view selector) noexcept {
  return selector.find_first_of("*?") != std::string_view::npos;
}

std::size_t literal_letters(std::string_view selector) noexcept {
  return static_cast<std::size_t>(
      std::count_if(selector.begin(), selector.end(), [](char c) { return c != '*' && c != '?'; }));
}

// Orders selectors by how much they say; equal only for equally specific ones.
std::tuple<int, std::size_t, bool> specificity(const OverrideRule& rule) noexcept {
  const int kind = rule.selector == "*" ? 0 : is_glob(rule.selector) ? 1 : 2;
  return {kind, literal_letters(rule.selector), !rule.device.empty()};
}

bool contains(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// One pass over a spec. Every view points into the spec, which is how a column is found.
class Parser {
 public:
  Parser(std::string_view spec, const KnownNames& names) : spec_(spec), names_(names) {
    for (const std::string_view op : names.ops)
      if (std::none_of(names.aliases.begin(), names.aliases.end(),
                       [&](const auto& a) { return a.first == op; }))
        ops_.push_back(op);
  }

  std::vector<OverrideRule> parse() {
    if (spec_.size() > kLongestSpec) {
      fail(kLongestSpec,
           fmt::format("the text has {} bytes, at most {} are read", spec_.size(), kLongestSpec));
      return {};
    }
    if (trimmed(spec_).empty()) return {};
    for (std::size_t begin = 0; !error_;) {
      const std::size_t end = std::min(spec_.find_first_of(",;", begin), spec_.size());
      rule(spec_.substr(begin, end - begin));
      if (end == spec_.size()) break;
      begin = end + 1;
    }
    if (!error_) refuse_ambiguous_globs();
    return std::move(rules_);
  }

  // Column and text of the first mistake.
  const std::optional<std::pair<std::size_t, std::string>>& error() const { return error_; }

 private:
  std::size_t offset(std::string_view part) const {
    return static_cast<std::size_t>(part.data() - spec_.data());
  }

  void fail(std::size_t at, std::string text) {
    if (!error_) error_ = {at + 1, std::move(text)};
  }

  void rule(std::string_view raw) {
    const std::string_view text = trimmed(raw);
    if (text.empty()) return fail(offset(text), "an empty rule; rules are separated by one ',' or ';'");
    OverrideRule parsed;
    parsed.text = text;
    parsed.column = offset(text) + 1;

    const std::size_t equals = text.find('=');
    std::string_view chain = text;
    if (equals == std::string_view::npos) {
      parsed.selector = "*";
    } else {
      chain = text.substr(equals + 1);
      if (const auto second = chain.find('='); second != std::string_view::npos)
        return fail(offset(chain) + second, "a second '=' in one rule; rules are separated by ',' or ';'");
      selector(trimmed(text.substr(0, equals)), parsed);
    }
    if (!error_) items(chain, parsed);
    if (!error_) refuse_duplicate(parsed, equals == std::string_view::npos);
    if (!error_) rules_.push_back(std::move(parsed));
  }

  void selector(std::string_view text, OverrideRule& parsed) {
    std::string_view name = text;
    if (const auto at = text.find('@'); at != std::string_view::npos) {
      name = trimmed(text.substr(0, at));
      const std::string_view device = trimmed(text.substr(at + 1));
      if (std::find(std::begin(kDevices), std::end(kDevices), device) == std::end(kDevices))
        return fail(offset(device),
                    device.empty()
                        ? "'@' without a device; devices: cpu, cuda, hip"
                        : unknown_name("device", device, {std::begin(kDevices), std::end(kDevices)}));
      parsed.device = device;
    }
    if (name.empty()) return fail(offset(text), "'=' without an op before it; write '*=' for every op");
    parsed.selector = name;
    if (name == "*") return;
    if (is_glob(name)) {
      if (std::none_of(ops_.begin(), ops_.end(), [&](std::string_view op) { return glob_match(name, op); }))
        fail(offset(name), fmt::format("{} matches no op.{}", quoted(name), known_names("op", ops_)));
      return;
    }
    for (const auto& [alias, op] : names_.aliases)
      if (alias == name) parsed.selector = op;
    if (!contains(names_.ops, name)) fail(offset(name), unknown_name("op", name, names_.ops));
  }

  void items(std::string_view chain, OverrideRule& parsed) {
    for (std::size_t begin = 0; !error_;) {
      const std::size_t end = std::min(chain.find(':', begin), chain.size());
      item(trimmed(chain.substr(begin, end - begin)), parsed);
      if (end == chain.size()) break;
      begin = end + 1;
    }
  }

  void item(std::string_view text, OverrideRule& parsed) {
    if (text.empty())
      return fail(offset(text),
                  fmt::format("a backend, an implementation or 'auto' is missing here.  Known backends: {}",
                              listed(names_.backends)));
    if (text == "auto") return parsed.chain.push_back({ChainItem::automatic, ""});
    if (text.front() == '!') return excluded(trimmed(text.substr(1)), text, parsed);
    if (contains(names_.backends, text))
      return parsed.chain.push_back({ChainItem::backend, std::string(text)});
    const std::size_t dot = text.find('.');
    if (dot == std::string_view::npos)
      return fail(offset(text), unknown_name("backend", text, names_.backends));
    known_implementation(text, text.substr(0, dot));
    parsed.chain.push_back({ChainItem::implementation, std::string(text)});
  }

  void excluded(std::string_view name, std::string_view whole, OverrideRule& parsed) {
    if (name.empty()) return fail(offset(whole), "'!' without a backend after it");
    if (const auto dot = name.find('.');
        dot != std::string_view::npos && contains(names_.backends, name.substr(0, dot)))
      return fail(
          offset(name),
          fmt::format("'!' takes a backend and {} is an implementation; write '!{}' to leave out all of it",
                      quoted(name), name.substr(0, dot)));
    if (!contains(names_.backends, name))
      return fail(offset(name), unknown_name("backend", name, names_.backends));
    parsed.chain.push_back({ChainItem::exclude, std::string(name)});
  }

  // The implementations of a backend that is not loaded cannot be checked here: resolution says that it is
  // not loaded, which is the better message anyway.
  void known_implementation(std::string_view id, std::string_view backend) {
    if (std::any_of(names_.implementations.begin(), names_.implementations.end(),
                    [&](std::string_view known) { return names_implementation(id, known); }))
      return;
    if (!contains(names_.backends, backend))
      return fail(offset(id), unknown_name("backend", backend, names_.backends));
    std::vector<std::string_view> of_backend;
    for (const std::string_view known : names_.implementations) {
      if (known.substr(0, known.find('.')) != backend) continue;
      of_backend.push_back(known);
      if (const auto last = known.rfind('.'); last > backend.size())
        of_backend.push_back(known.substr(0, last));  // its family
    }
    if (!of_backend.empty()) fail(offset(id), unknown_name("implementation", id, of_backend));
  }

  void refuse_duplicate(const OverrideRule& rule, bool bare) {
    for (const OverrideRule& other : rules_) {
      if (other.selector != rule.selector || other.device != rule.device) continue;
      const std::string where =
          fmt::format("{}{}{}", rule.selector, rule.device.empty() ? "" : "@", rule.device);
      return fail(rule.column - 1,
                  fmt::format("{} for '{}'; the first is {} in column {}",
                              bare ? "a second rule" : "the same selector twice: a second rule", where,
                              quoted(other.text), other.column));
    }
  }

  // Two globs that say equally much about one op would be decided by accident.
  void refuse_ambiguous_globs() {
    for (const OverrideRule& rule : rules_)
      for (const OverrideRule& other : rules_) {
        if (&other == &rule) break;
        if (!is_glob(rule.selector) || specificity(rule) != specificity(other) || rule.device != other.device)
          continue;
        for (const std::string_view op : ops_)
          if (glob_match(rule.selector, op) && glob_match(other.selector, op))
            return fail(
                rule.column - 1,
                fmt::format(
                    "'{}' and '{}' (column {}) are equally specific and both match '{}'; make one longer",
                    rule.selector, other.selector, other.column, op));
      }
  }

  std::string_view spec_;
  const KnownNames& names_;
  std::vector<std::string_view> ops_;  // without aliases: what selectors are matched against
  std::vector<OverrideRule> rules_;
  std::optional<std::pair<std::size_t, std::string>> error_;
};

}  // namespace

bool names_implementation(std::string_view word, std::string_view id) noexcept {
  return id.substr(0, word.size()) == word && (id.size() == word.size() || id[word.size()] == '.');
}

Override Override::parse(std::string_view spec, std::string_view source, const KnownNames& names) {
  Override parsed;
  parsed.text_ = spec.substr(0, kLongestSpec);
  Parser parser(spec, names);
  parsed.rules_ = parser.parse();
  if (const auto& error = parser.error()) {
    parsed.rules_.clear();
    parsed.error_ =
        Status(RLK_CONFIGURATION, fmt::format("{}, column {}: {}", source, error->first, error->second));
  }
  return parsed;
}

const OverrideRule* Override::find(std::string_view op, std::string_view device) const noexcept {
  const OverrideRule* best = nullptr;
  for (const OverrideRule& rule : rules_) {
    if (!rule.device.empty() && rule.device != device) continue;
    if (!glob_match(rule.selector, op)) continue;
    // The text only orders globs that tie on an op registered after the spec was checked.
    if (!best || specificity(*best) < specificity(rule) ||
        (specificity(*best) == specificity(rule) && rule.selector < best->selector))
      best = &rule;
  }
  return best;
}

}  // namespace rlk
