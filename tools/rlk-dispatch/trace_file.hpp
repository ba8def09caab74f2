// A trace as rlk/trace.h writes it, read whole. Whatever the file holds, reading it ends with a trace that keeps its own
// promises (keys that exist, as many digests as rows) or with a Failure that names the line.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rlk::cli {

struct TraceTensor {
  std::string name, role, dtype;
  std::vector<int64_t> shape;
  std::string digest;          // of the whole; empty: it was not digested
  bool by_rows = false;        // rows are there
  std::vector<uint64_t> rows;  // of the rows that were chosen
  std::string value;           // of a column that has one value, as JSON
};

struct TraceRecord {
  std::string op, tag, implementation, version, arithmetic;  // op empty: a foreign tensor
  std::map<std::string, std::string> attributes;             // values as JSON
  uint64_t keys = 0;                                         // 0: none
  std::vector<TraceTensor> tensors;

  const TraceTensor* find(std::string_view name, bool output) const;
};

// The sequence and the position that a row belongs to.
using RowKey = std::pair<int64_t, int64_t>;

struct Trace {
  std::string name;  // for messages
  std::string version, build, cpu;
  int64_t every = 1;
  bool whole = false;                     // it was ended
  std::vector<std::vector<RowKey>> keys;  // of rows that were chosen; number k is keys[k - 1]
  std::vector<TraceRecord> records;       // record n is records[n - 1]
  std::vector<RowKey> keys_of(const TraceRecord& record) const {
    return record.keys ? keys[record.keys - 1] : std::vector<RowKey>();
  }
};

Trace parse_trace(std::string_view text, const std::string& name);

}  // namespace rlk::cli
