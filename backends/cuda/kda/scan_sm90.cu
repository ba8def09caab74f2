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
// Every matrix is kept transposed, V first. A warpgroup owns 64 columns of V and all of K: its 64 x K state
// stays in wgmma accumulators, which as they lie are the A operand of the next product, and so are x and
// vnew. Warps exchange nothing but whether a token is NaN; every B operand is a tile of the chunk's record as
// it lies, which TMA brings one to three chunks ahead (Pipe is that pipeline). What the next chunk does not
// wait for - the outputs, all stores - is done while the tensor cores work. The number of warpgroups per
// block (the cut of V) follows the size of the call and changes no bit: columns of V never meet. x and dvnew
// are split into two bf16 terms before they meet A, so that only P, A, vnew and the state operands are
// rounded. Where the gate is computed here, the gradients get vnew and dS in two terms as well.
//
// Fragments are flat: [n][e] with e as in mma, rows (columns of V) lane / 4 and that + 8, columns 8 n + 2
// (lane % 4) and the next.
#include "cuda/hopper/wgmma.cuh"
#include "cuda/kda/segments.cuh"

namespace rlk::cuda::kda {
namespace {

// A step's tile of a record, 64 rows of 128 bytes swizzled by 128, as wgmma's B operand. Panels of 64 columns
// are `panels` times 16 bytes apart.
__device__ inline Descriptor tile_at(std::uint32_t address, std::uint32_t panels) {
  return {address >> 4, panels, 1024 / 16, Swizzle::bytes128};
}
// d (+)= a tile[64 rows][16 columns at step ks]^T: the tile's rows are the result's columns.
template <int Size>
__device__ inline void times_rows(float (&d)[Size], const std::uint32_t (&a)[4], std::uint32_t tile, int ks,
                                  bool add = true) {
  wgmma<false>(d, a, tile_at(tile + ks / 4 * 8192 + ks % 4 * 32, 1).at(0), add);
}
// d (+)= a tile[16 rows at step ks][columns].
template <int Size>
__device__ inline void times_columns(float (&d)[Size], const std::uint32_t (&a)[4], std::uint32_t tile,
                                     int ks, bool add = true) {
  wgmma<true>(d, a, tile_at(tile + ks * 2048, 8192 / 16).at(0), add);
}

// What a warp walks: a sequence or a segment of one, of one head, and 16 columns of V.
struct Slice {
  int sequence, head, column;  // first column of V of this warp
  std::int64_t token, tokens;  // the first in the sequence, and how many
  int slot;                    // of the first chunk
};
__device__ inline Slice whole_sequence(const Job& p, int n, int head, int column) {
  return {n, head, column, 0, sequence_length(p, n), first_slot(p, n)};
}

// A state in memory, or none.
struct Matrix {
  float* data;
  bool v_first;
};
template <int K>
__device__ inline Matrix matrix_at(const float* data, std::int64_t index, bool v_first) {
  return {const_cast<float*>(data ? data + index * (K * K) : nullptr), v_first};
}
// Among the caller's states.
template <int K>
__device__ inline Matrix callers(const Job& p, const float* data, const Slice& s) {
  return matrix_at<K>(data, static_cast<std::int64_t>(s.sequence) * p.value_heads + s.head, p.v_first);
}

// The A operand of step `ks` of a fragment, rounded to bf16.
template <int Size>
__device__ inline void round_operand(const float (&x)[Size], int ks, std::uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack(x[8 * ks + 2 * i], x[8 * ks + 2 * i + 1]);
}
// What that rounding left.
template <int Size>
__device__ inline void round_rest(const float (&x)[Size], int ks, const std::uint32_t (&a)[4],
                                  std::uint32_t (&rest)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    rest[i] = pack(x[8 * ks + 2 * i] - low(a[i]), x[8 * ks + 2 * i + 1] - high(a[i]));
}

template <int K>
struct State {
  float x[K / 2];  // 16 columns of V x K

