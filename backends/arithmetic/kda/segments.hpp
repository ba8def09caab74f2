// KDA by segments, fp32, forward and backward: arithmetic fma32/kda/seg4096, over the chunks of fma32/kda (chunk.hpp).
//
// A segment is 4096 tokens, counted from a sequence's first. The recurrence is linear in the state, so a whole segment is a map of it:
//
//     S_(i+1) = T_i S_i + U_i        T_i: K x K, where the segment's chunks take the unit matrix when v is zero
//                                    U_i: K x V, where they take a state of zeros
//
// In three steps: maps (one task a whole segment and value head), joins (one a sequence and value head, segments in turn), and the
// chunks of every segment from its own first state. Columns of a state never meet, so T and U are one state of V + K columns. T S is one
// ascending fma chain from +0 an element, and U is added to it. What lies behind the last whole segment is a chain of chunks as ever.
//
// Backward the gradient of the state takes the same way in reverse, from what is left behind the whole segments on:
//
//     dS_i = T_i^T dS_(i+1) + W_i    W_i: what the segment's chunks hand back of a gradient of zeros behind it
//
// and a segment's chunks have their gradients from its first state and the gradient behind it. d_a_log and d_dt_bias are sums of fp64 over
// a segment's tokens from the last to the first, and these added from the first segment on.
#pragma once

#include "arithmetic/kda/chunk.hpp"

namespace rlk::kda::chunked {

inline constexpr std::int64_t kSegment = 4096;

// Where the segments of a call lie: the maps of sequence n from maps(n) on, whole(n) of them; and of all of its segments, what is left
// behind the whole ones included, from pieces(n) on. Packed sequences never meet: floor(a) + floor(b) <= floor(a + b).
struct Segments {
  const Problem& p;

  RLK_HD std::int64_t whole(std::int64_t n) const { return p.length(n) / kSegment; }
  // Those whose map somebody needs: not the last where nothing is behind it.
  RLK_HD std::int64_t needed(std::int64_t n) const {
    const std::int64_t count = whole(n);
    return count > 0 && !p.final && count * kSegment == p.length(n) ? count - 1 : count;
  }
  // Backward: the first whose W somebody needs; and any whose map somebody needs.
  RLK_HD std::int64_t first_back() const { return p.d_initial ? 0 : 1; }
  RLK_HD bool mapped(std::int64_t n, std::int64_t i) const {
    return i < needed(n) || (p.d_out && i < whole(n) && i >= first_back());
  }
  RLK_HD std::int64_t map(std::int64_t n) const {
    return p.cu_seqlens ? p.bound(n) / kSegment : n * (p.tokens / kSegment);
  }
  RLK_HD std::int64_t maps() const {
    return p.cu_seqlens ? p.tokens / kSegment : p.sequences * (p.tokens / kSegment);
  }
  RLK_HD std::int64_t piece(std::int64_t n) const { return map(n) + n; }
  RLK_HD std::int64_t pieces() const { return maps() + p.sequences; }

