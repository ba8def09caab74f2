// KDA recurrences over chunks: one block per (sequence, value head, slice of V), serial over its chunks.
//
//   forward:   x = beta (v - (k e^G) S)     vnew = A x     o = (scale q e^G) S + P vnew
//              S <- Diag(e^{G_L}) S + (k e^{G_L-G})^T vnew
//   backward:  dvnew = P^T do + (k e^{G_L-G}) dS     dx = A^T dvnew     dv = beta dx
//              dS <- Diag(e^{G_L}) dS + (scale q e^G)^T do - (k e^G)^T (beta dx)
//
// These are the WY products with w and u multiplied out: no w, no u, no rounding of them, and v is used
// exactly. Once the preparation is done neither recurrence needs the other, so the backward runs both in one
// grid.
//
// Every matrix is kept transposed, V first. A warp owns 16 columns of V and all of K: its 16 x K state stays
// in mma accumulators, which as they lie are the A operand of the next product, and so are x and vnew. Warps
// never exchange anything; every B operand is a tile of the chunk's record, which the bulk copy engine brings
// two chunks deep. The number of warps per block (the cut of V) follows the size of the call and changes no
// bit: columns of V never meet. Where blocks are narrow the forward's outputs are left to a second warp per
// warp, which the recurrence does not wait for. x and dvnew are split into two bf16 terms before they meet A,
// so that only P, A, vnew and the state operands are rounded.
#include "kda_sm90_device.cuh"

namespace rlk::cuda::kda90 {
namespace {

struct Slice {
  int sequence, head, column;  // first column of V of this warp
};

template <int K>
struct State {
  float x[K / 8][4];  // 16 columns of V (rows of the fragment) x K

  __device__ void read(const Job& p, const float* from, const Slice& s) {
    const int lane = threadIdx.x % 32;
    const float* base =
        from ? from + (static_cast<std::int64_t>(s.sequence) * p.value_heads + s.head) * K * K : nullptr;
#pragma unroll
    for (int n = 0; n < K / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int v = s.column + lane / 4 + (e / 2) * 8, k = 8 * n + 2 * (lane % 4) + e % 2;
        x[n][e] = base ? base[p.v_first ? v * K + k : k * K + v] : 0.f;
      }
    }
  }
  __device__ void write(const Job& p, float* to, const Slice& s) const {
    if (!to) return;
    const int lane = threadIdx.x % 32;
    float* base = to + (static_cast<std::int64_t>(s.sequence) * p.value_heads + s.head) * K * K;
#pragma unroll
    for (int n = 0; n < K / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int v = s.column + lane / 4 + (e / 2) * 8, k = 8 * n + 2 * (lane % 4) + e % 2;
        base[p.v_first ? v * K + k : k * K + v] = x[n][e];
      }
    }
  }
  // The A operand of k step `ks`, rounded to bf16.
  __device__ void operand(std::uint32_t (&a)[4], int ks) const {
    a[0] = pack(x[2 * ks][0], x[2 * ks][1]);
    a[1] = pack(x[2 * ks][2], x[2 * ks][3]);
    a[2] = pack(x[2 * ks + 1][0], x[2 * ks + 1][1]);
    a[3] = pack(x[2 * ks + 1][2], x[2 * ks + 1][3]);
  }
  __device__ void decay(const float* factors) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < K / 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * n + 2 * t);
      x[n][0] *= f.x, x[n][1] *= f.y, x[n][2] *= f.x, x[n][3] *= f.y;
    }
  }
};

// A fragment of 16 columns of V x 16 steps as blocks of a [V][width] matrix, in slices of 64 columns: [width
// / 64][V] [64]; `vb`, `cb` count blocks.
template <int V>
__device__ inline void store_blocks(bf16* base, int vb, int cb, const std::uint32_t (&a)[4]) {
  auto to =
      reinterpret_cast<std::uint32_t*>(base) + ((cb / 8 * (V / 8) + vb) * 8 + cb % 8) * 32 + threadIdx.x % 32;
  to[0] = a[0];
  to[8 * 32] = a[1];
  to[32] = a[2];
  to[9 * 32] = a[3];
}

