// attention and attention_part as Hopper computes attention, on any processor: sm90/t25k16/attn128/s<S>, an implementation for every S and two
// instruction sets. For proof: a thousand times slower than the GPU.
#include <algorithm>
#include <string>
#include <vector>

#include "arithmetic/attention/bind.hpp"
#include "native/attention/check.hpp"
#include "native/attention/replay.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using attn128::Problem;
using attn128::problem_of;

// There are two.
template <Isa I>
const ReplayKernels* kernels() {
  return I == Isa::avx512 ? replay_kernels_avx512() : &replay_kernels_scalar();
}

std::int64_t blocks_of(std::int64_t rows) { return (rows + attn::kReplayRows - 1) / attn::kReplayRows; }

// Args is Attention or AttentionPart.
template <class Args, Isa I, int S>
struct Replays {
  static rlk_verdict supports(const Args& a, const rlk_request&) {
    if (!kernels<I>()) return refuse("this build lacks the instruction set");
    if (a.split == S) return kAccept;
    return refuse("split is {0}, this arithmetic has {1}", {a.split, S},
                  "set split, or take another arithmetic");
  }
  static std::uint64_t workspace(const Args& a, const rlk_request& r) {
    const Problem p = problem_of(a);
    const std::int64_t blocks =
        p.cu_q ? blocks_of(p.queries * p.group) + p.sequences : blocks_of(p.queries * p.group) * p.sequences;
    return workers::workspace_for(r.threads, blocks * p.heads, attn::replay_scratch(p, *kernels<I>()));
  }
  static rlk_code run(const Args& a, const Call& call) {
    const Problem p = problem_of(a);
    if (a.split != S)
      return call.fail(RLK_UNSUPPORTED, std::string(Args::kName) + ": split is not this implementation's");
    if (const rlk_code code = attn::Check(Args::kName, p, call)()) return code;
    std::vector<attn::Block> blocks;
    for (std::int64_t n = 0; n < p.sequences; ++n)
      for (std::int64_t rows = p.q_len(n) * p.group, first = 0; first < rows; first += attn::kReplayRows)
        for (std::int64_t h = 0; h < p.heads; ++h)
          blocks.push_back(
              {n, h, first, static_cast<int>(std::min<std::int64_t>(attn::kReplayRows, rows - first))});
    workers::run_tasks(call, static_cast<std::int64_t>(blocks.size()), attn::replay_scratch(p, *kernels<I>()),
                       0, [&](std::int64_t task, std::byte* scratch) {
                         attn::replay_forward(p, blocks[static_cast<std::size_t>(task)], *kernels<I>(),
                                              scratch);
                       });
    return RLK_OK;
  }
};

template <class Args, Family F, Isa I, int S, int Order>
constexpr rlk_implementation replay(const char* arithmetic) {
  using Forms = Replays<Args, I, S>;
  return implement<Args, Forms::run, Forms::supports, Forms::workspace>(
      facts_at<F, I>({.id = "",
                      .doc = "Hopper tensor cores' bits on the CPU",
                      .priority = 20 - 3 * Order,
                      .arithmetic = arithmetic,
                      .dtypes = RLK_BF16 | RLK_F16,
                      .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT}));
}

}  // namespace

extern const rlk_implementation attention_replay_s1024_scalar, attention_replay_s1024_avx512,
    attention_replay_s512_scalar, attention_replay_s512_avx512, attention_replay_s2048_scalar,
    attention_replay_s2048_avx512, attention_replay_s4096_scalar, attention_replay_s4096_avx512,
    attention_replay_snone_scalar, attention_replay_snone_avx512;
constinit const rlk_implementation attention_replay_s1024_scalar =
    replay<Attention, "native.replay_sm90_s1024", Isa::scalar, 1024, 0>("sm90/t25k16/attn128/s1024");
constinit const rlk_implementation attention_replay_s1024_avx512 =
    replay<Attention, "native.replay_sm90_s1024", Isa::avx512, 1024, 0>("sm90/t25k16/attn128/s1024");
constinit const rlk_implementation attention_replay_s512_scalar =
    replay<Attention, "native.replay_sm90_s512", Isa::scalar, 512, 1>("sm90/t25k16/attn128/s512");
