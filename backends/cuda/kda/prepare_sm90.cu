// KDA preparation, one block per (chunk, value head): everything of a chunk that does not need the state.
//
//   E_ij,d = prod_{j < l <= i} e^{g_ld}        P_ij = scale sum_d q_id k_jd E_ij,d          (i >= j)
//   M_ij   = beta_i sum_d k_id k_jd E_ij,d     (i > j)          A = (I + M)^-1
//   writes k e^G, k e^{G_L - G}, scale q e^G, A, P (bf16), beta and e^{G_L} (fp32): Record<K>
//
// Per token and head: reads 2K (q) + 2K (k) + 4K (g) bytes, writes 6K + 256: 1.8 kB at K = 128.
//
// A warp has a strip of 8 tokens, a lane K / 32 neighbouring channels of all 8, so that whatever stays inside
// a strip needs no barrier. Decays are running products of e^{g}, never differences of sums: no overflow, no
// cancellation at large |G|, masked gates (-1000) give exact zeros.
// P and M by halving inside a strip: at level s = 4, 2, 1 the tokens with bit s set ("upper") meet those of
// the s tokens before their aligned group ("lower"), with the decay since the group began on one side and
// until it begins on the other. Between strips I > J: the decay since strip I began, that of the whole strips
// between them, and that until strip J ends. All factors are at most 1 whatever the gates, so one path serves
// bounded and unbounded gates. A 16 x 8 mma tile carries 8 rows of q and 8 of k, or two levels of a strip.
// Rejected: one exp per (i, j, d) in the diagonal blocks (70 k exps per chunk), a single anchor per 16 tokens
// (overflows below g = -5), halving over all 64 tokens (every token scaled for two more levels, and their
// barriers). Operands are fp16 after scaling each row of q and k by a power of two (row maximum in [256,
// 512)): tf32's precision at bf16's cost, for any magnitude.
#include <algorithm>
#include <type_traits>

#include "cuda/kda/device.cuh"

