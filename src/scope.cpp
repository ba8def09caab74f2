// Thread-local policy: precision and backend scopes.
#include "src/scope.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>

#include "rlk/options.hpp"
#include "src/failure.hpp"
#include "src/fork_mutex.hpp"
#include "src/gate.hpp"
#include "src/registry.hpp"
#include "src/text.hpp"
#include "src/thread_state.hpp"

namespace rlk {
namespace {

// How many scopes all threads are in; the gate knows whether there are any. Together, or the gate could miss
// one.
ForkMutex scopes_mutex;
int64_t scopes = 0;
void count_scope(int change) noexcept {
  const std::lock_guard lock(scopes_mutex);
  const bool any = scopes != 0;
  scopes += change;
  if ((scopes != 0) != any) set_scoped(scopes != 0);
}

// Made when the library is loaded: what a thread makes for the first time while another one forks is never made in the child.
template <class What>
struct Guarded {
  ForkMutex mutex;
  What what;
};
auto& interned() {
  static auto& nodes = *new Guarded<std::map<std::pair<const ScopeNode*, std::string>, ScopeNode>>;
  return nodes;
}
auto& parsed() {
  static auto& cache = *new Guarded<std::unordered_map<std::string, std::shared_ptr<const Override>>>;
  return cache;
}
[[maybe_unused]] const auto& interned_early = interned();
[[maybe_unused]] const auto& parsed_early = parsed();

const ScopeNode* nested(const ScopeNode* outer, std::string_view spec) {
  // Interned and kept as text: it is parsed again when the registry has changed under a long-lived scope.
  auto& [mutex, nodes] = interned();
  const std::lock_guard lock(mutex);
  return &nodes.try_emplace({outer, std::string(spec)}, ScopeNode{outer, std::string(spec)}).first->second;
}

}  // namespace

Result<Precision> precision_named(std::string_view word) {
  if (word == "standard") return Precision::standard;
  if (word == "strict") return Precision::strict;
  if (word == "golden") return Precision::golden;
  return Status(RLK_INVALID_ARGUMENT,
                fmt::format("options: precision is {}, it is standard, strict or golden", quoted(word)));
}

PrecisionScope::PrecisionScope(Precision precision) noexcept : before_(scope_state.precision) {
  count_scope(1);
  // Raised, never lowered: code under a golden scope cannot opt out of it.
  if (precision > before_) scope_state.precision = precision;
}
PrecisionScope::~PrecisionScope() {
  scope_state.precision = before_;
  count_scope(-1);
}
Precision PrecisionScope::current() noexcept { return scope_state.precision; }

BackendScope::BackendScope(std::string_view spec) : before_(scope_state.backends) {
  scope_state.backends = nested(scope_state.backends, spec);
  count_scope(1);
}
BackendScope::~BackendScope() {
  scope_state.backends = static_cast<const ScopeNode*>(before_);
  count_scope(-1);
}

std::shared_ptr<const Override> parsed_override(std::string_view spec, std::string_view source) {
  // Specs are few and repeat; parsed ones are kept per snapshot, since known names change with it. Who makes
  // up new ones for ever has them parsed again.
  constexpr std::size_t kMost = 256;
  auto& [mutex, cache] = parsed();
  const Snapshot& s = snapshot();
  std::string key = fmt::format("{}\n{}\n{}", source, static_cast<const void*>(&s), spec);
  {
    const std::lock_guard lock(mutex);
    if (const auto it = cache.find(key); it != cache.end()) return it->second;
  }
  auto parsed = std::make_shared<const Override>(Override::parse(spec, source, s.names()));
  const std::lock_guard lock(mutex);
  if (cache.size() >= kMost) cache.clear();
  return cache.try_emplace(std::move(key), std::move(parsed)).first->second;
}

}  // namespace rlk

// ---- the same for C ----

using namespace rlk;

extern "C" rlk_code rlk_scope_enter(const char* precision, const char* backend) try {
  const Result<Precision> wanted = precision_named(precision ? precision : "standard");
  if (!wanted) return set_failure(wanted.status());
  std::vector<ScopeState>& entered = ThreadState::need().entered;
  const ScopeNode* const node = backend ? nested(scope_state.backends, backend) : scope_state.backends;
  entered.push_back(scope_state);
  scope_state = {std::max(*wanted, scope_state.precision), node};
  count_scope(1);
  return RLK_OK;
} catch (const std::bad_alloc&) {
  return static_cast<rlk_code>(set_failure(RLK_OUT_OF_MEMORY, "out of memory"));
}

extern "C" rlk_code rlk_scope_leave() {
  ThreadState* const state = ThreadState::here;
  if (!state || state->entered.empty())
    return static_cast<rlk_code>(
        set_failure(RLK_INVALID_ARGUMENT, "scope: left more often than entered on this thread"));
  scope_state = state->entered.back();
  state->entered.pop_back();
  count_scope(-1);
  return RLK_OK;
}
