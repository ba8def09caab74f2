// The preparation's loads, the scales of its rows, and the three tiles that the scans read.
#pragma once

#include <type_traits>

#include "cuda/kda/prepare/block.cuh"

namespace rlk::cuda::kda::prepare {

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
__device__ inline void load_shared(std::uint32_t (&x)[N], const char* from) {
  if constexpr (N == 1) {
    x[0] = *reinterpret_cast<const unsigned*>(from);
  } else if constexpr (N == 2) {
    const uint2 y = *reinterpret_cast<const uint2*>(from);
    x[0] = y.x, x[1] = y.y;
  } else {
    const uint4 y = *reinterpret_cast<const uint4*>(from);
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
__device__ inline std::uint32_t pack_half(float lo, float hi) {
  const __half2 z = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const std::uint32_t*>(&z);
}

// q, k and g of the strip. Rows past the end repeat the last one: loads without branches overlap.
template <class B, int K>
__device__ inline void load_rows(const B& b, Strip<K>& x) {
  constexpr int N = B::kWords, C = B::kChannels;
  const Job& p = b.p;
  const Chunk& c = b.c;
  const int h = b.head();
  const bf16 *q_row = row_of(p.q, c.row, c.token, h) + C * b.lane,
             *k_row = row_of(p.k, c.row, c.token, h) + C * b.lane;
  const int q_step = static_cast<int>(p.q.token), k_step = static_cast<int>(p.k.token);
  const int last = c.length - 1, g_step = static_cast<int>(p.g.token);
  const std::int64_t g_row = index_of(p.g, c.row, c.token, b.hv) + C * b.lane;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int t = min(8 * b.strip + i, last);
    load_words(x.q[i], rows_on(q_row, t, q_step));
    load_words(x.k[i], rows_on(k_row, t, k_step));
  }
  by_type(p.g, [&](auto is_bf16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int t = min(8 * b.strip + i, last);
      if constexpr (is_bf16.value) {
        std::uint32_t y[N];
        load_words(y, rows_on(static_cast<const bf16*>(p.g.data) + g_row, t, g_step));
#pragma unroll
        for (int n = 0; n < N; ++n) x.e[i][2 * n] = low(y[n]), x.e[i][2 * n + 1] = high(y[n]);
      } else {
        std::uint32_t y[C];
        load_words(y, rows_on(static_cast<const float*>(p.g.data) + g_row, t, g_step));
#pragma unroll
        for (int n = 0; n < C; ++n) x.e[i][n] = __uint_as_float(y[n]);
      }
    }
  });
}

// The same from the landing, where rows past the end are zeros. One thread orders them.
template <class B>
__device__ inline void order_rows(const B& b) {
  constexpr int kRow = 64 * B::K;
  auto& to = b.s.landing();
  std::uint64_t* const arrived = &b.s.arrived;
  const int n = sequence_of(b.p, b.slot), token = (b.slot - n * b.p.slots_each) * kChunk, h = b.head();
  barrier_expect(arrived, (b.p.g.bf16 ? 6 : 8) * kRow);
  tma_load(to.q, &b.maps.q, arrived, 0, h, token, n);
  tma_load(to.k, &b.maps.k, arrived, 0, h, token, n);
  tma_load(to.g, &b.maps.g, arrived, 0, b.hv, token, n);
}
template <class B, int K>
__device__ inline void read_rows(const B& b, Strip<K>& x) {
  constexpr int N = B::kWords, C = B::kChannels;
  const auto& from = b.s.landing();
  const int first = 8 * b.strip * K + C * b.lane;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    load_shared(x.q[i], from.q + 2 * (first + i * K));
    load_shared(x.k[i], from.k + 2 * (first + i * K));
  }
  by_type(b.p.g, [&](auto is_bf16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (is_bf16.value) {
        std::uint32_t y[N];
        load_shared(y, from.g + 2 * (first + i * K));
#pragma unroll
        for (int n = 0; n < N; ++n) x.e[i][2 * n] = low(y[n]), x.e[i][2 * n + 1] = high(y[n]);
      } else {
        std::uint32_t y[C];
        load_shared(y, from.g + 4 * (first + i * K));
#pragma unroll
        for (int n = 0; n < C; ++n) x.e[i][n] = __uint_as_float(y[n]);
      }
    }
  });
}

__device__ inline float add_squares(float sum, std::uint32_t x) {
  sum = fmaf(low(x), low(x), sum);
  return fmaf(high(x), high(x), sum);
}