// acc[V x 64] += operand(ks)[V x 16] * tile[64 rows][16 columns at step ks]^T: the tile's rows are the
// result's columns.
__device__ inline void times_rows(float (&acc)[8][4], const std::uint32_t (&a)[4], std::uint32_t tile, int ks,
                                  int from) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int np = 0; np < 4; ++np) {
    if (np < from) continue;
    std::uint32_t b[4];
    ldmatrix(b, tile + row_tile(64, 16 * np + (lane / 16) * 8 + lane % 8, 2 * ks + (lane / 8) % 2));
    mma(acc[2 * np], a, b[0], b[1]);
    mma(acc[2 * np + 1], a, b[2], b[3]);
  }
}
// The same for an operand in two terms.
__device__ inline void times_rows(float (&acc)[8][4], const std::uint32_t (&lo)[4],
                                  const std::uint32_t (&hi)[4], std::uint32_t tile, int ks, int from) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int np = 0; np < 4; ++np) {
    if (np < from) continue;
    std::uint32_t b[4];
    ldmatrix(b, tile + row_tile(64, 16 * np + (lane / 16) * 8 + lane % 8, 2 * ks + (lane / 8) % 2));
    mma(acc[2 * np], lo, b[0], b[1]);
    mma(acc[2 * np + 1], lo, b[2], b[3]);
    mma(acc[2 * np], hi, b[0], b[1]);
    mma(acc[2 * np + 1], hi, b[2], b[3]);
  }
}
// acc[V x 16 Pairs] += operand[V x 16] * tile[16 rows at step ks][16 Pairs columns].
template <int N>
__device__ inline void times_columns(float (&acc)[N][4], const std::uint32_t (&a)[4], std::uint32_t tile,
                                     int ks, int to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int np = 0; np < N / 2; ++np) {
    if (np >= to) continue;
    std::uint32_t b[4];
    ldmatrix_t(b, tile + row_tile(64, 16 * ks + lane % 16, 2 * np + lane / 16));
    mma(acc[2 * np], a, b[0], b[1]);
    mma(acc[2 * np + 1], a, b[2], b[3]);
  }
}

// The same for an operand in two terms.
template <int N>
__device__ inline void times_columns(float (&acc)[N][4], const std::uint32_t (&lo)[4],
                                     const std::uint32_t (&hi)[4], std::uint32_t tile, int ks, int to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int np = 0; np < N / 2; ++np) {
    if (np >= to) continue;
    std::uint32_t b[4];
    ldmatrix_t(b, tile + row_tile(64, 16 * ks + lane % 16, 2 * np + lane / 16));
    mma(acc[2 * np], lo, b[0], b[1]);
    mma(acc[2 * np + 1], lo, b[2], b[3]);
    mma(acc[2 * np], hi, b[0], b[1]);
    mma(acc[2 * np + 1], hi, b[2], b[3]);
  }
}

// This warp's 16 columns of a [token][V] tensor, 64 tokens, in its own 2 KiB of shared memory: 32-byte rows,
// the two halves of a row swapped in every second group of four rows.
__device__ inline int slim_tile(int row, int piece) { return row * 32 + ((piece ^ (row >> 2 & 1)) << 4); }

__device__ inline void load_slim(std::uint32_t shared, const bf16* from, std::int64_t step, int length) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 8 * 2 * i + lane / 2, piece = lane % 2;
    const bool valid = row < length;
    copy16(shared + slim_tile(row, piece), from + (valid ? row : 0) * step + 8 * piece, valid);
  }
}
// Fragment [V][16 tokens at step ks] of a slim tile.
__device__ inline void slim_operand(std::uint32_t (&a)[4], std::uint32_t tile, int ks) {
  const int lane = threadIdx.x % 32;
  ldmatrix_t(a, tile + slim_tile(16 * ks + (lane / 16) * 8 + lane % 8, (lane / 8) % 2));
}

