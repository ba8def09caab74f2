// attention on the CPU: fma32/attn128/s<S> by instruction set, and amx/k32/attn128/s<S>; an implementation for every S.
//
// The attribute `split` chooses among the ids and each implementation refuses the others: so an id says all there is to
// know of the bits, to policies, certificates and replays alike, and the dispatcher needs to know nothing of splits.
//
// Operations: 2 (D + Dv) per query head and key that the tile grid holds for it. A task is up to 96 rows (queries of the heads
// that share keys) and reads each of their tiles of K and V once, or, where there are few of them, one split of their keys.
#include "native/attention/golden.hpp"
#include "native/attention/tasks.hpp"

namespace rlk::native {
namespace {

using attn128::Problem;
using attn128::problem_of;

// Bytes for the sums of splits that are tasks of their own: where blocks are too few to keep the workers busy, as in decoding.
// By shapes alone, as workspace is asked for before lengths are known.
std::uint64_t part_bytes(const Problem& p, std::int32_t threads) {
  constexpr std::int64_t kBlocksPerWorker = 4, kMost = std::int64_t{1} << 26;
  const std::int64_t blocks = attention::most_blocks(p), workers = workers::workers_for(threads, INT64_MAX);
  if (p.sequences == 0 || workers == 1 || blocks >= kBlocksPerWorker * workers) return 0;
  const std::int64_t floats = p.room > kMost ? 0 : attention::part_floats(p);
  return p.splits() == 1 || floats > kMost ? 0 : static_cast<std::uint64_t>(floats) * sizeof(float);
}

struct Whole {
  using Args = Attention;

  template <class By>
  static std::uint64_t workspace(const Problem& p, std::int32_t threads) {
    const std::uint64_t parts = part_bytes(p, threads);
    const std::int64_t tasks = attention::most_blocks(p) * (parts == 0 ? 1 : p.splits());
    return workers::workspace_for(threads, tasks, attention::scratch_bytes<By>(p), parts);
  }

