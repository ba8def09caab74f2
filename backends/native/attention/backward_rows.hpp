// What every native attention_bwd does beside its tiles: rows of no sequence, and the gradients of sinks.
#pragma once

#include <cstring>

#include "arithmetic/attention/backward.hpp"

namespace rlk::native::attn {

using attn128::Backward;
using attn128::Stat;

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

}  // namespace rlk::native::attn
