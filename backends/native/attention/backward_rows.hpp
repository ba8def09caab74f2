// What every native attention_bwd does beside its tiles: rows of no sequence, the two passes, the gradients of sinks.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "native/attention/backward_engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native::attention {

inline std::int64_t parts(std::int64_t n, std::int64_t size) { return n / size + (n % size != 0); }

inline std::uint64_t stat_bytes(const Backward& g) {
  return g.p.sequences == 0 ? 0 : static_cast<std::uint64_t>(g.rows() * g.all_heads()) * sizeof(Stat);
}

inline void clear(const attn128::Tensor& t, std::int64_t n, attn128::Visible rows, int heads, int width) {
  for (std::int64_t i = rows.first; t && i < rows.last; ++i)
    for (int h = 0; h < heads; ++h)
      std::memset(t.at(n, i, h), 0, static_cast<std::size_t>(width * rows::size_of(t.type)));
}
inline void clear_idle(const Backward& g) {
  const attn128::Problem& p = g.p;
  const auto keys = [&](std::int64_t n, attn128::Visible rows) {
    clear(g.d_k, n, rows, p.heads, p.width), clear(g.d_v, n, rows, p.heads, p.value_width);
  };
  for (std::int64_t n = 0; n < p.sequences; ++n) keys(p.cu_k ? 0 : n, g.idle_keys(n));
  for (std::int64_t n = 0; p.sequences == 0 && n < g.key_batches; ++n) keys(n, {0, p.room});
  if (p.cu_q && p.sequences > 0)
    clear(g.d_q, 0, {p.q_begin(p.sequences - 1) + p.q_len(p.sequences - 1), p.queries}, g.all_heads(),
          p.width);
}

inline void sink_gradient(const Backward& g, const Stat* stats, std::int64_t head) {
  double sum = 0;
  for (std::int64_t n = 0; n < g.p.sequences; ++n)
    for (std::int64_t i = 0; i < g.p.q_len(n); ++i) {
      const auto* lse = static_cast<const float*>(g.p.lse.at(n, g.p.q_begin(n) + i, head));
      sum += attn128::sink_term(g.p.sinks[head], *lse, stats[g.row(n, i) * g.all_heads() + head].delta);
    }
  rows::store(rows::Type::f32, g.d_sinks, head, 0 - sum);
}

// Bytes for blocks of `rows` rows, each task with `scratch` bytes, and `sums` bytes beside. Packed sequences may each leave a
// block and a tile that are not full.
inline std::uint64_t passes_bytes(const Backward& g, std::int32_t threads, std::int64_t rows,
                                  std::uint64_t scratch, std::uint64_t sums = 0) {
  const attn128::Problem& p = g.p;
  const std::int64_t blocks = parts(p.queries * p.group, rows) * (p.cu_q ? 1 : p.sequences),
                     tiles = parts(p.room, kTile) * (p.cu_k ? 1 : p.sequences);
  const std::int64_t tasks = (std::max(blocks, tiles) + p.sequences) * p.heads;
  return workers::workspace_for(threads, tasks, scratch, stat_bytes(g) + sums);
}

// queries(block, stats, scratch) for all blocks, then keys(tile, stats, scratch) for all tiles, then the gradients of sinks. Behind
// the stats are `sums` bytes of workspace.
template <class Queries, class Tile, class Keys>
void run_passes(const Call& call, const Backward& g, const std::vector<Block>& blocks,
                const std::vector<Tile>& tiles, std::uint64_t scratch_bytes, Queries queries, Keys keys,
                std::uint64_t sums = 0) {
  auto* stats = reinterpret_cast<Stat*>(workers::shared_workspace(call));
  const auto run_all = [&](const auto& tasks, auto one) {
    workers::run_tasks(call, static_cast<std::int64_t>(tasks.size()), scratch_bytes, stat_bytes(g) + sums,
                       [&](std::int64_t task, std::byte* scratch) {
                         one(tasks[static_cast<std::size_t>(task)], stats, scratch);
                       });
  };
  run_all(blocks, queries);
  run_all(tiles, keys);
  if (g.d_sinks != nullptr)
    call.parallel_for(g.all_heads(), [&](std::int64_t head) { sink_gradient(g, stats, head); });
}

}  // namespace rlk::native::attention
