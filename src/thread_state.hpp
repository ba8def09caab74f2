// What the library keeps for one thread. Static TLS holds a pointer to it, since that memory is scarce for
// libraries that are opened at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/scope.hpp"
#include "src/trace_marks.hpp"
#include "src/workspace.hpp"

namespace rlk {

struct OpCache;

struct ThreadState {
  ThreadState();
  ~ThreadState();

  std::unique_ptr<std::unique_ptr<OpCache>[]> by_op;  // resolved calls, by op index
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
