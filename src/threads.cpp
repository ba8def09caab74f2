#include "src/threads.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "rlk/float_guard.hpp"
#include "rlk/machine.hpp"

namespace rlk {
namespace {

// One parallel_for at a time uses the workers; indices are handed out by an atomic counter.
class Pool {
 public:
  bool try_run(int32_t helpers, int64_t n, void (*body)(void*, int64_t), void* context) {
    std::unique_lock owner(owner_, std::try_to_lock);
    if (!owner) return false;
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int32_t>(workers_.size()) < helpers) {
        const auto index = static_cast<int32_t>(workers_.size());
        // Detached: a library must not join threads while the process is being torn down.
        workers_.emplace_back([this, index, seen = generation_] { work(index, seen); });
        workers_.back().detach();
      }
      body_ = body;
      context_ = context;
      n_ = n;
      next_.store(0, std::memory_order_relaxed);
      helpers_ = helpers;
      running_ = helpers;
      ++generation_;
    }
    wake_.notify_all();
    drain(body, context, n);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    return true;
  }

 private:
  void drain(void (*body)(void*, int64_t), void* context, int64_t n) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n;) body(context, i);
  }
  void work(int32_t index, uint64_t seen) {
    FloatGuard::reset();
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (index >= helpers_) continue;
      const auto body = body_;
      const auto context = context_;
      const int64_t n = n_;
      lock.unlock();
      drain(body, context, n);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  std::atomic<int64_t> next_{0};
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0;
  int32_t helpers_ = 0, running_ = 0;
  uint64_t generation_ = 0;
};

Pool& pool() {
  static Pool* p = new Pool;  // never destroyed: detached workers use it until the process ends
  return *p;
}

thread_local bool inside = false;

}  // namespace

void parallel_for(int32_t threads, int64_t n, void (*body)(void*, int64_t), void* context) {
  if (threads <= 0) threads = processors();
  const auto helpers = static_cast<int32_t>(std::min<int64_t>(threads, n) - 1);
  if (helpers > 0 && !inside) {
    inside = true;
    const bool done = pool().try_run(std::min(helpers, 255), n, body, context);
    inside = false;
    if (done) return;
  }
  for (int64_t i = 0; i < n; ++i) body(context, i);
}

}  // namespace rlk
