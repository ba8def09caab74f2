// attention_bwd as Hopper computes it, on any processor: sm90/t25k16/attn128 on two instruction sets. For proof: a thousand
// times slower than the GPU.
#include <algorithm>
#include <vector>

#include "arithmetic/attention/bind.hpp"
#include "native/attention/backward_replay.hpp"
#include "native/attention/backward_rows.hpp"
#include "native/attention/check.hpp"
#include "rlk/workers.hpp"

namespace rlk::native {
namespace {

using attn128::Backward;
using attn128::backward_of;
using attn128::Problem;
using attn128::Stat;

template <Isa I>
const ReplayKernels* kernels() {
  return I == Isa::avx512 ? replay_kernels_avx512() : &replay_kernels_scalar();
}

template <Isa I>
struct Replay {
  static rlk_verdict supports(const AttentionBwd& a, const rlk_request&) {
    if (!kernels<I>()) return refuse("this build lacks the instruction set");
    if (a.d_out.dtype() != a.q.dtype())
      return refuse("d_out is fp32, tensor cores take it in q's dtype", {}, "round d_out to q's dtype");
    return kAccept;
  }
  static std::uint64_t workspace(const AttentionBwd& a, const rlk_request& r) {
    const Backward g = backward_of(a);
    const Problem& p = g.p;
    if (p.sequences == 0 || !kernels<I>()) return 0;
    const std::int64_t blocks =
        attn::parts(p.queries * p.group, attn::kReplayBlock) * (p.cu_q ? 1 : p.sequences);
    const std::int64_t tiles = attn::parts(p.room, attn::kTile) * (p.cu_k ? 1 : p.sequences);
    return workers::workspace_for(r.threads, (std::max(blocks, tiles) + p.sequences) * p.heads,
                                  attn::backward_replay_scratch(p, *kernels<I>()), attn::stat_bytes(g));
  }
  static rlk_code run(const AttentionBwd& a, const Call& call) {
    const Backward g = backward_of(a);
    const Problem& p = g.p;
    if (const rlk_code code = attn::Check("attention_bwd", p, call)()) return code;
    attn::clear_idle(g);
    auto* stats = reinterpret_cast<Stat*>(workers::shared_workspace(call));
    std::vector<attn::Block> blocks;
    std::vector<attn::KeyTile> tiles;
    for (std::int64_t n = 0; n < p.sequences; ++n)
      for (std::int64_t h = 0; h < p.heads; ++h) {
        for (std::int64_t rows = p.q_len(n) * p.group, at = 0; at < rows; at += attn::kReplayBlock)
          blocks.push_back(
              {n, h, at, static_cast<int>(std::min<std::int64_t>(attn::kReplayBlock, rows - at))});
        for (std::int64_t at = 0; (g.d_k || g.d_v) && at < p.kv_count(n); at += attn::kTile)
          tiles.push_back({n, h, at});
      }
    const auto run_all = [&](const auto& tasks, auto one) {
      workers::run_tasks(call, static_cast<std::int64_t>(tasks.size()),
                         attn::backward_replay_scratch(p, *kernels<I>()), attn::stat_bytes(g),
                         [&](std::int64_t task, std::byte* scratch) {
                           one(g, tasks[static_cast<std::size_t>(task)], stats, *kernels<I>(), scratch);
                         });
    };
    run_all(blocks, attn::replay_queries);
    run_all(tiles, attn::replay_keys);
    if (g.d_sinks != nullptr)
      call.parallel_for(g.all_heads(), [&](std::int64_t head) { attn::sink_gradient(g, stats, head); });
    return RLK_OK;
  }
};

template <Isa I>
constexpr rlk_implementation replay() {
  using Forms = Replay<I>;
  return implement<AttentionBwd, Forms::run, Forms::supports, Forms::workspace>(
      facts_at<"native.replay_sm90", I>({.id = "",
                                         .doc = "Hopper tensor cores' bits on the CPU",
                                         .priority = 20,
                                         .arithmetic = "sm90/t25k16/attn128",
                                         .dtypes = RLK_BF16 | RLK_F16,
                                         .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT}));
}

}  // namespace

extern const rlk_implementation attention_bwd_replay_scalar, attention_bwd_replay_avx512;
constinit const rlk_implementation attention_bwd_replay_scalar = replay<Isa::scalar>();
constinit const rlk_implementation attention_bwd_replay_avx512 = replay<Isa::avx512>();

}  // namespace rlk::native
