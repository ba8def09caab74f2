// What the KDA kernels share: the call as kernels see it, where a chunk lies, tile layouts, gates. The
// instructions themselves (mma, ldmatrix, TMA, mbarriers) are in cuda/hopper/.
//
// Layouts of 16-bit tiles:
//   rows   - [cols / 64][rows][64] with the 16-byte pieces of a 128-byte row permuted by piece ^ (row % 8), the
//            128-byte swizzle of TMA and wgmma: what threads that walk along a row write, and what ldmatrix
//            reads without bank conflicts.
//   blocks - 8 x 8 blocks of 128 contiguous bytes: what a warp holding mma fragments writes with one full-line
//            store per block, and what ldmatrix reads without bank conflicts.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/copy.cuh"
#include "cuda/hopper/mma.cuh"
#include "cuda/hopper/tma.cuh"
#include "cuda/kda/sm90.h"

namespace rlk::cuda::kda {

using namespace hopper;

using bf16 = __nv_bfloat16;

constexpr int kChunk = 64;

// The parameters plus the workspace; `records`, [slots, HV] of Record<K>, lies there when the caller keeps none.
struct Job : Params {
  int slots_each = 0;        // chunks per sequence, when not packed
  unsigned slots_magic = 0;  // for sequence_of
  int slots_shift = 0;
  const int* slot_sequence = nullptr;  // packed only: the sequence of each slot, or -1
  bf16* states = nullptr;              // [slots, HV][V, K] blocks: state at each chunk's start
  bf16* d_states = nullptr;            // [slots, HV][V, K] blocks: gradient of the state after each chunk
  bf16* v_new = nullptr;               // [slots, HV][V, 64] blocks
  bf16* d_x = nullptr;                 // [slots, HV][V, 64] blocks: A^T dvnew
  // What rounding left of v_new and d_states, where the gate is computed here.
  bf16* v_new_rest = nullptr;
  bf16* d_states_rest = nullptr;
  float* q_part = nullptr;  // [B * T, HV, K]: dq, dk before the sum over a group of heads
  float* k_part = nullptr;
  // [B * T, H, K] and [B * T, H]: normalised rows and their factors, for the backward.
  bf16* q_norm = nullptr;
  bf16* k_norm = nullptr;
  float* q_factor = nullptr;
  float* k_factor = nullptr;
  unsigned* beta_half = nullptr;  // K = 128: [slots, HV][64], see gradients_kernel
  float* bias_part = nullptr;     // [slots, HV, K]: sums over a chunk's tokens, for d_dt_bias
  double* a_log_part = nullptr;   // [slots, HV, K / 32]: and over 32 channels, for d_a_log
  float* inter = nullptr;         // unfused only: [slots, HV][kInter]
  float* carried = nullptr;       // in groups: [N, HV][K, V], a state and its gradient between two groups
  float* d_carried = nullptr;
  // By segments: of every whole one and head [V, K], its U and then the state behind it, and [K, K], column by column, its T.
  float* ends = nullptr;
  float* moves = nullptr;
  // And in the backward of every one and head [V, K], its W and then the gradient before it, and T once more, row by row.
  float* d_ends = nullptr;
  float* d_moves = nullptr;
};

// Per chunk and head, what both scans read: sizes are multiples of 1024 bytes.
template <int K>
struct Record {
  static constexpr int kBeta = 0, kDecay = 256;       // beta[64] and e^{G_L}[K], fp32
  static constexpr int kKeyIn = 1024;                 // k e^G          rows
  static constexpr int kKeyOut = kKeyIn + 128 * K;    // k e^{G_L - G}  rows
  static constexpr int kInverse = kKeyOut + 128 * K;  // A              rows
  static constexpr int kShort = kInverse + 8192;      // what the forward recurrence alone needs ends here
  static constexpr int kQuery = kShort;               // scale q e^G    rows
  static constexpr int kScores = kQuery + 128 * K;    // P              rows
  static constexpr int kSize = kScores + 8192;
};
// chunk_records of the schema.
static_assert(Record<64>::kSize == 17408 + 384 * 64 && Record<128>::kSize == 17408 + 384 * 128);

// Unfused backward, floats per chunk, head and 64 channels: Q, W, U before the part inside the chunk, dP, dM,
// D . v, S dS.
constexpr int kInter = 3 * 64 * 64 + 2 * 4096 + 64 + 64;

struct Chunk {
  int sequence, index, length, slot;
  std::int64_t row, token;  // batch row and first token
};

__device__ inline std::int64_t sequence_start(const Job& p, int n) {
  return p.cu_seqlens ? p.cu_seqlens[n] : 0;
}
__device__ inline std::int64_t sequence_length(const Job& p, int n) {
  return p.cu_seqlens ? p.cu_seqlens[n + 1] - p.cu_seqlens[n] : p.tokens;
}
__device__ inline int first_slot(const Job& p, int n) {
  return p.cu_seqlens ? static_cast<int>(p.cu_seqlens[n] / kChunk) + n : n * p.slots_each;
}

// slot / slots_each without a division, which would be most of what a block does before its first load.
__device__ inline int sequence_of(const Job& p, int slot) {
  const auto n = static_cast<unsigned>(slot);
  return static_cast<int>((__umulhi(n, p.slots_magic) + n) >> p.slots_shift);
}

// False for a slot that no chunk uses.
__device__ inline bool find_chunk(const Job& p, int slot, Chunk& c) {
  int n;
  if (p.cu_seqlens) {
    n = p.slot_sequence[slot];
    if (n < 0) return false;
  } else {
    n = sequence_of(p, slot);
  }
  c.sequence = n;
  c.slot = slot;
  c.index = slot - first_slot(p, n);
  c.row = p.cu_seqlens ? 0 : n;
  c.token = sequence_start(p, n) + static_cast<std::int64_t>(c.index) * kChunk;
  const std::int64_t left = sequence_length(p, n) - static_cast<std::int64_t>(c.index) * kChunk;
  c.length = left < kChunk ? static_cast<int>(left) : kChunk;
  return true;
}

template <class T>
__device__ inline T* row_of(const Strided<T>& t, std::int64_t row, std::int64_t token, int head) {
  return t.data + row * t.batch + token * t.token + head * t.head;
}
// `row` rows of `step` elements further on: one instruction, where 64-bit steps take six.
template <class T>
__device__ inline T* rows_on(T* from, int row, int step) {
  const std::int64_t bytes = static_cast<std::int64_t>(row) * (step * static_cast<int>(sizeof(T)));
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(from) + static_cast<std::uintptr_t>(bytes));
}
__device__ inline std::int64_t index_of(const Real& t, std::int64_t row, std::int64_t token, int head) {
  return row * t.batch + token * t.token + head * t.head;
}
__device__ inline float load_real(const Real& t, std::int64_t i) {
  return t.bf16 ? __bfloat162float(static_cast<const bf16*>(t.data)[i])
                : static_cast<const float*>(t.data)[i];
}
__device__ inline void store_real(const Real& t, std::int64_t i, float x) {
  if (t.bf16) {
    static_cast<bf16*>(t.data)[i] = __float2bfloat16_rn(x);
  } else {
    static_cast<float*>(t.data)[i] = x;
  }
}

