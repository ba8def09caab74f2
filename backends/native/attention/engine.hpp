// attention on the CPU (arithmetic fma32/attn128/s<S>), compiled once per instruction set; the choice changes no bit.
#pragma once

#include "arithmetic/attention/problem.hpp"
#include "native/levels.hpp"

namespace rlk::native::attention {

using attn128::kTile;
using attn128::Problem;

// Rows of a task: the queries of one head of k and v, those that share a key side by side. They share a tile of keys, which
// is turned once for all of them. A multiple of 6, which is what the widest product holds in registers.
inline constexpr int kRows = 96;

// A task: rows [first, first + count) of sequence n and head h.
struct Block {
  std::int64_t n, h, first;
  int count;
};

struct Engine {
  void (*forward)(const Problem& p, const Block& block, float* scratch);
  // The same in two steps, for fewer blocks than workers: each split's sums in `parts`, then what they make. The first step
  // alone is attention_part, where splits count from the first one here.
  void (*forward_split)(const Problem& p, const Block& block, std::int64_t split, float* parts,
                        float* scratch);
  void (*join_splits)(const Problem& p, const Block& block, const float* parts, float* scratch);
  // A row of attention_merge.
  void (*merge)(const attn128::Merge& g, std::int64_t row);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

// The sums of all rows in each split that there is room for: m, l and O.
inline std::int64_t part_floats(const Problem& p) {
  return p.queries * (p.cu_q ? 1 : p.sequences) * p.heads * p.group * p.splits() * (p.value_width + 2);
}

inline std::int64_t scratch_floats(const Problem& p) {
  const std::int64_t d = p.width, dv = p.value_width;
  return kTile * (d + dv) + 16 * d + kRows * (d + kTile + 2 * dv) + 2 * kTile + 4 * kRows;
}

// Beside it, of an fp8 cache: a tile of keys and values as numbers of at most 32 bits.
inline std::int64_t widened_floats(const Problem& p) {
  return p.k.f8 ? kTile * (p.width + p.value_width) : 0;
}

}  // namespace rlk::native::attention
