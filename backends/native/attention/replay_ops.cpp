// attention and attention_part as Hopper computes them, on any processor: sm90/t25k16/ex2/h8/attn128/s<S>; an
// implementation for every S and two instruction sets. For proof: a thousand times slower than the GPU.
#include <algorithm>
#include <vector>

#include "native/attention/replay.hpp"
#include "native/attention/splits.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using attn128::Problem;

std::int64_t blocks_of(std::int64_t rows) {
  return (rows + attention::kReplayRows - 1) / attention::kReplayRows;
}

template <Isa I>
struct Hopper {
  static const char* missing() {
    return replay_kernels<I>() == nullptr ? "this build lacks the instruction set" : nullptr;
  }
  static const ReplayKernels& kernels() { return *replay_kernels<I>(); }
};

// Of either op.
template <class A>
struct Replay {
  using Args = A;

  template <class By>
  static std::uint64_t workspace(const Problem& p, std::int32_t threads) {
    const std::int64_t blocks =
        p.cu_q ? blocks_of(p.queries * p.group) + p.sequences : blocks_of(p.queries * p.group) * p.sequences;
    return workers::workspace_for(threads, blocks * p.heads, attention::replay_scratch(p, By::kernels()));
  }

  template <class By>
  static rlk_code run(const Problem& p, const Call& call) {
    std::vector<attention::Block> blocks;
    for (std::int64_t n = 0; n < p.sequences; ++n)
      for (std::int64_t rows = p.q_len(n) * p.group, first = 0; first < rows; first += attention::kReplayRows)
        for (std::int64_t h = 0; h < p.heads; ++h)
          blocks.push_back(
              {n, h, first, static_cast<int>(std::min<std::int64_t>(attention::kReplayRows, rows - first))});
    workers::run_tasks(
        call, static_cast<std::int64_t>(blocks.size()), attention::replay_scratch(p, By::kernels()), 0,
        [&](std::int64_t task, std::byte* scratch) {
          attention::replay_forward(p, blocks[static_cast<std::size_t>(task)], By::kernels(), scratch);
        });
    return RLK_OK;
  }
};

template <class Args, Family F, Isa I, int S>
constexpr rlk_implementation replay(const char* arithmetic) {
  return attention::of_split<Replay<Args>, Hopper<I>, S>(
      facts_at<F, I>({.id = "",
                      .doc = "Hopper tensor cores' bits on the CPU",
                      .priority = 20,
                      .arithmetic = arithmetic,
                      .dtypes = RLK_BF16 | RLK_F16,
                      .traits = kPinned}));
}

}  // namespace

extern const rlk_implementation attention_replay_ex2_s1024_scalar, attention_replay_ex2_s1024_avx512,
    attention_replay_ex2_s512_scalar, attention_replay_ex2_s512_avx512, attention_replay_ex2_s2048_scalar,
    attention_replay_ex2_s2048_avx512, attention_replay_ex2_s4096_scalar, attention_replay_ex2_s4096_avx512,
    attention_replay_ex2_snone_scalar, attention_replay_ex2_snone_avx512;
constinit const rlk_implementation attention_replay_ex2_s1024_scalar =
    replay<Attention, "native.replay_sm90_ex2_s1024", Isa::scalar, 1024>("sm90/t25k16/ex2/h8/attn128/s1024");
constinit const rlk_implementation attention_replay_ex2_s1024_avx512 =
    replay<Attention, "native.replay_sm90_ex2_s1024", Isa::avx512, 1024>("sm90/t25k16/ex2/h8/attn128/s1024");
constinit const rlk_implementation attention_replay_ex2_s512_scalar =
    replay<Attention, "native.replay_sm90_ex2_s512", Isa::scalar, 512>("sm90/t25k16/ex2/h8/attn128/s512");
constinit const rlk_implementation attention_replay_ex2_s512_avx512 =
    replay<Attention, "native.replay_sm90_ex2_s512", Isa::avx512, 512>("sm90/t25k16/ex2/h8/attn128/s512");
constinit const rlk_implementation attention_replay_ex2_s2048_scalar =
    replay<Attention, "native.replay_sm90_ex2_s2048", Isa::scalar, 2048>("sm90/t25k16/ex2/h8/attn128/s2048");
