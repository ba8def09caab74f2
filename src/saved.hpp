// The table of live saved ranges.
#pragma once

#include <cstdint>
#include <string>

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
// The name of a live saved range that meets this one; empty: none.
std::string saved_overlap(ByteRange range);

}  // namespace rlk
