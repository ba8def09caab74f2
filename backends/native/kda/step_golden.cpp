// kda_step in fp64 (arithmetic fma64): rows of the open chunk from its cache, which holds fp32. Plain loops over elements; nothing
// is flushed, and every number that is kept or returned is rounded once.
#include <algorithm>
#include <cmath>

#include "arithmetic/kda/step.hpp"
#include "native/kda/recurrent.hpp"

namespace rlk::native::kda::recurrent {
namespace {

using chunked::kBlock;
using chunked::OpenChunk;
using Bump = simt::Bump<double>;

// One task: a sequence and value head.
struct Stepping {
  const Step& p;
  Token token;
  double *state, *dense;  // [K, V], as wide as the cache's rows, and as the op has it
  double *k_start, *q_start, *k_block,
      *q_block;  // of the row, decayed from the chunk's and its block's start
  double *M, *P, *out;
  float* own_cache;
  int K, V;  // as wide as the cache's rows

  Stepping(const Step& step, Bump& bump)
      : p(step),
        token(take_token(step, bump)),
        state(bump.take(step.layout.keys * step.layout.values)),
        dense(bump.take(std::int64_t(step.k_dim) * step.v_dim)),
        k_start(bump.take(step.k_dim)),
        q_start(bump.take(step.k_dim)),
        k_block(bump.take(step.k_dim)),
        q_block(bump.take(step.k_dim)),
        M(bump.take(step.chunk)),
        P(bump.take(step.chunk)),
        out(bump.take(step.v_dim)),
        own_cache(step.cache ? nullptr : reinterpret_cast<float*>(bump.take(step.layout.size))),
        K(int(step.layout.keys)),
        V(int(step.layout.values)) {}

  // Between the op's state, whose rows lie one behind the other, and one as wide as the cache.
  void widen() const {
    for (int d = 0; d < K; ++d)
      for (int j = 0; j < V; ++j)
        state[std::int64_t(d) * V + j] =
            d < p.k_dim && j < p.v_dim ? dense[std::int64_t(d) * p.v_dim + j] : 0.0;
  }
  void narrow() const {
    for (int d = 0; d < p.k_dim; ++d)
      for (int j = 0; j < p.v_dim; ++j) dense[std::int64_t(d) * p.v_dim + j] = state[std::int64_t(d) * V + j];
  }

  double before(const OpenChunk& c, int block, int d) const {
    return block == 0 ? 1.0 : double(c.start[block * K + d]);
  }

  void close_chunk(const OpenChunk& c) const {
    const int last = c.C - kBlock;
    for (int d = 0; d < K; ++d) {
      double* line = state + std::int64_t(d) * V;
      double total = before(c, last / kBlock, d), to_end = 1;
      for (int i = last; i < c.C; ++i) total *= double(c.decay[i * K + d]);
      for (int j = 0; j < V; ++j) line[j] *= total;
      for (int i = c.C - 1; i >= 0; --i) {
        const double k = c.k[i * K + d] * to_end;
        for (int j = 0; j < V; ++j) line[j] = std::fma(k, double(c.n[i * V + j]), line[j]);
        to_end *= double(c.decay[i * K + d]);
      }
    }
  }

  void close_block(const OpenChunk& c, int first) const {
    const int block = first / kBlock;
    for (int d = 0; d < K; ++d) {
      double over = 1, to_end = 1;
      for (int i = first; i < first + kBlock; ++i) over *= double(c.decay[i * K + d]);
      c.start[(block + 1) * K + d] = float(before(c, block, d) * over);
      c.whole[block * K + d] = float(over);
      for (int i = first + kBlock - 1; i >= first; --i) {
        c.tail[d * c.C + i] = float(c.k[i * K + d] * to_end);
        to_end *= double(c.decay[i * K + d]);
      }
    }
  }

