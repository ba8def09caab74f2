// Runs code while allocations fail: every one once, and then all from it on.
//
// malloc and its kin are the program's own, so that what libstdc++ and the library allocate is counted too; one file of a
// program includes this. RLK_OWN_MALLOC is not defined where a sanitizer has its own malloc.
#pragma once

#include <doctest/doctest.h>

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#  define RLK_OWN_MALLOC

#  include <atomic>
#  include <cerrno>
#  include <cstdint>
#  include <cstdlib>
#  include <functional>
#  include <new>
#  include <string>

#  include "rlk/rlk.hpp"

namespace {

std::atomic<bool> armed{false}, hit{false}, lasting{false};
std::atomic<int64_t> left{0};

inline bool refused() noexcept {
  if (!armed.load(std::memory_order_relaxed)) return false;
  const int64_t before = left.fetch_sub(1);
  if (before > 0 || (before < 0 && !lasting)) return false;
  hit = true;
  errno = ENOMEM;
  return true;
}

}  // namespace

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t n) { return refused() ? nullptr : __libc_malloc(n); }
void* calloc(size_t n, size_t size) { return refused() ? nullptr : __libc_calloc(n, size); }
void* realloc(void* p, size_t n) { return refused() ? nullptr : __libc_realloc(p, n); }
void* memalign(size_t alignment, size_t n) { return refused() ? nullptr : __libc_memalign(alignment, n); }
void* aligned_alloc(size_t alignment, size_t n) {
  return refused() ? nullptr : __libc_memalign(alignment, n);
}
int posix_memalign(void** out, size_t alignment, size_t n) {
  if (refused()) return ENOMEM;
  *out = __libc_memalign(alignment, n);
  return *out ? 0 : ENOMEM;
}
}

namespace {

// Runs the body with the n-th allocation failing, and says whether there was an n-th one.
struct Attempt {
  rlk_code code;
  bool hit;
  bool thrown = false;  // std::bad_alloc, which the C++ face may throw where the C face returns a code
};
inline Attempt attempt(int64_t n, bool from_then_on, const std::function<rlk_code()>& body) {
  left = n, lasting = from_then_on, hit = false, armed = true;
  Attempt a{RLK_OUT_OF_MEMORY, false};
  try {
    a.code = body();
  } catch (const std::bad_alloc&) {
    a.thrown = true;
  }
  armed = false;
  a.hit = hit;
  return a;
}

// `before` makes what the body changes anew; `after` must hold once there is memory again.
enum class Failing { each, fewer };  // fewer: ever larger steps, for a long list of the same kind
inline void survive(
    const std::string& what, rlk_code wanted, const std::function<rlk_code()>& body,
    const std::function<bool()>& after, const std::function<void()>& before = [] {},
    Failing failing = Failing::each) {
  for (const bool from_then_on : {false, true})
    for (int64_t n = 0;; n += failing == Failing::each ? 1 : 1 + n / 20) {
      REQUIRE_MESSAGE(n < 20000, what);
      before();
      const Attempt a = attempt(n, from_then_on, body);
      const std::string text = rlk_last_error();
      if (!a.hit) {
        CHECK_MESSAGE(a.code == wanted, what, ": ", rlk_code_name(a.code), ": ", text);
        break;
      }
      // An allocation may be one that is not needed: a log line, a hint in a text.
      const bool right = a.code == RLK_OUT_OF_MEMORY || a.code == wanted;
      CHECK_MESSAGE(right, what, ", allocation ", n, ": ", rlk_code_name(a.code), ": ", text);
      if (a.code == RLK_OUT_OF_MEMORY && !a.thrown)
        CHECK_MESSAGE(text.find("memory") != std::string::npos, text);
      CHECK_MESSAGE(after(), what, ", after allocation ", n, ": ", std::string(rlk_last_error()));
    }
}

// Of a call that gives a text or another handle: null is a failure.
inline rlk_code code_of(const void* made) {
  if (made) return RLK_OK;
  return std::string(rlk_last_error()).find("memory") != std::string::npos ? RLK_OUT_OF_MEMORY : RLK_INTERNAL;
}

}  // namespace

#endif
