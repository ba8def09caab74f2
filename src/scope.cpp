// Thread-local policy: precision and backend scopes.
#include "src/scope.hpp"

#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "rlk/options.hpp"
#include "src/registry.hpp"

namespace rlk {

constinit thread_local ScopeState scope_state [[gnu::tls_model("initial-exec")]];

PrecisionScope::PrecisionScope(Precision precision) noexcept : before_(scope_state.precision) {
  // Raised, never lowered: code under a golden scope cannot opt out of it.
  if (precision > before_) scope_state.precision = precision;
}
PrecisionScope::~PrecisionScope() { scope_state.precision = before_; }
Precision PrecisionScope::current() noexcept { return scope_state.precision; }

const Override* parsed_override(std::string_view spec, std::string_view source) {
  // Specs are few and repeat; parsed ones are kept per snapshot, since known names change with it.
  static std::mutex mutex;
  static auto& cache = *new std::unordered_map<std::string, Override>;
  const Snapshot& s = snapshot();
  std::string key =
      std::string(source) + '\n' + std::to_string(reinterpret_cast<uintptr_t>(&s)) + '\n' + std::string(spec);
  std::lock_guard lock(mutex);
  const auto found = cache.find(key);
  if (found != cache.end()) return &found->second;
  // Kept only once it is whole: what memory ran out under must be read again.
  Override parsed = Override::parse(spec, source, s.names());
  return &cache.emplace(std::move(key), std::move(parsed)).first->second;
}

BackendScope::BackendScope(std::string_view spec) : before_(scope_state.backends) {
  // Interned and kept as text: it is parsed again when the registry has changed under a long-lived scope.
  static std::mutex mutex;
  static auto& nodes = *new std::map<std::pair<const ScopeNode*, std::string>, ScopeNode>;
  std::lock_guard lock(mutex);
  auto [it, fresh] = nodes.try_emplace({scope_state.backends, std::string(spec)},
                                       ScopeNode{scope_state.backends, std::string(spec)});
  scope_state.backends = &it->second;
}
BackendScope::~BackendScope() { scope_state.backends = static_cast<const ScopeNode*>(before_); }

}  // namespace rlk