// Writes a fragment pair (16 columns of V, 8 tokens, bf16 pairs along tokens) to a [token][V] tensor.
__device__ inline void store_turned(bf16* to, std::int64_t step, int token, int length, std::uint32_t r0,
                                    std::uint32_t r1) {
  const int lane = threadIdx.x % 32, t = lane % 4, row = token + lane / 4;
  r0 = movmatrix(r0), r1 = movmatrix(r1);
  const bool odd = t & 1;
  const std::uint32_t got = __shfl_xor_sync(~0u, odd ? r0 : r1, 1);
  if (row < length) {
    *reinterpret_cast<uint2*>(to + row * step + (t & 1) * 8 + (t >> 1) * 4) =
        odd ? make_uint2(got, r1) : make_uint2(r0, got);
  }
}

__device__ inline void clear(float (&acc)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[n][e] = 0.f;
  }
}
// acc as the A operand of step ks: rounded, and what the rounding left.
__device__ inline void split(const float (&acc)[8][4], int ks, std::uint32_t (&hi)[4],
                             std::uint32_t (&lo)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = acc[2 * ks + i / 2][2 * (i % 2)], b = acc[2 * ks + i / 2][2 * (i % 2) + 1];
    hi[i] = pack(a, b);
    lo[i] = pack(a - low(hi[i]), b - high(hi[i]));
  }
}
__device__ inline void round_operand(const float (&acc)[8][4], int ks, std::uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = pack(acc[2 * ks + i / 2][2 * (i % 2)], acc[2 * ks + i / 2][2 * (i % 2) + 1]);
}

// acc = tile[64 x 64] y for a lower triangular tile, y in two bf16 terms.
__device__ inline void solve(float (&acc)[8][4], const float (&y)[8][4], std::uint32_t tile) {
  clear(acc);
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) {
    std::uint32_t hi[4], lo[4];
    split(y, ks, hi, lo);
    times_rows(acc, lo, hi, tile, ks, ks);
  }
}

// The tokens from which on a warp's columns of V are NaN, 64 for none: columns lane / 4 and that + 8.
//
// A token that is NaN or infinite must not reach the ones before it, but the zeros of A and P times NaN are
// NaN. So the products see zeros in its place, and what depends on it is set to NaN afterwards.
struct Broken {
  int from[2] = {64, 64};

  __device__ static bool any(const float (&x)[8][4]) {
    float zero = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = fmaf(x[n][e], 0.f, zero);
    }
    return __any_sync(~0u, zero != 0.f);
  }
  __device__ static int token(int n, int e) { return 8 * n + 2 * (threadIdx.x % 4) + e % 2; }

  __device__ void take(float (&x)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (fabsf(x[n][e]) < INFINITY) continue;
        from[e / 2] = min(from[e / 2], token(n, e));
        x[n][e] = 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from[i] = min(from[i], __shfl_xor_sync(~0u, from[i], 1));
      from[i] = min(from[i], __shfl_xor_sync(~0u, from[i], 2));
    }
  }
  __device__ void put(float (&x)[8][4]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = token(n, e) >= from[e / 2] ? NAN : x[n][e];
    }
  }
  __device__ void put(std::uint32_t (&operand)[4], int ks) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = token(2 * ks + i / 2, 0), first = from[i % 2];
      operand[i] |= (t >= first ? 0x7fffu : 0u) | (t + 1 >= first ? 0x7fff0000u : 0u);
    }
  }
};

// Where the output is computed: not at all, by the warp that has the state, or by another warp of its own,
// which has the state's operand and vnew sent to it, so that the recurrence need not wait for it.
enum class Out { none, here, apart };

__device__ inline void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
constexpr int kPairBarrier = 1, kStateBarrier = 5, kOutputBarrier = 6;  // a pair's is its number further

// Two chunks' worth of what a warp with the state sends: the operands [K / 16] and [4], and Broken::from.
template <int K>
struct Letter {
  static constexpr int kState = 0, kNew = kState + K * 32, kBroken = kNew + 2048, kSize = kBroken + 256;
};
template <int K, int Warps>
struct Apart {
  static constexpr int kStage = Record<K>::kShort + Warps * 2048,
                       kTail = Record<K>::kSize - Record<K>::kShort;
  static constexpr int kTails = 2 * kStage, kLetters = kTails + 2 * kTail;
  static constexpr int kSize = kLetters + 2 * Warps * Letter<K>::kSize;
};