// (sum x^2 + 1e-6)^-1/2 of the strip's rows, in the order of normalise_kernel: words w and w + 32 are one
// chain, and then join those that are 16, 8, .. 1 further on. At K = 128 words w and w + 32 are 16 lanes
// apart: the upper lanes go on with q and the lower ones with k.
template <class B, int K>
__device__ inline void find_factors(const B& b, const Strip<K>& x) {
  const auto add = [](float y, float z) { return y + z; };
  float sums[16];  // K = 128: [row][word]; else k, then q
  if constexpr (K == 128) {
    const bool up = b.lane & 16;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const std::uint32_t q = x.q[i / 2][i % 2], k = x.k[i / 2][i % 2];
      const std::uint32_t got = __shfl_xor_sync(~0u, up ? k : __float_as_uint(add_squares(0.f, q)), 16);
      sums[i] = add_squares(up ? __uint_as_float(got) : add_squares(0.f, k), up ? q : got);
    }
    reduce_many<16, 8>(sums, add);
    sums[0] += __shfl_xor_sync(~0u, sums[0], 1);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sums[i] = add_squares(0.f, x.k[i][0]), sums[8 + i] = add_squares(0.f, x.q[i][0]);
    reduce_many<16>(sums, add);
  }
  b.s.factors[8 * b.strip + b.lane % 16 / 2][b.lane / 16] = 1.f / sqrtf(sums[0] + 1e-6f);
  __syncwarp();
}

// q and k over their norms, rounded to bf16; a backward finds them in memory.
template <class B, int K>
__device__ inline void normalise_rows(const B& b, Strip<K>& x) {
  const Job& p = b.p;
  find_factors(b, x);
  const auto scale = [](std::uint32_t& y, float f) { y = pack(low(y) * f, high(y) * f); };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float *of = b.s.factors[8 * b.strip + i], of_k = of[0], of_q = of[1];
#pragma unroll
    for (int n = 0; n < B::kWords; ++n) scale(x.q[i][n], of_q), scale(x.k[i][n], of_k);
  }
  const int h = b.head();
  if (!p.q_norm || (p.heads != p.value_heads && b.hv != h * (p.value_heads / p.heads))) return;
  const std::int64_t first = (b.c.row * p.tokens + b.c.token) * p.heads + h;
  const std::int64_t to = (first + 8 * b.strip * p.heads) * K + B::kChannels * b.lane;
  const int left = b.c.length - 8 * b.strip;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    bf16 *q = rows_on(p.q_norm + to, i, p.heads * K), *k = rows_on(p.k_norm + to, i, p.heads * K);
    if (i >= left) continue;
    store_words(reinterpret_cast<std::uintptr_t>(q), x.q[i]);
    store_words(reinterpret_cast<std::uintptr_t>(k), x.k[i]);
  }
  if (const int token = 8 * b.strip + b.lane % 8; b.lane < 16 && token < b.c.length)
    (b.lane < 8 ? p.k_factor : p.q_factor)[first + token * p.heads] = b.s.factors[token][b.lane / 8];
}

// From g to e^{g}; rows past the end count as zero.
template <class B, int K>
__device__ inline void apply_gates(const B& b, Strip<K>& x) {
  constexpr int N = B::kWords, C = B::kChannels;
  const Job& p = b.p;
  const int last = b.c.length - 1;
  float rate = 1.f, bias[C] = {};
  if constexpr (B::Gated) {
    if (p.a_log) rate = expf(p.a_log[b.hv]);
    if (p.dt_bias) {
#pragma unroll
      for (int n = 0; n < C; ++n) bias[n] = p.dt_bias[b.hv * K + C * b.lane + n];
    }
  }
  if constexpr (B::Gated) {
    by_gate(p, [&](auto softplus) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int n = 0; n < C; ++n) x.e[i][n] = gate_value<softplus.value>(p, x.e[i][n] + bias[n], rate);
      }
    });
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int n = 0; n < C; ++n) x.e[i][n] = exp2_fast(x.e[i][n] * kLog2e);
  }
  if (8 * b.strip + 7 <= last) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (8 * b.strip + i <= last) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) x.q[i][n] = x.k[i][n] = 0, x.e[i][2 * n] = x.e[i][2 * n + 1] = 1.f;
  }
}

template <class B, int K>
__device__ inline void store_total(const B& b, const Strip<K>& x) {
  float total[B::kChannels];
#pragma unroll
  for (int n = 0; n < B::kChannels; ++n) {
    total[n] = x.e[0][n];
#pragma unroll
    for (int i = 1; i < 8; ++i) total[n] *= x.e[i][n];
  }
  store_floats(b.totals(b.strip), total);
}