namespace rlk::cuda::kda {
namespace {

constexpr int kPitch = 68;             // of the fp32 64 x 64 matrices
constexpr int kWidePitch = 36;         // of an fp64 32 x 32 matrix
constexpr int kThreads = 256;          // a warp per strip
constexpr int kExponent = 23;          // the biased fp16 exponent of a scaled row's maximum
constexpr unsigned kGridRows = 32768;  // chunk slots along the grid's second dimension

template <int K>
struct Layout {
  static constexpr int kUpper = 0;                      // [8 strips][K / 64][8 rows of q, 8 of k][64]
  static constexpr int kLower = kUpper + 8 * 32 * K;    // [8 strips][K / 64][8 rows of k][64]
  static constexpr int kM = kLower + 8 * 16 * K;        // fp32
  static constexpr int kP = kM + 64 * kPitch * 4;       // bf16, as in the record
  static constexpr int kTotals = kP + 8192;             // [8 strips][K]: decay of a strip
  static constexpr int kBetween = kTotals + 8 * 4 * K;  // [28 pairs of strips][4 lanes][K / 8 channel pairs]
  static constexpr int kLane = K / 2 + (K == 128 ? 16 : 0);  // bytes; padded against bank conflicts
  static constexpr int kBeta = kBetween + 28 * 4 * kLane;
  static constexpr int kScale = kBeta + 256;   // float[q, k][64]: what the fp16 rows were divided by
  static constexpr int kShift = kScale + 512;  // short2[64][q, k]: what to add to the bits of a row
  static constexpr int kFirst = kShift + 512;  // int[2]: the first broken row in each half
  static constexpr int kSize = kFirst + 16;
  // Once the tiles are done, A (fp32) in their place; once P is stored, a product on the way to A (fp64).
  static constexpr int kA = 0;
  static constexpr int kWide = kP;
  static_assert(kWide + 32 * kWidePitch * 8 <= kBetween);
};

__device__ inline int pair_index(int upper, int lower) { return upper * (upper - 1) / 2 + lower; }

// N words of 32 bits to or from consecutive addresses.
template <int N>
__device__ inline void load_words(std::uint32_t (&x)[N], const void* from) {
  if constexpr (N == 1) {
    x[0] = __ldg(static_cast<const unsigned*>(from));
  } else if constexpr (N == 2) {
    const uint2 y = __ldg(static_cast<const uint2*>(from));
    x[0] = y.x, x[1] = y.y;
  } else {
    const uint4 y = __ldg(static_cast<const uint4*>(from));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
}
template <int N>
__device__ inline void store_words(std::uintptr_t to, const std::uint32_t (&x)[N]) {  // global memory
  if constexpr (N == 1) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(x[0]) : "memory");
  } else {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x[0]), "r"(x[1]) : "memory");
  }
}
template <int N>
__device__ inline void store_shared(std::uint32_t to, const std::uint32_t (&x)[N]) {
  if constexpr (N == 1) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x[0]) : "memory");
  } else {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x[0]), "r"(x[1]) : "memory");
  }
}
template <int N>
__device__ inline void store_floats(void* to, const float (&x)[N]) {
  if constexpr (N == 2) {
    *static_cast<float2*>(to) = make_float2(x[0], x[1]);
  } else {
    *static_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

__device__ inline std::uint32_t times_half(std::uint32_t x, std::uint32_t y) {
  const __half2 z = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const std::uint32_t*>(&z);
}
__device__ inline std::uint32_t pack_half(float lo, float hi) {
  const __half2 z = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const std::uint32_t*>(&z);
}

// The left operand of a product on the FP64 tensor cores: 16 x 16 of an fp32 matrix in memory. The unit's
// step `i` of lane `t` stands for the sum's index order(i, t), so that a result can be the next product's
// operand.
struct Wide {
  double x[8];

  __device__ static int order(int i, int t) { return 8 * (i / 2) + 2 * t + i % 2; }
  __device__ explicit Wide(const float* from) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 y =
            *reinterpret_cast<const float2*>(from + (lane / 4 + 8 * r) * kPitch + 8 * m + 2 * (lane % 4));
        x[4 * m + r] = y.x, x[4 * m + 2 + r] = y.y;
      }
    }
  }
  // The results of two products, 8 columns each.
  __device__ Wide(const double (&left)[4], const double (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i / 2 + 2 * (i % 2)] = left[i];
      x[4 + i / 2 + 2 * (i % 2)] = right[i];
    }
  }
  // acc += this * from[16 x 8]
  template <class T>
  __device__ void times(double (&acc)[4], const T* from, int pitch) const {
    const int lane = threadIdx.x % 32;
    double b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = from[order(i, lane % 4) * pitch + lane / 4];
    mma_f64(acc, x, b);
  }
};

