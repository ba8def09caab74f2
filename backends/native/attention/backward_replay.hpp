// Replay of attention's gradients on Hopper (arithmetics sm90/t25k16/attn128 and sm90/t25k16/ex2/attn128): the chains are those
// of the tensor core, the steps between them fp32 as everywhere. A chain over rows of q counts its groups of 16 from the
// sequence's first row.
#pragma once

#include "native/attention/backward_engine.hpp"
#include "native/attention/exponential.hpp"
#include "native/lm_head/replay.hpp"

namespace rlk::native::attention {

// Rows of q in a block: whole groups of a chain.
inline constexpr int kReplayBlock = 32;

// Bytes of scratch that a task needs; it lies on 64 bytes.
std::uint64_t backward_replay_scratch(const Problem& p, const ReplayKernels& kernels);

// Who computes: chains, and 2^x of weights.
struct ReplayWay {
  const ReplayKernels& kernels;
  Exponential by;
};

// A block of at most kReplayBlock rows: leaves their stats, and d_q where there is one. Data is bf16 or fp16.
void replay_queries(const Backward& g, const Block& block, Stat* stats, const ReplayWay& way,
                    std::byte* scratch);
// d_k and d_v of a tile of keys.
void replay_keys(const Backward& g, const KeyTile& tile, const Stat* stats, const ReplayWay& way,
                 std::byte* scratch);

}  // namespace rlk::native::attention