template <int K, int Warps, Out out, bool Keep>
__device__ void forward_scan(const Job& p, const Slice& s, char* smem, std::uint32_t bars) {
  using R = Record<K>;
  constexpr int kRecord = out == Out::here ? R::kSize : R::kShort, kStage = kRecord + Warps * 2048;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const std::int64_t start = sequence_start(p, s.sequence), tokens = sequence_length(p, s.sequence);
  const int chunks = static_cast<int>((tokens + kChunk - 1) / kChunk), slot0 = first_slot(p, s.sequence);
  const std::int64_t row = p.cu_seqlens ? 0 : s.sequence;
  const std::uint32_t base = shared_address(smem);
  auto length = [&](int c) {
    return static_cast<int>(
        min(tokens - static_cast<std::int64_t>(c) * kChunk, static_cast<std::int64_t>(kChunk)));
  };
  auto item = [&](int c) { return static_cast<std::int64_t>(slot0 + c) * p.value_heads + s.head; };
  auto load = [&](int c) {
    const std::uint32_t stage = base + (c & 1) * kStage;
    if (tid == 0) {
      barrier_expect(bars + 8 * (c & 1), kRecord);
      bulk_copy(stage, p.records + item(c) * R::kSize, kRecord, bars + 8 * (c & 1));
    }
    load_slim(stage + kRecord + warp * 2048, row_of(p.v, row, start + c * kChunk, s.head) + s.column,
              p.v.token, length(c));
    copy_commit();
  };

  State<K> state;
  state.read(p, p.initial, s);
  if (chunks > 0) load(0);
  for (int c = 0; c < chunks; ++c) {
    if (c + 1 < chunks) {
      load(c + 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    barrier_wait(bars + 8 * (c & 1), c >> 1 & 1);
    __syncwarp();
    const std::uint32_t stage = base + (c & 1) * kStage;
    const char* record = smem + (c & 1) * kStage;
    const float* beta = reinterpret_cast<const float*>(record + R::kBeta);

    char* letter = smem + Apart<K, Warps>::kLetters + ((c & 1) * Warps + warp) * Letter<K>::kSize + lane * 16;

    float y[8][4], o[out == Out::here ? 8 : 1][4];
    clear(y);
    if constexpr (out == Out::here) clear(o);
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) {
      std::uint32_t a[4];
      state.operand(a, ks);
      if constexpr (Keep) {
        store_blocks<K>(
            p.states + ((static_cast<std::int64_t>(slot0) + c + s.sequence) * p.value_heads + s.head) * K * K,
            s.column / 8, 2 * ks, a);
      }
      if constexpr (out == Out::apart) {
        *reinterpret_cast<uint4*>(letter + Letter<K>::kState + 512 * ks) = make_uint4(a[0], a[1], a[2], a[3]);
      }
      times_rows(y, a, stage + R::kKeyIn, ks, 0);
      if constexpr (out == Out::here) times_rows(o, a, stage + R::kQuery, ks, 0);
    }
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      std::uint32_t v[4];
      slim_operand(v, stage + kRecord + warp * 2048, ks);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* e = &y[2 * ks + i / 2][2 * (i % 2)];
        const float2 b = *reinterpret_cast<const float2*>(beta + 16 * ks + (i / 2) * 8 + 2 * (lane % 4));
        e[0] = b.x * (low(v[i]) - e[0]);
        e[1] = b.y * (high(v[i]) - e[1]);
      }
    }
    float fresh[8][4];
    solve(fresh, y, stage + R::kInverse);
    Broken broken;
    const bool any_broken = Broken::any(fresh);
    if (any_broken) {
      broken.take(y);
      solve(fresh, y, stage + R::kInverse);
      broken.take(fresh);
    }
    state.decay(reinterpret_cast<const float*>(record + R::kDecay));
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      std::uint32_t a[4];
      round_operand(fresh, ks, a);
      if constexpr (out == Out::here) times_rows(o, a, stage + R::kScores, ks, ks);
      if constexpr (out == Out::apart) {
        *reinterpret_cast<uint4*>(letter + Letter<K>::kNew + 512 * ks) = make_uint4(a[0], a[1], a[2], a[3]);
      }
      times_columns(state.x, a, stage + R::kKeyOut, ks, K / 16);
      if constexpr (Keep) {
        if (any_broken) broken.put(a, ks);
        store_blocks<K>(p.v_new + item(c) * K * kChunk, s.column / 8, 2 * ks, a);
      }
    }
    if (any_broken) {
      if constexpr (out == Out::here) broken.put(o);
#pragma unroll
      for (int n = 0; n < K / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.x[n][e] = broken.from[e / 2] < kChunk ? NAN : state.x[n][e];
      }
    }
    if constexpr (out == Out::here) {
      bf16* to = row_of(p.out, row, start + c * kChunk, s.head) + s.column;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        store_turned(to, p.out.token, 8 * n, length(c), pack(o[n][0], o[n][1]), pack(o[n][2], o[n][3]));
      }
    }
    if constexpr (out == Out::apart) {
      *reinterpret_cast<int2*>(letter - lane * 8 + Letter<K>::kBroken) =
          make_int2(broken.from[0], broken.from[1]);
      meet(kPairBarrier + warp, 64);
      meet(kStateBarrier, 32 * Warps);
    } else {
      __syncthreads();
    }
  }
  if constexpr (Keep) {
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) {
      std::uint32_t a[4];
      state.operand(a, ks);
      store_blocks<K>(
          p.states +
              ((static_cast<std::int64_t>(slot0) + chunks + s.sequence) * p.value_heads + s.head) * K * K,
          s.column / 8, 2 * ks, a);
    }
  }
  state.write(p, p.final, s);
}