  template <class By>
  static rlk_code run(const Problem& p, const Call& call) {
    const std::vector<attention::Block> blocks = attention::blocks_in(p);
    const attention::Engine& engine = By::engine();
    const std::uint64_t shared = part_bytes(p, call.threads());
    const auto block = [&](std::int64_t i) -> const attention::Block& {
      return blocks[static_cast<std::size_t>(i)];
    };
    const auto count = static_cast<std::int64_t>(blocks.size());
    if (shared == 0) {
      attention::run_all<By>(call, p, count, 0,
                             [&](std::int64_t i, float* scratch) { engine.forward(p, block(i), scratch); });
      return RLK_OK;
    }
    auto* parts = reinterpret_cast<float*>(workers::shared_workspace(call));
    const std::int64_t splits = p.splits();
    attention::run_all<By>(call, p, count * splits, shared, [&](std::int64_t i, float* scratch) {
      engine.forward_split(p, block(i / splits), i % splits, parts, scratch);
    });
    attention::run_all<By>(call, p, count, shared, [&](std::int64_t i, float* scratch) {
      engine.join_splits(p, block(i), parts, scratch);
    });
    return RLK_OK;
  }
};

// ---- golden

void golden_row(const Problem& p, std::int64_t n, std::int64_t i, std::int64_t head) {
  const attn128::KeyRows places = p.key_rows(n);
  const std::int64_t keys = p.kv_count(n), token = p.q_begin(n) + i;
  const std::int64_t kv_head = head / p.group;
  const float factor = p.v_scale.of(kv_head);
  const attn128::Visible seen = p.visible(keys - p.q_len(n) + i, keys);
  std::vector<double> scores = attention::golden_scores(p, n, p.q.at(n, token, head), kv_head, seen);
  std::vector<double> out(static_cast<std::size_t>(p.value_width));
  double top = -__builtin_inf(), sum = 0;
  bool any = false;
  for (double x : scores) {
    if (x > top) top = x;
    any = any || x != -__builtin_inf();
  }
  double lse = p.sinks != nullptr ? double{p.sinks[head]} : -__builtin_inf();
  if (any) {
    const double sink = lse;
    if (!(top > sink)) top = sink;
    const double base = top == -__builtin_inf() ? 0 : top;
    for (double& x : scores) sum += x = simt::exp<double>(x - base);
    if (p.sinks != nullptr) sum += simt::exp<double>(sink - base);
    for (std::int64_t j = seen.first; j < seen.last; ++j) {
      const void* v = p.key(p.v, n, places, j, kv_head);
      const double weight = scores[static_cast<std::size_t>(j - seen.first)];
      for (std::size_t d = 0; d < out.size(); ++d)
        out[d] = simt::fused(weight, double{attn128::element(p.v, v, static_cast<std::int64_t>(d), factor)},
                             out[d]);
    }
    for (double& x : out) x /= sum;
    lse = base + simt::ln<double>(sum);
  }
  for (std::size_t d = 0; d < out.size(); ++d)
    rows::store(p.out.type, p.out.at(n, token, head), static_cast<std::int64_t>(d), out[d]);
  if (p.lse) rows::store(rows::Type::f32, p.lse.at(n, token, head), 0, lse);
}

rlk_code run_golden(const Attention& a, const Call& call) {
  const Problem p = problem_of(a);
  if (const rlk_code code = attention::Check("attention", p, call)()) return code;
  const std::int64_t heads = std::int64_t{p.heads} * p.group;
  for (std::int64_t n = 0; n < p.sequences; ++n)
    call.parallel_for(p.q_len(n) * heads,
                      [&](std::int64_t row) { golden_row(p, n, row / heads, row % heads); });
  return RLK_OK;
}

}  // namespace

extern const Levels attention_s1024, attention_s512, attention_s2048, attention_s4096, attention_snone;
constinit const Levels attention_s1024 =
    attention::tiles<Whole, "native.tiles_s1024", 1024>("fma32/attn128/s1024");
constinit const Levels attention_s512 =
    attention::tiles<Whole, "native.tiles_s512", 512>("fma32/attn128/s512");
constinit const Levels attention_s2048 =
    attention::tiles<Whole, "native.tiles_s2048", 2048>("fma32/attn128/s2048");
constinit const Levels attention_s4096 =
    attention::tiles<Whole, "native.tiles_s4096", 4096>("fma32/attn128/s4096");
constinit const Levels attention_snone =
    attention::tiles<Whole, "native.tiles_snone", 0>("fma32/attn128/snone");

extern const rlk_implementation attention_amx_s1024, attention_amx_s512, attention_amx_s2048,
    attention_amx_s4096, attention_amx_snone, attention_golden;
constinit const rlk_implementation attention_amx_s1024 =
    attention::amx<Whole, 1024>("native.amx_s1024", "amx/k32/attn128/s1024");
constinit const rlk_implementation attention_amx_s512 =
    attention::amx<Whole, 512>("native.amx_s512", "amx/k32/attn128/s512");
constinit const rlk_implementation attention_amx_s2048 =
    attention::amx<Whole, 2048>("native.amx_s2048", "amx/k32/attn128/s2048");
constinit const rlk_implementation attention_amx_s4096 =
    attention::amx<Whole, 4096>("native.amx_s4096", "amx/k32/attn128/s4096");
constinit const rlk_implementation attention_amx_snone =
    attention::amx<Whole, 0>("native.amx_snone", "amx/k32/attn128/snone");
constinit const rlk_implementation attention_golden =
    implement<Attention, run_golden>(golden_facts("ascending fp64 sums, one rounding"));

extern const Levels attention_replay_amx_s1024, attention_replay_amx_s512, attention_replay_amx_s2048,
    attention_replay_amx_s4096, attention_replay_amx_snone;
constinit const Levels attention_replay_amx_s1024 =
    attention::replay_amx<Whole, "native.replay_amx_s1024", 1024>("amx/k32/attn128/s1024");
constinit const Levels attention_replay_amx_s512 =
    attention::replay_amx<Whole, "native.replay_amx_s512", 512>("amx/k32/attn128/s512");
constinit const Levels attention_replay_amx_s2048 =
    attention::replay_amx<Whole, "native.replay_amx_s2048", 2048>("amx/k32/attn128/s2048");
constinit const Levels attention_replay_amx_s4096 =
    attention::replay_amx<Whole, "native.replay_amx_s4096", 4096>("amx/k32/attn128/s4096");
constinit const Levels attention_replay_amx_snone =
    attention::replay_amx<Whole, "native.replay_amx_snone", 0>("amx/k32/attn128/snone");

}  // namespace rlk::native
