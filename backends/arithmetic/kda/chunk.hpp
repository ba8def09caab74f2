// KDA in chunks, fp32, forward and backward: arithmetic fma32/kda, one source for host vectors and GPU blocks.
//
// A task is one (sequence, q/k head): it walks the sequence's chunks in order with the state in scratch. With
// C rows, S the state before the chunk, E_ij the decay from token j to token i (a product of single-token
// decays, never a quotient, so that any gate in [-inf, 0] is exact to rounding), eg_i the decay from the
// chunk's start, el_j to its end:
//
//     M_ij = beta_i k_i . (k_j E_ij)  (i > j)     A = (I + M)^-1      P_ij = s q_i . (k_j E_ij)  (i >= j)
//     x = v - (k eg) S      y = beta x      n = A y
//     out = (s q eg) S + P n      S' = eg_last S + (k el)^T n
//
// n is what other texts call v_new. Solving for n from x, and not as u - w S, avoids a cancellation when keys
// are nearly parallel, and needs neither u nor w. Backward, with dS' the gradient of the state after the
// chunk:
//
//     dn = P^T do + (k el) dS'     D = A^T dn     dv = beta D     dM = -stril(D n^T)     dP = tril(do n^T)
//     dS = eg_last dS' + (s q eg)^T do - (k eg)^T dv
//
// and dq, dk, dg by the product rule; E's own gradient is summed over rows from the end of the chunk.
//
// Every dot product is one ascending fma chain, every other operation is rounded on its own, in the order
// written here; sums over 16 interleaved chains (row sums) add the chains in order. Rows read earlier rows
// only: later tokens, other sequences, the number of threads and the width of vectors cannot change a bit.
// Decays below 2^-100 count as zero.
//
// Team is who works on a task: 8 or 16 lanes of one CPU thread, or a GPU block. It gives
//
//   Lane, kWidth               a pack of floats and its width, 1 on a GPU
//   load, store, unit          of packs; unit(l) is 1 in lane l, 0 elsewhere
//   lanes(n, f)                f(d) for packs d = 0, kWidth, .. < n
//   packs(n, f)                f.operator()<count>(d) for groups of `count` neighbouring packs, so that their sums overlap
//   grid(rows, n, f)           f(i, d) for every row and pack
//   items(n, f)                f(d) for single elements
//   cells(rows, n, f)          f(i, d) for single elements
//   gemm(g)                    see Gemm
//   transpose(rows, cols, from, ld_from, to, ld_to)
//                              to_ji = from_ij
//   pairs(blocks, width, q, k, decay, k_turned, M, P)
//                              the 16 x 16 blocks on the diagonal: F_jj = k_j, F_ij = F_(i-1)j decay_i;
//                              M_ij = k_i . F_ij for i > j and, if q is given, P_ij = q_i . F_ij for i >= j
//   sync()                     ends a step; what a step wrote may be read after it
#pragma once

#include "arithmetic/bump.hpp"
#include "arithmetic/kda/gate.hpp"

#if defined(__CUDACC__) || defined(__HIP__)
#  define RLK_TEAM __device__ inline
#else
#  define RLK_TEAM inline
#endif

namespace rlk::kda::chunked {

enum class Init { zero, load, scale };   // an accumulator starts from 0, from C0_ij, from C0_ij * row_scale_i
enum class Span { full, lower, upper };  // k runs over all, over k <= i, over k >= i

// C_ij = init + sum over k of A_ik B_kj. A has strides (am, ak), B and C are row-major, N is a multiple
// of 16.
struct Gemm {
  int m, n, k;
  const float* a;
  int am, ak;
  const float* b;
  int ldb;
  float* c;
  int ldc;
  const float* c0 = nullptr;  // leading dimension ldc
  const float* row_scale = nullptr;
};

inline constexpr int kRows = 64;  // most rows of a chunk, and the leading dimension of C x C matrices
// Rows of a block: pairs inside one use exact products, pairs across two anchors.
inline constexpr int kBlock = 16;

RLK_HD int padded(int n) { return (n + 15) / 16 * 16; }

template <class L>
RLK_HD L flushed(L x) {
  const L tiny = L{} + 0x1p-100f, zero = L{};
  return x < tiny ? zero : x;
}

// Scratch of one task.
using Bump = simt::Bump<float, 16>;

struct ForwardScratch {
  int K, V;
  float *q, *k, *v, *decay, *beta, *bias;  // inputs: q scaled; decay per token
  float *from_start, *to_end, *total;      // eg, el, and the whole chunk's
  float *q_start, *k_start, *k_end;        // s q eg, -k eg, k el
  float *q_block, *k_block, *k_tail,
      *block_all;                 // decayed from or to the bounds of the 16-row block; its whole decay
  float *k_turned, *tail_turned;  // transposes of k and k_tail
  float *M, *P, *A;               // M without beta
  float *x, *y, *n, *o, *state;
  float *sums, *row;