  __device__ static int value(int column, int i) { return column + threadIdx.x % 32 / 4 + (i / 2 % 2) * 8; }
  __device__ static int key(int i) { return i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2; }
  __device__ static int place(const Matrix& m, int column, int i) {
    return m.v_first ? value(column, i) * K + key(i) : key(i) * K + value(column, i);
  }
  __device__ void read(const Matrix& from, int column) {
    if (from.data) {
#pragma unroll
      for (int i = 0; i < K / 2; ++i) x[i] = from.data[place(from, column, i)];
    } else {
#pragma unroll
      for (int i = 0; i < K / 2; ++i) x[i] = 0.f;
    }
  }
  __device__ void write(const Matrix& to, int column) const {
    if (!to.data) return;
#pragma unroll
    for (int i = 0; i < K / 2; ++i) to.data[place(to, column, i)] = x[i];
  }
  __device__ void be_unit(int column) {
#pragma unroll
    for (int i = 0; i < K / 2; ++i) x[i] = value(column, i) == key(i) ? 1.f : 0.f;
  }
  __device__ void decay(const float* factors) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < K / 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * n + 2 * t);
      x[4 * n] *= f.x, x[4 * n + 1] *= f.y, x[4 * n + 2] *= f.x, x[4 * n + 3] *= f.y;
    }
    wgmma_fence_operand(x);
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

// This warp's 16 columns of a [token][V] tensor, 64 tokens, in its own 2 KiB of shared memory: 32-byte rows,
// the two halves of a row swapped in every second group of four rows.
__device__ inline int slim_tile(int row, int piece) { return row * 32 + ((piece ^ (row >> 2 & 1)) << 4); }

__device__ inline void load_slim(std::uint32_t shared, const bf16* from, int step, int length) {
  const int row = threadIdx.x % 32 / 2, piece = threadIdx.x % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool valid = 16 * i + row < length;
    copy16(shared + slim_tile(row, piece) + 512 * i, from + 8 * piece + (valid ? (16 * i + row) * step : 0),
           valid ? 16 : 0);
  }
}
// Fragment [V][16 tokens at step ks] of a slim tile.
__device__ inline void slim_operand(std::uint32_t (&a)[4], std::uint32_t tile, int ks) {
  const int lane = threadIdx.x % 32;
  ldmatrix_transposed(a, tile + slim_tile(16 * ks + (lane / 16) * 8 + lane % 8, (lane / 8) % 2));
}

// Writes a fragment pair (16 columns of V, 8 tokens, bf16 pairs along tokens) transposed, to a [token][V]
// tensor at this lane's place, see turned_place.
__device__ inline void store_turned(bf16* to, bool valid, std::uint32_t r0, std::uint32_t r1) {
  const bool odd = threadIdx.x & 1;
  r0 = movmatrix(r0), r1 = movmatrix(r1);
  const std::uint32_t got = __shfl_xor_sync(~0u, odd ? r0 : r1, 1);
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.u32 [%0], {%1, %2};\n}" ::"l"(to),
               "r"(odd ? got : r0), "r"(odd ? r1 : got), "r"(static_cast<int>(valid))
               : "memory");
}
__device__ inline bf16* turned_place(bf16* to, std::int64_t step) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  return to + lane / 4 * step + (t & 1) * 8 + (t >> 1) * 4;
}

// The write strengths of this lane's tokens, two by two; volatile, so that they are loaded here and not after
// the next wait.
__device__ inline void load_strengths(float2 (&strength)[8], const float* beta) {
  const std::uint32_t at = shared_address(beta + 2 * (threadIdx.x % 4));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(strength[i].x), "=f"(strength[i].y)
                 : "r"(at + 32 * i));
  }
}

// y = beta (v - y).
__device__ inline void subtract_from(float (&y)[32], const std::uint32_t (&v)[4][4],
                                     const float2 (&strength)[8]) {
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* e = &y[8 * ks + 2 * i];
      const float2 b = strength[2 * ks + i / 2];
      e[0] = b.x * (low(v[ks][i]) - e[0]);
      e[1] = b.y * (high(v[ks][i]) - e[1]);
    }
  }
}

// acc = tile y for a lower triangular 64 x 64 tile, y in two bf16 terms; one group of wgmmas.
__device__ inline void solve(float (&acc)[32], const float (&y)[32], std::uint32_t tile) {
  std::uint32_t hi[4][4], lo[4][4];
#pragma unroll
  for (int ks = 0; ks < 4; ++ks) {
    round_operand(y, ks, hi[ks]);
    round_rest(y, ks, hi[ks], lo[ks]);
    wgmma_fence();
    times_rows(acc, lo[ks], tile, ks, ks > 0);
    times_rows(acc, hi[ks], tile, ks);
  }
  wgmma_commit();
}

