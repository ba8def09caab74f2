// KDA preparation, one block per (chunk, value head): everything of a chunk that does not need the state.
//
//   E_ij,d = prod_{j < l <= i} e^{g_ld}        P_ij = scale sum_d q_id k_jd E_ij,d          (i >= j)
//   M_ij   = beta_i sum_d k_id k_jd E_ij,d     (i > j)          A = (I + M)^-1
//   writes k e^G, k e^{G_L - G}, scale q e^G, A, P (bf16), beta and e^{G_L} (fp32): Record<K>
//
// Per token and head: reads 2K (q) + 2K (k) + 4K (g) bytes, writes 6K + 256: 1.8 kB at K = 128.
//
// Decays are running products of e^{g} along a thread's 16 tokens, never differences of sums: no overflow, no
// cancellation at large |G|, masked gates (-1000) give exact zeros.
// P and M by halving: at level s = 32, 16, 8, 4, 2, 1 the tokens with bit s set ("upper") meet those of the s
// tokens before their aligned group ("lower"), with e^{G_i - G_a} on one side and e^{G_a - G_j} on the other,
// a the group's first row. All factors are at most 1 whatever the gates, so one path serves bounded and
// unbounded gates; a 16 x 8 mma tile carries 8 rows of q and 8 rows of k, so levels below 16 cost one tile
// per 16 tokens. Rejected: one exp per (i, j, d) in the diagonal blocks (70 k exps per chunk), a single
// anchor per 16 tokens (overflows below g = -5). Operands are fp16 after scaling each row of q and k by a
// power of two (row maximum in [1, 2)): tf32's precision at bf16's cost, for any magnitude.
#include <type_traits>

#include "kda_sm90_device.cuh"

namespace rlk::cuda::kda90 {
namespace {

constexpr int kPitch = 68;  // of the fp32 64 x 64 matrices

template <int K>
struct Layout {
  static constexpr int kLevel = 96 * K * 2;  // 32 rows of q, 32 of k (upper tokens), 32 of k (lower tokens)
  static constexpr int kM = 2 * kLevel;
  static constexpr int kP = kM + 64 * kPitch * 4;
  static constexpr int kFirst = kP + 8192;       // e^{g} of each 16-block's first token
  static constexpr int kRest = kFirst + 16 * K;  // product over its other tokens
  static constexpr int kBeta = kRest + 16 * K;
  static constexpr int kScale = kBeta + 256;  // [q, k][64]: what the fp16 rows were divided by
  static constexpr int kMax = kScale + 512;   // [K / 64][q, k][64]
  static constexpr int kDiagonal = kMax + K / 64 * 512;
  static constexpr int kSize = kDiagonal + K / 64 * 256;
  // After the levels, in their place: A and a buffer for the inverse.
  static constexpr int kA = 0;
  static constexpr int kT = 64 * kPitch * 4;
};

// c += X[16 x 16] row * Y[16 x 16] columns 4 * (t % 4)..., row t / 4 of a 16 x 16 product by 64 threads.
// For a lower triangular X, rows of Y below the row of the result are left out: a NaN there must not reach
// it.
template <bool Lower>
__device__ inline void product16(float4& c, const float* x, const float* y, int t) {
  const float* row = x + (t / 4) * kPitch;
  const float* column = y + 4 * (t % 4);
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    if (Lower && k > t / 4) continue;
    const float a = row[k];
    const float4 b = *reinterpret_cast<const float4*>(column + k * kPitch);
    c.x = fmaf(a, b.x, c.x), c.y = fmaf(a, b.y, c.y), c.z = fmaf(a, b.z, c.z), c.w = fmaf(a, b.w, c.w);
  }
}

// A = (I + M)^-1 for unit lower triangular I + M, in fp32: 16 x 16 blocks by substitution, one thread per
// column, then block diagonals downwards: A_IJ = -A_II sum_{J <= L < I} M_IL A_LJ.
template <int kThreads>
__device__ void invert(const float* m, float* a, float* t) {
  const int tid = threadIdx.x;
  for (int i = tid; i < 64 * 16; i += kThreads) {
    *reinterpret_cast<float4*>(a + (i / 16) * kPitch + 4 * (i % 16)) = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __syncthreads();
  if (tid < 64) {
    const int block = tid / 16, column = tid % 16;
    const float* mb = m + 16 * block * (kPitch + 1);
    float* ab = a + 16 * block * (kPitch + 1) + column;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float s = i == column ? 1.f : 0.f;
#pragma unroll
      for (int l = 0; l < i; ++l) s = fmaf(-mb[i * kPitch + l], x[l], s);
      x[i] = s;
      ab[i * kPitch] = s;
    }
  }
  __syncthreads();
  auto at = [](auto* p, int i, int j) { return p + 16 * i * kPitch + 16 * j; };
#pragma unroll
  for (int d = 1; d < 4; ++d) {
    for (int w = tid; w < 64 * (4 - d); w += kThreads) {
      const int j = w / 64, i = j + d, e = w % 64;
      float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int l = j; l < i; ++l) product16<false>(c, at(m, i, l), at(a, l, j), e);
      *reinterpret_cast<float4*>(t + (16 * j + e / 4) * kPitch + 4 * (e % 4)) = c;
    }
    __syncthreads();
    for (int w = tid; w < 64 * (4 - d); w += kThreads) {
      const int j = w / 64, i = j + d, e = w % 64;
      float4 c = make_float4(0.f, 0.f, 0.f, 0.f);
      product16<true>(c, at(a, i, i), t + 16 * j * kPitch, e);
      *reinterpret_cast<float4*>(at(a, i, j) + (e / 4) * kPitch + 4 * (e % 4)) =
          make_float4(-c.x, -c.y, -c.z, -c.w);
    }
    __syncthreads();
  }
}