  ForwardScratch() = default;
  RLK_HD ForwardScratch(const Problem& p, Bump& bump) : K(padded(p.k_dim)), V(padded(p.v_dim)) {
    const int rk = kRows * K, rv = kRows * V, rr = kRows * kRows;
    float** const k_sized[] = {&q,     &k,       &decay,   &from_start, &to_end,   &q_start,    &k_start,
                               &k_end, &q_block, &k_block, &k_tail,     &k_turned, &tail_turned};
    for (float** f : k_sized) *f = bump.take(rk);
    float** const v_sized[] = {&v, &x, &y, &n, &o};
    for (float** f : v_sized) *f = bump.take(rv);
    float** const square[] = {&M, &P, &A};
    for (float** f : square) *f = bump.take(rr);
    beta = bump.take(kRows);
    bias = bump.take(K);
    total = bump.take(K);
    block_all = bump.take(kRows / kBlock * K);
    state = bump.take(std::int64_t(K) * V);
    sums = bump.take(kRows * 16);
    row = bump.take(kRows);
  }
};

struct BackwardScratch {
  ForwardScratch f;
  float *d_out, *dn, *D, *dv, *dP, *dM;
  float *n_turned, *state_turned, *d_state_turned;
  float *through_q, *through_x, *through_n;  // do S^T, dv S^T, n dS'^T
  float* state_dot;                          // sum over V of S . dS'
  float *dq, *dk, *dG, *dq_in, *R, *Y, *write_k;
  float *sum_q, *sum_k;  // over the value heads of a group
  float* d_states;       // one dS per value head of the group
  float* states;         // the state before every chunk of every value head