// The tokens from which on a warp's columns of V are NaN, 64 for none: columns lane / 4 and that + 8.
//
// A token that is NaN or infinite must not reach the ones before it, but the zeros of A and P times NaN are
// NaN. So the products see zeros in its place, and what depends on it is set to NaN afterwards.
struct Broken {
  int from[2] = {64, 64};

  __device__ static bool any(const float (&x)[32]) {
    float zero[4] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) zero[i % 4] = fmaf(x[i], 0.f, zero[i % 4]);
    return zero[0] + zero[1] + (zero[2] + zero[3]) != 0.f;
  }
  __device__ static int token(int i) { return i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2; }

  __device__ void take(float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (fabsf(x[i]) < INFINITY) continue;
      from[i / 2 % 2] = min(from[i / 2 % 2], token(i));
      x[i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from[i] = min(from[i], __shfl_xor_sync(~0u, from[i], 1));
      from[i] = min(from[i], __shfl_xor_sync(~0u, from[i], 2));
    }
  }
  __device__ void put(float (&x)[32]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = token(i) >= from[i / 2 % 2] ? NAN : x[i];
  }
  __device__ void put(std::uint32_t (&operand)[4], int ks) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = token(8 * ks + 2 * i), first = from[i % 2];
      operand[i] |= (t >= first ? 0x7fffu : 0u) | (t + 1 >= first ? 0x7fff0000u : 0u);
    }
  }
};

// Recomputed: for the backward, which needs the states and v_new instead of the outputs. Map: the last state alone; unit: likewise, from
// the unit matrix and without values. Reverse map: the last gradient alone.
enum class Scan { forward, recomputed, reverse, map, reverse_map };

// How a kernel is cut: channels, warps per block with 16 columns of V each, blocks on an SM.
template <int Channels, int WarpCount, int BlockCount>
struct Cut {
  static constexpr int K = Channels, Warps = WarpCount, Blocks = BlockCount;
};

// Chunks in flight: as many as shared memory holds.
template <class C, Scan scan>
struct Stages {
  static constexpr bool kIsShort = scan == Scan::recomputed || scan == Scan::map;
  static constexpr int kRecord = kIsShort ? Record<C::K>::kShort : Record<C::K>::kSize;
  static constexpr int kEach = kRecord + C::Warps * 2048;
  static constexpr int kCount = std::min(4, (227 * 1024 / C::Blocks - 1024) / kEach);
  static constexpr int kSize = 1024 + kCount * kEach;
};

// The chunks of a slice on their way through shared memory, in the order a scan takes them.
template <class C, Scan scan>
struct Pipe {
  using S = Stages<C, scan>;
  static constexpr bool kReverse = scan == Scan::reverse || scan == Scan::reverse_map;
  using R = Record<C::K>;
  const Job& p;
  const Slice& s;
  char* smem;
  std::uint32_t bars;
  std::int64_t tokens;
  const char* records;  // of the first chunk
  const bf16* lines;    // v or d_out, this warp's columns
  int chunks, slot0;
  bool mute = false;  // v is zero, whatever it is

  __device__ Pipe(const Job& job, const Slice& slice, char* memory)
      : p(job), s(slice), smem(memory + 1024), bars(shared_address(memory)) {
    tokens = s.tokens;
    chunks = static_cast<int>((tokens + kChunk - 1) / kChunk), slot0 = s.slot;
    records = p.records + item(0) * R::kSize;
    lines = rows(kReverse ? p.d_out : p.v);
  }
  __device__ int chunk(int n) const { return kReverse ? chunks - 1 - n : n; }
  __device__ int length(int c) const {
    return static_cast<int>(
        min(tokens - static_cast<std::int64_t>(c) * kChunk, static_cast<std::int64_t>(kChunk)));
  }
  __device__ std::int64_t item(int c) const {
    return static_cast<std::int64_t>(slot0 + c) * p.value_heads + s.head;
  }
  // This warp's columns of the first token.
  template <class T>
  __device__ T* rows(const Strided<T>& t) const {
    return row_of(t, p.cu_seqlens ? 0 : s.sequence, sequence_start(p, s.sequence) + s.token, s.head) +
           s.column;
  }
  __device__ const char* record(int n) const { return smem + n % S::kCount * S::kEach; }
  __device__ std::uint32_t tile(int n) const { return shared_address(record(n)); }
  __device__ std::uint32_t slim(int n) const { return tile(n) + S::kRecord + threadIdx.x / 32 * 2048; }