// The outputs of the columns that another warp keeps the state of.
template <int K, int Warps>
__device__ void output_scan(const Job& p, const Slice& s, char* smem, std::uint32_t bars) {
  using R = Record<K>;
  using A = Apart<K, Warps>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - Warps;
  const std::int64_t start = sequence_start(p, s.sequence), tokens = sequence_length(p, s.sequence);
  const int chunks = static_cast<int>((tokens + kChunk - 1) / kChunk), slot0 = first_slot(p, s.sequence);
  const std::int64_t row = p.cu_seqlens ? 0 : s.sequence;
  auto load = [&](int c) {
    if (warp > 0 || lane > 0) return;
    const std::int64_t item = static_cast<std::int64_t>(slot0 + c) * p.value_heads + s.head;
    barrier_expect(bars + 8 * (c & 1), A::kTail);
    bulk_copy(shared_address(smem) + A::kTails + (c & 1) * A::kTail, p.records + item * R::kSize + R::kShort,
              A::kTail, bars + 8 * (c & 1));
  };
  if (chunks > 0) load(0);
  for (int c = 0; c < chunks; ++c) {
    if (c + 1 < chunks) load(c + 1);
    barrier_wait(bars + 8 * (c & 1), c >> 1 & 1);
    meet(kPairBarrier + warp, 64);
    const std::uint32_t tail = shared_address(smem) + A::kTails + (c & 1) * A::kTail;
    const char* letter = smem + A::kLetters + ((c & 1) * Warps + warp) * Letter<K>::kSize + lane * 16;
    auto operand = [&](std::uint32_t(&a)[4], int at, int ks) {
      const uint4 x = *reinterpret_cast<const uint4*>(letter + at + 512 * ks);
      a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    };
    float o[8][4];
    clear(o);
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) {
      std::uint32_t a[4];
      operand(a, Letter<K>::kState, ks);
      times_rows(o, a, tail, ks, 0);
    }
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      std::uint32_t a[4];
      operand(a, Letter<K>::kNew, ks);
      times_rows(o, a, tail + R::kScores - R::kShort, ks, ks);
    }
    const int2 from = *reinterpret_cast<const int2*>(letter - lane * 8 + Letter<K>::kBroken);
    Broken broken;
    broken.from[0] = from.x, broken.from[1] = from.y;
    if (__any_sync(~0u, min(from.x, from.y) < kChunk)) broken.put(o);
    bf16* to = row_of(p.out, row, start + c * kChunk, s.head) + s.column;
    const int length = static_cast<int>(
        min(tokens - static_cast<std::int64_t>(c) * kChunk, static_cast<std::int64_t>(kChunk)));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      store_turned(to, p.out.token, 8 * n, length, pack(o[n][0], o[n][1]), pack(o[n][2], o[n][3]));
    }
    meet(kOutputBarrier, 32 * Warps);
  }
}

