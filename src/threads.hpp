// The project's thread pool: plain std::threads, as many as the process may use CPUs.
#pragma once

#include <cstdint>

namespace rlk {

// Runs body(context, i) for every i in [0, n) on at most `threads` threads (0: all), the caller among them.
// Nested or concurrent calls are fine: who finds the pool busy runs alone. Results must not depend on the
// split.
void parallel_for(int32_t threads, int64_t n, void (*body)(void* context, int64_t i), void* context);

}  // namespace rlk
