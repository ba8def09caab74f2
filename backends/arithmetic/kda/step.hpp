// kda_step: the tokens that follow the open chunk's rows so far, with the bits that kda_fwd gives them. Arithmetic fma32/kda, one
// source for host vectors and GPU blocks.
//
// A task is one (sequence, value head). Row i of a chunk (the formulas and the Team are those of chunk.hpp) needs the state at
// the chunk's start and of the rows j < i what the cache holds: k and the decay, y, n, row j of A, and once their block of 16 is
// over k decayed to its end. So a token takes
//
//     x_i, (s q_i eg_i) S    one product of two rows with the state: 4 K V bytes, read once for all tokens of the call
//     M_ij, P_ij             two chains of K for every j, keys decayed from their block's end, or in i's block row by row
//     A_i, n_i, P_i n        i^2 / 2, i V and i V products
//
// and the chunk's product with the state, K V C, comes once in C tokens, at the beginning of the call that finds the chunk full.
// Until then nothing that a later call reads is overwritten by another row's: who goes back to fewer rows has a smaller `rows`.
#pragma once

#include "arithmetic/kda/chunk.hpp"

namespace rlk::kda::chunked {

// The cache of a task.
struct OpenChunk {
  float *k, *decay, *y, *n, *A, *tail, *start, *whole;
  int C;

