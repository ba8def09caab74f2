// The table of live saved ranges.
#pragma once

#include <cstdint>
#include <string>

#include "rlk/options.hpp"
#include "rlk/plugin.h"

namespace rlk {

struct ByteRange {
  const char* low = nullptr;
  const char* high = nullptr;  // one past the last byte
  bool meets(const ByteRange& other) const noexcept { return low < other.high && other.low < high; }
};

// From the lowest to the highest byte a tensor touches; empty when it has no elements.
ByteRange range_of(const DLTensor& t) noexcept;

uint64_t save_range(ByteRange range, std::string name);
void release_range(uint64_t id);
// The highest precision in force when what a backward op reads was saved; standard for other ops.
Precision saved_precision(const rlk_op_schema& op, const rlk_slot* slots);
// The name of a live saved range that meets this one; empty: none.
std::string saved_overlap(ByteRange range);

}  // namespace rlk