template <int K, bool Gated>
__global__ void __launch_bounds__(2 * K, K == 128 ? 2 : 4) prepare_kernel(const Job p) {
  using L = Layout<K>;
  constexpr int kThreads = 2 * K, kWarps = kThreads / 32, kPairs = K / 2, kHalves = K / 64;
  extern __shared__ __align__(1024) char smem[];
  float* m_matrix = reinterpret_cast<float*>(smem + L::kM);
  char* p_matrix = smem + L::kP;
  auto first = reinterpret_cast<float2*>(smem + L::kFirst);
  auto rest = reinterpret_cast<float2*>(smem + L::kRest);
  float* beta_s = reinterpret_cast<float*>(smem + L::kBeta);
  float* unscale = reinterpret_cast<float*>(smem + L::kScale);
  auto maxima = reinterpret_cast<unsigned*>(smem + L::kMax);
  float* diagonal = reinterpret_cast<float*>(smem + L::kDiagonal);

  const int slot = blockIdx.x / p.value_heads, hv = blockIdx.x % p.value_heads;
  Chunk c;
  if (!find_chunk(p, slot, c)) return;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int pair = tid % kPairs, block = tid / kPairs, half = pair / 32;
  char* record = p.records + (static_cast<std::int64_t>(slot) * p.value_heads + hv) * Record<K>::kSize;

  // This thread's channels 2 pair, 2 pair + 1 of tokens 16 block ... 16 block + 15.
  float2 e[16];
  std::uint32_t q[16], k[16];
  {
    const int h = hv / (p.value_heads / p.heads);
    const std::uint32_t *q_row, *k_row;  // pairs of channels
    int q_step = static_cast<int>(p.q.token), k_step = static_cast<int>(p.k.token);
    if (p.l2norm) {
      const std::int64_t row = (c.row * p.tokens + c.token) * p.heads + h;
      q_row = reinterpret_cast<const std::uint32_t*>(p.q_norm + row * K) + pair;
      k_row = reinterpret_cast<const std::uint32_t*>(p.k_norm + row * K) + pair;
      q_step = k_step = p.heads * K;
    } else {
      q_row = reinterpret_cast<const std::uint32_t*>(row_of(p.q, c.row, c.token, h)) + pair;
      k_row = reinterpret_cast<const std::uint32_t*>(row_of(p.k, c.row, c.token, h)) + pair;
    }
    q_step /= 2, k_step /= 2;
    // Rows past the end repeat the last one, then count as zero: loads without branches overlap.
    const int last = c.length - 1, g_step = static_cast<int>(p.g.token) / 2;
    const std::int64_t g_row = index_of(p.g, c.row, c.token, hv) / 2 + pair;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int t = min(16 * block + i, last);
      q[i] = q_row[t * q_step];
      k[i] = k_row[t * k_step];
    }
    by_type(p.g, [&](auto is_bf16) {
      using T = std::conditional_t<is_bf16.value, std::uint32_t, float2>;
      const T* from = static_cast<const T*>(p.g.data) + g_row;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const T x = from[min(16 * block + i, last) * g_step];
        if constexpr (is_bf16.value) {
          e[i] = make_float2(low(x), high(x));
        } else {
          e[i] = x;
        }
      }
    });
    float rate = 1.f;
    float2 bias = make_float2(0.f, 0.f);
    if constexpr (Gated) {
      if (p.a_log) rate = expf(p.a_log[hv]);
      if (p.dt_bias) bias = *reinterpret_cast<const float2*>(p.dt_bias + hv * K + 2 * pair);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const bool valid = 16 * block + i <= last;
      if constexpr (Gated) {
        e[i] = make_float2(gate_value(p, e[i].x + bias.x, rate), gate_value(p, e[i].y + bias.y, rate));
      }
      q[i] = valid ? q[i] : 0u;
      k[i] = valid ? k[i] : 0u;
      e[i] = valid ? e[i] : make_float2(0.f, 0.f);
    }
  }
  {
    float2 product = make_float2(1.f, 1.f);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      e[i] = make_float2(exp2_fast(e[i].x * kLog2e), exp2_fast(e[i].y * kLog2e));
      if (i > 0) product = make_float2(product.x * e[i].x, product.y * e[i].y);
    }
    first[block * kPairs + pair] = e[0];
    rest[block * kPairs + pair] = product;
    auto larger = [](unsigned a, unsigned b) { return max(a, b); };
    auto largest = [&](const std::uint32_t(&x)[16], int which) {
      unsigned v[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = max(x[i] & 0x7fffu, (x[i] >> 16) & 0x7fffu);
      reduce_many<16>(v, larger);
      if (lane % 2 == 0) maxima[half * 128 + which * 64 + 16 * block + lane / 2] = v[0];
    };
    largest(q, 0);
    largest(k, 1);
    float dots[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) dots[i] = fmaf(low(q[i]), low(k[i]), high(q[i]) * high(k[i]));
    reduce_many<16>(dots, [](float a, float b) { return a + b; });
    if (lane % 2 == 0) diagonal[half * 64 + 16 * block + lane / 2] = dots[0];
  }
  for (int i = tid; i < 64; i += kThreads) {
    float b = 0.f;
    if (i < c.length) b = beta_value(p, load_real(p.beta, index_of(p.beta, c.row, c.token + i, hv)));
    beta_s[i] = b;
    reinterpret_cast<float*>(record + Record<K>::kBeta)[i] = b;
  }
  for (int i = tid; i < 512; i += kThreads) reinterpret_cast<uint4*>(p_matrix)[i] = make_uint4(0, 0, 0, 0);
  for (int i = tid; i < 64 * 17; i += kThreads) {
    reinterpret_cast<float4*>(m_matrix)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __syncthreads();

  // Row exponents: 2^{127 - x} scales the row's maximum into [1, 2).
  for (int i = tid; i < 128; i += kThreads) {
    unsigned x = maxima[i];
    if (kHalves == 2) x = max(x, maxima[128 + i]);
    x = min(max(x >> 7, 1u), 253u);
    unscale[i] = __uint_as_float(x << 23);
  }
  // Products over whole 16-blocks, and the three tiles that the scans read.
  auto mul = [](float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); };
  auto block_product = [&](int b) { return mul(first[b * kPairs + pair], rest[b * kPairs + pair]); };
  {
    float2 before = make_float2(1.f, 1.f), after = make_float2(1.f, 1.f);
    for (int b = 0; b < block; ++b) before = mul(before, block_product(b));
    for (int b = 3; b > block; --b) after = mul(after, block_product(b));
    if (block == 3) {
      reinterpret_cast<float2*>(record + Record<K>::kDecay)[pair] = mul(before, block_product(3));
    }
    int place[8];  // of this pair in row 16 block + r of a tile; rows 8 apart share the permutation
#pragma unroll
    for (int r = 0; r < 8; ++r) place[r] = row_tile(64, 16 * block + r, pair / 4) + (pair % 4) * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      before = mul(before, e[i]);
      const int at = place[i % 8] + i / 8 * 1024;
      *reinterpret_cast<std::uint32_t*>(record + Record<K>::kKeyIn + at) =
          pack(low(k[i]) * before.x, high(k[i]) * before.y);
      *reinterpret_cast<std::uint32_t*>(record + Record<K>::kQuery + at) =
          pack(low(q[i]) * before.x * p.scale, high(q[i]) * before.y * p.scale);
    }
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      const int at = place[i % 8] + i / 8 * 1024;
      *reinterpret_cast<std::uint32_t*>(record + Record<K>::kKeyOut + at) =
          pack(low(k[i]) * after.x, high(k[i]) * after.y);
      after = mul(after, e[i]);
    }
  }
  __syncthreads();

  // q and k as scaled fp16, in place.
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int t = 16 * block + i;
    const float sq = __uint_as_float(0x7f000000u - __float_as_uint(unscale[t]));
    const float sk = __uint_as_float(0x7f000000u - __float_as_uint(unscale[64 + t]));
    const __half2 qh = __floats2half2_rn(low(q[i]) * sq, high(q[i]) * sq);
    const __half2 kh = __floats2half2_rn(low(k[i]) * sk, high(k[i]) * sk);
    q[i] = *reinterpret_cast<const std::uint32_t*>(&qh);
    k[i] = *reinterpret_cast<const std::uint32_t*>(&kh);
  }

  auto times = [](std::uint32_t x, float2 f) {
    const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&x), __floats2half2_rn(f.x, f.y));
    return *reinterpret_cast<const std::uint32_t*>(&y);
  };
  int place[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) place[r] = row_tile(96, r, pair / 4) + (pair % 4) * 4;
  // `level` points at a row that is a multiple of 8; `r` counts from there and is known at compile time.
  auto put = [&](char* level, int r, std::uint32_t x) {
    *reinterpret_cast<std::uint32_t*>(level + place[r % 8] + r / 8 * 1024) = x;
  };
  auto put_upper = [&](char* level, int r, int i, float2 f) {
    put(level, r, times(q[i], f));
    put(level, 32 + r, times(k[i], f));
  };
  auto put_lower = [&](char* level, int r, int i, float2 f) { put(level, 64 + r, times(k[i], f)); };
  // Whole 16-blocks against each other: `f` starts at the anchor.
  auto wide_upper = [&](char* level, float2 f) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i > 0) f = mul(f, e[i]);
      put_upper(level, i, i, f);
    }
  };
  auto wide_lower = [&](char* level, float2 f) {
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      put_lower(level, i, i, f);
      f = mul(f, e[i]);
    }
  };
  auto narrow = [&](char* level, auto size) {
    constexpr int s = decltype(size)::value;
#pragma unroll
    for (int a = 0; a < 16; a += 2 * s) {
      float2 f = e[a + s];
#pragma unroll
      for (int j = s - 1; j >= 0; --j) {
        put_lower(level, a / 2 + j, a + j, f);
        f = mul(f, e[a + j]);
      }
      f = make_float2(1.f, 1.f);
#pragma unroll
      for (int j = 0; j < s; ++j) {
        if (j > 0) f = mul(f, e[a + s + j]);
        put_upper(level, a / 2 + j, a + s + j, f);
      }
    }
  };
  // 8 upper tokens (q and k) against 8 lower ones.
  auto tile = [&](int level, int s, int upper, int lower) {
    const std::uint32_t base = shared_address(smem) + level * L::kLevel;
    const int mat = lane / 8, r = lane % 8;
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int ks = 0; ks < K / 16; ks += 2) {
      std::uint32_t b[4], a[4];
      ldmatrix(b, base + row_tile(96, 64 + 8 * lower + r, 2 * ks + mat));
      ldmatrix(a, base + row_tile(96, 32 * (mat & 1) + 8 * upper + r, 2 * ks + (mat >> 1)));
      mma_half(acc, a, b[0], b[1]);
      ldmatrix(a, base + row_tile(96, 32 * (mat & 1) + 8 * upper + r, 2 * ks + 2 + (mat >> 1)));
      mma_half(acc, a, b[2], b[3]);
    }
    const int u = 8 * upper + lane / 4;
    const int i = u / s * 2 * s + s + u % s;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int l = 8 * lower + 2 * (lane % 4) + x;
      if (l / s != u / s) continue;
      const int j = l / s * 2 * s + l % s;
      const float back = unscale[64 + j];
      *reinterpret_cast<bf16*>(p_matrix + row_tile(64, i, j / 8) + (j % 8) * 2) =
          __float2bfloat16_rn(acc[x] * unscale[i] * back * p.scale);
      m_matrix[i * kPitch + j] = acc[2 + x] * unscale[64 + i] * back * beta_s[i];
    }
  };
  char* level0 = smem;
  char* level1 = smem + L::kLevel;
  if (block >= 2) {
    float2 f = make_float2(1.f, 1.f);
    if (block == 3) f = mul(rest[2 * kPairs + pair], first[3 * kPairs + pair]);
    wide_upper(level0 + 2048 * (block - 2), f);
  } else {
    float2 f = first[2 * kPairs + pair];
    if (block == 0) f = mul(f, block_product(1));
    wide_lower(level0 + 2048 * block, f);
  }
  if (block % 2 == 1) {
    wide_upper(level1 + 2048 * (block / 2), make_float2(1.f, 1.f));
  } else {
    wide_lower(level1 + 2048 * (block / 2), first[(block + 1) * kPairs + pair]);
  }
  for (int i = tid; i < 64; i += kThreads) {
    const float d = kHalves == 2 ? diagonal[i] + diagonal[64 + i] : diagonal[i];
    *reinterpret_cast<bf16*>(p_matrix + row_tile(64, i, i / 8) + (i % 8) * 2) =
        __float2bfloat16_rn(d * p.scale);
  }
  __syncthreads();
  for (int w = warp; w < 8; w += kWarps) {
    const int upper = w % 4, lower = 2 * (w / 4);
    tile(0, 32, upper, lower);
    tile(0, 32, upper, lower + 1);
    tile(1, 16, upper, upper / 2 * 2 + w / 4);
  }
  __syncthreads();
  narrow(level0 + 1024 * block, std::integral_constant<int, 8>{});
  narrow(level1 + 1024 * block, std::integral_constant<int, 4>{});
  __syncthreads();
  for (int w = warp; w < 8; w += kWarps) tile(w / 4, w < 4 ? 8 : 4, w % 4, w % 4);
  __syncthreads();
  narrow(level0 + 1024 * block, std::integral_constant<int, 2>{});
  narrow(level1 + 1024 * block, std::integral_constant<int, 1>{});
  __syncthreads();
  for (int w = warp; w < 8; w += kWarps) tile(w / 4, w < 4 ? 2 : 1, w % 4, w % 4);
  __syncthreads();

  float* a_matrix = reinterpret_cast<float*>(smem + L::kA);
  invert<kThreads>(m_matrix, a_matrix, reinterpret_cast<float*>(smem + L::kT));
  for (int i = tid; i < 512; i += kThreads) {
    const int row = i / 8, piece = i % 8, at = row_tile(64, row, piece);
    const float4 x = *reinterpret_cast<const float4*>(a_matrix + row * kPitch + 8 * piece);
    const float4 y = *reinterpret_cast<const float4*>(a_matrix + row * kPitch + 8 * piece + 4);
    *reinterpret_cast<uint4*>(record + Record<K>::kInverse + at) =
        make_uint4(pack(x.x, x.y), pack(x.z, x.w), pack(y.x, y.y), pack(y.z, y.w));
    *reinterpret_cast<uint4*>(record + Record<K>::kScores + at) =
        *reinterpret_cast<const uint4*>(p_matrix + at);
  }
}

template <int K>
void launch(const Job& job, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(job.slots() * job.value_heads);
  const auto kernel = job.gate != Gate::none ? prepare_kernel<K, true> : prepare_kernel<K, false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<K>::kSize);
  kernel<<<blocks, 2 * K, Layout<K>::kSize, stream>>>(job);
}

}  // namespace

void launch_prepare(const Job& job, cudaStream_t stream) {
  if (job.slots() == 0) return;
  job.dim == 128 ? launch<128>(job, stream) : launch<64>(job, stream);
}

}  // namespace rlk::cuda::kda90