  // Past the end an empty group, so that the wait need not know.
  __device__ void load(int n) const {
    if (n < chunks) {
      const int c = chunk(n), step = static_cast<int>(kReverse ? p.d_out.token : p.v.token);
      if (threadIdx.x == 0) {
        const std::uint32_t bar = bars + 8 * (n % S::kCount);
        barrier_expect(bar, S::kRecord);
        bulk_load(tile(n), records + static_cast<std::int64_t>(c) * p.value_heads * R::kSize, S::kRecord,
                  bar);
      }
      load_slim(slim(n), lines + c * (std::int64_t{kChunk} * step), step,
                scan == Scan::map && mute ? 0 : length(c));
    }
    copy_commit();
  }
  __device__ void begin() const {
    for (int n = 0; n < S::kCount - 1; ++n) load(n);
  }
  __device__ void wait(int n) const {
    copy_wait<S::kCount - 2>();
    barrier_wait(bars + 8 * (n % S::kCount), n / S::kCount & 1);
    __syncwarp();
  }
  // Everyone has left the chunk before, whose place another takes. True if anyone says so.
  __device__ bool proceed(int n, bool any = false) const {
    any = __syncthreads_or(any);
    load(n + S::kCount - 1);
    return any;
  }
};

// `first` says where the state before is and `last` takes the one behind: what they need is found then, not kept in registers.
template <class C, Scan scan, bool Rest, class First, class Last>
__device__ void forward_scan(const Job& p, const Slice& s, First first, Last last, char* smem,
                             bool unit = false) {
  constexpr int K = C::K;
  using R = Record<K>;
  constexpr bool kKeep = scan == Scan::recomputed, kOut = scan == Scan::forward;
  const int lane = threadIdx.x % 32;
  Pipe<C, scan> pipe(p, s, smem);
  pipe.mute = unit;
  auto store_state = [&](int c, int ks, const std::uint32_t(&a)[4]) {
    store_blocks<K>(p.states + pipe.item(c) * K * K, s.column / 8, 2 * ks, a);
  };

  State<K> state;
  if (scan == Scan::map && unit) {
    state.be_unit(s.column);
  } else {
    state.read(first(), s.column);
  }
  const std::int64_t step = p.out.token;
  bf16* to = kOut ? turned_place(pipe.rows(p.out), step) : nullptr;
  pipe.begin();
  for (int c = 0; c < pipe.chunks; ++c) {
    pipe.wait(c);
    const std::uint32_t tile = pipe.tile(c);
    const char* record = pipe.record(c);
    const float* beta = reinterpret_cast<const float*>(record + R::kBeta);

    std::uint32_t before[K / 16][4];
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) round_operand(state.x, ks, before[ks]);
    float y[32], fresh[32], out[32];
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) times_rows(y, before[ks], tile + R::kKeyIn, ks, ks > 0);
    wgmma_commit();
    std::uint32_t v[4][4];
    float2 strength[8];
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) slim_operand(v[ks], pipe.slim(c), ks);
    load_strengths(strength, beta);
    if constexpr (kKeep) {
#pragma unroll
      for (int ks = 0; ks < K / 16; ++ks) store_state(c, ks, before[ks]);
    }
    wgmma_wait<0>();
    subtract_from(y, v, strength);
    solve(fresh, y, tile + R::kInverse);
    state.decay(reinterpret_cast<const float*>(record + R::kDecay));
    if constexpr (kOut) {
      wgmma_fence();
#pragma unroll
      for (int ks = 0; ks < K / 16; ++ks) times_rows(out, before[ks], tile + R::kQuery, ks, ks > 0);
      wgmma_commit();
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    Broken broken;
    const bool any_broken =
        pipe.proceed(c, Broken::any(fresh));  // of the block: wgmma is for whole warpgroups
    if (any_broken) {
      broken.take(y);
      solve(fresh, y, tile + R::kInverse);
      wgmma_wait<0>();
      broken.take(fresh);
    }
    std::uint32_t rounded[4][4];
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) round_operand(fresh, ks, rounded[ks]);
    wgmma_fence();
    if constexpr (kOut) {
#pragma unroll
      for (int ks = 0; ks < 4; ++ks) times_rows(out, rounded[ks], tile + R::kScores, ks);
      wgmma_commit();
    }
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) times_columns(state.x, rounded[ks], tile + R::kKeyOut, ks);
    wgmma_commit();
    if constexpr (kKeep) {
#pragma unroll
      for (int ks = 0; ks < 4; ++ks) {
        std::uint32_t a[4] = {rounded[ks][0], rounded[ks][1], rounded[ks][2], rounded[ks][3]};
        if (any_broken) broken.put(a, ks);
        store_blocks<K>(p.v_new + pipe.item(c) * K * kChunk, s.column / 8, 2 * ks, a);
        if constexpr (Rest) {
          round_rest(fresh, ks, rounded[ks], a);
          store_blocks<K>(p.v_new_rest + pipe.item(c) * K * kChunk, s.column / 8, 2 * ks, a);
        }
      }
    } else if constexpr (kOut) {
      wgmma_wait<1>();
      if (any_broken) broken.put(out);
      const int left = pipe.length(c) - lane / 4;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        store_turned(to + 8 * n * step, 8 * n < left, pack(out[4 * n], out[4 * n + 1]),
                     pack(out[4 * n + 2], out[4 * n + 3]));
      }
      to += kChunk * step;
    }
    wgmma_wait<0>();
    if (any_broken) {
#pragma unroll
      for (int i = 0; i < K / 2; ++i) state.x[i] = broken.from[i / 2 % 2] < kChunk ? NAN : state.x[i];
    }
  }
  last(state);
}