// Loads that give zero, and stores that do nothing, when not `valid`: one predicate, no branch, so that they
// overlap.
__device__ inline std::uint32_t load16(const void* p, bool valid) {
  std::uint16_t x;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.nc.u16 %0, [%1];\n}"
      : "=h"(x)
      : "l"(p), "r"(static_cast<int>(valid)));
  return x;
}
__device__ inline std::uint32_t load32(const void* p, bool valid) {
  std::uint32_t x;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
      : "=r"(x)
      : "l"(p), "r"(static_cast<int>(valid)));
  return x;
}
__device__ inline float2 load64(const void* p, bool valid) {
  float2 x;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
      "@p ld.global.nc.v2.f32 {%0, %1}, [%2];\n}"
      : "=f"(x.x), "=f"(x.y)
      : "l"(p), "r"(static_cast<int>(valid)));
  return x;
}
__device__ inline void store16(void* p, float x, bool valid) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.u16 [%0], %1;\n}" ::"l"(p),
               "h"(__bfloat16_as_ushort(__float2bfloat16_rn(x))), "r"(static_cast<int>(valid))
               : "memory");
}
__device__ inline void store32(void* p, float x, bool valid) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(p), "f"(x),
               "r"(static_cast<int>(valid))
               : "memory");
}

// body(std::true_type) when so: keeps the branch out of loops, so that their loads overlap.
template <class Body>
__device__ inline void decide(bool so, Body body) {
  if (so) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}
