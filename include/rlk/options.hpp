// What a caller may say about a call besides its arguments, and the scopes that say it for everything below.
#pragma once

#include <cstdint>
#include <string_view>

#include "rlk/plugin.h"

namespace rlk {

// standard: any implementation. strict: only those immune to ambient switches. golden: only golden
// arithmetic.
enum class Precision : int32_t {
  standard = RLK_PRECISION_STANDARD,
  strict = RLK_PRECISION_STRICT,
  golden = RLK_PRECISION_GOLDEN
};

struct Options {
  void* stream = nullptr;                     // opaque stream handle of the tensors' device
  std::string_view backend{};                 // chain, e.g. "cuda:native"; wins over scopes and RLK_BACKEND
  std::string_view arithmetic{};              // required arithmetic id
  Precision precision = Precision::standard;  // raised, never lowered, by an enclosing PrecisionScope
  bool needs_backward = false;                // fail now if no implementation can give the gradient
  bool deterministic = false;                 // only implementations that promise run-to-run equal bits
  std::string_view gradients{};               // comma-separated arguments whose gradient is wanted
  void* workspace = nullptr;                  // caller's workspace; null: a per-thread arena for CPU ops
  uint64_t workspace_bytes = 0;
  // Asked for workspace where none is given, at most once in a call; see rlk_options. A bound op asks when it
  // resolves, and keeps what it got for as long as it lives.
  void* (*allocate)(void* context, uint64_t bytes) = nullptr;
  void* allocate_context = nullptr;
  int32_t threads = 0;    // CPU threads; 0: all in the affinity mask, no more than a cgroup's CPU quota
  bool evidence = false;  // only implementations that a loaded certificate covers on this build and device
};

// Everything this thread calls while the scope lives is at least this precise. Nestable; restored on any
// exit.
class RLK_API PrecisionScope {
 public:
  explicit PrecisionScope(Precision precision) noexcept;
  ~PrecisionScope();
  PrecisionScope(const PrecisionScope&) = delete;
  PrecisionScope& operator=(const PrecisionScope&) = delete;

  // The precision in force on this thread.
  static Precision current() noexcept;

 private:
  Precision before_;
};

// Overrides in RLK_BACKEND's grammar for this thread, e.g. BackendScope only{"lm_head=native"}. A wrong spec
// is reported by every call made under it.
class RLK_API BackendScope {
 public:
  explicit BackendScope(std::string_view spec);
  ~BackendScope();
  BackendScope(const BackendScope&) = delete;
  BackendScope& operator=(const BackendScope&) = delete;

 private:
  const void* before_;
};

}  // namespace rlk
