// What benchmarks of CPU code share: a clock and the median.
#pragma once

#include <time.h>

#include <algorithm>
#include <vector>

// CLOCK_PROCESS_CPUTIME_ID leaves out what other programs take; CLOCK_MONOTONIC suits several threads.
inline double milliseconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return 1e3 * static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_nsec);
}

// How long run() takes.
template <class Run>
double milliseconds(clockid_t clock, const Run& run) {
  const double start = milliseconds(clock);
  run();
  return milliseconds(clock) - start;
}

inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}
