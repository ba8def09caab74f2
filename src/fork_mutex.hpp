// A mutex that a fork waits for, so that the child finds it free and what it protects whole. For objects that
// live for ever. Who holds one takes no other and runs nobody else's code.
#pragma once

#include <mutex>

namespace rlk {

class ForkMutex {
 public:
  ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static void lock_all() noexcept;
  static void unlock_all() noexcept;

  std::mutex mutex_;
  ForkMutex* next_ = nullptr;
};

}  // namespace rlk
