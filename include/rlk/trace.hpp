// Traces for C++: trace.h says what one holds.
//
//   rlk::check(rlk::trace("sampler.trace"));
//   {
//     const rlk::TraceTag tag("layer 3 qkv");
//     rlk::check(rlk::linear(...));
//   }
//   rlk::check(rlk::end_trace());
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "rlk/status.hpp"
#include "rlk/trace.h"

namespace rlk {

struct TraceOptions {
  std::string tags{};         // globs, comma separated; empty: all
  int64_t every = 0;          // only rows at positions that are a multiple; 0: all
  bool weights_once = false;  // see rlk_trace_options
};

inline Status trace_status(rlk_code code) {
  return code == RLK_OK ? Status() : Status(code, rlk_last_error());
}

inline Status trace(const std::string& file, const TraceOptions& options = {}) {
  const rlk_trace_options o{sizeof(rlk_trace_options), options.weights_once,
                            options.tags.empty() ? nullptr : options.tags.c_str(), options.every};
  return trace_status(rlk_trace_begin(file.c_str(), &o));
}
inline Status end_trace() { return trace_status(rlk_trace_end()); }
inline bool tracing() noexcept { return rlk_tracing() != 0; }

inline Status trace_rows(std::span<const int64_t> sequences, std::span<const int64_t> positions) {
  if (sequences.size() != positions.size())
    return {RLK_INVALID_ARGUMENT, "trace: " + std::to_string(sequences.size()) + " sequences and " +
                                      std::to_string(positions.size()) + " positions are given"};
  return trace_status(rlk_trace_rows(sequences.data(), positions.data(), sequences.size()));
}

// The tag of this thread's calls while it lives; none afterwards.
class TraceTag {
 public:
  explicit TraceTag(const std::string& tag) { check(trace_status(rlk_trace_tag(tag.c_str()))); }
  ~TraceTag() { rlk_trace_tag(nullptr); }
  TraceTag(const TraceTag&) = delete;
  TraceTag& operator=(const TraceTag&) = delete;
};

}  // namespace rlk
