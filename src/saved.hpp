// The table of live saved ranges.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rlk/options.hpp"
#include "rlk/plugin.h"
#include "rlk/status.hpp"

namespace rlk {

// A ticket for release_range(); 0 for a tensor without elements, which nothing can overwrite.
Result<uint64_t> save_range(const DLTensor& tensor, std::string name);
void release_range(uint64_t ticket);

// The highest precision in force when what a backward op reads was saved; standard for other ops.
Precision saved_precision(const rlk_op_schema& op, const rlk_slot* slots);
// What the call would write, the caller's workspace included, against all live ranges.
Status check_saved(const rlk_op_schema& op, const rlk_slot* slots, const Options& options);

struct SavedRange {
  uint64_t ticket;
  std::string name;
  DLDevice device;
  uint64_t address, bytes;  // from its lowest to its highest byte
  Precision precision;
};
// What is saved and not released, in the order in which it was saved.
std::vector<SavedRange> saved_ranges();

}  // namespace rlk
