// labels: unit
// What happens to a process around a call: it forks, runs out of threads, pins or cancels the calling thread.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "rlk/float_guard.hpp"
#include "rlk/machine.hpp"
#include "rlk/rlk.hpp"
#include "src/threads.hpp"

namespace {

std::atomic<bool> no_more_threads{false};

}  // namespace

// Stands before libc's, so that the system can be made to refuse threads.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) {
  using Create = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static auto* next = reinterpret_cast<Create*>(dlsym(RTLD_NEXT, "pthread_create"));
  if (no_more_threads) return EAGAIN;
  return next(thread, attributes, start, argument);
}

namespace {

// How many threads run 32 indices. Each waits until `expected` have come, ten seconds at most.
struct Work {
  std::atomic<int> sum{0};
  std::size_t expected = 0;
  std::mutex mutex;
  std::condition_variable came;
  std::set<std::thread::id> threads;
  static void one(void* self, int64_t i) {
    auto& w = *static_cast<Work*>(self);
    w.sum += static_cast<int>(i);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::unique_lock lock(w.mutex);
    w.threads.insert(std::this_thread::get_id());
    w.came.notify_all();
    w.came.wait_for(lock, std::chrono::seconds(10), [&] { return w.threads.size() >= w.expected; });
  }
  std::size_t run(int32_t wanted, std::size_t expect, int64_t n = 32) {
    sum = 0;
    expected = expect;
    threads.clear();
    rlk::parallel_for(wanted, n, one, this);
    CHECK(sum == n * (n - 1) / 2);
    return threads.size();
  }
};

// The exit status of a child that runs body; 255 when it has not ended after ten seconds.
template <class Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    _exit(body());
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

std::size_t threads_now() {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                                                std::filesystem::directory_iterator()));
}

// A thread of this process other than the first, once it is there.
pid_t newest_thread() {
  pid_t newest = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    newest = std::max(newest, static_cast<pid_t>(std::stoi(entry.path().filename())));
  return newest;
}

}  // namespace

// First of all: no helper has started yet.
TEST_CASE("without threads from the system a call runs on those that are there") {
  Work work;
  no_more_threads = true;
  CHECK(work.run(4, 1) == 1);
  no_more_threads = false;
  CHECK(work.run(3, 3) == 3);
  no_more_threads = true;
  CHECK(work.run(8, 3) == 3);
  no_more_threads = false;
}

TEST_CASE("a child of fork runs parallel calls on threads of its own") {
  Work work;
  CHECK(work.run(4, 4) == 4);
  CHECK(in_child([&] { return static_cast<int>(work.run(4, 4)); }) == 4);
#ifndef __SANITIZE_ADDRESS__  // whose own allocator may be locked for ever in such a child
  // While another thread has the pool.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) Work().run(4, 4);
  });
  for (int i = 0; i < 20; ++i) CHECK(in_child([&] { return static_cast<int>(Work().run(3, 3)); }) == 3);
  stop = true;
  busy.join();
#endif
}

TEST_CASE("a child of fork asks, reloads and logs, whatever other threads were doing") {
#ifdef __SANITIZE_ADDRESS__
  MESSAGE("[skip] the address sanitizer's own allocator may be locked for ever in such a child");
  return;
#endif
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  const auto keep = [&](auto body) {
    busy.emplace_back([&stop, body] {
      while (!stop) body();
    });
  };
  rlk_set_log_sink([](void*, int32_t, const char*) {}, nullptr);
  keep([] { rlk_reload_environment(); });
  keep([] { rlk_load_evidence("/dev/null"); });
  keep([] { rlk_set_log_sink([](void*, int32_t, const char*) {}, nullptr); });
  for (int i = 0; i < 100; ++i)
    CHECK(in_child([] {
            rlk_set_log_sink([](void*, int32_t, const char*) {}, nullptr);
            if (rlk_load_evidence("/dev/null") == RLK_OK) return 2;
            return rlk_reload_environment() == RLK_OK ? 7 : 3;
          }) == 7);
  stop = true;
  for (std::thread& t : busy) t.join();
  rlk_set_log_sink(nullptr, nullptr);
}

TEST_CASE("a program that reloads in a loop does not grow") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  MESSAGE("[skip] the sanitizers' allocators do not tell");
  return;
#endif
  CHECK(in_child([] {
          rlk_set_log_sink([](void*, int32_t, const char*) {}, nullptr);
          const auto reload = [](int times) {
            for (int i = 0; i < times; ++i) {
              setenv("RLK_BACKEND", i % 2 ? "native" : "nonsense", 1);
              rlk_reload_environment();
            }
            return mallinfo2().uordblks;
          };
          const std::size_t few = reload(10), many = reload(1000);
          return many > few + 10'000 ? 2 : 1;
        }) == 1);
}

TEST_CASE("helpers run on all CPUs of the process, whoever made the first call") {
  cpu_set_t all;
  REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
  // A child, so that its pool is new.
  CHECK(in_child([&] {
          cpu_set_t one;
          CPU_ZERO(&one);
          int first = 0;
          while (!CPU_ISSET(first, &all)) ++first;
          CPU_SET(first, &one);
          sched_setaffinity(0, sizeof one, &one);
          Work().run(2, 2);
          cpu_set_t helper;
          sched_getaffinity(newest_thread(), sizeof helper, &helper);
          return static_cast<int>(newest_thread() != getpid() && CPU_EQUAL(&helper, &all));
        }) == 1);
}

TEST_CASE("a call that asks for very many threads gets some, and they leave again") {
  Work work;
  CHECK(work.run(100000, 0, 512) <= static_cast<std::size_t>(rlk::most_threads()));
  const std::size_t most = static_cast<std::size_t>(rlk::processors()) + 1;  // doctest's own, and the helpers
  for (int i = 0; i < 100 && threads_now() > most; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(threads_now() <= most);
}

TEST_CASE("a thread that is cancelled during a call finishes the call first") {
  std::atomic<int> finished{0};
  for (int i = 0; i < 20; ++i) {
    std::atomic<bool> inside{false}, cancelled{false};
    pthread_t thread;
    struct Both {
      std::atomic<bool>&inside, &cancelled;
      std::atomic<int>& finished;
    } both{inside, cancelled, finished};
    REQUIRE(pthread_create(
                &thread, nullptr,
                [](void* context) -> void* {
                  auto& b = *static_cast<Both*>(context);
                  Work work;
                  b.inside = true;
                  work.run(4, 0, 8);
                  ++b.finished;
                  while (!b.cancelled) std::this_thread::yield();  // a short call may end first
                  pthread_testcancel();
                  return nullptr;
                },
                &both) == 0);
    while (!inside) std::this_thread::yield();
    pthread_cancel(thread);
    cancelled = true;
    void* result = nullptr;
    pthread_join(thread, &result);
    CHECK(result == PTHREAD_CANCELED);
  }
  CHECK(finished == 20);
}

TEST_CASE("what a task leaves in a helper's floating-point environment ends with the task") {
#ifdef __x86_64__
  struct Modes {
    std::atomic<int> wrong{0};
    static void spoil(void*, int64_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      _mm_setcsr(0xffc0);  // flush to zero, denormals are zero, towards zero
    }
    static void look(void* self, int64_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if ((_mm_getcsr() & ~0x3fu) != 0x1f80) ++static_cast<Modes*>(self)->wrong;
    }
  } modes;
  rlk::parallel_for(4, 32, Modes::spoil, &modes);
  rlk::FloatGuard::reset();  // this thread's, which is not the pool's
  rlk::parallel_for(4, 32, Modes::look, &modes);
  CHECK(modes.wrong == 0);
#endif
}
