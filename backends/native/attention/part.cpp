// attention_part and attention_merge on the CPU.
//
// attention_part: arithmetic ids, instruction sets and products of attention; a task is a block of rows and a split, and leaves
// the split's sums. attention_merge (attn128/merge): a row at a time, its splits one after another; 4 (Dv + 2) bytes are read and 2 Dv
// fused multiply-adds made for each.
#include <cmath>

#include "native/attention/golden.hpp"
#include "native/attention/tasks.hpp"

namespace rlk::native {
namespace {

using attn128::Merge;
using attn128::Problem;
using attn128::problem_of;

struct Part {
  using Args = AttentionPart;

  template <class By>
  static std::uint64_t workspace(const Problem& p, std::int32_t threads) {
    return workers::workspace_for(threads, attention::most_blocks(p) * p.splits(),
                                  attention::scratch_bytes<By>(p), 0);
  }

  template <class By>
  static rlk_code run(const Problem& p, const Call& call) {
    const std::vector<attention::Block> blocks = attention::blocks_in(p);
    const std::int64_t splits = p.splits();
    attention::run_all<By>(call, p, static_cast<std::int64_t>(blocks.size()) * splits, 0,
                           [&](std::int64_t i, float* scratch) {
                             By::engine().forward_split(p, blocks[static_cast<std::size_t>(i / splits)],
                                                        i % splits, p.partials, scratch);
                           });
    return RLK_OK;
  }
};

// ---- golden

void golden_split(const Problem& p, std::int64_t n, std::int64_t kv_head, const void* q,
                  attn128::Visible keys, float* to) {
  constexpr double kLog2e = 1.4426950408889634;
  std::vector<double> weights = attention::golden_scores(p, n, q, kv_head, keys),
                      o(static_cast<std::size_t>(p.value_width));
  double top = -__builtin_inf(), sum = 0;
  for (double x : weights) top = x > top ? x : top;
  const double base = top == -__builtin_inf() ? 0 : top;
  const attn128::KeyRows places = p.key_rows(n);
  const std::int64_t from = p.here(n).first;
  const float factor = p.v_scale.of(kv_head);
  for (std::size_t j = 0; j < weights.size(); ++j) {
    sum += weights[j] = simt::exp<double>(weights[j] - base);
    const void* v = p.key(p.v, n, places, keys.first + static_cast<std::int64_t>(j) - from, kv_head);
    for (std::size_t d = 0; d < o.size(); ++d)
      o[d] = simt::fused(weights[j], double{attn128::element(p.v, v, static_cast<std::int64_t>(d), factor)},
                         o[d]);
  }
  const bool none = keys.first >= keys.last;
  rows::store(rows::Type::f32, to, 0, top * kLog2e);
  rows::store(rows::Type::f32, to, 1, none ? double{attn128::kNoKey} : sum);
  for (std::size_t d = 0; d < o.size(); ++d)
    rows::store(rows::Type::f32, to, 2 + static_cast<std::int64_t>(d), o[d]);
}

rlk_code run_golden(const AttentionPart& a, const Call& call) {
  const Problem p = problem_of(a);
  if (const rlk_code code = attention::Check(AttentionPart::kName, p, call)()) return code;
  const std::int64_t heads = std::int64_t{p.heads} * p.group, splits = p.splits();
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    const attn128::Visible here = p.here(n);
    const std::int64_t offset = p.keys(n) - p.q_len(n), first = p.cu_q ? p.q_begin(n) : n * p.queries;
    call.parallel_for(p.q_len(n) * heads, [&](std::int64_t row) {
      const std::int64_t i = row / heads, head = row % heads;
      const attn128::Visible seen = p.visible(offset + i, here);
      for (std::int64_t s = 0; s < splits; ++s) {
        attn128::Visible keys = seen;
        if (p.split != 0) {
          keys.first = std::max(seen.first, here.first + s * p.split);
          keys.last = std::max(keys.first, std::min(seen.last, here.first + (s + 1) * p.split));
        }
        golden_split(p, n, head / p.group, p.q.at(n, p.q_begin(n) + i, head), keys,
                     p.part(p.partials, (first + i) * heads + head, s));
      }
    });
  }
  return RLK_OK;
}

// ---- attention_merge

template <Isa I>
rlk_code merge(const AttentionMerge& a, const Call& call) {
  const Merge g = attn128::merge_of(a);
  call.parallel_for(g.rows(), [&](std::int64_t row) { attention::engine_for(I).merge(g, row); });
  return RLK_OK;
}

void golden_merge_row(const Merge& g, std::int64_t row) {
  constexpr double kLn2 = 0.6931471805599453, kLog2e = 1.4426950408889634;
  const attn128::MergeRow at = attn128::merge_row(g, row);
  const std::int64_t count = g.parts * g.splits;
  const double sink = g.sinks != nullptr ? double{g.sinks[at.head]} : -__builtin_inf();
  double top = sink * kLog2e, sum = 0;
  for (std::int64_t i = 0; i < count; ++i)
    if (const float* part = attn128::split_at(g, at, i); part[1] != attn128::kNoKey)
      top = part[0] > top ? part[0] : top;
  const double base = top == -__builtin_inf() ? 0 : top;
  std::vector<double> o(static_cast<std::size_t>(g.width));
  for (std::int64_t i = 0; i < count; ++i) {
    const float* part = attn128::split_at(g, at, i);
    if (part[1] == attn128::kNoKey) continue;
    const double scale = simt::exp<double>((part[0] - base) * kLn2);
    sum = simt::fused(double{part[1]}, scale, sum);
    for (std::size_t d = 0; d < o.size(); ++d) o[d] = simt::fused(double{part[2 + d]}, scale, o[d]);
  }
  const bool none = sum == 0;
  if (g.sinks != nullptr) sum += simt::exp<double>(sink - base * kLn2);
  for (std::size_t d = 0; d < o.size(); ++d)
    rows::store(g.out.type, g.out.at(at.n, at.token, at.head), static_cast<std::int64_t>(d),
                none ? 0.0 : o[d] / sum);
  if (g.lse)
    rows::store(rows::Type::f32, g.lse.at(at.n, at.token, at.head), 0,
                none ? sink : base * kLn2 + simt::ln<double>(sum));
}

rlk_code golden_merge(const AttentionMerge& a, const Call& call) {
  const Merge g = attn128::merge_of(a);
  call.parallel_for(g.rows(), [&](std::int64_t row) { golden_merge_row(g, row); });
  return RLK_OK;
}

}  // namespace