// A row's largest exponent is to become kExponent by adding to the bits of its elements; a row with a NaN
// or an infinity gets NaN as its scale.
template <class B, int K>
__device__ inline void find_scales(const B& b, const Strip<K>& x) {
  unsigned largest[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    unsigned y = x.q[i][0] & 0x7fff7fffu, z = x.k[i][0] & 0x7fff7fffu;
#pragma unroll
    for (int n = 1; n < B::kWords; ++n) {
      y = __vmaxu2(y, x.q[i][n] & 0x7fff7fffu), z = __vmaxu2(z, x.k[i][n] & 0x7fff7fffu);
    }
    largest[i] = __vmaxu2(__byte_perm(y, z, 0x5410), __byte_perm(y, z, 0x7632));
  }
  reduce_many<8>(largest, [](unsigned a, unsigned c) { return __vmaxu2(a, c); });
  if (b.lane % 4 == 0) {
    const int row = 8 * b.strip + b.lane / 4;
    auto scale_of = [&](unsigned bits, int which) {
      const int exponent = static_cast<int>(bits >> 7), y = max(exponent, kExponent);
      b.s.unscale[which][row] =
          exponent == 255 ? NAN : __uint_as_float(static_cast<unsigned>(y + 15 - kExponent) << 23);
      return static_cast<unsigned>((kExponent - y) << 7 & 0xffff) * 0x10001u;
    };
    b.s.shift[row] = make_uint2(scale_of(largest[0] & 0xffff, 0), scale_of(largest[0] >> 16, 1));
  }
}

// Products over whole strips, and the three tiles that the scans read.
template <class B, int K>
__device__ inline void store_tiles(const B& b, const Strip<K>& x) {
  constexpr int N = B::kWords, C = B::kChannels;
  using R = typename B::R;
  const Job& p = b.p;
  float before[C], after[C];
#pragma unroll
  for (int n = 0; n < C; ++n) before[n] = after[n] = 1.f;
  auto multiply = [&](float(&y)[C], int s) {
    const float* by = b.totals(s);
#pragma unroll
    for (int n = 0; n < C; ++n) y[n] *= by[n];
  };
#pragma unroll 1
  for (int s = 0; s < b.strip; ++s) multiply(before, s);
#pragma unroll 1
  for (int s = b.strip + 1; s < 8; ++s) {
    // Channel pair `pair` belongs to lane pair % 4 of the tiles.
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int pair = N * b.lane + n;
      *reinterpret_cast<std::uint32_t*>(b.s.between[pair_index(s, b.strip)][pair % 4] + pair / 4 * 4) =
          pack_half(after[2 * n], after[2 * n + 1]);
    }
    multiply(after, s);
  }
  const auto to = reinterpret_cast<std::uintptr_t>(b.record) + (b.half * 64 + 8 * b.strip) * 128 + b.swizzled;
  auto place = [&](int i) { return (to ^ i << 4) + i * 128; };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    std::uint32_t y[N], z[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float f = before[2 * n] *= x.e[i][2 * n], g = before[2 * n + 1] *= x.e[i][2 * n + 1];
      y[n] = pack(low(x.k[i][n]) * f, high(x.k[i][n]) * g);
      z[n] = pack(low(x.q[i][n]) * f * p.scale, high(x.q[i][n]) * g * p.scale);
    }
    store_words(place(i) + R::kKeyIn, y);
    store_words(place(i) + R::kQuery, z);
  }
  if (b.strip == 7) store_floats(b.record + R::kDecay + C * b.lane * 4, before);
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    std::uint32_t y[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float &f = after[2 * n], &g = after[2 * n + 1];
      y[n] = pack(low(x.k[i][n]) * f, high(x.k[i][n]) * g);
      f *= x.e[i][2 * n], g *= x.e[i][2 * n + 1];
    }
    store_words(place(i) + R::kKeyOut, y);
  }
}

// q and k as scaled fp16, in place.
template <class B, int K>
__device__ inline void scale_rows(const B& b, Strip<K>& x) {
  auto scaled = [](std::uint32_t y, unsigned by) {
    return __viaddmax_s16x2(y & 0x7fff7fffu, by, 0u) << 3 | (y & 0x80008000u);
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint2 by = b.s.shift[8 * b.strip + i];
#pragma unroll
    for (int n = 0; n < B::kWords; ++n)
      x.q[i][n] = scaled(x.q[i][n], by.x), x.k[i][n] = scaled(x.k[i][n], by.y);
  }
}

}  // namespace rlk::cuda::kda::prepare