template <int K, int Warps>
__device__ void reverse_scan(const Job& p, const Slice& s, char* smem, std::uint32_t bars) {
  using R = Record<K>;
  constexpr int kStage = R::kSize + Warps * 2048;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const std::int64_t start = sequence_start(p, s.sequence), tokens = sequence_length(p, s.sequence);
  const int chunks = static_cast<int>((tokens + kChunk - 1) / kChunk), slot0 = first_slot(p, s.sequence);
  const std::int64_t row = p.cu_seqlens ? 0 : s.sequence;
  const std::uint32_t base = shared_address(smem);
  auto length = [&](int c) {
    return static_cast<int>(
        min(tokens - static_cast<std::int64_t>(c) * kChunk, static_cast<std::int64_t>(kChunk)));
  };
  auto item = [&](int c) { return static_cast<std::int64_t>(slot0 + c) * p.value_heads + s.head; };
  // `n` counts the chunks from the last one.
  auto load = [&](int n) {
    const int c = chunks - 1 - n;
    const std::uint32_t stage = base + (n & 1) * kStage;
    if (tid == 0) {
      barrier_expect(bars + 8 * (n & 1), R::kSize);
      bulk_copy(stage, p.records + item(c) * R::kSize, R::kSize, bars + 8 * (n & 1));
    }
    load_slim(stage + R::kSize + warp * 2048, row_of(p.d_out, row, start + c * kChunk, s.head) + s.column,
              p.d_out.token, length(c));
    copy_commit();
  };

  State<K> state;
  state.read(p, p.d_final, s);
  if (chunks > 0) load(0);
  for (int n = 0; n < chunks; ++n) {
    const int c = chunks - 1 - n;
    if (n + 1 < chunks) {
      load(n + 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    barrier_wait(bars + 8 * (n & 1), n >> 1 & 1);
    __syncwarp();
    const std::uint32_t stage = base + (n & 1) * kStage;
    const char* record = smem + (n & 1) * kStage;
    const float* beta = reinterpret_cast<const float*>(record + R::kBeta);

    float dv[8][4];
    clear(dv);
    std::uint32_t out[4][4];  // do, V x 64
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      slim_operand(out[ks], stage + R::kSize + warp * 2048, ks);
      times_columns(dv, out[ks], stage + R::kScores, ks, ks + 1);
    }
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) {
      std::uint32_t a[4];
      state.operand(a, ks);
      store_blocks<K>(p.d_states + item(c) * K * K, s.column / 8, 2 * ks, a);
      times_rows(dv, a, stage + R::kKeyOut, ks, 0);
    }
    float dx[8][4];
    clear(dx);
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      std::uint32_t hi[4], lo[4];
      split(dv, ks, hi, lo);
      times_columns(dx, lo, hi, stage + R::kInverse, ks, ks + 1);
    }
    state.decay(reinterpret_cast<const float*>(record + R::kDecay));
    bf16* to = row_of(p.d_v, row, start + c * kChunk, s.head) + s.column;
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      std::uint32_t a[4];
      round_operand(dx, ks, a);
      store_blocks<K>(p.d_x + item(c) * K * kChunk, s.column / 8, 2 * ks, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 b = *reinterpret_cast<const float2*>(beta + 16 * ks + (i / 2) * 8 + 2 * (lane % 4));
        const float* e = &dx[2 * ks + i / 2][2 * (i % 2)];
        a[i] = pack(b.x * e[0], b.y * e[1]);
      }
      store_turned(to, p.d_v.token, 16 * ks, length(c), a[0], a[1]);
      store_turned(to, p.d_v.token, 16 * ks + 8, length(c), a[2], a[3]);
      for (auto& x : a) x ^= 0x80008000u;
      times_columns(state.x, out[ks], stage + R::kQuery, ks, K / 16);
      times_columns(state.x, a, stage + R::kKeyIn, ks, K / 16);
    }
    __syncthreads();
  }
  state.write(p, p.d_initial, s);
}