// The same of gradients: `first` of the one behind, `last` of the one before.
template <class C, Scan scan, bool Rest, class First, class Last>
__device__ void reverse_scan(const Job& p, const Slice& s, First first, Last last, char* smem) {
  constexpr int K = C::K;
  using R = Record<K>;
  constexpr bool kKeep = scan == Scan::reverse;
  const int lane = threadIdx.x % 32;
  const Pipe<C, scan> pipe(p, s, smem);

  State<K> state;
  state.read(first(), s.column);
  const std::int64_t step = p.d_v.token;
  bf16* d_v = kKeep ? turned_place(pipe.rows(p.d_v), step) : nullptr;
  pipe.begin();
  for (int n = 0; n < pipe.chunks; ++n) {
    const int c = pipe.chunk(n);
    pipe.wait(n);
    const std::uint32_t tile = pipe.tile(n);
    const char* record = pipe.record(n);
    const float* beta = reinterpret_cast<const float*>(record + R::kBeta);

    float dv[32], dx[32];
    std::uint32_t out[4][4], after[K / 16][4];  // do, V x 64; dS, V x K
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) slim_operand(out[ks], pipe.slim(n), ks);
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) round_operand(state.x, ks, after[ks]);
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) times_columns(dv, out[ks], tile + R::kScores, ks, ks > 0);
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) times_rows(dv, after[ks], tile + R::kKeyOut, ks);
    wgmma_commit();
    if constexpr (kKeep) {
#pragma unroll
      for (int ks = 0; ks < K / 16; ++ks) {
        store_blocks<K>(p.d_states + pipe.item(c) * K * K, s.column / 8, 2 * ks, after[ks]);
        if constexpr (Rest) {
          std::uint32_t rest[4];
          round_rest(state.x, ks, after[ks], rest);
          store_blocks<K>(p.d_states_rest + pipe.item(c) * K * K, s.column / 8, 2 * ks, rest);
        }
      }
    }
    float2 strength[8];
    load_strengths(strength, beta);
    wgmma_wait<0>();
    std::uint32_t hi[4][4], lo[4][4];
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      round_operand(dv, ks, hi[ks]);
      round_rest(dv, ks, hi[ks], lo[ks]);
      wgmma_fence();
      times_columns(dx, lo[ks], tile + R::kInverse, ks, ks > 0);
      times_columns(dx, hi[ks], tile + R::kInverse, ks);
    }
    wgmma_commit();
    state.decay(reinterpret_cast<const float*>(record + R::kDecay));
    pipe.proceed(n);
    wgmma_wait<0>();
    std::uint32_t written[4][4];  // -beta dx
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 b = strength[2 * ks + i / 2];
        written[ks][i] = pack(b.x * dx[8 * ks + 2 * i], b.y * dx[8 * ks + 2 * i + 1]) ^ 0x80008000u;
      }
    }
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ++ks) {
      times_columns(state.x, out[ks], tile + R::kQuery, ks);
      times_columns(state.x, written[ks], tile + R::kKeyIn, ks);
    }
    wgmma_commit();
    if constexpr (kKeep) {
      wgmma_fence_operand(dx);
      const int left = pipe.length(c) - lane / 4;
      bf16* to = d_v + c * (kChunk * step);
#pragma unroll
      for (int ks = 0; ks < 4; ++ks) {
        std::uint32_t a[4];
        round_operand(dx, ks, a);
        store_blocks<K>(p.d_x + pipe.item(c) * K * kChunk, s.column / 8, 2 * ks, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = written[ks][i] ^ 0x80008000u;
        store_turned(to + 16 * ks * step, 16 * ks < left, a[0], a[1]);
        store_turned(to + (16 * ks + 8) * step, 16 * ks + 8 < left, a[2], a[3]);
      }
    }
    wgmma_wait<0>();
  }
  last(state);
}