constinit const rlk_implementation attention_replay_ex2_s2048_avx512 =
    replay<Attention, "native.replay_sm90_ex2_s2048", Isa::avx512, 2048>("sm90/t25k16/ex2/h8/attn128/s2048");
constinit const rlk_implementation attention_replay_ex2_s4096_scalar =
    replay<Attention, "native.replay_sm90_ex2_s4096", Isa::scalar, 4096>("sm90/t25k16/ex2/h8/attn128/s4096");
constinit const rlk_implementation attention_replay_ex2_s4096_avx512 =
    replay<Attention, "native.replay_sm90_ex2_s4096", Isa::avx512, 4096>("sm90/t25k16/ex2/h8/attn128/s4096");
constinit const rlk_implementation attention_replay_ex2_snone_scalar =
    replay<Attention, "native.replay_sm90_ex2_snone", Isa::scalar, 0>("sm90/t25k16/ex2/h8/attn128/snone");
constinit const rlk_implementation attention_replay_ex2_snone_avx512 =
    replay<Attention, "native.replay_sm90_ex2_snone", Isa::avx512, 0>("sm90/t25k16/ex2/h8/attn128/snone");

extern const rlk_implementation attention_part_replay_ex2_s1024_scalar,
    attention_part_replay_ex2_s1024_avx512, attention_part_replay_ex2_s512_scalar,
    attention_part_replay_ex2_s512_avx512, attention_part_replay_ex2_s2048_scalar,
    attention_part_replay_ex2_s2048_avx512, attention_part_replay_ex2_s4096_scalar,
    attention_part_replay_ex2_s4096_avx512, attention_part_replay_ex2_snone_scalar,
    attention_part_replay_ex2_snone_avx512;
constinit const rlk_implementation attention_part_replay_ex2_s1024_scalar =
    replay<AttentionPart, "native.replay_sm90_ex2_s1024", Isa::scalar, 1024>(
        "sm90/t25k16/ex2/h8/attn128/s1024");
constinit const rlk_implementation attention_part_replay_ex2_s1024_avx512 =
    replay<AttentionPart, "native.replay_sm90_ex2_s1024", Isa::avx512, 1024>(
        "sm90/t25k16/ex2/h8/attn128/s1024");
constinit const rlk_implementation attention_part_replay_ex2_s512_scalar =
    replay<AttentionPart, "native.replay_sm90_ex2_s512", Isa::scalar, 512>("sm90/t25k16/ex2/h8/attn128/s512");
constinit const rlk_implementation attention_part_replay_ex2_s512_avx512 =
    replay<AttentionPart, "native.replay_sm90_ex2_s512", Isa::avx512, 512>("sm90/t25k16/ex2/h8/attn128/s512");
constinit const rlk_implementation attention_part_replay_ex2_s2048_scalar =
    replay<AttentionPart, "native.replay_sm90_ex2_s2048", Isa::scalar, 2048>(
        "sm90/t25k16/ex2/h8/attn128/s2048");
constinit const rlk_implementation attention_part_replay_ex2_s2048_avx512 =
    replay<AttentionPart, "native.replay_sm90_ex2_s2048", Isa::avx512, 2048>(
        "sm90/t25k16/ex2/h8/attn128/s2048");
constinit const rlk_implementation attention_part_replay_ex2_s4096_scalar =
    replay<AttentionPart, "native.replay_sm90_ex2_s4096", Isa::scalar, 4096>(
        "sm90/t25k16/ex2/h8/attn128/s4096");
constinit const rlk_implementation attention_part_replay_ex2_s4096_avx512 =
    replay<AttentionPart, "native.replay_sm90_ex2_s4096", Isa::avx512, 4096>(
        "sm90/t25k16/ex2/h8/attn128/s4096");
constinit const rlk_implementation attention_part_replay_ex2_snone_scalar =
    replay<AttentionPart, "native.replay_sm90_ex2_snone", Isa::scalar, 0>("sm90/t25k16/ex2/h8/attn128/snone");
constinit const rlk_implementation attention_part_replay_ex2_snone_avx512 =
    replay<AttentionPart, "native.replay_sm90_ex2_snone", Isa::avx512, 0>("sm90/t25k16/ex2/h8/attn128/snone");

}  // namespace rlk::native
