#include "src/thread_state.hpp"

#include <pthread.h>

#include <new>

namespace rlk {
namespace {

// A key's destructor runs after those of C++ thread_locals, and once more for what later destructors made
// anew.
struct Key {
  pthread_key_t key;
  bool made;
  Key() noexcept
      : made(pthread_key_create(&key, [](void* state) {
               ThreadState::here = nullptr;
               delete static_cast<ThreadState*>(state);
             }) == 0) {}
};

}  // namespace

constinit thread_local ThreadState* ThreadState::here [[gnu::tls_model("initial-exec")]] = nullptr;

ThreadState* ThreadState::get() noexcept {
  if (here) return here;
  here = new (std::nothrow) ThreadState;
  static const Key key;
  if (here && key.made) pthread_setspecific(key.key, here);
  return here;
}

ThreadState& ThreadState::need() {
  if (ThreadState* state = get()) return *state;
  throw std::bad_alloc();
}

}  // namespace rlk