__device__ inline void begin_barriers(char* smem) {
  const std::uint32_t bars = shared_address(smem);
  if (threadIdx.x < 4) barrier_init(bars + 8 * threadIdx.x, 1);
  if (threadIdx.x < 4) fence_barrier_init();
  __syncthreads();
}

template <class C, bool Both>
constexpr int kScanBytes =
    Both ? std::max(Stages<C, Scan::recomputed>::kSize, Stages<C, Scan::reverse>::kSize)
         : Stages<C, Scan::forward>::kSize;
// Both: the two recurrences of the backward, half of the grid each, with Rest what the rounding of v_new and
// dS left as well; otherwise the forward op. `back` is what the reverse one takes, the same call or a later
// part of the same sequence.
template <class C, bool Both, bool Rest>
__global__ void __launch_bounds__(32 * C::Warps, C::Blocks) scan_kernel(const Job p, const Job back) {
  extern __shared__ __align__(1024) char smem[];
  begin_barriers(smem);
  constexpr int kWidth = 16 * C::Warps, kSlices = C::K / kWidth;
  const unsigned half = Both ? gridDim.x / 2 : gridDim.x;
  const int block = blockIdx.x % half, cell = block / kSlices, warp = static_cast<int>(threadIdx.x) / 32;
  const auto slice = [&](const Job& job) {
    return whole_sequence(job, cell / job.value_heads, cell % job.value_heads,
                          block % kSlices * kWidth + warp * 16);
  };
  if (Both && blockIdx.x >= half) {
    if constexpr (Both) {
      const Slice s = slice(back);
      const auto first = [&] { return callers<C::K>(back, back.d_final, s); };
      const auto last = [&](const State<C::K>& x) {
        x.write(callers<C::K>(back, back.d_initial, s), s.column);
      };
      reverse_scan<C, Scan::reverse, Rest>(back, s, first, last, smem);
    }
  } else {
    const Slice s = slice(p);
    const auto first = [&] { return callers<C::K>(p, p.initial, s); };
    const auto last = [&](const State<C::K>& x) { x.write(callers<C::K>(p, p.final, s), s.column); };
    forward_scan<C, Both ? Scan::recomputed : Scan::forward, Rest>(p, s, first, last, smem);
  }
}

// Segment g from its first chunk on.
__device__ inline Slice slice_of(const Job& p, const Segment& g, int head, int column) {
  const std::int64_t token = g.index * kSegment, left = sequence_length(p, g.sequence) - token;
  return {g.sequence,
          head,
          column,
          token,
          min(left, kSegment),
          first_slot(p, g.sequence) + g.index * static_cast<int>(kSegment / kChunk)};
}

// What a block has: a cell (segment, value head), and of the `ways` it is scanned in and their slices of V one. Its warp's first column.
template <class C>
struct Cell {
  static constexpr int kWidth = 16 * C::Warps, kSlices = C::K / kWidth;
  int cell, slice, column;

  __device__ explicit Cell(int block, int ways = 1)
      : cell(block / (ways * kSlices)),
        slice(block % (ways * kSlices)),
        column(slice % kSlices * kWidth + static_cast<int>(threadIdx.x) / 32 * 16) {}
};

