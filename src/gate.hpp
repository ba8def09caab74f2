// One number that every call reads: whether what was resolved earlier still stands, and whether more than the
// key of a resolved call must be looked at now.
#pragma once

#include <atomic>
#include <cstdint>

namespace rlk {

struct Gate {
  uint64_t value;

  // Moves when anything is registered, reloaded or otherwise changed that resolutions depend on.
  uint64_t epoch() const noexcept { return value & ~(kSavedLives | kScoped | kTraced); }
  // The epoch while no saved range lives and nothing is traced, else no epoch.
  uint64_t unsaved() const noexcept { return value & ~kScoped; }
  // A saved range lives: every call must check what it writes.
  bool saved_lives() const noexcept { return value & kSavedLives; }
  // Some thread is inside a scope: a bound call must look at the policy of its thread.
  bool scoped() const noexcept { return value & kScoped; }
  // Calls are recorded: src/trace.hpp.
  bool traced() const noexcept { return value & kTraced; }

  static Gate now() noexcept { return {word.load(std::memory_order_acquire)}; }

  static constexpr uint64_t kSavedLives = 1, kScoped = 2, kTraced = 4, kStep = 8;
  static std::atomic<uint64_t> word;
};

void move_gate() noexcept;
// Called by the one who counts: the saved table under its lock, the first scope in and the last one out.
void set_saved_lives(bool lives) noexcept;
void set_scoped(bool scoped) noexcept;
void set_traced(bool traced) noexcept;

}  // namespace rlk
