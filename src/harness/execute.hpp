// Running one problem on one implementation as a user would, with everything around it watched: inputs hashed
// and in pages that cannot be written, results filled with NaN, pages that cannot be touched around every
// array, the caller's floating-point mode looked at afterwards.
#pragma once

#include <barrier>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rlk/options.hpp"
#include "src/harness/memory.hpp"
#include "src/harness/problem.hpp"
#include "src/registry.hpp"

namespace rlk::harness {

// Arguments, and results, that differ in one axis at most may be parts of one array, side by side.
enum class Packing : uint8_t { none, in_order, last_first };

// Where and how: everything here must not change a bit.
struct Manner {
  int32_t threads = 0;
  int64_t offset = 0;       // bytes every array is moved by, rounded up to its element size
  int64_t row_padding = 0;  // elements between the rows of arguments that may be strided
  void* stream = nullptr;
  bool graph = false;               // captured, then replayed
  int64_t workspace_percent = 100;  // of what the implementation asks for, where it may get less
  WatchedMemory::Edge edge = WatchedMemory::apart;  // which end of every array nobody may touch (CPU)
  uint64_t draw = 0;  // not 0: places, strides, byte offsets and workspace are drawn from it, each by itself
  // Which of the results of places_shared() lie where an argument does: bit by bit.
  uint32_t in_place = 0;
  bool broadcast = false;  // read arguments whose slices along the first axis are equal have stride 0 there
  Packing packing = Packing::none;
  uint32_t float_mode = 0;  // bits of the control register that are set on the caller's thread
  uint32_t traps = 0;       // and those of it that are cleared: exceptions that would end the process
  Precision precision = Precision::standard;
  bool needs_backward = false, deterministic = false;
  std::shared_ptr<const Problem> before{};  // ran in this very memory first; of the same shapes
  std::barrier<>* together = nullptr;       // where several callers meet before each makes its call
};

struct Outcome {
  rlk_code code = RLK_OK;
  std::string text;            // of a failure
  std::string broken;          // a promise about memory, in words; empty: kept
  std::vector<Array> results;  // by argument, dense; dtype none where absent
};

// The implementation under test, and the memory services of its device (null on the CPU).
struct Subject {
  const rlk_op_schema* op = nullptr;
  const rlk_implementation* implementation = nullptr;
  Backend* backend = nullptr;
  rlk_device device{kDLCPU, 0, 0, {}};
  const rlk_device_services* services = nullptr;
};

Outcome execute(const Problem& p, const Subject& subject, const Manner& manner = {});

// By argument: whose array it may be a part of, mostly its own, and the axis along which the parts lie.
struct Part {
  std::size_t owner, axis;
};
std::vector<Part> arrays_shared(const Problem& p);

// Results that may lie where an argument does, and that argument.
std::vector<std::pair<std::size_t, std::size_t>> places_shared(const Problem& p);

// The op's reference with results in fp64 where the op allows it: the truth.
Outcome execute_reference(const Problem& p, bool in_fp64);

// Runs the implementation's function directly, past its own refusal, on the CPU and on one thread. What the
// processor cannot execute is never entered.
Outcome execute_forced(const Problem& p, const Subject& subject);

}  // namespace rlk::harness
