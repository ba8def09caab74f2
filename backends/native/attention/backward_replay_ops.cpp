// attention_bwd as Hopper computes it, on any processor: sm90/t25k16/attn128 and sm90/t25k16/ex2/attn128 on two instruction sets.
// For proof: a thousand times slower than the GPU.
#include <algorithm>
#include <vector>

#include "arithmetic/attention/bind.hpp"
#include "native/attention/backward_replay.hpp"
#include "native/attention/backward_rows.hpp"
#include "native/attention/check.hpp"

namespace rlk::native {
namespace {

using attn128::Backward;
using attn128::backward_of;
using attn128::Problem;
using attn128::Stat;

template <Isa I, attention::Exponential By>
struct Replay {
  static std::uint64_t scratch_bytes(const Problem& p) {
    return attention::backward_replay_scratch(p, *replay_kernels<I>());
  }
  static rlk_verdict supports(const AttentionBwd& a, const rlk_request&) {
    if (!replay_kernels<I>()) return refuse("this build lacks the instruction set");
    if (a.d_out.dtype() != a.q.dtype())
      return refuse("d_out is fp32, tensor cores take it in q's dtype", {}, "round d_out to q's dtype");
    return kAccept;
  }
  static std::uint64_t workspace(const AttentionBwd& a, const rlk_request& r) {
    const Backward g = backward_of(a);
    if (g.p.sequences == 0 || !replay_kernels<I>()) return 0;
    return attention::passes_bytes(g, r.threads, attention::kReplayBlock, scratch_bytes(g.p));
  }
  static rlk_code run(const AttentionBwd& a, const Call& call) {
    const Backward g = backward_of(a);
    const Problem& p = g.p;
    if (const rlk_code code = attention::Check("attention_bwd", p, call)()) return code;
    attention::clear_idle(g);
    std::vector<attention::Block> blocks;
    std::vector<attention::KeyTile> tiles;
    for (std::int64_t n = 0; n < p.sequences; ++n)
      for (std::int64_t h = 0; h < p.heads; ++h) {
        for (std::int64_t rows = p.q_len(n) * p.group, at = 0; at < rows; at += attention::kReplayBlock)
          blocks.push_back(
              {n, h, at, static_cast<int>(std::min<std::int64_t>(attention::kReplayBlock, rows - at))});
        const attn128::Visible keys = g.own_keys(n);
        for (std::int64_t at = keys.first; (g.d_k || g.d_v) && at < keys.last; at += attention::kTile)
          tiles.push_back({n, h, at});
      }
    const attention::ReplayWay way{*replay_kernels<I>(), By};
    attention::run_passes(
        call, g, blocks, tiles, scratch_bytes(p),
        [&](const attention::Block& block, Stat* stats, std::byte* scratch) {
          attention::replay_queries(g, block, stats, way, scratch);
        },
        [&](const attention::KeyTile& tile, const Stat* stats, std::byte* scratch) {
          attention::replay_keys(g, tile, stats, way, scratch);
        });
    return RLK_OK;
  }
};

template <Family F, Isa I, attention::Exponential By = attention::Exponential::own>
constexpr rlk_implementation replay(const char* arithmetic) {
  using Forms = Replay<I, By>;
  return implement<AttentionBwd, Forms::run, Forms::supports, Forms::workspace>(
      facts_at<F, I>({.id = "",
                      .doc = "Hopper tensor cores' bits on the CPU",
                      .priority = By == attention::Exponential::own ? 20 : 10,
                      .arithmetic = arithmetic,
                      .dtypes = RLK_BF16 | RLK_F16,
                      .traits = kPinned}));
}

}  // namespace

extern const rlk_implementation attention_bwd_replay_scalar, attention_bwd_replay_avx512;
constinit const rlk_implementation attention_bwd_replay_scalar =
    replay<"native.replay_sm90", Isa::scalar>("sm90/t25k16/attn128");
constinit const rlk_implementation attention_bwd_replay_avx512 =
    replay<"native.replay_sm90", Isa::avx512>("sm90/t25k16/attn128");

extern const rlk_implementation attention_bwd_replay_ex2_scalar, attention_bwd_replay_ex2_avx512;
constinit const rlk_implementation attention_bwd_replay_ex2_scalar =
    replay<"native.replay_sm90_ex2", Isa::scalar, attention::Exponential::unit>("sm90/t25k16/ex2/attn128");
constinit const rlk_implementation attention_bwd_replay_ex2_avx512 =
    replay<"native.replay_sm90_ex2", Isa::avx512, attention::Exponential::unit>("sm90/t25k16/ex2/attn128");

}  // namespace rlk::native
