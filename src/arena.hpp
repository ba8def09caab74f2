// The memory that a thread keeps for the CPU implementations it calls.
#pragma once

#include <cstdint>

namespace rlk {

// One block that grows to the largest call and, when calls have long asked for much less, shrinks to those.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Null when there is no memory. It is the caller's until give_back().
  void* take(uint64_t bytes) noexcept;
  void give_back() noexcept { taken_ = false; }
  bool taken() const noexcept { return taken_; }
  uint64_t size() const noexcept { return size_; }

 private:
  void resize(uint64_t bytes) noexcept;
  void* data_ = nullptr;
  uint64_t size_ = 0;
  uint64_t largest_ = 0;  // of the small calls in a row
  int32_t small_ = 0;     // how many
  bool taken_ = false;
};

}  // namespace rlk
