// labels: unit
// The memory that CPU implementations compute in: grows, is kept, shrinks, and is never two calls' at once.
#include "src/workspace.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <thread>

namespace {

constexpr rlk_device kCpu{kDLCPU, 0, 0, "cpu"};

rlk_call call_on(const rlk_device& device) {
  rlk_call call{};
  call.device = &device;
  return call;
}

void on_a_new_thread(void (*body)()) { std::thread(body).join(); }

}  // namespace

TEST_CASE("a thread's first call may need no workspace at all") {
  on_a_new_thread([] {
    rlk_call call = call_on(kCpu);
    rlk::Workspace workspace;
    const rlk::Status s = workspace.take(call, {}, 0, "op");
    INFO(s.message());
    CHECK(s);
    CHECK(call.workspace_bytes == 0);
  });
}

TEST_CASE("a call inside a call has memory of its own, and both stay whole") {
  on_a_new_thread([] {
    rlk_call outer = call_on(kCpu), inner = call_on(kCpu);
    rlk::Workspace first;
    REQUIRE(first.take(outer, {}, 4096, "op"));
    std::memset(outer.workspace, 1, 4096);
    {
      rlk::Workspace second;
      REQUIRE(second.take(inner, {}, 1 << 20, "op"));
      std::memset(inner.workspace, 2, 1 << 20);
    }
    for (int i = 0; i < 4096; ++i) REQUIRE(static_cast<const char*>(outer.workspace)[i] == 1);
  });
}

TEST_CASE("the arena keeps its block, and gives a large one back after many small calls") {
  constexpr uint64_t kLarge = 8 << 20;
  rlk::Arena arena;
  void* const block = arena.take(kLarge);
  REQUIRE(block);
  arena.give_back();
  CHECK(arena.take(kLarge / 2) == block);
  arena.give_back();
  for (int i = 0; i < 1000 && arena.size() == kLarge; ++i) {
    REQUIRE(arena.take(5000));
    arena.give_back();
  }
  CHECK(arena.size() == 5000);
  CHECK(arena.take(kLarge));
}

TEST_CASE("what no machine has is out of memory, and the next call is served") {
  rlk::Arena arena;
  CHECK(arena.take(uint64_t{1} << 62) == nullptr);
  CHECK_FALSE(arena.taken());
  CHECK(arena.take(64));
  on_a_new_thread([] {
    rlk_call call = call_on(kCpu);
    const rlk::Status s = rlk::Workspace().take(call, {}, uint64_t{1} << 62, "op");
    CHECK(s.code() == RLK_OUT_OF_MEMORY);
    CHECK(std::string(s.message()) == "op: no memory for 4611686018427387904 bytes of workspace");
  });
}

TEST_CASE("device memory is the caller's to give") {
  const rlk_device gpu{kDLCUDA, 0, 90, "gpu"};
  rlk_call call = call_on(gpu);
  rlk::Workspace workspace;
  CHECK(workspace.take(call, {}, 0, "op"));
  CHECK(workspace.take(call, {}, 16, "op").code() == RLK_INVALID_ARGUMENT);
}
