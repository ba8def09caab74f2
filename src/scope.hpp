// What the scopes of this thread say.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "rlk/options.hpp"
#include "rlk/status.hpp"
#include "src/override.hpp"

namespace rlk {

// One BackendScope inside another; interned, so equal pointers mean equal nests.
struct ScopeNode {
  const ScopeNode* outer = nullptr;
  std::string spec;
};

struct ScopeState {
  Precision precision = Precision::standard;
  const ScopeNode* backends = nullptr;  // innermost
};
// Static TLS: read on every call.
extern constinit thread_local ScopeState scope_state [[gnu::tls_model("initial-exec")]];

// Parsed once per (spec, source, snapshot), while it is among those last asked for.
std::shared_ptr<const Override> parsed_override(std::string_view spec, std::string_view source);

// "standard", "strict" or "golden".
Result<Precision> precision_named(std::string_view word);

}  // namespace rlk
