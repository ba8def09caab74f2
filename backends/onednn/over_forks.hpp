// A child of fork has one thread: a mutex that another one held would stay locked there for ever, and what it protects might be
// half done. So a fork waits for it.
#pragma once

#include <pthread.h>

#include <mutex>

namespace rlk::onednn {

// From now on `mutex`, which lives for ever, is held while the process forks.
template <std::mutex& (*mutex)()>
void held_over_forks() {
  [[maybe_unused]] static const int once =
      pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] { mutex().unlock(); });
}

}  // namespace rlk::onednn
