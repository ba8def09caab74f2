// attention_bwd on the CPU: fma32/attn128 by instruction set, amx/k32/attn128, and golden.
//
// Operations: 2 (3 D + 2 Dv) per query head and key for d_k and d_v, 2 (2 D + Dv) for d_q: scores are computed twice, so that
// no sum crosses tasks; or 2 (3 D + 2 Dv) for all three, where a task has a sequence and head. Workspace: 8 bytes per query and
// head, 4 D more in the latter case, beside the tasks' own.
#include <algorithm>
#include <vector>

#include "arithmetic/attention/bind.hpp"
#include "native/attention/backward_rows.hpp"
#include "native/attention/check.hpp"
#include "native/attention/unit.hpp"

namespace rlk::native {
namespace {

using attention::parts;
using attn128::Backward;
using attn128::backward_of;
using attn128::Problem;
using attn128::Stat;

// Who computes a task.
template <Isa I>
struct Vectors {
  static const char* missing() { return nullptr; }
  static const attention::BackwardEngine& engine() { return attention::backward_engine_for(I); }
};
template <const attention::BackwardEngine* (*Get)()>
struct OnUnit {
  static const char* missing() { return Get() == nullptr ? kNoUnit : nullptr; }
  static const attention::BackwardEngine& engine() { return *Get(); }
};

std::uint64_t scratch_bytes(const Problem& p, const attention::BackwardEngine& engine) {
  return static_cast<std::uint64_t>(engine.scratch_floats(p)) * sizeof(float);
}

// Bytes of d_q's sums, where a sequence and head is a task: five products for seven, if workers have as many of them or nearly
// so. By shapes alone, as workspace is asked for before lengths are known.
std::uint64_t sum_bytes(const Backward& g, std::int32_t threads) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;  // floats
  if (!g.d_q || !(g.d_k || g.d_v) || g.p.prefix_of) return 0;
  const std::int64_t pairs = g.p.sequences * g.p.heads, workers = workers::workers_for(threads, INT64_MAX),
                     turns = (pairs + workers - 1) / workers;
  if (5 * turns * workers > 6 * pairs || g.rows() > kMost / g.all_heads() / g.p.width) return 0;
  return static_cast<std::uint64_t>(g.rows() * g.all_heads() * g.p.width) * sizeof(float);
}

template <class By>
std::uint64_t workspace(const AttentionBwd& a, const rlk_request& r) {
  const Backward g = backward_of(a);
  if (g.p.sequences == 0 || By::missing()) return 0;
  return attention::passes_bytes(g, r.threads, attention::kRows, scratch_bytes(g.p, By::engine()),
                                 sum_bytes(g, r.threads));
}
template <class By>
rlk_verdict supports(const AttentionBwd& a, const rlk_request&) {
  if (const char* missing = By::missing()) return refuse(missing);
  if (a.d_out.dtype() != a.q.dtype())
    return refuse("d_out is fp32, a matrix unit takes it in q's dtype", {}, "round d_out to q's dtype");
  return kAccept;
}

// ---- tiles

// The first pass leaves stats alone.
void run_pairs(const Backward& g, const Call& call, const attention::BackwardEngine& engine,
               const std::vector<attention::Block>& blocks, std::uint64_t sum_bytes) {
  const Problem& p = g.p;
  Backward stats_alone = g;
  stats_alone.d_q = {};
  struct Pair {
    std::int64_t n, h;
  };
  std::vector<Pair> pairs;
  for (std::int64_t n = 0; n < p.sequences; ++n)
    for (std::int64_t h = 0; h < p.heads; ++h) pairs.push_back({n, h});
  auto* const sums = reinterpret_cast<float*>(workers::shared_workspace(call) + attention::stat_bytes(g));
  attention::run_passes(
      call, g, blocks, pairs, scratch_bytes(p, engine),
      [&](const attention::Block& block, Stat* stats, std::byte* scratch) {
        engine.queries(stats_alone, block, stats, reinterpret_cast<float*>(scratch));
      },
      [&](const Pair& pair, const Stat* stats, std::byte* scratch) {
        // Those of a sequence's heads lie one behind the other.
        const std::int64_t at = g.row(pair.n, 0) * g.all_heads() + p.q_len(pair.n) * pair.h * p.group;
        engine.pair(g, pair.n, pair.h, stats, sums + at * p.width, reinterpret_cast<float*>(scratch));
      },
      sum_bytes);
}

template <class By>
rlk_code run(const AttentionBwd& a, const Call& call) {
  const Backward g = backward_of(a);
  const Problem& p = g.p;
  if (const rlk_code code = attention::Check("attention_bwd", p, call)()) return code;
  attention::clear_idle(g);
  std::vector<attention::Block> blocks;
  std::vector<attention::KeyTile> tiles;
  // The last queries of a causal sequence see the most keys, its first keys are seen by the most queries: they go first.
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    for (std::int64_t rows = p.q_len(n) * p.group, b = parts(rows, attention::kRows) - 1; b >= 0; --b)
      for (std::int64_t h = 0; h < p.heads; ++h)
        blocks.push_back(
            {n, h, b * attention::kRows,
             static_cast<int>(std::min<std::int64_t>(attention::kRows, rows - b * attention::kRows))});
    const attn128::Visible keys = g.own_keys(n);
    for (std::int64_t at = keys.first; (g.d_k || g.d_v) && at < keys.last; at += attention::kTile)
      for (std::int64_t h = 0; h < p.heads; ++h) tiles.push_back({n, h, at});
  }
  const attention::BackwardEngine& engine = By::engine();
  if (const std::uint64_t sums = sum_bytes(g, call.threads()); sums != 0) {
    run_pairs(g, call, engine, blocks, sums);
    return RLK_OK;
  }
  attention::run_passes(
      call, g, blocks, tiles, scratch_bytes(p, engine),
      [&](const attention::Block& block, Stat* stats, std::byte* scratch) {
        engine.queries(g, block, stats, reinterpret_cast<float*>(scratch));
      },
      [&](const attention::KeyTile& tile, const Stat* stats, std::byte* scratch) {
        engine.keys(g, tile, stats, reinterpret_cast<float*>(scratch));
      });
  return RLK_OK;
}

