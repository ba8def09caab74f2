// Replay of attention on Hopper (arithmetics sm90/t25k16/ex2/h8/attn128/s<S>): the chains are those of the tensor core,
// weights as the special function unit has 2^x, beside a reference that is held while no score exceeds it by much, and all
// else fp32 as everywhere.
#pragma once

#include "native/attention/engine.hpp"
#include "native/attention/exponential.hpp"
#include "native/lm_head/replay.hpp"

namespace rlk::native::attention {

// Rows of a task; they share the tiles of keys that are made ready for the replay.
inline constexpr int kReplayRows = 32;

// Bytes of scratch that a task needs.
std::uint64_t replay_scratch(const Problem& p, const ReplayKernels& kernels);

// Data is bf16 or fp16. Scratch lies on 64 bytes.
void replay_forward(const Problem& p, const Block& block, const ReplayKernels& kernels, void* scratch);

}  // namespace rlk::native::attention