// By whether the tensor is bf16, and whether the gate is the softplus one.
template <class Body>
__device__ inline void by_type(const Real& t, Body body) {
  decide(t.bf16, body);
}
template <class Body>
__device__ inline void by_gate(const Job& p, Body body) {
  decide(p.gate == Gate::softplus, body);
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
constexpr float kLog2e = 1.4426950408889634f;

// Relative error about 1e-7 (1 + |x|), as that of the decays made of it; 0 and 1 at the ends, NaN for NaN.
__device__ inline float sigmoid(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + exp2_fast(-kLog2e * x)));
  return y;
}

// The log decay of one channel, and what its backward needs. `rate` is e^{a_log}.
template <bool Softplus>
__device__ inline float gate_value(const Job& p, float x, float rate) {
  if constexpr (Softplus) return -rate * (x > 20.f ? x : log1pf(expf(x)));
  return p.lower_bound * sigmoid(rate * x);
}
// Gradient at x; `log_rate` receives the gradient at a_log.
template <bool Softplus>
__device__ inline float gate_gradient(const Job& p, float x, float rate, float dg, float& log_rate) {
  if constexpr (Softplus) {
    log_rate = dg * gate_value<true>(p, x, rate);
    return -rate * sigmoid(x) * dg;
  }
  const float y = sigmoid(rate * x);
  const float dx = p.lower_bound * y * (1.f - y) * rate * dg;
  log_rate = dx * x;
  return dx;
}
__device__ inline float beta_value(const Job& p, float b) {
  return p.beta_sigmoid ? (p.neg_eigval ? 2.f : 1.f) / (1.f + expf(-b)) : b;
}

// From the gradient of a write strength (b) to that of what was given.
__device__ inline float beta_gradient(const Job& p, float b, float d) {
  if (!p.beta_sigmoid) return d;
  const float full = p.neg_eigval ? 2.f : 1.f, s = b / full;
  return d * full * s * (1.f - s);
}

// Byte offset of 16-byte piece `piece` (8 columns) of `row` in a `rows` tile with `height` rows.
__device__ inline int row_tile(int height, int row, int piece) {
  return ((piece >> 3) * height + row) * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

__device__ inline std::uint32_t pack(float lo, float hi) {
  std::uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}
__device__ inline float low(std::uint32_t x) { return __uint_as_float(x << 16); }
__device__ inline float high(std::uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// Reduces N values per lane over a warp; afterwards v[0] of lane l is the total of value l * N / 32. Over the
// lanes Off to Last apart, doubled each time, where these are given; what is left is in the first places.
template <int N, int Off = 16, int Last = 1, class T, int Size, class Op>
__device__ inline void reduce_many(T (&v)[Size], Op op) {
  if constexpr (N > 1 && Off >= Last) {
    const bool up = threadIdx.x & Off;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      const T send = up ? v[j] : v[j + N / 2];
      const T keep = up ? v[j + N / 2] : v[j];
      v[j] = op(keep, __shfl_xor_sync(~0u, send, Off));
    }
    reduce_many<N / 2, Off / 2, Last>(v, op);
  } else if constexpr (Off >= Last) {
    v[0] = op(v[0], __shfl_xor_sync(~0u, v[0], Off));
    reduce_many<1, Off / 2, Last>(v, op);
  }
}

// The steps of a call, in order.
Job plan_job(const Params& params, void* workspace, bool backward);
void launch_before(const Job& job, cudaStream_t stream);     // chunk plan
void launch_normalise(const Job& job, cudaStream_t stream);  // where nothing is prepared
void launch_prepare(const Job& job, cudaStream_t stream);
void launch_forward_scan(const Job& job, cudaStream_t stream);
// By segments, in place of the scan: the maps, the states between segments, the outputs. In the backward each is of both recurrences.
void launch_map_scan(const Job& job, cudaStream_t stream);
void launch_join(const Job& job, cudaStream_t stream);
void launch_piece_scan(const Job& job, cudaStream_t stream);
// The two recurrences of the backward, each over chunks of its own: `ahead` forward, `back` in reverse.
void launch_both_scans(const Job& ahead, const Job& back, cudaStream_t stream);
void launch_gradients(const Job& job, cudaStream_t stream);
void launch_after(const Job& job, cudaStream_t stream);  // group sums, parameter gradients

}  // namespace rlk::cuda::kda