  // The row's key and decay, and what the decays before it multiply.
  void keep_token(const OpenChunk& c, int i) const {
    const int first = i - i % kBlock;
    for (int d = 0; d < K; ++d) {
      const bool inside = d < p.k_dim;
      c.k[i * K + d] = inside ? float(token.k[d]) : 0.0f;
      c.decay[i * K + d] = inside ? float(token.decay[d]) : 0.0f;
      if (!inside) continue;
      double in_block = token.decay[d];
      for (int m = i - 1; m >= first; --m) in_block *= double(c.decay[m * K + d]);
      const double from_start = before(c, first / kBlock, d) * in_block;
      k_start[d] = token.k[d] * from_start, q_start[d] = token.q[d] * from_start;
      k_block[d] = token.k[d] * in_block, q_block[d] = token.q[d] * in_block;
    }
  }

  // M_ij and P_ij of an earlier row or of the row itself.
  void pair(const OpenChunk& c, int i, int j) const {
    const int block = i / kBlock;
    const bool own = j / kBlock == block;
    M[j] = P[j] = 0;
    for (int d = 0; d < p.k_dim; ++d) {
      double met = j == i ? token.k[d] : double(own ? c.k[j * K + d] : c.tail[d * c.C + j]);
      for (int b = j / kBlock + 1; b < block; ++b) met *= double(c.whole[b * K + d]);
      for (int m = j + 1; own && m <= i; ++m) met *= m == i ? token.decay[d] : double(c.decay[m * K + d]);
      M[j] = std::fma(own ? token.k[d] : k_block[d], met, M[j]);
      P[j] = std::fma(own ? token.q[d] : q_block[d], met, P[j]);
    }
  }

  void row(const OpenChunk& c, int i) const {
    keep_token(c, i);
    for (int j = 0; j <= i; ++j) pair(c, i, j);
    for (int j = 0; j < chunked::padded(i + 1); ++j) {
      double sum = j == i ? 1 : 0;
      for (int m = j; m < i; ++m) sum = std::fma(-token.beta * M[m], double(c.A[m * c.C + j]), sum);
      c.A[i * c.C + j] = float(sum);
    }
    for (int j = 0; j < V; ++j) {
      double x = j < p.v_dim ? token.v[j] : 0, n = 0, o = 0;
      for (int d = 0; d < p.k_dim; ++d) {
        const double S = state[std::int64_t(d) * V + j];
        x = std::fma(-k_start[d], S, x);
        o = std::fma(q_start[d], S, o);
      }
      const double y = x * token.beta;
      c.y[i * V + j] = float(y);
      for (int m = 0; m < i; ++m) {
        n = std::fma(double(c.A[i * c.C + m]), double(c.y[m * V + j]), n);
        o = std::fma(P[m], double(c.n[m * V + j]), o);
      }
      n += y;
      c.n[i * V + j] = float(n);
      if (j < p.v_dim) out[j] = std::fma(P[i], n, o);
    }
    if (i % kBlock == kBlock - 1 && i + 1 < c.C) close_block(c, i + 1 - kBlock);
  }
};

}  // namespace

std::size_t step_scratch(const Step& p) {
  Bump bump{nullptr};
  Stepping count(p, bump);
  return std::size_t(bump.used) * sizeof(double);
}

void step(const Step& p, std::int64_t task, void* scratch) {
  Bump bump{static_cast<double*>(scratch)};
  Stepping s(p, bump);
  const std::int64_t n = task / p.value_heads, first = p.start(n);
  const int hv = int(task % p.value_heads);
  const OpenChunk c(p.layout, p.cache
                                  ? static_cast<float*>(p.cache.data) + n * p.cache.row + hv * p.cache.head
                                  : s.own_cache);
  read_state(p, p.initial, n, hv, s.dense);
  s.widen();
  int i = int(p.cached(n));
  if (i == p.chunk) {
    s.close_chunk(c);
    s.narrow();
    write_state(p, p.final, n, hv, s.dense);
    i = 0;
  }
  for (std::int64_t t = 0; t < p.length(n); ++t) {
    read_token(p, p.row(n), first + t, hv, s.token);
    s.row(c, i + int(t));
    const std::int64_t base = at(p.out, p.row(n), first + t, hv);
    for (int j = 0; j < p.v_dim; ++j) store64(p.out.data, p.out.type, base + j, p.scale * s.out[j]);
  }
}

}  // namespace rlk::native::kda::recurrent
