// The scopes that a thread is in.
#pragma once

#include <string>

#include "rlk/options.hpp"

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

}  // namespace rlk
