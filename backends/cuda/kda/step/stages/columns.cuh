// A row of the open chunk from its token: the stage of the columns of V.
#pragma once

#include "cuda/kda/step/stages/block.cuh"

namespace rlk::cuda::kda::step::stages {

// What a thread's two columns take of a task's token.
struct FetchedColumns {
  Rows rows;
  Bits v[2], beta;

  __device__ FetchedColumns(const Step& p, const char* rows_from, const char* v_from, const char* beta_from)
      : rows(rows_from, p.wide_rows),
        v{Bits(v_from, p.v.type), Bits(v_from + (p.v.type == Float::f32 ? 4 : 2), p.v.type)},
        beta(beta_from, p.beta.type) {}
  __device__ FetchedColumns(const Step& p, const Row& r, int column)
      : FetchedColumns(p, rows_at(p, r), channel_at(p.v, r.n, r.hv, column),
                       channel_at(p.beta, r.n, r.hv, 0)) {}
};

// A chain for each of a thread's two columns: two, since every factor that a thread reads is as much traffic
// of shared memory as a number that it multiplies.
using Two = float[2];

// Some rows, with the factors of two sums.
struct Some {
  static constexpr int kCount = 8;
  Two row[kCount];
  float a[kCount], b[kCount];

  __device__ __forceinline__ void ask(const float* rows, const float* of_a, const float* of_b) {
#pragma unroll
    for (int m = 0; m < kCount; ++m) read(rows + m * kDim, row[m]);
    read(of_a, a), read(of_b, b);
  }
  __device__ __forceinline__ void add(Two& x, Two& o) const {
#pragma unroll
    for (int m = 0; m < kCount; ++m)
#pragma unroll
      for (int c = 0; c < 2; ++c) x[c] = fused(a[m], row[m][c], x[c]), o[c] = fused(b[m], row[m][c], o[c]);
  }
};

// x and (s q eg) S: `x` begins as v, `o` as zero. Rows are on their way from shared memory while those before
// them are added.
__device__ __forceinline__ void add_state(Shared& s, unsigned piece, const Handed& from, int column, Two& x,
                                          Two& o) {
  constexpr int kHalfPiece = Some::kCount;
  static_assert(2 * kHalfPiece == kBlock);
  Some one, other;
  const float *rows = wait_for(s.columns, piece) + column, *k = from.k_start, *q = from.q_start;
  one.ask(rows, k, q);
#pragma unroll 2
  for (int b = 0; b < kDim / kBlock; ++b, ++piece, k += kBlock, q += kBlock) {
    other.ask(rows + kHalfPiece * kDim, k + kHalfPiece, q + kHalfPiece);
    one.add(x, o);
    if (b + 1 < kDim / kBlock) {
      rows = wait_for(s.columns, piece + 1) + column;
      one.ask(rows, k + kBlock, q + kBlock);
    }
    other.add(x, o);
    release(s.columns, piece);
  }
}

// Row i of A times y, and P n on top of `o`, over 16 rows, of which `count` lie before row i. What lies
// behind is -0 times +0.
template <bool Whole>
__device__ __forceinline__ void add_block(const float* n, const float* y, const float* A, const float* P,
                                          int count, Two& sum, Two& o) {
  Two of_n[kBlock], of_y[kBlock];
  float a[kBlock], p[kBlock];
#pragma unroll
  for (int m = 0; m < kBlock; ++m) read(n + m * kDim, of_n[m]), read(y + m * kDim, of_y[m]);
  read(A, a), read(P, p);
#pragma unroll
  for (int m = 0; m < kBlock; ++m) {
    const bool there = Whole || m < count;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[c] = fused(there ? a[m] : -0.0f, there ? of_y[m][c] : 0.0f, sum[c]);
      o[c] = fused(there ? p[m] : -0.0f, there ? of_n[m][c] : 0.0f, o[c]);
    }
  }
}
__device__ __forceinline__ void add_rows(Shared& s, unsigned piece, const Handed& from, int i, int column,
                                         Two& sum, Two& o) {
#pragma unroll 1
  for (int first = 0; first < i; first += kBlock, piece += 2) {
    const float *n = wait_for(s.columns, piece) + column, *y = wait_for(s.columns, piece + 1) + column;
    if (first + kBlock <= i) {
      add_block<true>(n, y, from.row + first, from.P + first, kBlock, sum, o);
    } else {
      add_block<false>(n, y, from.row + first, from.P + first, i - first, sum, o);
    }
    release(s.columns, piece), release(s.columns, piece + 1);
  }
}

// Two columns of a task, whose `out` it returns. `piece` is the first of the task's, and then the first of
// the next one's.
__device__ __forceinline__ void step_columns(const Step& p, const Row& r, const FetchedColumns& fetched,
                                             Shared& s, Handed& from, int parity, unsigned& piece, int column,
                                             Two& out) {
  const float beta =
      ::rlk::kda::write_strength<float>(p, ::rlk::kda::from_bits(p.beta.type, fetched.beta.value()));
  Two x, y, n = {0, 0};
  for (int c = 0; c < 2; ++c) x[c] = ::rlk::kda::from_bits(p.v.type, fetched.v[c].value()), out[c] = 0;
  barrier_wait(&from.started, parity);
  add_state(s, piece, from, column, x, out);
  piece += kDim / kBlock;
  barrier_wait(&from.complete, parity);
  add_rows(s, piece, from, r.i, column, n, out);
  piece += 2 * static_cast<unsigned>((r.i + kBlock - 1) / kBlock);
  const float A = from.row[r.i], P = from.P[r.i];
  arrive_warp(&from.taken);
  for (int c = 0; c < 2; ++c) {
    y[c] = mul_rn(x[c], beta);
    n[c] = fused(A, y[c], n[c]);
    out[c] = fused(P, n[c], out[c]);
  }
  write(r.c.y + r.i * kDim + column, y);
  write(r.c.n + r.i * kDim + column, n);
}

// What the columns' warps do.
__device__ inline void consume_columns(const Step& p, Shared& s, int task, int step, int thread) {
  const int tasks = static_cast<int>(p.sequences * p.value_heads), column = thread * 2;
  unsigned piece = 0, turn = 0;
  begin_reading();
  FetchedColumns next(p, Row(p, task), column);
  for (; task < tasks; task += step) {
    Row r(p, task);
    const FetchedColumns fetched = next;
    if (task + step < tasks) next = FetchedColumns(p, Row(p, task + step), column);
    const unsigned rows = fetched.rows.value();
    Two out = {::rlk::simt::bits_float(0x7fc00000), ::rlk::simt::bits_float(0x7fc00000)};
    if (fits(rows)) {
      r.i = static_cast<int>(rows % kRows);
      step_columns(p, r, fetched, s, s.handed[turn % 2], turn / 2 & 1, piece, column, out);
      ++turn;
    }
    for (int c = 0; c < 2; ++c)
      ::rlk::kda::store(p.out.data, p.out.type, ::rlk::kda::at(p.out, r.n, 0, r.hv) + column + c, out[c]);
  }
}

}  // namespace rlk::cuda::kda::step::stages
