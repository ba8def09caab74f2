// Something that is done once, by whoever comes first; afterwards asking costs one load, where std::call_once
// still makes calls.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>

namespace rlk {

class Once {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  template <class Body>
  void run(Body&& body) {
    if (done()) return;
    std::call_once(flag_, [&] {
      std::forward<Body>(body)();
      done_.store(true, std::memory_order_release);
    });
  }

 private:
  std::once_flag flag_;
  std::atomic<bool> done_{false};
};

}  // namespace rlk
