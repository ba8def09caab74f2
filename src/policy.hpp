// What a caller wants of a call beside its arguments, with the thread's scopes folded in: one value that
// decides the choice, tells cached calls apart and goes into the fingerprint.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>

#include "rlk/options.hpp"
#include "src/scope.hpp"

namespace rlk {

struct Demands {
  Precision precision = Precision::standard;
  int32_t threads = 0;
  bool needs_backward = false, deterministic = false, evidence = false;
  const ScopeNode* scope = nullptr;
  bool operator==(const Demands&) const = default;
};

// Nearly always empty, which is what comparing them sees first.
struct Texts {
  std::string_view backend{}, arithmetic{}, gradients{};
  bool any() const noexcept { return (backend.size() | arithmetic.size() | gradients.size()) != 0; }
  bool operator==(const Texts& o) const noexcept { return !any() ? !o.any() : same_texts(o); }

 private:
  [[gnu::noinline]] bool same_texts(const Texts& o) const noexcept;
};

struct Policy : Demands, Texts {
  // Takes Options apart by name, as fingerprint() does this struct: an option that is added compiles only once
  // both say what it means.
  static Policy of(const Options& options) noexcept {
    const auto& [stream, backend, arithmetic, precision, needs_backward, deterministic, gradients, workspace,
                 workspace_bytes, allocate, allocate_context, threads, evidence] = options;
    Policy policy{demands(options), {backend, arithmetic, gradients}};
    policy.needs_backward |= !gradients.empty();
    return policy;
  }
  // All of it where the options have no texts.
  static Demands demands(const Options& o) noexcept {
    return {.precision = std::max(o.precision, scope_state.precision),
            .threads = o.threads,
            .needs_backward = o.needs_backward,
            .deterministic = o.deterministic,
            .evidence = o.evidence,
            .scope = scope_state.backends};
  }

  bool operator==(const Policy&) const = default;

  // What an implementation may look at. Far more threads than CPUs are cut to most_threads().
  rlk_request request(const rlk_device& device) const noexcept;
};

// Of what may change bits: not the number of threads, and not how the choice was narrowed.
uint64_t fingerprint(const Policy& policy, uint64_t seed) noexcept;

// A policy whose texts live with it.
class KeptPolicy {
 public:
  KeptPolicy() = default;
  explicit KeptPolicy(const Policy& policy);
  const Policy& operator*() const noexcept { return policy_; }
  const Policy* operator->() const noexcept { return &policy_; }

 private:
  Policy policy_;
  std::unique_ptr<char[]> texts_;  // moves without moving the texts
};

}  // namespace rlk
