// What a thread says of its next calls to a trace.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace rlk {

struct TraceMarks {
  std::string tag;
  std::vector<std::pair<int64_t, int64_t>> rows;  // (sequence, position) of each
  uint64_t trace = 0, keys = 0;  // the trace that `rows` were written to, and their number there
  bool inside = false;           // a traced call runs: what its implementation calls is part of it
};

}  // namespace rlk
