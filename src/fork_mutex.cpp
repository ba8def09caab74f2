#include "src/fork_mutex.hpp"

#include <pthread.h>

namespace rlk {
namespace {

constinit std::mutex list_mutex;
constinit ForkMutex* list = nullptr;

}  // namespace

void ForkMutex::lock_all() noexcept {
  list_mutex.lock();
  for (ForkMutex* m = list; m; m = m->next_) m->lock();
}

void ForkMutex::unlock_all() noexcept {
  for (ForkMutex* m = list; m; m = m->next_) m->unlock();
  list_mutex.unlock();
}

ForkMutex::ForkMutex() {
  const std::lock_guard lock(list_mutex);
  if (!list) pthread_atfork(lock_all, unlock_all, unlock_all);
  next_ = list;
  list = this;
}

}  // namespace rlk