// ---- golden

class Golden {
 public:
  explicit Golden(const Backward& g)
      : g_(g), p_(g.p), deltas_(static_cast<std::size_t>(p_.sequences == 0 ? 0 : g.rows() * g.all_heads())) {}

  // Of one head of k and v, and the heads of q that share it; all queries first.
  void queries(std::int64_t n, std::int64_t h) {
    for (std::int64_t i = 0; i < p_.q_len(n); ++i)
      for (std::int64_t head = h * p_.group; head < (h + 1) * p_.group; ++head) query(n, i, head);
  }
  void keys(std::int64_t n, std::int64_t h) const {
    const attn128::Visible own = g_.own_keys(n);
    for (std::int64_t j = own.first; (g_.d_k || g_.d_v) && j < own.last; ++j) key(n, j, h);
  }
  void sink(std::int64_t head) const {
    double sum = 0;
    for (std::int64_t n = 0; n < p_.sequences; ++n)
      for (std::int64_t i = 0; i < p_.q_len(n); ++i) {
        const double lse = lse_of(n, i, head);
        if (lse == -__builtin_inf()) continue;
        const double delta = deltas_[static_cast<std::size_t>(g_.row(n, i) * g_.all_heads() + head)];
        sum = simt::fused(simt::exp<double>(double{p_.sinks[head]} - lse), delta, sum);
      }
    rows::store(rows::Type::f32, g_.d_sinks, head, 0 - sum);
  }

 private:
  void query(std::int64_t n, std::int64_t i, std::int64_t head) {
    const std::int64_t token = p_.q_begin(n) + i, keys = p_.kv_count(n);
    const attn128::KeyRows places = p_.key_rows(n);
    double& delta = deltas_[static_cast<std::size_t>(g_.row(n, i) * g_.all_heads() + head)];
    delta = dot(g_.d_out, g_.d_out.at(n, token, head), p_.out, p_.out.at(n, token, head), p_.value_width);
    if (g_.d_lse) delta -= double{*static_cast<const float*>(g_.d_lse.at(n, token, head))};
    if (!g_.d_q) return;
    const attn128::Visible seen = p_.visible(keys - p_.q_len(n) + i, keys);
    std::vector<double> sum(static_cast<std::size_t>(p_.width));
    for (std::int64_t j = seen.first; j < seen.last; ++j)
      add(pair(n, i, head, j).ds, p_.k, p_.key(p_.k, n, places, j, head / p_.group), sum);
    store(g_.d_q, g_.d_q.at(n, token, head), p_.scale64, sum);
  }
  void key(std::int64_t n, std::int64_t j, std::int64_t h) const {
    std::vector<double> d_k(static_cast<std::size_t>(p_.width)),
        d_v(static_cast<std::size_t>(p_.value_width));
    for (std::int64_t head = h * p_.group; head < (h + 1) * p_.group; ++head)
      for (std::int64_t reader = n; reader < p_.sequences; reader = g_.next_reader(n, reader)) {
        const attn128::Visible rows = g_.queries(reader, j, j + 1);
        for (std::int64_t i = rows.first; i < rows.last; ++i) {
          const std::int64_t token = p_.q_begin(reader) + i;
          const Pair of = pair(reader, i, head, j);
          add(of.ds, p_.q, p_.q.at(reader, token, head), d_k);
          add(of.p, g_.d_out, g_.d_out.at(reader, token, head), d_v);
        }
      }
    const std::int64_t token = p_.key_rows(n).row(j);
    if (g_.d_k) store(g_.d_k, g_.d_k.at(n, token, h), p_.scale64, d_k);
    if (g_.d_v) store(g_.d_v, g_.d_v.at(n, token, h), 1, d_v);
  }