// A = (I + M)^-1 for unit lower triangular I + M: 16 x 16 blocks by substitution in fp32, then what is below
// them as A_21 = -A_22 M_21 A_11 for halves of 32 and of 64, on the FP64 tensor cores. M must be finite:
// there are products with the zeros above the diagonal.
//
// The two diagonal blocks of 32, by two warps.
__device__ inline void invert_halves(const float* m, float* a) {
  const int tid = threadIdx.x, lane = tid % 32, half = tid / 32;
  {
    const int block = tid / 16, column = tid % 16;
    const float* mb = m + 16 * block * (kPitch + 1);
    float* ab = a + 16 * block * (kPitch + 1) + column;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int l = 0; l < 16; l += 4) {
      float4 y[16];
#pragma unroll
      for (int i = l + 1; i < 16; ++i) y[i] = *reinterpret_cast<const float4*>(mb + i * kPitch + l);
#pragma unroll
      for (int i = l + 1; i < 16; ++i) x[i] = fmaf(-y[i].x, x[l], x[i]);
#pragma unroll
      for (int i = l + 2; i < 16; ++i) x[i] = fmaf(-y[i].y, x[l + 1], x[i]);
#pragma unroll
      for (int i = l + 3; i < 16; ++i) x[i] = fmaf(-y[i].z, x[l + 2], x[i]);
#pragma unroll
      for (int i = l + 4; i < 16; ++i) x[i] = fmaf(-y[i].w, x[l + 3], x[i]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) ab[i * kPitch] = x[i];
  }
  __syncwarp();
  const int corner = 32 * half * (kPitch + 1), below = corner + 16 * kPitch;
  const Wide inverse(a + below + 16);
  double c[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) inverse.times(c[n], m + below + 8 * n, kPitch);
  const Wide product(c[0], c[1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    double x[4] = {};
    product.times(x, a + corner + 8 * n, kPitch);
    float* to = a + below + lane / 4 * kPitch + 8 * n + 2 * (lane % 4);
    *reinterpret_cast<float2*>(to) = make_float2(static_cast<float>(-x[0]), static_cast<float>(-x[1]));
    *reinterpret_cast<float2*>(to + 8 * kPitch) =
        make_float2(static_cast<float>(-x[2]), static_cast<float>(-x[3]));
  }
}

// The block of 32 below them, by eight warps, 16 x 8 each: first t = M_21 A_11.
__device__ inline void multiply_below(const float* m, const float* a, double* t) {
  const int lane = threadIdx.x % 32, block = threadIdx.x / 128, n = threadIdx.x / 32 % 4;
  const float* from = m + (32 + 16 * block) * kPitch;
  double x[4] = {};
  if (n < 2) Wide(from).times(x, a + 8 * n, kPitch);
  Wide(from + 16).times(x, a + 16 * kPitch + 8 * n, kPitch);
  double* to = t + (16 * block + lane / 4) * kWidePitch + 8 * n + 2 * (lane % 4);
  *reinterpret_cast<double2*>(to) = make_double2(x[0], x[1]);
  *reinterpret_cast<double2*>(to + 8 * kWidePitch) = make_double2(x[2], x[3]);
}
// Then A_21 = -A_22 t: rows lane / 4 and that + 8, columns 2 (lane % 4) and its neighbour.
__device__ inline void finish_below(const float* a, const double* t, double (&x)[4]) {
  const int block = threadIdx.x / 128, n = threadIdx.x / 32 % 4;
  const float* from = a + (32 + 16 * block) * kPitch + 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = 0;
  Wide(from).times(x, t + 8 * n, kWidePitch);
  if (block == 1) Wide(from + 16).times(x, t + 16 * kWidePitch + 8 * n, kWidePitch);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = -x[i];
}

template <int K, bool Gated>
__global__ void __launch_bounds__(kThreads, K == 128 ? 2 : 3) prepare_kernel(const Job p) {
  using L = Layout<K>;
  using R = Record<K>;
  constexpr int N = K / 64, C = 2 * N;  // words and channels of a lane
  extern __shared__ __align__(1024) char smem[];
  float* m_matrix = reinterpret_cast<float*>(smem + L::kM);
  char* p_matrix = smem + L::kP;
  float* beta_s = reinterpret_cast<float*>(smem + L::kBeta);
  float* unscale = reinterpret_cast<float*>(smem + L::kScale);
  auto shift = reinterpret_cast<uint2*>(smem + L::kShift);

  const int hv = blockIdx.x, slot = blockIdx.y + blockIdx.z * kGridRows;
  Chunk c;
  if (slot >= static_cast<int>(p.slots()) || !find_chunk(p, slot, c)) return;
  const int tid = threadIdx.x, lane = tid % 32, strip = tid / 32;
  char* record = p.records + (static_cast<std::int64_t>(slot) * p.value_heads + hv) * R::kSize;

  float beta = 0.f;  // of token `tid`
  if (tid < c.length) beta = load_real(p.beta, index_of(p.beta, c.row, c.token + tid, hv));
  // e^{g}, q and k of this lane's channels.
  float e[8][C];
  std::uint32_t q[8][N], k[8][N];
  {
    const int h = p.heads == p.value_heads ? hv : hv / (p.value_heads / p.heads);
    const bf16 *q_row, *k_row;
    int q_step = static_cast<int>(p.q.token), k_step = static_cast<int>(p.k.token);
    if (p.l2norm) {
      const std::int64_t row = (c.row * p.tokens + c.token) * p.heads + h;
      q_row = p.q_norm + row * K;
      k_row = p.k_norm + row * K;
      q_step = k_step = p.heads * K;
    } else {
      q_row = row_of(p.q, c.row, c.token, h);
      k_row = row_of(p.k, c.row, c.token, h);
    }
    q_row += C * lane, k_row += C * lane;
    // Rows past the end repeat the last one, then count as zero: loads without branches overlap.
    const int last = c.length - 1, g_step = static_cast<int>(p.g.token);
    const std::int64_t g_row = index_of(p.g, c.row, c.token, hv) + C * lane;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int t = min(8 * strip + i, last);
      load_words(q[i], rows_on(q_row, t, q_step));
      load_words(k[i], rows_on(k_row, t, k_step));
    }
    by_type(p.g, [&](auto is_bf16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int t = min(8 * strip + i, last);
        if constexpr (is_bf16.value) {
          std::uint32_t x[N];
          load_words(x, rows_on(static_cast<const bf16*>(p.g.data) + g_row, t, g_step));
#pragma unroll
          for (int n = 0; n < N; ++n) e[i][2 * n] = low(x[n]), e[i][2 * n + 1] = high(x[n]);
        } else {
          std::uint32_t x[C];
          load_words(x, rows_on(static_cast<const float*>(p.g.data) + g_row, t, g_step));
#pragma unroll
          for (int n = 0; n < C; ++n) e[i][n] = __uint_as_float(x[n]);
        }
      }
    });
    float rate = 1.f, bias[C] = {};
    if constexpr (Gated) {
      if (p.a_log) rate = expf(p.a_log[hv]);
      if (p.dt_bias) {
#pragma unroll
        for (int n = 0; n < C; ++n) bias[n] = p.dt_bias[hv * K + C * lane + n];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int n = 0; n < C; ++n) {
        if constexpr (Gated) e[i][n] = gate_value(p, e[i][n] + bias[n], rate);
        e[i][n] = exp2_fast(e[i][n] * kLog2e);
      }
    }
    if (8 * strip + 7 > last) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (8 * strip + i <= last) continue;
#pragma unroll
        for (int n = 0; n < N; ++n) q[i][n] = k[i][n] = 0, e[i][2 * n] = e[i][2 * n + 1] = 1.f;
      }
    }
  }
  // A row of a tile is K / 64 times 128 bytes; in row r, this lane's lie at `swizzled` ^ (r % 8 << 4) of one.
  const int half = lane * N / 32, swizzled = lane * N % 32 * 4;
  auto totals = [&](int s) { return reinterpret_cast<float*>(smem + L::kTotals) + s * K + C * lane; };
  {
    float total[C];
#pragma unroll
    for (int n = 0; n < C; ++n) {
      total[n] = e[0][n];
#pragma unroll
      for (int i = 1; i < 8; ++i) total[n] *= e[i][n];
    }
    store_floats(totals(strip), total);
  }
  // A row's largest exponent is to become kExponent by adding to the bits of its elements; a row with a NaN
  // or an infinity gets NaN as its scale.
  {
    unsigned largest[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      unsigned x = q[i][0] & 0x7fff7fffu, y = k[i][0] & 0x7fff7fffu;
#pragma unroll
      for (int n = 1; n < N; ++n) {
        x = __vmaxu2(x, q[i][n] & 0x7fff7fffu), y = __vmaxu2(y, k[i][n] & 0x7fff7fffu);
      }
      largest[i] = __vmaxu2(__byte_perm(x, y, 0x5410), __byte_perm(x, y, 0x7632));
    }
    reduce_many<8>(largest, [](unsigned a, unsigned b) { return __vmaxu2(a, b); });
    if (lane % 4 == 0) {
      auto scale_of = [&](unsigned bits, int which) {
        const int exponent = static_cast<int>(bits >> 7), x = max(exponent, kExponent);
        unscale[64 * which + 8 * strip + lane / 4] =
            exponent == 255 ? NAN : __uint_as_float(static_cast<unsigned>(x + 15 - kExponent) << 23);
        return static_cast<unsigned>((kExponent - x) << 7 & 0xffff) * 0x10001u;
      };
      shift[8 * strip + lane / 4] =
          make_uint2(scale_of(largest[0] & 0xffff, 0), scale_of(largest[0] >> 16, 1));
    }
  }
  if (tid < 64) {
    const float b = tid < c.length ? beta_value(p, beta) : 0.f;
    beta_s[tid] = b;
    reinterpret_cast<float*>(record + R::kBeta)[tid] = b;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reinterpret_cast<uint4*>(p_matrix)[tid + i * kThreads] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  // Products over whole strips, and the three tiles that the scans read.
  {
    float before[C], after[C];
#pragma unroll
    for (int n = 0; n < C; ++n) before[n] = after[n] = 1.f;
    auto multiply = [&](float(&x)[C], int s) {
      const float* by = totals(s);
#pragma unroll
      for (int n = 0; n < C; ++n) x[n] *= by[n];
    };
#pragma unroll 1
    for (int s = 0; s < strip; ++s) multiply(before, s);
#pragma unroll 1
    for (int s = strip + 1; s < 8; ++s) {
      // Channel pair `pair` belongs to lane pair % 4 of the tiles.
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int pair = N * lane + n;
        *reinterpret_cast<std::uint32_t*>(smem + L::kBetween + pair_index(s, strip) * 4 * L::kLane +
                                          pair % 4 * L::kLane + pair / 4 * 4) =
            pack_half(after[2 * n], after[2 * n + 1]);
      }
      multiply(after, s);
    }
    const auto to = reinterpret_cast<std::uintptr_t>(record) + (half * 64 + 8 * strip) * 128 + swizzled;
    auto place = [&](int i) { return (to ^ i << 4) + i * 128; };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      std::uint32_t x[N], y[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float f = before[2 * n] *= e[i][2 * n], g = before[2 * n + 1] *= e[i][2 * n + 1];
        x[n] = pack(low(k[i][n]) * f, high(k[i][n]) * g);
        y[n] = pack(low(q[i][n]) * f * p.scale, high(q[i][n]) * g * p.scale);
      }
      store_words(place(i) + R::kKeyIn, x);
      store_words(place(i) + R::kQuery, y);
    }
    if (strip == 7) store_floats(record + R::kDecay + C * lane * 4, before);
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      std::uint32_t x[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float &f = after[2 * n], &g = after[2 * n + 1];
        x[n] = pack(low(k[i][n]) * f, high(k[i][n]) * g);
        f *= e[i][2 * n], g *= e[i][2 * n + 1];
      }
      store_words(place(i) + R::kKeyOut, x);
    }
  }

  // q and k as scaled fp16, in place.
  {
    auto scaled = [](std::uint32_t x, unsigned by) {
      return __viaddmax_s16x2(x & 0x7fff7fffu, by, 0u) << 3 | (x & 0x80008000u);
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint2 by = shift[8 * strip + i];
#pragma unroll
      for (int n = 0; n < N; ++n) q[i][n] = scaled(q[i][n], by.x), k[i][n] = scaled(k[i][n], by.y);
    }
  }

  // Rows of this warp's tiles.
  const std::uint32_t base = shared_address(smem);
  const std::uint32_t upper = base + L::kUpper + strip * 32 * K + half * 2048 + swizzled,
                      lower = base + L::kLower + strip * 16 * K + half * 1024 + swizzled;
  auto put_plain = [&](std::uint32_t tile, int row, const std::uint32_t(&x)[N]) {
    store_shared((tile ^ row % 8 << 4) + row * 128, x);
  };
  auto put = [&](std::uint32_t tile, int row, const std::uint32_t(&x)[N], const std::uint32_t(&f)[N]) {
    std::uint32_t y[N];
#pragma unroll
    for (int n = 0; n < N; ++n) y[n] = times_half(x[n], f[n]);
    put_plain(tile, row, y);
  };
  auto rounded = [](std::uint32_t(&y)[N], const float(&x)[C]) {
#pragma unroll
    for (int n = 0; n < N; ++n) y[n] = pack_half(x[2 * n], x[2 * n + 1]);
  };
  // Tokens [from, from + count) as upper ones in rows `row` (q) and `row` + `gap` (k) onwards; as lower ones.
  auto put_upper = [&](int from, int count, int row, int gap) {
    float f[C];
#pragma unroll
    for (int j = 0; j < count; ++j) {
#pragma unroll
      for (int n = 0; n < C; ++n) f[n] = j == 0 ? e[from][n] : f[n] * e[from + j][n];
      std::uint32_t y[N];
      rounded(y, f);
      put(upper, row + j, q[from + j], y);
      put(upper, row + gap + j, k[from + j], y);
    }
  };
  auto put_lower = [&](int from, int count, int row) {
    put_plain(lower, row + count - 1, k[from + count - 1]);
    float f[C];
#pragma unroll
    for (int j = count - 2; j >= 0; --j) {
#pragma unroll
      for (int n = 0; n < C; ++n) f[n] = j == count - 2 ? e[from + j + 1][n] : f[n] * e[from + j + 1][n];
      std::uint32_t y[N];
      rounded(y, f);
      put(lower, row + j, k[from + j], y);
    }
  };
  const std::uint32_t upper_row = base + L::kUpper + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4),
                      lower_row = base + L::kLower + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
  auto load_upper = [&](std::uint32_t(&a)[4], int s, int ks) {
    ldmatrix(a, (upper_row + s * 32 * K ^ ks % 4 << 5) + ks / 4 * 2048);
  };
  auto load_lower = [&](std::uint32_t(&b)[4], int s, int ks) {
    ldmatrix(b, (lower_row + s * 16 * K ^ ks % 4 << 5) + ks / 4 * 1024);
  };
  auto strip_tile = [&](float(&acc)[4]) {
    float odd[4] = {};
#pragma unroll
    for (int n = 0; n < 4; ++n) acc[n] = 0.f;
#pragma unroll
    for (int ks = 0; ks < K / 16; ks += 2) {
      std::uint32_t a[4], b[4];
      load_lower(b, strip, ks);
      load_upper(a, strip, ks);
      mma_f16(acc, a, b[0], b[1]);
      load_upper(a, strip, ks + 1);
      mma_f16(odd, a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) acc[n] += odd[n];
  };
  auto p_at = [&](int i, int j) { return p_matrix + row_tile(64, i, j / 8) + j % 8 * 2; };
  float poison = 0.f;  // stays zero while all of M is finite
  const int row = lane / 4, column = 2 * (lane % 4), base_token = 8 * strip;

  // Levels 4 and 2 in one tile: rows 0-3 q and 4-7 k of level 4, 8-11 and 12-15 of level 2, columns likewise.
  put_upper(4, 4, 0, 4);
  put_lower(0, 4, 0);
  put_upper(2, 2, 8, 4), put_upper(6, 2, 10, 4);
  put_lower(0, 2, 4), put_lower(4, 2, 6);
  __syncwarp();
  {
    float acc[4];
    strip_tile(acc);
    const bool two = column >= 4;
    const float x = two ? acc[2] : acc[0], y = two ? acc[3] : acc[1];
    const int u = row % 4, l = column % 4;
    if (!two || u / 2 == l / 2) {
      const int i = base_token + (two ? u / 2 * 4 + 2 + u % 2 : 4 + u),
                j = base_token + (two ? l / 2 * 4 : l);
      const float2 back = *reinterpret_cast<const float2*>(unscale + 64 + j);
      if (row < 4) {
        const float f = unscale[i] * p.scale;
        *reinterpret_cast<std::uint32_t*>(p_at(i, j)) = pack(x * f * back.x, y * f * back.y);
      } else {
        const float f = unscale[64 + i] * beta_s[i], a = x * f * back.x, b = y * f * back.y;
        *reinterpret_cast<float2*>(m_matrix + i * kPitch + j) = make_float2(a, b);
        poison = fmaf(a, 0.f, poison), poison = fmaf(b, 0.f, poison);
      }
    }
  }
  __syncwarp();
  // Level 1 and the diagonal: rows 0-3 q and 4-7 k of the odd tokens with their decay, 8-11 q of the even and
  // 12-15 of the odd ones as they are; columns 0-3 k of the even, 4-7 of the odd tokens.
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    put_upper(2 * j + 1, 1, j, 4);
    put_plain(upper, 8 + j, q[2 * j]), put_plain(upper, 12 + j, q[2 * j + 1]);
    put_plain(lower, j, k[2 * j]), put_plain(lower, 4 + j, k[2 * j + 1]);
  }
  __syncwarp();
  {
    float acc[4];
    strip_tile(acc);
    if (row / 2 == lane % 4) {  // the diagonal, columns row and row
      const int i = base_token + row % 4 * 2 + row / 4;
      const float f = unscale[i] * p.scale;
      *reinterpret_cast<bf16*>(p_at(i, i)) =
          __float2bfloat16_rn((row % 2 ? acc[3] : acc[2]) * f * unscale[64 + i]);
    }
    const int u = row % 4;
    if (u / 2 == lane % 4) {
      const int i = base_token + 2 * u + 1, j = i - 1;
      const float x = (u % 2 ? acc[1] : acc[0]) * unscale[64 + j];
      if (row < 4) {
        *reinterpret_cast<bf16*>(p_at(i, j)) = __float2bfloat16_rn(x * (unscale[i] * p.scale));
      } else {
        const float y = x * (unscale[64 + i] * beta_s[i]);
        m_matrix[i * kPitch + j] = y;
        poison = fmaf(y, 0.f, poison);
      }
    }
  }
  __syncwarp();
  put_upper(0, 8, 0, 8);
  put_lower(0, 8, 0);
  __syncthreads();

  // Strip `s` against the strips [from, to) before it.
  auto cross = [&](int s, int from, int to) {
    if (from >= to) return;
    std::uint32_t a[K / 16][4];
#pragma unroll
    for (int ks = 0; ks < K / 16; ++ks) load_upper(a[ks], s, ks);
    const int i = 8 * s + row;
    const float of_q = unscale[i] * p.scale, of_k = unscale[64 + i] * beta_s[i];
    for (int t = from; t < to; ++t) {
      std::uint32_t f[K / 16][2];
      if (s > t + 1) {
        const char* between = smem + L::kBetween + (4 * pair_index(s, t) + lane % 4) * L::kLane;
#pragma unroll
        for (int ks = 0; ks < K / 16; ks += 2) {
          const uint4 x = *reinterpret_cast<const uint4*>(between + 8 * ks);
          f[ks][0] = x.x, f[ks][1] = x.y, f[ks + 1][0] = x.z, f[ks + 1][1] = x.w;
        }
      } else {
#pragma unroll
        for (int ks = 0; ks < K / 16; ++ks) f[ks][0] = f[ks][1] = 0x3c003c00u;
      }
      float acc[4] = {}, odd[4] = {};
#pragma unroll
      for (int ks = 0; ks < K / 16; ks += 2) {
        std::uint32_t b[4];
        load_lower(b, t, ks);
        mma_f16(acc, a[ks], times_half(b[0], f[ks][0]), times_half(b[1], f[ks][1]));
        mma_f16(odd, a[ks + 1], times_half(b[2], f[ks + 1][0]), times_half(b[3], f[ks + 1][1]));
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) acc[n] += odd[n];
      const int j = 8 * t + column;
      const float2 back = *reinterpret_cast<const float2*>(unscale + 64 + j);
      *reinterpret_cast<std::uint32_t*>(p_at(i, j)) = pack(acc[0] * of_q * back.x, acc[1] * of_q * back.y);
      const float x = acc[2] * of_k * back.x, y = acc[3] * of_k * back.y;
      *reinterpret_cast<float2*>(m_matrix + i * kPitch + j) = make_float2(x, y);
      poison = fmaf(x, 0.f, poison), poison = fmaf(y, 0.f, poison);
    }
  };
  // 28 pairs, at most 4 a warp.
  cross(strip, 0, min(strip, 4));
  if (strip < 4) cross(7 - strip, 4, 7 - strip);

  // A token that is NaN or infinite must not reach the ones before it: its row of M and those after count as
  // zero, and become NaN at the end.
  int first = 64;
  if (__syncthreads_or(poison != 0.f)) {
    auto firsts = reinterpret_cast<int*>(smem + L::kFirst);
    if (tid < 64) {
      float zero = 0.f;
      for (int j = 0; j < tid; ++j) zero = fmaf(m_matrix[tid * kPitch + j], 0.f, zero);
      const unsigned broken = __ballot_sync(~0u, zero != 0.f);
      if (lane == 0) firsts[strip] = broken ? 32 * strip + __ffs(static_cast<int>(broken)) - 1 : 64;
    }
    __syncthreads();
    first = min(firsts[0], firsts[1]);
    for (int i = 64 * first + tid; i < 4096; i += kThreads) m_matrix[i / 64 * kPitch + i % 64] = 0.f;
    __syncthreads();
  }
  float* a_matrix = reinterpret_cast<float*>(smem + L::kA);
  auto wide = reinterpret_cast<double*>(smem + L::kWide);
  if (tid < 64) {
    invert_halves(m_matrix, a_matrix);
  } else {
    for (int i = tid - 64; i < 512; i += kThreads - 64) {
      const int at = row_tile(64, i / 8, i % 8);
      *reinterpret_cast<uint4*>(record + R::kScores + at) = *reinterpret_cast<const uint4*>(p_matrix + at);
    }
  }
  __syncthreads();
  multiply_below(m_matrix, a_matrix, wide);
  {
    // Both diagonal blocks of 32, and the zeros above them.
    const int i = tid / 4, piece = tid % 4, own = i / 32 * 4 + piece;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (own / 2 <= i / 16) {
      const float4 y = *reinterpret_cast<const float4*>(a_matrix + i * kPitch + 8 * own);
      const float4 z = *reinterpret_cast<const float4*>(a_matrix + i * kPitch + 8 * own + 4);
      x = make_uint4(pack(y.x, y.y), pack(y.z, y.w), pack(z.x, z.y), pack(z.z, z.w));
    }
    if (i >= first) x = make_uint4(~0u, ~0u, ~0u, ~0u);
    *reinterpret_cast<uint4*>(record + R::kInverse + row_tile(64, i, own)) = x;
    if (i < 32) {
      *reinterpret_cast<uint4*>(record + R::kInverse + row_tile(64, i, 4 + piece)) = make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();
  double x[4];
  finish_below(a_matrix, wide, x);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int i = 32 + 16 * (strip / 4) + 8 * n + row;
    *reinterpret_cast<std::uint32_t*>(record + R::kInverse + row_tile(64, i, strip % 4) + 2 * column) =
        i < first ? pack(static_cast<float>(x[2 * n]), static_cast<float>(x[2 * n + 1])) : ~0u;
  }
}

template <int K>
void launch(const Job& job, cudaStream_t stream) {
  const auto slots = static_cast<unsigned>(job.slots());
  const dim3 blocks(static_cast<unsigned>(job.value_heads), std::min(slots, kGridRows),
                    (slots + kGridRows - 1) / kGridRows);
  const auto kernel = job.gate != Gate::none ? prepare_kernel<K, true> : prepare_kernel<K, false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<K>::kSize);
  kernel<<<blocks, kThreads, Layout<K>::kSize, stream>>>(job);
}

}  // namespace

void launch_prepare(const Job& job, cudaStream_t stream) {
  if (job.slots() == 0) return;
  job.dim == 128 ? launch<128>(job, stream) : launch<64>(job, stream);
}

}  // namespace rlk::cuda::kda
