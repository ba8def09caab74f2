#include "src/gate.hpp"

namespace rlk {

constinit std::atomic<uint64_t> Gate::word{Gate::kStep};

void move_gate() noexcept { Gate::word.fetch_add(Gate::kStep, std::memory_order_acq_rel); }

void set_saved_lives(bool lives) noexcept {
  Gate::word.fetch_add(lives ? Gate::kSavedLives : -Gate::kSavedLives, std::memory_order_acq_rel);
}

void set_scoped(bool scoped) noexcept {
  Gate::word.fetch_add(scoped ? Gate::kScoped : -Gate::kScoped, std::memory_order_acq_rel);
}

void set_traced(bool traced) noexcept {
  Gate::word.fetch_add(traced ? Gate::kTraced : -Gate::kTraced, std::memory_order_acq_rel);
}

}  // namespace rlk
