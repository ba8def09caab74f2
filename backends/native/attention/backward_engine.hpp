// attention_bwd on the CPU (arithmetic fma32/attn128), compiled once per instruction set; the choice changes no bit.
//
// Two passes that each compute scores anew, so that every sum has one owner and one order: `queries` owns rows of q, `keys` owns
// tiles of keys. Where sequences and heads are enough for all workers, `pair` owns all of one: scores are computed once, and
// each tile of keys in turn adds its part of d_q.
#pragma once

#include "arithmetic/attention/backward.hpp"
#include "native/attention/engine.hpp"

namespace rlk::native::attention {

using attn128::Backward;
using attn128::Stat;

// A task of the second pass: keys [at, at + kTile) of sequence n and head h.
struct KeyTile {
  std::int64_t n, h, at;
};

struct BackwardEngine {
  // Leaves stats[row, head] for the other pass, and d_q where there is one.
  void (*queries)(const Backward& g, const Block& block, Stat* stats, float* scratch);
  // d_k and d_v.
  void (*keys)(const Backward& g, const KeyTile& tile, const Stat* stats, float* scratch);
  // d_q, d_k and d_v of sequence n and head h; sums: of d_q, [query, head of the group, width].
  void (*pair)(const Backward& g, std::int64_t n, std::int64_t h, const Stat* stats, float* sums,
               float* scratch);
  std::int64_t (*scratch_floats)(const Problem& p);
};
extern const BackwardEngine kBackwardScalar, kBackwardAvx2, kBackwardAvx512;

constexpr const BackwardEngine& backward_engine_for(Isa isa) {
  return isa == Isa::avx512 ? kBackwardAvx512 : isa == Isa::avx2 ? kBackwardAvx2 : kBackwardScalar;
}

// Sums of heads that wait for others: one for each level of the tree.
inline int levels_of(int group) {
  if ((group & (group - 1)) != 0) return 2;
  int levels = 1;
  while (group > 1) group /= 2, ++levels;
  return levels;
}

}  // namespace rlk::native::attention