  // The last sequence that begins at or before place `at`, whose segment it is if there are as many.
  template <class First>
  RLK_HD std::int64_t sequence(std::int64_t at, First first) const {
    std::int64_t low = 0, high = p.sequences - 1;
    while (low < high) {
      const std::int64_t middle = low + (high - low + 1) / 2;
      if (first(middle) <= at) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// U and T side by side, as rows of a state of V + K columns.
RLK_HD int map_columns(const Problem& p) { return padded(p.v_dim) + padded(p.k_dim); }
RLK_HD std::int64_t map_floats(const Problem& p) { return std::int64_t(padded(p.k_dim)) * map_columns(p); }
RLK_HD std::int64_t all_map_floats(const Problem& p) {
  return Segments{p}.maps() * p.value_heads * map_floats(p);
}
// Scratch for chunks of that many columns; v itself fills the first.
RLK_HD Problem widened(Problem p) {
  p.v_dim = map_columns(p);
  return p;
}

RLK_HD std::int64_t segment_floats(const Problem& p) { return forward_floats(widened(p)); }

// Map `task` / HV of value head `task` % HV.
template <class Team>
RLK_TEAM void map_segment(Team& team, const Problem& p, std::int64_t task, float* scratch, float* maps) {
  const Segments all{p};
  const std::int64_t at = task / p.value_heads,
                     n = all.sequence(at, [&](std::int64_t i) { return all.map(i); }),
                     segment = at - all.map(n), chunks = kSegment / p.chunk;
  if (!all.mapped(n, segment)) return;
  const int hv = int(task % p.value_heads), unit = padded(p.v_dim);
  Bump bump{scratch};
  ForwardScratch s(widened(p), bump);
  s.state = maps + task * map_floats(p);
  float* state = s.state;
  const int width = s.V;
  team.cells(s.K, width, [=](int d, int j) { state[d * width + j] = j - unit == d ? 1.0f : 0.0f; });
  team.sync();
  for (std::int64_t c = segment * chunks; c < (segment + 1) * chunks; ++c) {
    const Place place = place_of(p, n, c);
    prepare(team, p, place, hv, s, false);
    solve(team, place.rows, s);
    advance(team, place.rows, s);
  }
}

// One (sequence, value head): in the place of every U the state behind its segment.
template <class Team>
RLK_TEAM void join_segments(Team& team, const Problem& p, std::int64_t task, float* scratch, float* maps) {
  using L = typename Team::Lane;
  const Segments all{p};
  const std::int64_t n = task / p.value_heads;
  const int hv = int(task % p.value_heads), K = padded(p.k_dim), V = padded(p.v_dim), width = V + K;
  float *first = scratch, *moved = scratch + std::int64_t(K) * V;
  read_state(team, p, p.initial, n, hv, first);
  team.sync();
  const float* state = first;
  int ld = V;
  for (std::int64_t i = 0; i < all.needed(n); ++i) {
    float* map = maps + ((all.map(n) + i) * p.value_heads + hv) * map_floats(p);
    team.template gemm<Init::zero, Span::full>(Gemm{K, V, K, map + V, width, 1, state, ld, moved, V});
    team.sync();
    team.grid(K, V, [=](int d, int j) {
      Team::store(map + d * width + j, L(Team::load(moved + d * V + j) + Team::load(map + d * width + j)));
    });
    team.sync();
    state = map, ld = width;
  }
}

// Piece `task` / HV, a whole segment or what is left behind those, from its first state.
template <class Team>
RLK_TEAM void run_segment(Team& team, const Problem& p, std::int64_t task, float* scratch,
                          const float* maps) {
  const Segments all{p};
  const std::int64_t at = task / p.value_heads,
                     n = all.sequence(at, [&](std::int64_t i) { return all.piece(i); }),
                     segment = at - all.piece(n), whole = all.whole(n), chunks = kSegment / p.chunk;
  if (segment > whole) return;
  const int hv = int(task % p.value_heads);
  Bump bump{scratch};
  const ForwardScratch s(p, bump);
  if (segment == 0) {
    read_state(team, p, p.initial, n, hv, s.state);
  } else {
    const float* map = maps + ((all.map(n) + segment - 1) * p.value_heads + hv) * map_floats(p);
    const int width = map_columns(p), V = s.V;
    team.cells(s.K, V, [=](int d, int j) { s.state[d * V + j] = map[d * width + j]; });
  }
  team.sync();
  const std::int64_t first = segment * chunks;
  forward_chunks(team, p, n, hv, first, segment < whole ? first + chunks : chunks_of(p, n), s);
  if (segment == whole) write_state(team, p, p.final, n, hv, s.state);
  team.sync();
}

// ---- backward

// Scratch for the states of a segment's chunks, not of a sequence's.
RLK_HD Problem shortened(Problem p) {
  p.tokens = p.tokens < kSegment ? p.tokens : kSegment;
  return p;
}
RLK_HD std::int64_t segment_back_floats(const Problem& p) {
  const std::int64_t map = segment_floats(p), run = backward_floats(shortened(p));
  return map > run ? map : run;
}
// Of every piece and value head the gradient before it.
RLK_HD std::int64_t end_floats(const Problem& p) { return std::int64_t(padded(p.k_dim)) * padded(p.v_dim); }
RLK_HD std::int64_t all_end_floats(const Problem& p) {
  return Segments{p}.pieces() * p.value_heads * end_floats(p);
}

// Of piece `task` / HV of value head `task` % HV: W, or the gradient before what is left behind the whole ones.
template <class Team>
RLK_TEAM void map_segment_back(Team& team, const Problem& p, std::int64_t task, float* scratch, float* ends) {
  const Segments all{p};
  const std::int64_t at = task / p.value_heads,
                     n = all.sequence(at, [&](std::int64_t i) { return all.piece(i); }),
                     segment = at - all.piece(n), whole = all.whole(n), chunks = kSegment / p.chunk,
                     first = segment * chunks;
  if (whole == 0 || segment > whole || segment < all.first_back()) return;
  const int hv = int(task % p.value_heads);
  Bump bump{scratch};
  const BackwardScratch b(shortened(p), bump);
  float* d_state = ends + task * end_floats(p);
  read_state(team, p, segment == whole ? p.d_final : States{}, n, hv, d_state);
  team.sync();
  for (std::int64_t c = (segment == whole ? chunks_of(p, n) : first + chunks) - 1; c >= first; --c) {
    const Place place = place_of(p, n, c);
    read_rows(team, p.d_out, place, hv, p.v_dim, b.d_out, b.f.V);
    prepare(team, p, place, hv, b.f, true);
    pass_back(team, place.rows, b, d_state);
  }
}

// One (sequence, value head): in the place of every W the gradient before its segment.
template <class Team>
RLK_TEAM void join_segments_back(Team& team, const Problem& p, std::int64_t task, float* scratch,
                                 const float* maps, float* ends) {
  using L = typename Team::Lane;
  const Segments all{p};
  const std::int64_t n = task / p.value_heads, step = p.value_heads * end_floats(p);
  const int hv = int(task % p.value_heads), K = padded(p.k_dim), V = padded(p.v_dim), width = V + K;
  float* end = ends + (all.piece(n) * p.value_heads + hv) * end_floats(p);
  for (std::int64_t i = all.whole(n) - 1; i >= all.first_back(); --i) {
    const float *map = maps + ((all.map(n) + i) * p.value_heads + hv) * map_floats(p),
                *behind = end + (i + 1) * step;
    float* before = end + i * step;
    team.template gemm<Init::zero, Span::full>(Gemm{K, V, K, map + V, 1, width, behind, V, scratch, V});
    team.sync();
    team.grid(K, V, [=](int d, int j) {
      Team::store(before + d * V + j, L(Team::load(scratch + d * V + j) + Team::load(before + d * V + j)));
    });
    team.sync();
  }
  if (all.whole(n) > 0) write_state(team, p, p.d_initial, n, hv, end);
  team.sync();
}

// Piece `task` / H and a q/k head with all its value heads. `partials`: [pieces, HV, 2, K].
template <class Team>
RLK_TEAM void run_segment_back(Team& team, const Problem& p, std::int64_t task, float* scratch,
                               const float* maps, const float* ends, double* partials) {
  const Segments all{p};
  const std::int64_t at = task / p.heads, n = all.sequence(at, [&](std::int64_t i) { return all.piece(i); }),
                     segment = at - all.piece(n), whole = all.whole(n), chunks = kSegment / p.chunk,
                     matrix = end_floats(p);
  const int h = int(task % p.heads), group = p.group(), first = h * group, width = map_columns(p);
  Bump bump{scratch};
  const BackwardScratch b(shortened(p), bump);
  const int K = b.f.K, V = b.f.V;
  float* state = b.f.state;
  partials += at * p.value_heads * 2 * p.k_dim;
  for (int m = 0; m < group; ++m) {
    double* partial = partials + std::int64_t(first + m) * 2 * p.k_dim;
    team.items(2 * p.k_dim, [=](int i) { partial[i] = 0; });
  }
  if (segment > whole) return;
  const Chunks mine{n, segment * chunks, segment < whole ? (segment + 1) * chunks : chunks_of(p, n)};
  for (int m = 0; m < group; ++m) {
    const int hv = first + m;
    float* d_state = b.d_states + m * matrix;
    if (segment == whole) {
      read_state(team, p, p.d_final, n, hv, d_state);
    } else {
      const float* end = ends + ((at + 1) * p.value_heads + hv) * matrix;
      team.cells(K, V, [=](int d, int j) { d_state[d * V + j] = end[d * V + j]; });
    }
    if (p.chunk_states) continue;
    if (segment == 0) {
      read_state(team, p, p.initial, n, hv, state);
    } else {
      const float* map = maps + ((all.map(n) + segment - 1) * p.value_heads + hv) * map_floats(p);
      team.cells(K, V, [=](int d, int j) { state[d * V + j] = map[d * width + j]; });
    }
    team.sync();
    save_states(team, p, mine, hv, m, b);
  }
  team.sync();
  backward_chunks(team, p, mine, h, b, partials);
  for (int m = 0; whole == 0 && m < group; ++m)
    write_state(team, p, p.d_initial, n, first + m, b.d_states + m * matrix);
  team.sync();
}

}  // namespace rlk::kda::chunked