// U and, in blocks beside those, which find the records in L2, T of a whole segment.
template <class C, bool Both>
__device__ void map_forward(const Job& p, int block, char* smem) {
  constexpr int K = C::K;
  const Cell<C> b(block, 2);
  const Segment g = find_segment(p, b.cell / p.value_heads, false);
  const bool unit = b.slice >= Cell<C>::kSlices;
  const bool forward = g.index < needed_maps(p, g.sequence), reverse = Both && g.index >= first_needed(p);
  if (!g.used || !(forward || (unit && reverse))) return;
  const Slice s = slice_of(p, g, b.cell % p.value_heads, b.column);
  const auto last = [&](const State<K>& x) {
    x.write(matrix_at<K>(unit ? p.moves : p.ends, b.cell, true), s.column);
    if (Both && unit) x.write(matrix_at<K>(p.d_moves, b.cell, false), s.column);
  };
  forward_scan<C, Scan::map, false>(p, s, [] { return Matrix{nullptr, true}; }, last, smem, unit);
}

// W of a whole segment, and the gradient before what is left behind them.
template <class C>
__device__ void map_reverse(const Job& p, int block, char* smem) {
  constexpr int K = C::K;
  const Cell<C> b(block);
  const Segment g = find_segment(p, b.cell / p.value_heads, true);
  if (!g.used || g.whole == 0 || g.index < first_needed(p)) return;
  const Slice s = slice_of(p, g, b.cell % p.value_heads, b.column);
  const auto first = [&] { return callers<K>(p, g.index == g.whole ? p.d_final : nullptr, s); };
  const auto last = [&](const State<K>& x) { x.write(matrix_at<K>(p.d_ends, b.cell, true), s.column); };
  reverse_scan<C, Scan::reverse_map, false>(p, s, first, last, smem);
}

// Both: the backward's. The first `reverse` blocks go in reverse: they take longer.
template <class C, bool Both>
__global__ void __launch_bounds__(32 * C::Warps, C::Blocks) map_kernel(const Job p, int reverse) {
  extern __shared__ __align__(1024) char smem[];
  begin_barriers(smem);
  const int block = blockIdx.x;
  if (Both && block < reverse) {
    if constexpr (Both) map_reverse<C>(p, block, smem);
  } else {
    map_forward<C, Both>(p, block - reverse, smem);
  }
}

// A segment from its first state on: the outputs, and the last state of a sequence; or what the backward needs.
template <class C, Scan scan, bool Rest>
__device__ void piece_forward(const Job& p, int block, char* smem) {
  constexpr int K = C::K;
  const Cell<C> b(block);
  const int head = b.cell % p.value_heads;
  const Segment g = find_segment(p, b.cell / p.value_heads, true);
  if (!g.used) return;
  const Slice s = slice_of(p, g, head, b.column);
  const auto first = [&] {
    const std::int64_t before = (first_map(p, g.sequence) + g.index - 1) * p.value_heads + head;
    return g.index == 0 ? callers<K>(p, p.initial, s) : matrix_at<K>(p.ends, before, true);
  };
  const auto last = [&](const State<K>& x) {
    x.write(callers<K>(p, g.index == g.whole ? p.final : nullptr, s), s.column);
  };
  forward_scan<C, scan, Rest>(p, s, first, last, smem);
}

// And from the gradient behind it back; before the first one the join has it, if that is whole.
template <class C, bool Rest>
__device__ void piece_reverse(const Job& p, int block, char* smem) {
  constexpr int K = C::K;
  const Cell<C> b(block);
  const Segment g = find_segment(p, b.cell / p.value_heads, true);
  if (!g.used) return;
  const Slice s = slice_of(p, g, b.cell % p.value_heads, b.column);
  const auto first = [&] {
    return g.index == g.whole ? callers<K>(p, p.d_final, s)
                              : matrix_at<K>(p.d_ends, b.cell + p.value_heads, true);
  };
  const auto last = [&](const State<K>& x) {
    x.write(callers<K>(p, g.whole == 0 ? p.d_initial : nullptr, s), s.column);
  };
  reverse_scan<C, Scan::reverse, Rest>(p, s, first, last, smem);
}

template <class C, bool Both, bool Rest>
__global__ void __launch_bounds__(32 * C::Warps, C::Blocks) piece_kernel(const Job p, int reverse) {
  extern __shared__ __align__(1024) char smem[];
  begin_barriers(smem);
  const int block = blockIdx.x;
  if (Both && block < reverse) {
    if constexpr (Both) piece_reverse<C, Rest>(p, block, smem);
  } else {
    piece_forward<C, Both ? Scan::recomputed : Scan::forward, Rest>(p, block - reverse, smem);
  }
}