  RLK_HD OpenChunk(const CacheLayout& at, float* base)
      : k(base + at.k),
        decay(base + at.decay),
        y(base + at.y),
        n(base + at.n),
        A(base + at.inverse),
        tail(base + at.tail),
        start(base + at.start),
        whole(base + at.whole),
        C(int(at.chunk)) {}
};

// The parts of a chunk's scratch that a step uses, by the number of its tokens; of M and P one row.
RLK_HD ForwardScratch step_scratch(const Step& p, Bump& bump) {
  ForwardScratch s;
  s.K = padded(p.k_dim), s.V = padded(p.v_dim);
  const int rows = padded(p.most());
  float** const k_sized[] = {&s.q, &s.k, &s.decay, &s.q_block, &s.k_block};
  for (float** f : k_sized) *f = bump.take(rows * s.K);
  s.k_start = bump.take(2 * rows * s.K);  // s q eg behind it
  s.x = s.v = bump.take(2 * rows * s.V);  // out behind it
  s.k_tail = bump.take(kBlock * s.K);
  s.k_turned = bump.take(s.K * kBlock);
  s.k_end = bump.take(p.chunk * s.K);
  s.M = bump.take(kRows);
  s.P = bump.take(kRows);
  s.beta = bump.take(rows);
  s.bias = bump.take(s.K);
  s.total = bump.take(s.K);
  s.state = bump.take(std::int64_t(s.K) * s.V);
  s.sums = bump.take(rows * 16);
  s.row = bump.take(rows);
  return s;
}

RLK_HD std::int64_t step_floats(const Step& p) {
  Bump bump{nullptr};
  step_scratch(p, bump);
  if (!p.cache) bump.take(p.layout.size);
  return bump.used;
}

// Where the products find the state: in place, or in scratch if its layout is another one.
RLK_HD bool is_plain(const States& state, const Problem& p) {
  return !p.v_first && p.k_dim % 16 == 0 && p.v_dim % 16 == 0 && state.row % 4 == 0 && state.head % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(state.data) % 16 == 0;
}

// What the end of a chunk takes from channel d: the chunk's whole decay, and keys decayed to the end, rows `ld` apart.
template <class Team>
RLK_TEAM void end_channel(const OpenChunk& c, int K, int d, float* total, float* k_end, int ld) {
  using L = typename Team::Lane;
  const int last = c.C - kBlock;
  L from_start = Team::load(c.start + last / kBlock * K + d), to_end = L{} + 1.0f;
  for (int first = last; first >= 0; first -= kBlock) {
    L k[kBlock], e[kBlock];  // read before any of them is used
    RLK_UNROLL(16)
    for (int i = 0; i < kBlock; ++i) {
      k[i] = Team::load(c.k + (first + i) * K + d);
      e[i] = Team::load(c.decay + (first + i) * K + d);
    }
    RLK_UNROLL(16)
    for (int i = kBlock - 1; i >= 0; --i) {
      Team::store(k_end + (first + i) * ld, k[i] * to_end);
      to_end = flushed(L(to_end * e[i]));
    }
    if (first < last) continue;
    RLK_UNROLL(16)
    for (int i = 0; i < kBlock; ++i) from_start = flushed(L(from_start * e[i]));
    Team::store(total, from_start);
  }
}

// The state after a full chunk, in the state's place.
template <class Team>
RLK_TEAM void close_chunk(Team& team, const OpenChunk& c, const ForwardScratch& s) {
  const int K = s.K;
  team.lanes(K, [=](int d) { end_channel<Team>(c, K, d, s.total + d, s.k_end + d, K); });
  team.sync();
  ForwardScratch whole = s;
  whole.n = c.n;
  advance(team, c.C, whole);
}

// The decays of `count` tokens after `row` rows, and what they multiply; their keys and decays into the cache.
template <class Team>
RLK_TEAM void decay_rows(Team& team, int row, int count, const OpenChunk& c, const ForwardScratch& s) {
  using L = typename Team::Lane;
  const int K = s.K, first = row - row % kBlock;
  team.lanes(K, [=](int d) {
    L from_start = L{} + 1.0f, in_block = from_start;
    if (first > 0) from_start = Team::load(c.start + first / kBlock * K + d);
    for (int i = first; i < row + count; ++i) {
      const int t = i - row, id = t * K + d;
      const L e = Team::load(t < 0 ? c.decay + i * K + d : s.decay + id);
      from_start = flushed(L(from_start * e));
      in_block = i % kBlock == 0 ? e : flushed(L(in_block * e));
      if (t < 0) continue;
      const L k = Team::load(s.k + id), q = Team::load(s.q + id);
      Team::store(c.decay + i * K + d, e);
      Team::store(c.k + i * K + d, k);
      Team::store(s.k_start + id, -(k * from_start));
      Team::store(s.q_start + id, q * from_start);
      Team::store(s.k_block + id, k * in_block);
      Team::store(s.q_block + id, q * in_block);
    }
  });
  team.sync();
}

// What later blocks need of the block that begins with row `first`.
template <class Team>
RLK_TEAM void close_block(Team& team, int first, const OpenChunk& c, const ForwardScratch& s) {
  using L = typename Team::Lane;
  const int K = s.K, block = first / kBlock;
  team.lanes(K, [=](int d) {
    L from_start = L{} + 1.0f, in_block = from_start, to_bound = from_start;
    if (block > 0) from_start = Team::load(c.start + block * K + d);
    for (int i = first; i < first + kBlock; ++i) {
      const L e = Team::load(c.decay + i * K + d);
      from_start = flushed(L(from_start * e));
      in_block = i == first ? e : flushed(L(in_block * e));
    }
    Team::store(c.start + (block + 1) * K + d, from_start);
    Team::store(c.whole + block * K + d, in_block);
    for (int i = first + kBlock - 1; i >= first; --i) {
      Team::store(s.k_tail + (i - first) * K + d, Team::load(c.k + i * K + d) * to_bound);
      to_bound = flushed(L(to_bound * Team::load(c.decay + i * K + d)));
    }
  });
  team.sync();
  team.transpose(kBlock, K, s.k_tail, K, c.tail + first, c.C);
  team.sync();
}

// Count packs of a row of M and P from column j on: the sums over d of k and q with the keys as the row meets them.
template <class Team, int Count, class Met>
RLK_TEAM void pair_columns(int K, const float* k, const float* q, int j, Met met, float* M, float* P) {
  using L = typename Team::Lane;
  L m[Count] = {}, p[Count] = {};
  for (int d = 0; d < K; ++d) {
    const L left = L{} + k[d], up = L{} + q[d];
    RLK_UNROLL(4)
    for (int n = 0; n < Count; ++n) {
      const L key = met(d, j + n * Team::kWidth);
      m[n] = simt::fused(left, key, m[n]);
      p[n] = simt::fused(up, key, p[n]);
    }
  }
  RLK_UNROLL(4)
  for (int n = 0; n < Count; ++n) {
    Team::store(M + j + n * Team::kWidth, m[n]);
    Team::store(P + j + n * Team::kWidth, p[n]);
  }
}

// The same where a pack is a block: of all of them together, `Earlier` and the row's own, so that as many sums overlap.
template <class Team, int Earlier>
RLK_TEAM void pair_blocks(const OpenChunk& c, const ForwardScratch& s, int t) {
  using L = typename Team::Lane;
  const int K = s.K;
  L m[Earlier + 1] = {}, p[Earlier + 1] = {};
  for (int d = 0; d < K; ++d) {
    const L left = L{} + s.k_block[t * K + d], up = L{} + s.q_block[t * K + d];
    RLK_UNROLL(3)
    for (int n = 0; n < Earlier; ++n) {
      L key = Team::load(c.tail + d * c.C + n * kBlock);
      RLK_UNROLL(3)
      for (int b = n + 1; b < Earlier; ++b) key = key * c.whole[b * K + d];
      m[n] = simt::fused(left, key, m[n]);
      p[n] = simt::fused(up, key, p[n]);
    }
    const L key = Team::load(s.k_turned + d * kBlock);
    m[Earlier] = simt::fused(L{} + s.k[t * K + d], key, m[Earlier]);
    p[Earlier] = simt::fused(L{} + s.q[t * K + d], key, p[Earlier]);
  }
  RLK_UNROLL(4)
  for (int n = 0; n <= Earlier; ++n) Team::store(s.M + n * kBlock, m[n]), Team::store(s.P + n * kBlock, p[n]);
}

// Row i of M, without beta, and of P; i is token t of the call.
template <class Team>
RLK_TEAM void pair_row(Team& team, int i, int t, const OpenChunk& c, const ForwardScratch& s) {
  using L = typename Team::Lane;
  const int K = s.K, first = i - i % kBlock;
  // Keys of i's own block, decayed row by row.
  team.grid(i - first + 1, K, [=](int j, int d) {
    L met = Team::load(c.k + (first + j) * K + d);
    for (int m = first + j + 1; m <= i; ++m) met = met * Team::load(c.decay + m * K + d);
    Team::store(s.k_tail + j * K + d, met);
  });
  team.sync();
  team.transpose((i - first + 8) / 8 * 8, K, s.k_tail, K, s.k_turned, kBlock);
  team.sync();
  if constexpr (Team::kWidth == kBlock) {
    switch (first / kBlock) {
      case 0:
        pair_blocks<Team, 0>(c, s, t);
        break;
      case 1:
        pair_blocks<Team, 1>(c, s, t);
        break;
      case 2:
        pair_blocks<Team, 2>(c, s, t);
        break;
      default:
        pair_blocks<Team, 3>(c, s, t);
    }
  } else {
    team.packs(first, [=]<int Count>(int j) {
      const auto met = [=](int d, int column) {
        L key = Team::load(c.tail + d * c.C + column);
        for (int b = column / kBlock + 1; b < i / kBlock; ++b) key = key * c.whole[b * K + d];
        return key;
      };
      pair_columns<Team, Count>(K, s.k_block + t * K, s.q_block + t * K, j, met, s.M, s.P);
    });
    team.packs(padded(i - first + 1), [=]<int Count>(int j) {
      const auto met = [=](int d, int column) { return Team::load(s.k_turned + d * kBlock + column); };
      pair_columns<Team, Count>(K, s.k + t * K, s.q + t * K, j, met, s.M + first, s.P + first);
    });
  }
  team.sync();
}

// Count packs of row i of A from column j on. Of an earlier row nothing lies behind its own block.
template <class Team, int Count>
RLK_TEAM void inverse_columns(const OpenChunk& c, const float* M, float beta, int i, int j) {
  using L = typename Team::Lane;
  L row[Count];
  RLK_UNROLL(4)
  for (int n = 0; n < Count; ++n) row[n] = Team::unit(i - j - n * Team::kWidth);
  for (int m = j; m < i; ++m) {
    const int there = m / kBlock * kBlock + kBlock - j;  // columns of row m from j on
    const L with = L{} - beta * M[m];
    RLK_UNROLL(4)
    for (int n = 0; n < Count; ++n)
      if (n * Team::kWidth < there)
        row[n] = simt::fused(with, Team::load(c.A + m * c.C + j + n * Team::kWidth), row[n]);
  }
  RLK_UNROLL(4)
  for (int n = 0; n < Count; ++n) Team::store(c.A + i * c.C + j + n * Team::kWidth, row[n]);
}

// Row i, which is token t of the call, from x and (s q eg) S.
template <class Team>
RLK_TEAM void step_row(Team& team, int i, int t, const OpenChunk& c, const ForwardScratch& s) {
  const int V = s.V;
  pair_row(team, i, t, c, s);
  team.packs(padded(i + 1), [=]<int Count>(int j) { inverse_columns<Team, Count>(c, s.M, s.beta[t], i, j); });
  team.lanes(V, [=](int j) { Team::store(c.y + i * V + j, Team::load(s.x + t * V + j) * s.beta[t]); });
  team.sync();
  team.template gemm<Init::zero, Span::full>(
      Gemm{1, V, i + 1, c.A + i * c.C, c.C, 1, c.y, V, c.n + i * V, V});
  team.sync();
  float* out = s.o + t * V;
  team.template gemm<Init::load, Span::full>(Gemm{1, V, i + 1, s.P, kRows, 1, c.n, V, out, V, out});
  team.sync();
  if (i % kBlock == kBlock - 1 && i + 1 < c.C) close_block(team, i + 1 - kBlock, c, s);
}

// One (sequence, value head).
template <class Team>
RLK_TEAM void step(Team& team, const Step& p, std::int64_t task, float* scratch) {
  Bump bump{scratch};
  ForwardScratch s = step_scratch(p, bump);
  const std::int64_t n = task / p.value_heads;
  const int hv = int(task % p.value_heads), count = int(p.length(n) < p.chunk ? p.length(n) : p.chunk);
  const Place place{p.row(n), p.start(n), count};
  if (!p.fits(n)) {
    for (std::int64_t token = 0; token < p.length(n); ++token)
      team.items(p.v_dim, [=](int j) {
        kda::store(p.out.data, p.out.type, at(p.out, place.batch_row, place.token + token, hv) + j,
                   simt::bits_float(0x7fc00000));
      });
    return;
  }
  const OpenChunk c(p.layout, p.cache
                                  ? static_cast<float*>(p.cache.data) + n * p.cache.row + hv * p.cache.head
                                  : bump.take(p.layout.size));
  if (is_plain(p.initial, p)) {
    s.state = static_cast<float*>(p.initial.data) + n * p.initial.row + hv * p.initial.head;
  } else {
    read_state(team, p, p.initial, n, hv, s.state);
    team.sync();
  }
  int row = int(p.cached(n));
  if (row == p.chunk) {
    close_chunk(team, c, s);
    if (!is_plain(p.initial, p)) write_state(team, p, p.final, n, hv, s.state);
    team.sync();
    row = 0;
  }
  if (count == 0) return;
  s.q_start = s.k_start + count * s.K;
  s.o = s.x + count * s.V;
  read_chunk(team, p, place, hv, s, true);
  const int K = s.K, k_dim = p.k_dim;
  float* decay = s.decay;
  team.cells(count, K - k_dim, [=](int i, int d) { decay[i * K + k_dim + d] = 0; });
  team.sync();
  decay_rows(team, row, count, c, s);
  team.grid(count, s.V, [=](int i, int j) { Team::store(s.o + i * s.V + j, typename Team::Lane{}); });
  team.sync();
  team.template gemm<Init::load, Span::full>(
      Gemm{2 * count, s.V, s.K, s.k_start, s.K, 1, s.state, s.V, s.x, s.V, s.x});
  team.sync();
  for (int t = 0; t < count; ++t) step_row(team, row + t, t, c, s);
  write_rows(team, p.out, place, hv, p.v_dim, s.o, s.V);
  team.sync();
}

}  // namespace rlk::kda::chunked
