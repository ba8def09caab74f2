// The memory that CPU implementations compute in.
#pragma once

#include <cstdint>

#include "rlk/options.hpp"
#include "rlk/plugin.h"
#include "rlk/status.hpp"
#include "src/arena.hpp"

namespace rlk {

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
