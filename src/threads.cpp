#include "src/threads.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include "rlk/float_guard.hpp"
#include "rlk/machine.hpp"
#include "src/cancel.hpp"

namespace rlk {
namespace {

constexpr int32_t kMostHelpers = 255;
constexpr auto kIdle = std::chrono::seconds(1);

// The CPUs the process was given, asked when the library is loaded: a thread that pins itself before its
// first call decides neither how many helpers there are nor where they run.
struct Machine {
  cpu_set_t cpus;
  bool known;
  Machine() noexcept : known(sched_getaffinity(0, sizeof cpus, &cpus) == 0) { processors(); }
};
const Machine at_load;

// One parallel_for at a time uses the workers; indices are handed out by an atomic counter. Workers are
// alike: whoever wakes takes one of the open places.
class Pool {
 public:
  bool try_run(int32_t helpers, int64_t n, void (*body)(void*, int64_t), void* context) {
    const NoCancel whole;
    std::unique_lock owner(owner_, std::try_to_lock);
    if (!owner) return false;
    int32_t wanted = 0;
    bool all = false;
    {
      const std::lock_guard lock(mutex_);
      // Where the system gives no more threads, those that are there do all the work.
      while (alive_ < helpers && start()) ++alive_;
      body_ = body;
      context_ = context;
      n_ = n;
      next_.store(0, std::memory_order_relaxed);
      wanted = open_ = running_ = std::min(helpers, alive_);
      all = wanted == alive_;
    }
    // No more than have work: one wide call leaves many idle ones, and each that wakes for nothing costs as much as one
    // that helps.
    if (all)
      wake_.notify_all();
    else
      for (int32_t i = 0; i < wanted; ++i) wake_.notify_one();
    drain(body, context, n);
    std::unique_lock lock(mutex_);
    running_ -= open_;  // the work is done: who has not come need not come
    open_ = 0;
    // By pthread's name: condition_variable::wait is the one symbol here that systems before g++ 12 lack.
    while (running_ != 0) pthread_cond_wait(done_.native_handle(), mutex_.native_handle());
    return true;
  }

 private:
  bool start() noexcept {
    // Detached: a library must not join threads while the process is being torn down.
    pthread_attr_t detached;
    if (pthread_attr_init(&detached) != 0) return false;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const auto work = [](void* pool) -> void* {
      if (at_load.known) sched_setaffinity(0, sizeof at_load.cpus, &at_load.cpus);
      static_cast<Pool*>(pool)->work();
      return nullptr;
    };
    const int error = pthread_create(&thread, &detached, work, this);
    pthread_attr_destroy(&detached);
    return error == 0;
  }

  void drain(void (*body)(void*, int64_t), void* context, int64_t n) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n;) body(context, i);
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (!wake_.wait_for(lock, kIdle, [this] { return open_ > 0; })) {
        // More workers than CPUs were wanted once; they do not stay for that.
        if (alive_ < processors()) continue;
        --alive_;
        return;
      }
      --open_;
      const auto body = body_;
      const auto context = context_;
      const int64_t n = n_;
      lock.unlock();
      FloatGuard::reset();  // for every task: the one before may have left flags or a rounding mode
      drain(body, context, n);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> next_{0};
  void (*body_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0;
  int32_t alive_ = 0, open_ = 0, running_ = 0;
};

// Never destroyed: detached workers use it until the process ends. A child of fork has none of its parent's
// threads and makes a pool of its own.
std::atomic<Pool*> pool_of_process{nullptr};
// When the library is loaded: a handler that is registered while another thread forks would miss that fork.
const bool forgotten_in_children =
    pthread_atfork(nullptr, nullptr, [] { pool_of_process.store(nullptr, std::memory_order_relaxed); }) == 0;

// Null where there is no memory for one.
Pool* pool() noexcept {
  if (Pool* made = pool_of_process.load(std::memory_order_acquire)) return made;
  if (!forgotten_in_children) return nullptr;
  std::unique_ptr<Pool> fresh(new (std::nothrow) Pool);
  Pool* current = nullptr;
  if (fresh && pool_of_process.compare_exchange_strong(current, fresh.get(), std::memory_order_acq_rel))
    current = fresh.release();
  return current;
}

thread_local bool inside = false;

// What a body throws on a worker belongs to the caller: the first of it, after all threads have come back.
class Carrier {
 public:
  Carrier(void (*body)(void*, int64_t), void* context) noexcept : body_(body), context_(context) {}
  static void run(void* self, int64_t i) noexcept {
    auto& c = *static_cast<Carrier*>(self);
    if (c.thrown_.load(std::memory_order_relaxed)) return;
    try {
      c.body_(c.context_, i);
    } catch (...) {
      if (!c.thrown_.exchange(true)) c.first_ = std::current_exception();
    }
  }
  void hand_over() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  void (*body_)(void*, int64_t);
  void* context_;
  std::atomic<bool> thrown_{false};
  std::exception_ptr first_;
};

}  // namespace

int32_t most_threads() noexcept { return std::max(2 * processors(), 64); }

void parallel_for(int32_t threads, int64_t n, void (*body)(void*, int64_t), void* context) {
  if (threads <= 0) threads = processors();
  const auto helpers = static_cast<int32_t>(std::min<int64_t>(std::min(threads, most_threads()), n) - 1);
  Pool* const workers = helpers > 0 && !inside ? pool() : nullptr;
  if (workers) {
    Carrier carrier(body, context);
    inside = true;
    const bool done = workers->try_run(std::min(helpers, kMostHelpers), n, &Carrier::run, &carrier);
    inside = false;
    if (done) return carrier.hand_over();
  }
  for (int64_t i = 0; i < n; ++i) body(context, i);
}

}  // namespace rlk
