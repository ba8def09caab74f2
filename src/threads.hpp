// The project's thread pool: as many threads as the process may use CPUs, and more for a moment where a call
// asks for more.
#pragma once

#include <cstdint>

namespace rlk {

// What a call's `threads` are cut to: more than twice the CPUs only cost memory. Small machines may still be
// asked for the splits of large ones.
int32_t most_threads() noexcept;

// Runs body(context, i) for every i in [0, n) on at most `threads` threads (0: all), the caller among them.
// Nested or concurrent calls are fine: a call that finds the pool busy, or gets no threads from the system,
// runs alone. Results must not depend on the split. What a body throws ends the loop and is thrown from here.
void parallel_for(int32_t threads, int64_t n, void (*body)(void* context, int64_t i), void* context);

}  // namespace rlk
