// KDA in chunks on the CPU (arithmetic fma32/kda), compiled once per instruction set; the choice changes no
// bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arithmetic/kda/problem.hpp"
#include "native/levels.hpp"

namespace rlk::native::kda {

using namespace rlk::kda;

// Tasks may run in any order on any number of threads, each with its own scratch, 64-byte aligned. `partials`
// holds partials_bytes() for the whole call; finish() runs once per value head after all backward tasks are
// done.
struct Engine {
  const char* isa;
  void (*forward)(const Problem& p, std::int64_t task, float* scratch);
  void (*backward)(const Problem& p, std::int64_t task, float* scratch, double* partials);
  void (*finish)(const Problem& p, const double* partials);
  void (*decode)(const Problem& p, std::int64_t task);             // one per (sequence, value head)
  void (*step)(const Step& p, std::int64_t task, float* scratch);  // likewise
  void (*gate)(const Problem& p, std::int64_t block);              // one per block of tokens
  void (*gate_backward)(const Problem& p, std::int64_t block, double* partials);
  // fma32/kda/seg4096, each when all tasks of the one before are done (arithmetic/kda/segments.hpp).
  void (*map_segment)(const Problem& p, std::int64_t task, float* scratch, float* maps);
  void (*join_segments)(const Problem& p, std::int64_t task, float* scratch, float* maps);
  void (*run_segment)(const Problem& p, std::int64_t task, float* scratch, const float* maps);
  void (*map_segment_back)(const Problem& p, std::int64_t task, float* scratch, float* ends);
  void (*join_segments_back)(const Problem& p, std::int64_t task, float* scratch, const float* maps,
                             float* ends);
  void (*run_segment_back)(const Problem& p, std::int64_t task, float* scratch, const float* maps,
                           const float* ends, double* partials);
};

extern const Engine kPortable, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kPortable;
}

std::int64_t forward_task_count(const Problem& p);
std::int64_t backward_task_count(const Problem& p);
std::size_t forward_scratch_bytes(const Problem& p);
std::size_t backward_scratch_bytes(const Problem& p);
std::size_t step_scratch_bytes(const Step& p);
std::size_t partials_bytes(const Problem& p);
// The gate's backward has a partial per block of tokens, and finish() takes them as sequences.
std::int64_t gate_block_count(const Problem& p);

// Of calls by segments: how many there are of whole ones and of all, scratch of any task, and what the steps leave each other.
struct SegmentSizes {
  std::int64_t maps = 0, pieces = 0;
  std::size_t scratch_bytes = 0, back_scratch_bytes = 0, map_bytes = 0, end_bytes = 0;
};
SegmentSizes segment_sizes(const Problem& p);

}  // namespace rlk::native::kda