  RLK_HD BackwardScratch(const Problem& p, Bump& bump) : f(p, bump) {
    const int rk = kRows * f.K, rv = kRows * f.V, rr = kRows * kRows;
    const std::int64_t matrix = std::int64_t(f.K) * f.V;
    float** const k_sized[] = {&through_q, &through_x, &through_n, &dq,      &dk,    &dG,
                               &dq_in,     &R,         &Y,         &write_k, &sum_q, &sum_k};
    for (float** q : k_sized) *q = bump.take(rk);
    float** const v_sized[] = {&d_out, &dn, &D, &dv, &n_turned};
    for (float** q : v_sized) *q = bump.take(rv);
    dP = bump.take(rr);
    dM = bump.take(rr);
    state_turned = bump.take(matrix);
    d_state_turned = bump.take(matrix);
    state_dot = bump.take(f.K);
    d_states = bump.take(matrix * p.group());
    const std::int64_t chunks = p.chunk_states ? 0 : (p.tokens + p.chunk - 1) / p.chunk;
    states = bump.take(matrix * p.group() * chunks);
  }
};

// Where a chunk lies.
struct Place {
  std::int64_t batch_row, token;  // of the chunk's first row
  int rows;
};

template <class F>
RLK_TEAM void with_type(Float type, F f) {
  if (type == Float::f32) {
    f(float{});
  } else if (type == Float::bf16) {
    f(bf16{});
  } else {
    f(fp16{});
  }
}

// out[i][d] = the tensor's element, zero in padding columns and in rows up to the next block bound.
template <class Team>
RLK_TEAM void read_rows(Team& team, const Tensor& t, const Place& at_, int head, int width, float* out,
                        int ld) {
  with_type(t.type, [&](auto tag) {
    const auto* data = static_cast<const decltype(tag)*>(t.data) + at(t, at_.batch_row, at_.token, head);
    const std::int64_t step = t.token;
    const int rows = at_.rows;
    team.cells(rows, width, [=](int i, int d) { out[i * ld + d] = simt::to_float(data[i * step + d]); });
    team.cells(rows, ld - width, [=](int i, int d) { out[i * ld + width + d] = 0; });
    team.cells(padded(rows) - rows, ld, [=](int i, int d) { out[(rows + i) * ld + d] = 0; });
  });
}

// A result that the caller left out is not written.
template <class Team>
RLK_TEAM void write_rows(Team& team, const Tensor& t, const Place& at_, int head, int width, const float* in,
                         int ld) {
  if (!t) return;
  with_type(t.type, [&](auto tag) {
    using T = decltype(tag);
    auto* data = static_cast<T*>(t.data) + at(t, at_.batch_row, at_.token, head);
    const std::int64_t step = t.token;
    team.cells(at_.rows, width,
               [=](int i, int d) { data[i * step + d] = simt::from_float<T>(in[i * ld + d]); });
  });
}

template <class Team>
RLK_TEAM void read_state(Team& team, const Problem& p, const States& s, std::int64_t n, int hv, float* out) {
  const int K = p.k_dim, V = p.v_dim, ld = padded(V);
  const std::int64_t base = n * s.row + hv * s.head;
  const bool turned = p.v_first;
  team.cells(padded(K), ld, [=](int d, int j) {
    const bool inside = s && d < K && j < V;
    out[d * ld + j] = inside ? load(s.data, s.type, base + (turned ? j * K + d : d * V + j)) : 0.0f;
  });
}

template <class Team>
RLK_TEAM void write_state(Team& team, const Problem& p, const States& s, std::int64_t n, int hv,
                          const float* in) {
  if (!s) return;
  const int K = p.k_dim, V = p.v_dim, ld = padded(V);
  const std::int64_t base = n * s.row + hv * s.head;
  if (p.v_first) {
    team.cells(V, K, [=](int j, int d) { store(s.data, s.type, base + j * K + d, in[d * ld + j]); });
  } else {
    team.cells(K, V, [=](int d, int j) { store(s.data, s.type, base + d * V + j, in[d * ld + j]); });
  }
}

// out[i] = sum over d of a_id b_id: 16 interleaved chains, added in order.
template <class Team>
RLK_TEAM void row_dots(Team& team, int rows, int width, const float* a, const float* b, float* sums,
                       float* out) {
  using L = typename Team::Lane;
  team.grid(rows, 16, [=](int i, int l) {
    L sum = L{};
    for (int d = l; d < width; d += 16)
      sum = simt::fused(Team::load(a + i * width + d), Team::load(b + i * width + d), sum);
    Team::store(sums + i * 16 + l, sum);
  });
  team.sync();
  team.items(rows, [=](int i) {
    float sum = 0;
    for (int l = 0; l < 16; ++l) sum += sums[i * 16 + l];
    out[i] = sum;
  });
  team.sync();
}

// x <- x r rounded to the tensor's type; norms[i] = r.
template <class Team>
RLK_TEAM void normalise(Team& team, Float type, int rows, int width, float* x, float* sums, float* norms) {
  row_dots(team, rows, width, x, x, sums, norms);
  team.items(rows, [=](int i) { norms[i] = 1.0f / simt::root(norms[i] + float(kNormEps)); });
  team.sync();
  team.cells(rows, width,
             [=](int i, int d) { x[i * width + d] = round_to(type, x[i * width + d] * norms[i]); });
}

// dx = r (dy - y (dy . y)), in place.
template <class Team>
RLK_TEAM void unnormalise(Team& team, int rows, int width, const float* y, const float* norms, float* dy,
                          float* sums, float* along) {
  using L = typename Team::Lane;
  row_dots(team, rows, width, dy, y, sums, along);
  team.grid(rows, width, [=](int i, int d) {
    const float* yi = y + i * width + d;
    float* dyi = dy + i * width + d;
    Team::store(dyi, norms[i] * simt::fused(L{} - along[i], Team::load(yi), Team::load(dyi)));
  });
}

// q (not scaled), k, as the recurrence sees them.
template <class Team>
RLK_TEAM void read_key_like(Team& team, const Problem& p, const Tensor& t, const Place& place, int h,
                            float* out, float* sums, float* norms) {
  read_rows(team, t, place, h, p.k_dim, out, padded(p.k_dim));
  team.sync();
  if (!p.l2norm) return;
  normalise(team, t.type, place.rows, padded(p.k_dim), out, sums, norms);
  team.sync();
}

template <class Team>
RLK_TEAM GateParameters<typename Team::Lane> lane_gate(const Problem& p, int hv, const float* bias, int d) {
  using L = typename Team::Lane;
  const float rate = p.gate != Gate::none && p.a_log ? simt::exp<float>(p.a_log[hv]) : 1.0f;
  return {p.gate, L{} + rate, Team::load(bias + d), L{} + float(p.lower_bound)};
}

// The chunk's inputs as the recurrence sees them.
template <class Team>
RLK_TEAM void read_chunk(Team& team, const Problem& p, const Place& place, int hv, const ForwardScratch& s,
                         bool want_q) {
  using L = typename Team::Lane;
  const int K = s.K, n = place.rows, h = hv / p.group();
  read_key_like(team, p, p.k, place, h, s.k, s.sums, s.row);
  if (want_q) {
    read_key_like(team, p, p.q, place, h, s.q, s.sums, s.row);
    const float scale = float(p.scale);
    team.grid(n, K, [=](int i, int d) { Team::store(s.q + i * K + d, Team::load(s.q + i * K + d) * scale); });
  }
  read_rows(team, p.v, place, hv, p.v_dim, s.v, s.V);
  read_rows(team, p.g, place, hv, p.k_dim, s.decay, K);
  team.items(n, [=](int i) {
    s.beta[i] = write_strength<float>(
        p, kda::load(p.beta.data, p.beta.type, at(p.beta, place.batch_row, place.token + i, hv)));
  });
  // Not a choice for every element: masked loads from nowhere, which compilers make of it, are slow.
  const float* bias = p.dt_bias ? p.dt_bias + std::int64_t(hv) * p.k_dim : nullptr;
  const int biases = bias ? p.k_dim : 0;
  team.items(biases, [=](int d) { s.bias[d] = bias[d]; });
  team.items(K - biases, [=](int d) { s.bias[biases + d] = 0; });
  team.sync();
  team.grid(n, K, [=](int i, int d) {
    float* g = s.decay + i * K + d;
    Team::store(g, flushed(simt::exp<L>(lane_gate<Team>(p, hv, s.bias, d).value(Team::load(g)))));
  });
  team.sync();
}

// Running products of decays down and up the chunk and its blocks, and what they multiply.
template <class Team>
RLK_TEAM void decay_chunk(Team& team, int n, const ForwardScratch& s, bool want_q) {
  using L = typename Team::Lane;
  const int K = s.K;
  team.lanes(K, [=](int d) {
    L from_start = L{} + 1.0f, in_block = L{} + 1.0f;
    for (int i = 0; i < n; ++i) {
      const int id = i * K + d;
      const L e = Team::load(s.decay + id), k = Team::load(s.k + id);
      from_start = flushed(L(from_start * e));
      in_block = i % kBlock == 0 ? e : flushed(L(in_block * e));
      Team::store(s.from_start + id, from_start);
      Team::store(s.k_start + id, -(k * from_start));
      Team::store(s.k_block + id, k * in_block);
      if (want_q) {
        const L q = Team::load(s.q + id);
        Team::store(s.q_start + id, q * from_start);
        Team::store(s.q_block + id, q * in_block);
      }
      Team::store(s.block_all + i / kBlock * K + d, in_block);
    }
    Team::store(s.total + d, from_start);
    L to_end = L{} + 1.0f, to_bound = L{} + 1.0f;
    for (int i = n - 1; i >= 0; --i) {
      const int id = i * K + d;
      const L e = Team::load(s.decay + id), k = Team::load(s.k + id);
      if (i % kBlock == kBlock - 1) to_bound = L{} + 1.0f;
      Team::store(s.to_end + id, to_end);
      Team::store(s.k_end + id, k * to_end);
      Team::store(s.k_tail + id, k * to_bound);
      to_end = flushed(L(to_end * e));
      to_bound = flushed(L(to_bound * e));
    }
    for (int i = n; i < padded(n); ++i) Team::store(s.k_tail + i * K + d, L{});
  });
  team.sync();
  team.transpose(padded(n), K, s.k, K, s.k_turned, kRows);
  team.transpose(padded(n), K, s.k_tail, K, s.tail_turned, kRows);
  team.sync();
}

// M without beta, and P when wanted. Across blocks, rows are decayed from their block's start and columns up
// to it.
template <class Team>
RLK_TEAM void pair_chunk(Team& team, int n, const ForwardScratch& s, bool want_q) {
  const int K = s.K, blocks = (n + kBlock - 1) / kBlock;
  for (int b = 1; b < blocks; ++b) {
    const int first = b * kBlock, rows = n - first < kBlock ? n - first : kBlock;
    if (b > 1) {
      team.grid(K, first - kBlock, [=](int d, int j) {
        float* tail = s.tail_turned + d * kRows + j;
        Team::store(tail, Team::load(tail) * s.block_all[(b - 1) * K + d]);
      });
      team.sync();
    }
    team.template gemm<Init::zero, Span::full>(
        Gemm{rows, first, K, s.k_block + first * K, K, 1, s.tail_turned, kRows, s.M + first * kRows, kRows});
    if (want_q) {
      team.template gemm<Init::zero, Span::full>(Gemm{rows, first, K, s.q_block + first * K, K, 1,
                                                      s.tail_turned, kRows, s.P + first * kRows, kRows});
    }
    team.sync();
  }
  team.pairs(blocks, K, want_q ? s.q : nullptr, s.k, s.decay, s.k_turned, s.M, s.P);
  team.sync();
}

// A = (I + M)^-1 by forward substitution, column by column.
template <class Team>
RLK_TEAM void invert_chunk(Team& team, int n, const ForwardScratch& s) {
  using L = typename Team::Lane;
  team.lanes(padded(n), [=](int j) {
    for (int i = 0; i < n; ++i) {
      L row = Team::unit(i - j);
      const float beta = s.beta[i];
      for (int m = j; m < i; ++m) {
        row = simt::fused(L{} - beta * s.M[i * kRows + m], Team::load(s.A + m * kRows + j), row);
      }
      Team::store(s.A + i * kRows + j, row);
    }
  });
  team.sync();
}

// Everything of the chunk that does not depend on the state.
template <class Team>
RLK_TEAM void prepare(Team& team, const Problem& p, const Place& place, int hv, const ForwardScratch& s,
                      bool want_q) {
  read_chunk(team, p, place, hv, s, want_q);
  decay_chunk(team, place.rows, s, want_q);
  pair_chunk(team, place.rows, s, want_q);
  invert_chunk(team, place.rows, s);
}

// x, y and n of the chunk, given the state before it.
template <class Team>
RLK_TEAM void solve(Team& team, int n, const ForwardScratch& s) {
  const int K = s.K, V = s.V;
  team.template gemm<Init::load, Span::full>(Gemm{n, V, K, s.k_start, K, 1, s.state, V, s.x, V, s.v});
  team.sync();
  team.grid(n, V,
            [=](int i, int j) { Team::store(s.y + i * V + j, Team::load(s.x + i * V + j) * s.beta[i]); });
  team.sync();
  team.template gemm<Init::zero, Span::lower>(Gemm{n, V, n, s.A, kRows, 1, s.y, V, s.n, V});
  team.sync();
}

template <class Team>
RLK_TEAM void advance(Team& team, int n, const ForwardScratch& s) {
  const int K = s.K, V = s.V;
  team.template gemm<Init::scale, Span::full>(
      Gemm{K, V, n, s.k_end, 1, K, s.n, V, s.state, V, s.state, s.total});
  team.sync();
}

RLK_HD Place place_of(const Problem& p, std::int64_t n, std::int64_t chunk) {
  const std::int64_t left = p.length(n) - chunk * p.chunk;
  return {p.row(n), p.start(n) + chunk * p.chunk, int(left < p.chunk ? left : p.chunk)};
}

RLK_HD std::int64_t chunks_of(const Problem& p, std::int64_t n) {
  return (p.length(n) + p.chunk - 1) / p.chunk;
}

RLK_HD std::int64_t forward_tasks(const Problem& p) { return p.sequences * p.value_heads; }
RLK_HD std::int64_t backward_tasks(const Problem& p) { return p.sequences * p.heads; }

RLK_HD std::int64_t forward_floats(const Problem& p) {
  Bump bump{nullptr};
  ForwardScratch s(p, bump);
  return bump.used;
}

RLK_HD std::int64_t backward_floats(const Problem& p) {
  Bump bump{nullptr};
  BackwardScratch s(p, bump);
  return bump.used;
}

// Chunks first .. last - 1 of sequence n and value head hv, from the state in scratch to the one behind them.
template <class Team>
RLK_TEAM void forward_chunks(Team& team, const Problem& p, std::int64_t n, int hv, std::int64_t first,
                             std::int64_t last, const ForwardScratch& s) {
  const int V = s.V;
  for (std::int64_t c = first; c < last; ++c) {
    const Place place = place_of(p, n, c);
    write_state(team, p, p.chunk_states, p.slot(n) + c, hv, s.state);
    prepare(team, p, place, hv, s, true);
    if (p.chunk_inverses) {
      const int C = p.chunk;
      team.cells(place.rows, C, [=](int i, int j) {
        kda::store(p.chunk_inverses.data, p.chunk_inverses.type,
                   at(p.chunk_inverses, place.batch_row, place.token + i, hv) + j,
                   j <= i ? s.A[i * kRows + j] : 0.0f);
      });
    }
    solve(team, place.rows, s);
    team.template gemm<Init::zero, Span::full>(
        Gemm{place.rows, V, s.K, s.q_start, s.K, 1, s.state, V, s.o, V});
    team.sync();
    team.template gemm<Init::load, Span::lower>(
        Gemm{place.rows, V, place.rows, s.P, kRows, 1, s.n, V, s.o, V, s.o});
    advance(team, place.rows, s);
    write_rows(team, p.out, place, hv, p.v_dim, s.o, V);
    team.sync();
  }
}

// One (sequence, value head), forward.
template <class Team>
RLK_TEAM void forward(Team& team, const Problem& p, std::int64_t task, float* scratch) {
  Bump bump{scratch};
  const ForwardScratch s(p, bump);
  const std::int64_t n = task / p.value_heads;
  const int hv = int(task % p.value_heads);
  read_state(team, p, p.initial, n, hv, s.state);
  team.sync();
  forward_chunks(team, p, n, hv, 0, chunks_of(p, n), s);
  write_state(team, p, p.final, n, hv, s.state);
  team.sync();
}

// Gradients inside a chunk through P and M: dq_in, R and Y (see the head of this file; R_i = sum_j dM_ij k_j
// E_ij, Y_j = sum_i (dP_ij s q_i + dM_ij beta_i k_i) E_ij).
template <class Team>
RLK_TEAM void backward_pairs(Team& team, int n, const BackwardScratch& b) {
  using L = typename Team::Lane;
  const ForwardScratch& s = b.f;
  const int K = s.K, blocks = (n + kBlock - 1) / kBlock;
  // Across blocks, by rows: k_tail decays to the start of the row's block.
  for (int r = 1; r < blocks; ++r) {
    const int first = r * kBlock, rows = n - first < kBlock ? n - first : kBlock;
    if (r > 1) {
      team.grid(first - kBlock, K, [=](int j, int d) {
        float* tail = s.k_tail + j * K + d;
        Team::store(tail, Team::load(tail) * Team::load(s.block_all + (r - 1) * K + d));
      });
      team.sync();
    }
    team.template gemm<Init::zero, Span::full>(
        Gemm{rows, K, first, b.dP + first * kRows, kRows, 1, s.k_tail, K, b.dq_in + first * K, K});
    team.template gemm<Init::zero, Span::full>(
        Gemm{rows, K, first, b.dM + first * kRows, kRows, 1, s.k_tail, K, b.R + first * K, K});
    team.sync();
  }
  // Across blocks, by columns: q_block and write_k decay from the end of the column's block.
  for (int c = blocks - 2; c >= 0; --c) {
    const int first = c * kBlock, next = first + kBlock, later = next + kBlock;
    if (later < n) {
      team.grid(n - later, K, [=](int i, int d) {
        const L all = Team::load(s.block_all + (c + 1) * K + d);
        float *q = s.q_block + (later + i) * K + d, *k = b.write_k + (later + i) * K + d;
        Team::store(q, Team::load(q) * all);
        Team::store(k, Team::load(k) * all);
      });
      team.sync();
    }
    team.template gemm<Init::zero, Span::full>(Gemm{kBlock, K, n - next, b.dP + next * kRows + first, 1,
                                                    kRows, s.q_block + next * K, K, b.Y + first * K, K});
    team.sync();
    team.template gemm<Init::load, Span::full>(Gemm{kBlock, K, n - next, b.dM + next * kRows + first, 1,
                                                    kRows, b.write_k + next * K, K, b.Y + first * K, K,
                                                    b.Y + first * K});
    team.sync();
  }
  // Inside a block, decaying row by row, and the two parts together.
  team.grid(blocks, K, [=](int block, int d) {
    const int first = block * kBlock, rows = n - first < kBlock ? n - first : kBlock;
    L decayed[kBlock], in_block = L{} + 1.0f;
    for (int i = 0; i < rows; ++i) {
      const int row = first + i, id = row * K + d;
      const L e = Team::load(s.decay + id);
      in_block = i == 0 ? e : flushed(L(in_block * e));
      const float *dP = b.dP + row * kRows + first, *dM = b.dM + row * kRows + first;
      L dq = L{}, R = L{};
      for (int j = 0; j < i; ++j) {
        decayed[j] *= e;
        dq = simt::fused(L{} + dP[j], decayed[j], dq);
        R = simt::fused(L{} + dM[j], decayed[j], R);
      }
      decayed[i] = Team::load(s.k + id);
      dq = simt::fused(L{} + dP[i], decayed[i], dq);
      if (block > 0) {
        dq = simt::fused(in_block, Team::load(b.dq_in + id), dq);
        R = simt::fused(in_block, Team::load(b.R + id), R);
      }
      Team::store(b.dq_in + id, dq);
      Team::store(b.R + id, R);
    }
    L y[kBlock], to_bound = L{} + 1.0f, e = L{};
    for (int i = rows - 1; i >= 0; --i) {
      const int row = first + i, id = row * K + d;
      const L q = Team::load(s.q + id), write = Team::load(s.k + id) * s.beta[row];
      const float *dP = b.dP + row * kRows + first, *dM = b.dM + row * kRows + first;
      if (i == rows - 1) {
        for (int j = 0; j < i; ++j) y[j] = L{};
        y[i] = L{};
      }
      for (int j = 0; j < i; ++j) {
        if (i < rows - 1) y[j] *= e;
        y[j] = simt::fused(L{} + dP[j], q, y[j]);
        y[j] = simt::fused(L{} + dM[j], write, y[j]);
      }
      if (i < rows - 1) y[i] *= e;
      y[i] = simt::fused(L{} + dP[i], q, y[i]);
      if (block + 1 < blocks) y[i] = simt::fused(to_bound, Team::load(b.Y + id), y[i]);
      Team::store(b.Y + id, y[i]);
      e = Team::load(s.decay + id);
      to_bound = flushed(L(to_bound * e));
    }
  });
  team.sync();
}

// One chunk of one value head, backward: leaves dq (of s q), dk, dG, dv and the row sums of d beta; updates
// d_state.
template <class Team>
RLK_TEAM void backward_chunk(Team& team, int n, const BackwardScratch& b, float* d_state) {
  using L = typename Team::Lane;
  const ForwardScratch& s = b.f;
  const int K = s.K, V = s.V, wide = padded(n);
  team.template gemm<Init::zero, Span::upper>(Gemm{n, V, n, s.P, 1, kRows, b.d_out, V, b.dn, V});
  team.sync();
  team.template gemm<Init::load, Span::full>(Gemm{n, V, K, s.k_end, K, 1, d_state, V, b.dn, V, b.dn});
  team.transpose(wide, V, s.n, V, b.n_turned, kRows);
  team.transpose(K, V, s.state, V, b.state_turned, K);
  team.transpose(K, V, d_state, V, b.d_state_turned, K);
  team.sync();
  team.template gemm<Init::zero, Span::upper>(Gemm{n, V, n, s.A, 1, kRows, b.dn, V, b.D, V});
  team.template gemm<Init::zero, Span::full>(Gemm{n, wide, V, b.d_out, V, 1, b.n_turned, kRows, b.dP, kRows});
  team.sync();
  team.template gemm<Init::zero, Span::full>(Gemm{n, wide, V, b.D, V, 1, b.n_turned, kRows, b.dM, kRows});
  team.grid(n, V,
            [=](int i, int j) { Team::store(b.dv + i * V + j, Team::load(b.D + i * V + j) * s.beta[i]); });
  team.lanes(K, [=](int d) {
    L sum = L{};
    for (int j = 0; j < V; ++j) {
      sum =
          simt::fused(Team::load(b.state_turned + j * K + d), Team::load(b.d_state_turned + j * K + d), sum);
    }
    Team::store(b.state_dot + d, sum);
  });
  team.sync();
  team.grid(n, wide, [=](int i, int j) {
    float* m = b.dM + i * kRows + j;
    Team::store(m, -Team::load(m));
  });
  team.grid(n, K, [=](int i, int d) {
    Team::store(b.write_k + i * K + d, Team::load(s.k_block + i * K + d) * s.beta[i]);
  });
  team.template gemm<Init::zero, Span::full>(Gemm{n, K, V, b.d_out, V, 1, b.state_turned, K, b.through_q, K});
  team.template gemm<Init::zero, Span::full>(Gemm{n, K, V, b.dv, V, 1, b.state_turned, K, b.through_x, K});
  team.template gemm<Init::zero, Span::full>(Gemm{n, K, V, s.n, V, 1, b.d_state_turned, K, b.through_n, K});
  team.template gemm<Init::scale, Span::full>(
      Gemm{K, V, n, s.q_start, 1, K, b.d_out, V, d_state, V, d_state, s.total});
  team.sync();
  team.template gemm<Init::load, Span::full>(Gemm{K, V, n, s.k_start, 1, K, b.dv, V, d_state, V, d_state});
  backward_pairs(team, n, b);
  // d beta: through y, and through M.
  row_dots(team, n, V, b.D, s.x, s.sums, s.row);
  team.items(n, [=](int i) {
    float sum = s.row[i];
    for (int j = 0; j < i; ++j) sum = simt::fused(b.dM[i * kRows + j], s.M[i * kRows + j], sum);
    s.row[i] = sum;
  });
  team.lanes(K, [=](int d) {
    L last = Team::load(s.total + d) * Team::load(b.state_dot + d);
    for (int i = 0; i < n; ++i) {
      const int id = i * K + d;
      last = simt::fused(Team::load(s.k_end + id), Team::load(b.through_n + id), last);
    }
    L dg = last;
    for (int i = n - 1; i >= 0; --i) {
      const int id = i * K + d;
      const L q = Team::load(s.q + id), k = Team::load(s.k + id), from_start = Team::load(s.from_start + id);
      const L through_q = Team::load(b.through_q + id), through_x = Team::load(b.through_x + id),
              through_n = Team::load(b.through_n + id), dq_in = Team::load(b.dq_in + id),
              Y = Team::load(b.Y + id), R = Team::load(b.R + id) * s.beta[i];
      Team::store(b.dq + id, simt::fused(from_start, through_q, dq_in));
      L dk = simt::fused(Team::load(s.to_end + id), through_n, L(R + Y));
      dk = simt::fused(-from_start, through_x, dk);
      Team::store(b.dk + id, dk);
      L dG = Team::load(s.q_start + id) * through_q;
      dG = simt::fused(Team::load(s.k_start + id), through_x, dG);
      dG = simt::fused(-Team::load(s.k_end + id), through_n, dG);
      dG = simt::fused(q, dq_in, dG);
      dG = simt::fused(k, L(R - Y), dG);
      dg = dg + dG;
      Team::store(b.dG + id, dg);
    }
  });
  team.sync();
}

// Writes what a value head alone decides: d_v, d_beta, d_g; adds to the sums for d_a_log and d_dt_bias.
template <class Team>
RLK_TEAM void write_head_gradients(Team& team, const Problem& p, const Place& place, int hv,
                                   const BackwardScratch& b, double* partial) {
  const ForwardScratch& s = b.f;
  const int K = s.K, n = place.rows, k_dim = p.k_dim;
  write_rows(team, p.d_v, place, hv, p.v_dim, b.dv, s.V);
  team.items(n, [=](int i) {
    const float raw = kda::load(p.beta.data, p.beta.type, at(p.beta, place.batch_row, place.token + i, hv));
    if (p.d_beta)
      kda::store(p.d_beta.data, p.d_beta.type, at(p.d_beta, place.batch_row, place.token + i, hv),
                 write_strength_grad<float>(p, raw, s.row[i]));
  });
  if (p.gate != Gate::none) {
    read_rows(team, p.g, place, hv, k_dim, b.R, K);  // the raw gate
    team.sync();
    team.grid(n, K, [=](int i, int d) {
      const auto gate = lane_gate<Team>(p, hv, s.bias, d);
      const auto raw = Team::load(b.R + i * K + d), dg = Team::load(b.dG + i * K + d);
      Team::store(b.Y + i * K + d, gate.grad_a_log(raw, dg));
      Team::store(b.dG + i * K + d, gate.grad(raw, dg));
    });
    team.sync();
    team.items(k_dim, [=](int d) {
      double a_log = partial[d], bias = partial[k_dim + d];
      for (int i = n - 1; i >= 0; --i) {
        a_log += double(b.Y[i * K + d]);
        bias += double(b.dG[i * K + d]);
      }
      partial[d] = a_log;
      partial[k_dim + d] = bias;
    });
  }
  write_rows(team, p.d_g, place, hv, k_dim, b.dG, K);
  team.sync();
}

// d_q and d_k of a chunk from the sums over the group's value heads.
template <class Team>
RLK_TEAM void write_key_gradients(Team& team, const Problem& p, const Place& place, int h,
                                  const BackwardScratch& b) {
  const ForwardScratch& s = b.f;
  const int K = s.K, n = place.rows;
  const float scale = float(p.scale);
  team.grid(n, K,
            [=](int i, int d) { Team::store(b.sum_q + i * K + d, Team::load(b.sum_q + i * K + d) * scale); });
  team.sync();
  if (p.l2norm) {
    read_key_like(team, p, p.q, place, h, s.q, s.sums, s.row);
    unnormalise(team, n, K, s.q, s.row, b.sum_q, s.sums, s.beta);
    team.sync();
    read_key_like(team, p, p.k, place, h, s.k, s.sums, s.row);
    unnormalise(team, n, K, s.k, s.row, b.sum_k, s.sums, s.beta);
    team.sync();
  }
  write_rows(team, p.d_q, place, h, p.k_dim, b.sum_q, K);
  write_rows(team, p.d_k, place, h, p.k_dim, b.sum_k, K);
  team.sync();
}

// The gradient of the state alone, through one chunk; what backward_chunk makes of it.
template <class Team>
RLK_TEAM void pass_back(Team& team, int n, const BackwardScratch& b, float* d_state) {
  const ForwardScratch& s = b.f;
  const int K = s.K, V = s.V;
  team.template gemm<Init::zero, Span::upper>(Gemm{n, V, n, s.P, 1, kRows, b.d_out, V, b.dn, V});
  team.sync();
  team.template gemm<Init::load, Span::full>(Gemm{n, V, K, s.k_end, K, 1, d_state, V, b.dn, V, b.dn});
  team.sync();
  team.template gemm<Init::zero, Span::upper>(Gemm{n, V, n, s.A, 1, kRows, b.dn, V, b.D, V});
  team.sync();
  team.grid(n, V,
            [=](int i, int j) { Team::store(b.dv + i * V + j, Team::load(b.D + i * V + j) * s.beta[i]); });
  team.template gemm<Init::scale, Span::full>(
      Gemm{K, V, n, s.q_start, 1, K, b.d_out, V, d_state, V, d_state, s.total});
  team.sync();
  team.template gemm<Init::load, Span::full>(Gemm{K, V, n, s.k_start, 1, K, b.dv, V, d_state, V, d_state});
  team.sync();
}

// Chunks begin .. end - 1 of sequence n.
struct Chunks {
  std::int64_t n, begin, end;
  RLK_HD std::int64_t count() const { return end - begin; }
};

// The states before chunks of the value head `m` of a group, from the one in scratch on.
template <class Team>
RLK_TEAM void save_states(Team& team, const Problem& p, const Chunks& all, int hv, int m,
                          const BackwardScratch& b) {
  const ForwardScratch& s = b.f;
  const std::int64_t matrix = std::int64_t(s.K) * s.V;
  const int V = s.V;
  for (std::int64_t c = 0; c < all.count(); ++c) {
    float* saved = b.states + (m * all.count() + c) * matrix;
    team.grid(s.K, V, [=](int d, int j) { Team::store(saved + d * V + j, Team::load(s.state + d * V + j)); });
    if (c + 1 == all.count()) break;
    const Place place = place_of(p, all.n, all.begin + c);
    prepare(team, p, place, hv, s, false);
    solve(team, place.rows, s);
    advance(team, place.rows, s);
  }
  team.sync();
}

// A q/k head with all its value heads, backward: from the gradients behind these chunks, in b.d_states, to those before. States come from
// save_states() or the caller. `partials`: [HV, 2, K] sums, see finish.
template <class Team>
RLK_TEAM void backward_chunks(Team& team, const Problem& p, const Chunks& all, int h,
                              const BackwardScratch& b, double* partials) {
  const ForwardScratch& s = b.f;
  using L = typename Team::Lane;
  const std::int64_t matrix = std::int64_t(s.K) * s.V;
  const int group = p.group(), first = h * group, K = s.K, V = s.V;
  for (std::int64_t c = all.end - 1; c >= all.begin; --c) {
    const Place place = place_of(p, all.n, c);
    if (group == 0) {  // no value head reads the key head
      team.cells(place.rows, K, [=](int i, int d) { b.sum_q[i * K + d] = b.sum_k[i * K + d] = 0; });
      team.sync();
    }
    for (int m = 0; m < group; ++m) {
      const int hv = first + m;
      if (p.chunk_states) {
        read_state(team, p, p.chunk_states, p.slot(all.n) + c, hv, s.state);
      } else {
        const float* saved = b.states + (m * all.count() + c - all.begin) * matrix;
        team.grid(K, V,
                  [=](int d, int j) { Team::store(s.state + d * V + j, Team::load(saved + d * V + j)); });
      }
      read_rows(team, p.d_out, place, hv, p.v_dim, b.d_out, V);
      prepare(team, p, place, hv, s, true);
      solve(team, place.rows, s);
      backward_chunk(team, place.rows, b, b.d_states + m * matrix);
      team.grid(place.rows, K, [=](int i, int d) {
        const int id = i * K + d;
        const L dq = Team::load(b.dq + id), dk = Team::load(b.dk + id);
        Team::store(b.sum_q + id, m == 0 ? dq : L(Team::load(b.sum_q + id) + dq));
        Team::store(b.sum_k + id, m == 0 ? dk : L(Team::load(b.sum_k + id) + dk));
      });
      write_head_gradients(team, p, place, hv, b, partials + std::int64_t(hv) * 2 * p.k_dim);
    }
    write_key_gradients(team, p, place, h, b);
  }
}

// One (sequence, q/k head) with all its value heads, backward. `partials`: [sequences, HV, 2, K] sums, see
// finish.
template <class Team>
RLK_TEAM void backward(Team& team, const Problem& p, std::int64_t task, float* scratch, double* partials) {
  Bump bump{scratch};
  const BackwardScratch b(p, bump);
  const std::int64_t n = task / p.heads, matrix = std::int64_t(b.f.K) * b.f.V;
  const int h = int(task % p.heads), group = p.group(), first = h * group;
  const Chunks all{n, 0, chunks_of(p, n)};
  partials += n * p.value_heads * 2 * p.k_dim;
  for (int m = 0; m < group; ++m) {
    double* partial = partials + std::int64_t(first + m) * 2 * p.k_dim;
    team.items(2 * p.k_dim, [=](int i) { partial[i] = 0; });
    read_state(team, p, p.d_final, n, first + m, b.d_states + m * matrix);
    if (p.chunk_states) continue;
    read_state(team, p, p.initial, n, first + m, b.f.state);
    team.sync();
    save_states(team, p, all, first + m, m, b);
  }
  team.sync();
  backward_chunks(team, p, all, h, b, partials);
  for (int m = 0; m < group; ++m) write_state(team, p, p.d_initial, n, first + m, b.d_states + m * matrix);
  team.sync();
}

// d_a_log and d_dt_bias of one value head from the partial sums, sequences in order.
template <class Team>
RLK_TEAM void finish(Team& team, const Problem& p, int hv, const double* partials) {
  const int K = p.k_dim;
  const double* mine = partials + std::int64_t(hv) * 2 * K;
  const std::int64_t step = std::int64_t(p.value_heads) * 2 * K;
  if (p.d_dt_bias) {
    team.items(K, [=](int d) {
      double sum = 0;
      for (std::int64_t n = 0; n < p.sequences; ++n) sum += mine[n * step + K + d];
      store(p.d_dt_bias, Float::f32, std::int64_t(hv) * K + d, float(sum));
    });
  }
  if (p.d_a_log) {
    team.items(1, [=](int) {
      double sum = 0;
      for (int d = 0; d < K; ++d) {
        double channel = 0;
        for (std::int64_t n = 0; n < p.sequences; ++n) channel += mine[n * step + d];
        sum += channel;
      }
      store(p.d_a_log, Float::f32, hv, float(sum));
    });
  }
}

}  // namespace rlk::kda::chunked