  struct Pair {
    double p, ds;
  };
  double lse_of(std::int64_t n, std::int64_t i, std::int64_t head) const {
    return double{*static_cast<const float*>(p_.lse.at(n, p_.q_begin(n) + i, head))};
  }
  Pair pair(std::int64_t n, std::int64_t i, std::int64_t head, std::int64_t j) const {
    const std::int64_t token = p_.q_begin(n) + i, h = head / p_.group;
    const attn128::KeyRows places = p_.key_rows(n);
    double s = p_.scale64 * dot(p_.q, p_.q.at(n, token, head), p_.k, p_.key(p_.k, n, places, j, h), p_.width);
    double slope = 1;
    if (p_.cap64 != 0) {
      const double y = simt::tanh<double>(s / p_.cap64);
      s = p_.cap64 * y, slope = simt::fused(-y, y, 1.0);
    }
    const double lse = lse_of(n, i, head), base = lse == -__builtin_inf() ? 0 : lse;
    const double weight = simt::exp<double>(s - base);
    const double dp =
        dot(g_.d_out, g_.d_out.at(n, token, head), p_.v, p_.key(p_.v, n, places, j, h), p_.value_width);
    const double delta = deltas_[static_cast<std::size_t>(g_.row(n, i) * g_.all_heads() + head)];
    return {weight, weight * (dp - delta) * slope};
  }
  static double dot(const attn128::Tensor& x, const void* a, const attn128::Tensor& y, const void* b,
                    int width) {
    double sum = 0;
    for (int d = 0; d < width; ++d)
      sum = simt::fused(double{rows::load(x.type, a, d)}, double{rows::load(y.type, b, d)}, sum);
    return sum;
  }
  static void add(double x, const attn128::Tensor& t, const void* row, std::vector<double>& sum) {
    for (std::size_t d = 0; d < sum.size(); ++d)
      sum[d] = simt::fused(x, double{rows::load(t.type, row, static_cast<std::int64_t>(d))}, sum[d]);
  }
  static void store(const attn128::Tensor& t, void* to, double scale, const std::vector<double>& sum) {
    for (std::size_t d = 0; d < sum.size(); ++d)
      rows::store(t.type, to, static_cast<std::int64_t>(d), sum[d] * scale);
  }

  const Backward& g_;
  const Problem& p_;
  std::vector<double> deltas_;
};

rlk_code run_golden(const AttentionBwd& a, const Call& call) {
  const Backward g = backward_of(a);
  const Problem& p = g.p;
  if (const rlk_code code = attention::Check("attention_bwd", p, call)()) return code;
  attention::clear_idle(g);
  Golden golden(g);
  call.parallel_for(p.sequences * p.heads,
                    [&](std::int64_t task) { golden.queries(task / p.heads, task % p.heads); });
  call.parallel_for(p.sequences * p.heads,
                    [&](std::int64_t task) { golden.keys(task / p.heads, task % p.heads); });
  for (std::int64_t head = 0; g.d_sinks != nullptr && head < g.all_heads(); ++head) golden.sink(head);
  return RLK_OK;
}

}  // namespace

extern const Levels attention_bwd_tiles;
constinit const Levels attention_bwd_tiles = by_level([]<Isa I>() {
  return implement<AttentionBwd, run<Vectors<I>>, nullptr, workspace<Vectors<I>>>(facts_at<"native.tiles", I>(
      pinned_facts("blocks of 96 rows, then tiles of 128 keys", "fma32/attn128")));
});

extern const rlk_implementation attention_bwd_amx;
using OnAmx = OnUnit<attention::amx_backward>;
constinit const rlk_implementation attention_bwd_amx =
    implement<AttentionBwd, run<OnAmx>, supports<OnAmx>, workspace<OnAmx>>(
        amx_facts("the same on Intel's matrix unit", "amx/k32/attn128"));

extern const Levels attention_bwd_replay_amx;
constinit const Levels attention_bwd_replay_amx = by_level([]<Isa I>() {
  using By = OnUnit<attention::replay_amx_backward<I>>;
  return implement<AttentionBwd, run<By>, supports<By>, workspace<By>>(
      facts_at<"native.replay_amx", I>(amx_replay_facts("amx/k32/attn128")));
});

extern const rlk_implementation attention_bwd_golden;
constinit const rlk_implementation attention_bwd_golden =
    implement<AttentionBwd, run_golden>(golden_facts("ascending fp64 sums, one rounding"));

}  // namespace rlk::native