constinit const rlk_implementation attention_replay_s512_avx512 =
    replay<Attention, "native.replay_sm90_s512", Isa::avx512, 512, 1>("sm90/t25k16/attn128/s512");
constinit const rlk_implementation attention_replay_s2048_scalar =
    replay<Attention, "native.replay_sm90_s2048", Isa::scalar, 2048, 2>("sm90/t25k16/attn128/s2048");
constinit const rlk_implementation attention_replay_s2048_avx512 =
    replay<Attention, "native.replay_sm90_s2048", Isa::avx512, 2048, 2>("sm90/t25k16/attn128/s2048");
constinit const rlk_implementation attention_replay_s4096_scalar =
    replay<Attention, "native.replay_sm90_s4096", Isa::scalar, 4096, 3>("sm90/t25k16/attn128/s4096");
constinit const rlk_implementation attention_replay_s4096_avx512 =
    replay<Attention, "native.replay_sm90_s4096", Isa::avx512, 4096, 3>("sm90/t25k16/attn128/s4096");
constinit const rlk_implementation attention_replay_snone_scalar =
    replay<Attention, "native.replay_sm90_snone", Isa::scalar, 0, 4>("sm90/t25k16/attn128/snone");
constinit const rlk_implementation attention_replay_snone_avx512 =
    replay<Attention, "native.replay_sm90_snone", Isa::avx512, 0, 4>("sm90/t25k16/attn128/snone");

extern const rlk_implementation attention_part_replay_s1024_scalar, attention_part_replay_s1024_avx512,
    attention_part_replay_s512_scalar, attention_part_replay_s512_avx512, attention_part_replay_s2048_scalar,
    attention_part_replay_s2048_avx512, attention_part_replay_s4096_scalar,
    attention_part_replay_s4096_avx512, attention_part_replay_snone_scalar,
    attention_part_replay_snone_avx512;
constinit const rlk_implementation attention_part_replay_s1024_scalar =
    replay<AttentionPart, "native.replay_sm90_s1024", Isa::scalar, 1024, 0>("sm90/t25k16/attn128/s1024");
constinit const rlk_implementation attention_part_replay_s1024_avx512 =
    replay<AttentionPart, "native.replay_sm90_s1024", Isa::avx512, 1024, 0>("sm90/t25k16/attn128/s1024");
constinit const rlk_implementation attention_part_replay_s512_scalar =
    replay<AttentionPart, "native.replay_sm90_s512", Isa::scalar, 512, 1>("sm90/t25k16/attn128/s512");
constinit const rlk_implementation attention_part_replay_s512_avx512 =
    replay<AttentionPart, "native.replay_sm90_s512", Isa::avx512, 512, 1>("sm90/t25k16/attn128/s512");
constinit const rlk_implementation attention_part_replay_s2048_scalar =
    replay<AttentionPart, "native.replay_sm90_s2048", Isa::scalar, 2048, 2>("sm90/t25k16/attn128/s2048");
constinit const rlk_implementation attention_part_replay_s2048_avx512 =
    replay<AttentionPart, "native.replay_sm90_s2048", Isa::avx512, 2048, 2>("sm90/t25k16/attn128/s2048");
constinit const rlk_implementation attention_part_replay_s4096_scalar =
    replay<AttentionPart, "native.replay_sm90_s4096", Isa::scalar, 4096, 3>("sm90/t25k16/attn128/s4096");
constinit const rlk_implementation attention_part_replay_s4096_avx512 =
    replay<AttentionPart, "native.replay_sm90_s4096", Isa::avx512, 4096, 3>("sm90/t25k16/attn128/s4096");
constinit const rlk_implementation attention_part_replay_snone_scalar =
    replay<AttentionPart, "native.replay_sm90_snone", Isa::scalar, 0, 4>("sm90/t25k16/attn128/snone");
constinit const rlk_implementation attention_part_replay_snone_avx512 =
    replay<AttentionPart, "native.replay_sm90_snone", Isa::avx512, 0, 4>("sm90/t25k16/attn128/snone");

}  // namespace rlk::native
