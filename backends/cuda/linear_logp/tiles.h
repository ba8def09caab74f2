// linear_logp's logits as they leave Hopper's tensor cores: summed, or made into their gradients, in the registers where they are,
// and never in memory. Calls of many rows, whose logits nothing bends or masks.
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "cuda/lm_head/gemm.h"

namespace rlk::cuda::linear_logp {

using lm_head::Gemm;
using lse128::Problem;
using lse128::State;

inline constexpr std::int64_t kTileRows = 256;  // of a pair of blocks, which share the weight's

// Whether the product of `g` and what is made of it are of that kind. 16-bit logits have hidden's dtype.
bool tiles_serve(const Gemm& g, const Problem& p);

// Of each leaf of a row the sums of its tiles of 128, in `room` places; and the targets' logits. g: rows of hidden, a multiple of
// kTileRows, by all of the call's weight; what it says of a result is not used.
cudaError_t launch_tiles(const Gemm& g, const Problem& p, State* tiles, std::int64_t room, float* targets,
                         int multiprocessors, cudaStream_t stream);
// g: likewise, by the weight of columns [begin, begin + g.n), into g.c of hidden's dtype. `states`: as logp's gradient has them.
cudaError_t launch_slopes(const Gemm& g, const Problem& p, std::int64_t begin, const State* states,
                          int multiprocessors, cudaStream_t stream);

}  // namespace rlk::cuda::linear_logp