// The warps of one block are few enough to give each a second one for its outputs.
template <int Warps, bool Both>
constexpr bool kApart = !Both && Warps <= 4;

template <int K, int Warps, bool Both>
constexpr int kScanBytes =
    1024 + (kApart<Warps, Both> ? Apart<K, Warps>::kSize : 2 * (Record<K>::kSize + Warps * 2048));

// Both: the two recurrences of the backward, half of the grid each; otherwise the forward op.
template <int K, int Warps, bool Both>
__global__ void __launch_bounds__(32 * Warps * (kApart<Warps, Both> ? 2 : 1), 1) scan_kernel(const Job p) {
  extern __shared__ __align__(1024) char smem[];
  const std::uint32_t bars = shared_address(smem);
  if (threadIdx.x < 4) barrier_init(bars + 8 * threadIdx.x, 1);
  if (threadIdx.x < 4) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  constexpr int kSlices = K / (16 * Warps);
  const unsigned half = Both ? gridDim.x / 2 : gridDim.x;
  const int block = blockIdx.x % half, cell = block / kSlices, warp = static_cast<int>(threadIdx.x) / 32;
  const Slice s{cell / p.value_heads, cell % p.value_heads, block % kSlices * 16 * Warps + warp % Warps * 16};
  if constexpr (kApart<Warps, Both>) {
    if (warp < Warps) {
      forward_scan<K, Warps, Out::apart, false>(p, s, smem + 1024, bars);
    } else {
      output_scan<K, Warps>(p, s, smem + 1024, bars + 16);
    }
  } else if (Both && blockIdx.x >= half) {
    reverse_scan<K, Warps>(p, s, smem + 1024, bars);
  } else {
    forward_scan<K, Warps, Both ? Out::none : Out::here, Both>(p, s, smem + 1024, bars);
  }
}

template <int K, int Warps, bool Both>
void launch(const Job& job, cudaStream_t stream) {
  constexpr int kBytes = kScanBytes<K, Warps, Both>, kThreads = 32 * Warps * (kApart<Warps, Both> ? 2 : 1);
  const auto blocks =
      static_cast<unsigned>((Both ? 2 : 1) * job.sequences * job.value_heads * (K / (16 * Warps)));
  cudaFuncSetAttribute(scan_kernel<K, Warps, Both>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  scan_kernel<K, Warps, Both><<<blocks, kThreads, kBytes, stream>>>(job);
}

// The widest slice of V that still gives about one block per multiprocessor.
template <int K, bool Both>
void choose(const Job& job, cudaStream_t stream) {
  const std::int64_t cells = (Both ? 2 : 1) * job.sequences * job.value_heads;
  if (cells == 0) return;
  if constexpr (K == 128) {
    if (cells >= 96) return launch<K, 8, Both>(job, stream);
    if (cells >= 48) return launch<K, 4, Both>(job, stream);
    return launch<K, 2, Both>(job, stream);
  } else {
    if (cells >= 96) return launch<K, 4, Both>(job, stream);
    return launch<K, 2, Both>(job, stream);
  }
}

}  // namespace

void launch_forward_scan(const Job& job, cudaStream_t stream) {
  job.dim == 128 ? choose<128, false>(job, stream) : choose<64, false>(job, stream);
}
void launch_both_scans(const Job& job, cudaStream_t stream) {
  job.dim == 128 ? choose<128, true>(job, stream) : choose<64, true>(job, stream);
}

}  // namespace rlk::cuda::kda90
