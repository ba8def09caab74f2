#include "src/workspace.hpp"

#include <fmt/format.h>

#include <cstdlib>

#include "rlk/machine.hpp"
#include "src/thread_state.hpp"

namespace rlk {

Workspace::~Workspace() {
  if (arena_) arena_->give_back();
  std::free(own_);
}

Result<Options> with_allocated(const Options& given, uint64_t wanted, uint64_t needed, const char* op) {
  Options o = given;
  if (o.workspace || !o.allocate || !wanted) return o;
  o.workspace = o.allocate(o.allocate_context, wanted);
  if (!o.workspace && needed)
    return Status(
        RLK_OUT_OF_MEMORY,
        fmt::format("{}: the caller's allocator gave none of the {} bytes of workspace that are needed", op,
                    needed));
  o.workspace_bytes = o.workspace ? wanted : 0;
  return o;
}

Status check_workspace_size(const Options& o, uint64_t bytes, const rlk_device& device, const char* op) {
  if (o.workspace && o.workspace_bytes < bytes)
    return {RLK_INVALID_ARGUMENT,
            fmt::format("{}: workspace has {} bytes, {} are needed", op, o.workspace_bytes, bytes)};
  if (!o.workspace && bytes && device.type != kDLCPU)
    return {RLK_INVALID_ARGUMENT, fmt::format("{}: workspace has 0 bytes, {} are needed: pass device memory "
                                              "in Options::workspace, or Options::allocate",
                                              op, bytes)};
  return {};
}

Status Workspace::take(rlk_call& call, const Options& options, uint64_t bytes, const char* op) {
  if (Status s = check_workspace_size(options, bytes, *call.device, op); !s) return s;
  if (options.workspace) {
    call.workspace = options.workspace;
    call.workspace_bytes = options.workspace_bytes;
    return {};
  }
  if (!bytes) return {};
  ThreadState* state = ThreadState::get();
  if (state && !state->arena.taken()) {
    call.workspace = state->arena.take(bytes);
    if (call.workspace) arena_ = &state->arena;
  } else {
    call.workspace = own_ = allocate(bytes);
  }
  call.workspace_bytes = bytes;
  if (!call.workspace)
    return {RLK_OUT_OF_MEMORY, fmt::format("{}: no memory for {} bytes of workspace", op, bytes)};
  return {};
}

}  // namespace rlk
