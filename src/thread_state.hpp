// What the library keeps for one thread. Static TLS holds a pointer to it, since that memory is scarce for
// libraries that are opened at run time. Everything that keeps something here includes this header, so it and
// what it includes are plain data and know nothing of those.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/arena.hpp"
#include "src/scope_state.hpp"
#include "src/trace_marks.hpp"

namespace rlk {

struct OpCache;

struct ThreadState {
  // Resolved calls, by op index; who makes the array says how it goes.
  using ByOp = std::unique_ptr<std::unique_ptr<OpCache>[], void (*)(std::unique_ptr<OpCache>*)>;
  ByOp by_op{nullptr, nullptr};
  std::size_t ops = 0;
  Arena arena;
  TraceMarks trace;
  std::vector<ScopeState> entered;  // what rlk_scope_leave() goes back to
  char failure[1024] = "";

  // Null until it is needed, and again once the thread has ended: a call that a destructor of the thread or
  // an atexit handler makes then gets a new one.
  static constinit thread_local ThreadState* here [[gnu::tls_model("initial-exec")]];
  // Null when there is no memory.
  static ThreadState* get() noexcept;
  static ThreadState& need();  // or std::bad_alloc
};

}  // namespace rlk
