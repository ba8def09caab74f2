// What dispatch costs, in instructions. Run by tools/bench/count under callgrind, which dumps its counters at
// each name; per call is the dump divided by kCalls. The loop around the call is part of the count (plain
// call: all but one of its instructions).
#include <valgrind/callgrind.h>

#include <cstdio>

#include "noop.hpp"
#include "rlk/rlk.hpp"

using namespace rlk::bench;

namespace {

constexpr int kCalls = 1000;

template <class Body>
void count(const char* name, Body body) {
  body();  // resolved, cached, linked
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
  for (int i = 0; i < kCalls; ++i) body();
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}

template <int Tensors>
void count_cached(const char* name) {
  const NoopCall<Tensors> call;
  count(name, [&] {
    if (!call.call()) std::puts("failed");
  });
}

}  // namespace

int main() {
  if (rlk_register_backend(&noop_backend(), "bench") != RLK_OK) return std::puts(rlk_last_error()), 1;
  const NoopCall<4> call;
  auto* volatile run = NoopOp<4>::kImplementation.run;
  rlk_call facts{};
  count("plain function-pointer call", [&] {
    if (run(call.slots(), &facts) != RLK_OK) std::puts("failed");
  });
  rlk::BoundOp bound = rlk::check(rlk::bind(call.args));
  count("bound call", [&] {
    if (!bound.run()) std::puts("failed");
  });
  count_cached<2>("cached call, 2 tensors");
  count_cached<4>("cached call, 4 tensors");
  count_cached<12>("cached call, 12 tensors");
  count("cold resolve, one candidate", [&] {
    if (!rlk::resolve(call.args)) std::puts("failed");
  });
}