extern const Levels attention_part_s1024, attention_part_s512, attention_part_s2048, attention_part_s4096,
    attention_part_snone, attention_merge_rows;
constinit const Levels attention_part_s1024 =
    attention::tiles<Part, "native.tiles_s1024", 1024>("fma32/attn128/s1024");
constinit const Levels attention_part_s512 =
    attention::tiles<Part, "native.tiles_s512", 512>("fma32/attn128/s512");
constinit const Levels attention_part_s2048 =
    attention::tiles<Part, "native.tiles_s2048", 2048>("fma32/attn128/s2048");
constinit const Levels attention_part_s4096 =
    attention::tiles<Part, "native.tiles_s4096", 4096>("fma32/attn128/s4096");
constinit const Levels attention_part_snone =
    attention::tiles<Part, "native.tiles_snone", 0>("fma32/attn128/snone");
constinit const Levels attention_merge_rows = by_level([]<Isa I>() {
  Facts facts = pinned_facts("a row at a time", "attn128/merge", RLK_F32);
  facts.priority = 110;
  return implement<AttentionMerge, merge<I>>(facts_at<"native.rows", I>(facts));
});

extern const rlk_implementation attention_part_amx_s1024, attention_part_amx_s512, attention_part_amx_s2048,
    attention_part_amx_s4096, attention_part_amx_snone, attention_part_golden, attention_merge_golden;
constinit const rlk_implementation attention_part_amx_s1024 =
    attention::amx<Part, 1024>("native.amx_s1024", "amx/k32/attn128/s1024");
constinit const rlk_implementation attention_part_amx_s512 =
    attention::amx<Part, 512>("native.amx_s512", "amx/k32/attn128/s512");
constinit const rlk_implementation attention_part_amx_s2048 =
    attention::amx<Part, 2048>("native.amx_s2048", "amx/k32/attn128/s2048");
constinit const rlk_implementation attention_part_amx_s4096 =
    attention::amx<Part, 4096>("native.amx_s4096", "amx/k32/attn128/s4096");
constinit const rlk_implementation attention_part_amx_snone =
    attention::amx<Part, 0>("native.amx_snone", "amx/k32/attn128/snone");
constinit const rlk_implementation attention_part_golden =
    implement<AttentionPart, run_golden>(golden_facts("ascending fp64 sums, one rounding"));
constinit const rlk_implementation attention_merge_golden =
    implement<AttentionMerge, golden_merge>(golden_facts("ascending fp64 sums, one rounding", RLK_F32));

extern const Levels attention_part_replay_amx_s1024, attention_part_replay_amx_s512,
    attention_part_replay_amx_s2048, attention_part_replay_amx_s4096, attention_part_replay_amx_snone;
constinit const Levels attention_part_replay_amx_s1024 =
    attention::replay_amx<Part, "native.replay_amx_s1024", 1024>("amx/k32/attn128/s1024");
constinit const Levels attention_part_replay_amx_s512 =
    attention::replay_amx<Part, "native.replay_amx_s512", 512>("amx/k32/attn128/s512");
constinit const Levels attention_part_replay_amx_s2048 =
    attention::replay_amx<Part, "native.replay_amx_s2048", 2048>("amx/k32/attn128/s2048");
constinit const Levels attention_part_replay_amx_s4096 =
    attention::replay_amx<Part, "native.replay_amx_s4096", 4096>("amx/k32/attn128/s4096");
constinit const Levels attention_part_replay_amx_snone =
    attention::replay_amx<Part, "native.replay_amx_snone", 0>("amx/k32/attn128/snone");

}  // namespace rlk::native
