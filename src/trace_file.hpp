// The file of a trace, and what whoever began it chose.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "rlk/status.hpp"
#include "src/fd.hpp"
#include "src/trace_marks.hpp"

namespace rlk {

class TraceFile {
 public:
  struct Choice {
    std::vector<std::string> tags;  // globs; none: all
    int64_t every = 1;
    bool weights_once = false;
    bool wants(std::string_view tag) const;
  };
  // Where a weight lies: device type and id, address, bytes, dtype bits.
  using Place = std::tuple<int32_t, int32_t, uintptr_t, uint64_t, uint32_t>;

  // The process's trace; null when there is none, or when it is that of the process this one was forked from.
  static std::shared_ptr<TraceFile> now();
  static Status begin(std::string_view name, Choice choice);
  static Status end();

  TraceFile(std::string path, Fd file, Choice choice);

  const Choice& choice() const noexcept { return choice_; }
  // The number of these rows in the file; they are written when they are new. 0: there are none.
  uint64_t keys_of(TraceMarks& marks);
  // Appends a record whose members these are, under the next number.
  void record(std::string_view members);

  // A record was lost; end() says so.
  void lose(std::string_view why);

  // A weight's digest when it was met before.
  bool find_weight(const Place& place, uint64_t& digest);
  void keep_weight(const Place& place, uint64_t digest);
  void forget_weights();

 private:
  void append(std::string_view line);
  void flush();

  const std::string path_;
  Fd file_;
  const Choice choice_;
  const uint64_t number_;
  const pid_t owner_;
  uint64_t records_ = 0, key_sets_ = 0;
  std::string pending_;
  std::string failure_;  // the first
  bool ended_ = false;
  std::map<Place, uint64_t> weights_;
};

}  // namespace rlk
