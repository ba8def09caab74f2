// The memory that CPU implementations compute in.
#pragma once

#include <cstdint>

#include "rlk/options.hpp"
#include "rlk/plugin.h"
#include "rlk/status.hpp"

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

// One call's workspace: the caller's, the thread's arena, or, for a call inside a call that has the arena, a
// block of its own.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Sets call.workspace to at least `bytes`.
  Status take(rlk_call& call, const Options& options, uint64_t bytes, const char* op);

 private:
  Arena* arena_ = nullptr;
  void* own_ = nullptr;
};

// The options with the workspace that the caller's allocator gives, where it is asked.
Result<Options> with_allocated(const Options& options, uint64_t wanted, uint64_t needed, const char* op);

// The caller's workspace is large enough, or there is none and none may be made for it.
Status check_workspace_size(const Options& options, uint64_t bytes, const rlk_device& device, const char* op);

}  // namespace rlk