template <class C, bool Both>
void launch(const Job& job, const Job& back, std::int64_t cells, cudaStream_t stream) {
  constexpr int kBytes = kScanBytes<C, Both>;
  const auto blocks = static_cast<unsigned>(cells * (C::K / (16 * C::Warps)));
  const auto kernel = Both && job.v_new_rest ? scan_kernel<C, Both, Both> : scan_kernel<C, Both, false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<blocks, 32 * C::Warps, kBytes, stream>>>(job, back);
}

// The widest slice of V that still gives about one block per SM; at K = 64 two blocks share one
// when there are more.
template <bool Both>
void choose(const Job& job, const Job& back, cudaStream_t stream) {
  const std::int64_t cells = (Both ? 2 : 1) * job.sequences * job.value_heads;
  if (cells == 0) return;
  if (job.dim == 128) {
    cells >= 96 ? launch<Cut<128, 8, 1>, Both>(job, back, cells, stream)
                : launch<Cut<128, 4, 1>, Both>(job, back, cells, stream);
  } else {
    cells > 132 ? launch<Cut<64, 4, 2>, Both>(job, back, cells, stream)
                : launch<Cut<64, 4, 1>, Both>(job, back, cells, stream);
  }
}

// Both: the backward's, with `back` cells that go in reverse before the `ahead` others.
template <class C, bool Both>
void launch_maps(const Job& job, std::int64_t ahead, std::int64_t back, cudaStream_t stream) {
  constexpr int kBytes = Both ? std::max(Stages<C, Scan::map>::kSize, Stages<C, Scan::reverse_map>::kSize)
                              : Stages<C, Scan::map>::kSize;
  const std::int64_t reverse = back * Cell<C>::kSlices, blocks = reverse + ahead * Cell<C>::kSlices;
  cudaFuncSetAttribute(map_kernel<C, Both>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  map_kernel<C, Both>
      <<<static_cast<unsigned>(blocks), 32 * C::Warps, kBytes, stream>>>(job, static_cast<int>(reverse));
}
template <class C, bool Both>
void launch_pieces(const Job& job, std::int64_t cells, cudaStream_t stream) {
  constexpr int kBytes = kScanBytes<C, Both>;
  const std::int64_t blocks = cells * Cell<C>::kSlices, reverse = Both ? blocks / 2 : 0;
  const auto kernel = Both && job.v_new_rest ? piece_kernel<C, Both, Both> : piece_kernel<C, Both, false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<static_cast<unsigned>(blocks), 32 * C::Warps, kBytes, stream>>>(job, static_cast<int>(reverse));
}

// As choose().
template <class Launch>
void by_cut(int dim, std::int64_t cells, Launch launch) {
  if (dim == 128) {
    cells >= 96 ? launch(Cut<128, 8, 1>{}) : launch(Cut<128, 4, 1>{});
  } else {
    cells > 132 ? launch(Cut<64, 4, 2>{}) : launch(Cut<64, 4, 1>{});
  }
}

}  // namespace

void launch_map_scan(const Job& job, cudaStream_t stream) {
  const bool both = job.d_ends != nullptr;
  const std::int64_t ahead = 2 * map_count(job) * job.value_heads,
                     back = both ? piece_count(job) * job.value_heads : 0;
  by_cut(job.dim, ahead + back, [&]<class C>(C) {
    both ? launch_maps<C, true>(job, ahead, back, stream) : launch_maps<C, false>(job, ahead, 0, stream);
  });
}
void launch_piece_scan(const Job& job, cudaStream_t stream) {
  const bool both = job.d_ends != nullptr;
  const std::int64_t cells = (both ? 2 : 1) * piece_count(job) * job.value_heads;
  by_cut(job.dim, cells, [&]<class C>(C) {
    both ? launch_pieces<C, true>(job, cells, stream) : launch_pieces<C, false>(job, cells, stream);
  });
}
void launch_forward_scan(const Job& job, cudaStream_t stream) { choose<false>(job, job, stream); }
void launch_both_scans(const Job& ahead, const Job& back, cudaStream_t stream) {
  choose<true>(ahead, back, stream);
}

}  // namespace rlk::cuda::kda
