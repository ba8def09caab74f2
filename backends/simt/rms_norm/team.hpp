// What the kernels of rms_norm share: the threads of a row and its sum, gates, weights.
#pragma once

#include <type_traits>

#include "arithmetic/rms_norm/norm.hpp"
#include "simt/rows.hpp"

namespace rlk::simt::rms_norm {

using namespace rlk::rms32;
using rows::kPack;
using rows::RowOf;

inline constexpr int kThreads = 128;
inline constexpr int kWave = 32;

// The first steps of the sum of eight neighbours in each of `Lanes` lanes by halves: those of lanes four times as far, twice as
// far and as far as a pack is wide. A lane and its partner share the work: each goes on with one half of the values, and has one
// in the end.
template <int Lanes>
__device__ __forceinline__ float halved(float (&v)[kPack], int lane) {
#pragma unroll
  for (int step = Lanes / 2, n = 4; n > 0; step /= 2, n /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float mine = upper ? v[k + n] : v[k], other = upper ? v[k] : v[k + n];
      v[k] = add_rn(mine, __shfl_xor(other, step, kWave));
    }
  }
  return v[0];
}
// The other steps, to 1. Every lane gets the sum.
template <int Lanes>
__device__ __forceinline__ float rest(float sum) {
#pragma unroll
  for (int step = Lanes / 16; step > 0; step /= 2) sum = add_rn(sum, __shfl_xor(sum, step, kWave));
#pragma unroll
  for (int step = Lanes / 2; step > Lanes / 16; step /= 2) sum = add_rn(sum, __shfl_xor(sum, step, kWave));
  return sum;
}
// The same for four lanes, which are two steps: each has two values behind them, as far apart as the third step adds.
__device__ __forceinline__ float fold_of_four(float (&v)[kPack], int lane) {
#pragma unroll
  for (int step = 2, n = 4; n > 1; step /= 2, n /= 2) {
    const bool odd = (lane & step) != 0;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float mine = odd ? v[2 * k + 1] : v[2 * k], other = odd ? v[2 * k] : v[2 * k + 1];
      v[k] = add_rn(mine, __shfl_xor(other, step, kWave));
    }
  }
  float sum = add_rn(v[0], v[1]);
  sum = add_rn(sum, __shfl_xor(sum, 1, kWave));
  return add_rn(sum, __shfl_xor(sum, 2, kWave));
}
template <int Lanes>
__device__ __forceinline__ float fold(float (&v)[kPack], int lane) {
  if constexpr (Lanes == 4)
    return fold_of_four(v, lane);
  else
    return rest<Lanes>(halved<Lanes>(v, lane));
}

// A row's threads, and how many packs of it each keeps: of a row of no more these are as far apart as the first steps of its sum
// add, which so take no shuffle.
template <int Threads, int Held = 4>
struct Team {
  static constexpr int kThreadsOf = Threads, kHeld = Held;
  static constexpr int kLanesOf = Threads < kWave ? Threads : kWave;  // of a wave
  static constexpr int kRows = kThreads / kThreadsOf;
  static constexpr int kStride = kThreadsOf * kPack;         // from one pack of a thread to its next
  static constexpr int kMost = kHeld * kStride;              // of a row that it keeps
  static constexpr int kSums = Threads > kWave ? 1 : kHeld;  // lanes beyond stay +0
  std::int64_t row;
  bool there;  // rows past the end repeat the last one, since every lane must reach the shuffles
  int first, lane;

  __device__ __forceinline__ explicit Team(const Problem& p) {
    const std::int64_t mine = std::int64_t{blockIdx.x} * kRows + threadIdx.x / kThreadsOf;
    there = mine < p.axes.rows;
    row = there ? mine : p.axes.rows - 1;
    first = static_cast<int>(threadIdx.x) % kThreadsOf * kPack;
    lane = static_cast<int>(threadIdx.x) % kLanesOf;
  }

  // rms32 from the sums of all threads: lane j of its 1024 is sums[j / kStride] of the thread that has j % kStride.
  __device__ __forceinline__ float total(float (&sums)[kSums][kPack]) const {
    if constexpr (Threads > kWave) {
      return total_of_waves(sums[0]);
    } else {
      float v[kPack];
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        v[k] = kSums == 4 ? add_rn(add_rn(sums[0][k], sums[2][k]), add_rn(sums[1][k], sums[3][k]))
                          : add_rn(sums[0][k], sums[1][k]);
      const float sum = fold<kLanesOf>(v, lane);
      return kMost < kLanes ? add_rn(sum, 0.0f) : sum;  // as with the empty lanes: no -0
    }
  }

  // Each of the four waves has two of a pack's eight places; then every thread adds the eight. Who is late with reading what a
  // sum left has not come to the next one's first barrier.
  __device__ __forceinline__ float total_of_waves(const float (&sums)[kPack]) const {
    static_assert(Threads == kPack / 2 * kWave);
    float *all = dynamic_shared<float>(), *places = all + kLanes;
    const int thread = static_cast<int>(threadIdx.x), place = thread / kWave * 2;
#pragma unroll
    for (int k = 0; k < kPack; ++k) all[k * kThreadsOf + thread] = sums[k];
    __syncthreads();
    const auto over_waves = [&](int k) {
      const float* of = all + k * kThreadsOf + lane;
      return add_rn(add_rn(of[0], of[2 * kWave]), add_rn(of[kWave], of[3 * kWave]));
    };
    const float low = over_waves(place), high = over_waves(place + 1);
    const bool upper = lane >= kWave / 2;
    float sum = add_rn(upper ? high : low, __shfl_xor(upper ? low : high, kWave / 2, kWave));
#pragma unroll
    for (int step = kWave / 4; step > 0; step /= 2) sum = add_rn(sum, __shfl_xor(sum, step, kWave));
    if (lane % (kWave / 2) == 0) places[place + upper] = sum;
    __syncthreads();
    float v[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = places[k];
    return add_rn(add_rn(add_rn(v[0], v[4]), add_rn(v[2], v[6])),
                  add_rn(add_rn(v[1], v[5]), add_rn(v[3], v[7])));
  }

  // body(number, first element, how many) for kHeld packs of this thread, the first at `i`.
  template <class Body>
  __device__ __forceinline__ void for_some(std::int64_t i, std::int64_t width, Body body) const {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) body(c, i + c * kStride, rows::pack_at(i + c * kStride, width));
  }
  // read(number, first element, how many) for kHeld packs at a time, then body(lane, number, first element, how many) for
  // each. Nothing is read again by a later pass over a row of no more than kHeld packs a thread.
  template <class Read, class Body>
  __device__ __forceinline__ void for_packs(std::int64_t width, bool again, Read read, Body body) const {
    for (std::int64_t i = first; i < width; i += kHeld * kStride) {
      if (!again || width > kHeld * kStride) for_some(i, width, read);
      for_some(i, width, [&](int c, std::int64_t at, int n) {
        if (n > 0) body(c % kSums, c, at, n);
      });
    }
  }
};
using Wave = Team<kWave>;
using Waves = Team<4 * kWave>;
static_assert(Wave::kMost == kLanes && Waves::kStride == kLanes);
// What the sum of a row of four waves has in shared memory.
inline constexpr std::size_t kSumBytes = (kLanes + kPack) * sizeof(float);

struct Eight {
  float at[kPack];
};
// What the gate multiplies by, and its slope: out of line, for calls with a gate only.
RLK_DEVICE_CALL Eight gate_values(Gate act, Eight gate) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) gate.at[k] = activation::value(act, gate.at[k]);
  return gate;
}
RLK_DEVICE_CALL Eight gate_slopes(Gate act, Eight gate) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) gate.at[k] = activation::slope(act, gate.at[k]);
  return gate;
}

// A pack of bf16, and x + residual as a tensor of bf16 holds it.
__device__ __forceinline__ rows::Bytes16 packed(const float (&v)[kPack]) {
  rows::Bytes16 raw;
#pragma unroll
  for (int k = 0; k < kPack; k += 2) raw.word[k / 2] = rows::pair_of<bf16>(v[k], v[k + 1]);
  return raw;
}
__device__ __forceinline__ rows::Bytes16 added(const rows::Bytes16& x, const rows::Bytes16& residual) {
  float a[kPack], r[kPack];
  rows::unpack<bf16>(&x, a);
  rows::unpack<bf16>(&residual, r);
#pragma unroll
  for (int k = 0; k < kPack; ++k) a[k] = a[k] + r[k];
  return packed(a);
}

__device__ __forceinline__ void multiply(float (&v)[kPack], const float (&by)[kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) v[k] = v[k] * by[k];
}
// Whether a kernel for T knows of gates and residuals, and takes weights of any dtype.
template <class T>
inline constexpr bool kGeneral = !__is_same(T, rows::Whole);

// Weights as they multiply.
__device__ __forceinline__ void add_offset(const Problem& p, float (&w)[kPack]) {
  if (!p.offset) return;
#pragma unroll
  for (int k = 0; k < kPack; ++k) w[k] = 1 + w[k];
}
// The weight's part of a pack.
template <class T>
__device__ __forceinline__ void weights(const Problem& p, std::int64_t i, int n, float (&w)[kPack]) {
  using W = std::conditional_t<kGeneral<T>, rows::Any, rows::Whole>;
  rows::get_pack<W>(p.weight_type, p.weight, i, n, w);
  add_offset(p, w);
}

// Weights as they multiply, for all rows of a block: ones if there are none, and zeros behind a row.
template <int Most>
struct Factors {
  alignas(16) float at[Most];
  __device__ __forceinline__ void fill(const Problem& p, int threads) {
    for (int i = static_cast<int>(threadIdx.x); i < Most; i += threads)
      at[i] = i < p.width ? p.weight_at(i) : 0.0f;
  }
  __device__ __forceinline__ void multiply(int i, float (&v)[kPack]) const {
#pragma unroll
    for (int k = 0; k < kPack; ++k) v[k] = v[k] * at[i + k];
  }
};

// y's pack from what is normalised, but for a gate. `stored` gets the weights as they are stored, if there are.
template <class T, class Stored>
__device__ __forceinline__ void normalise_by(const Problem& p, float r, float (&out)[kPack], Stored stored) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) out[k] = out[k] * r;
  if (p.early) rows::round_pack<T>(p.y.type, out);
  if (!p.weight) return;
  float w[kPack];
  stored(w);
  add_offset(p, w);
  multiply(out, w);
}
template <class T>
__device__ __forceinline__ void normalise(const Problem& p, std::int64_t i, int n, float r,
                                          float (&out)[kPack]) {
  using W = std::conditional_t<kGeneral<T>, rows::Any, rows::Whole>;
  normalise_by<T>(p, r, out, [&](float(&w)[kPack]) { rows::get_pack<W>(p.weight_type, p.weight, i, n, w); });
}

// What is normalised, from x in `a`: with a residual, its sum with it as a tensor holds it.
template <class T>
__device__ __forceinline__ void add_residual(const RowOf& residual, std::int64_t i, int n,
                                             float (&a)[kPack]) {
  if (!kGeneral<T> || !residual) return;
  float r[kPack];
  residual.get<T>(i, n, r);
#pragma unroll
  for (int k = 0; k < kPack; ++k) a[k] = a[k] + r[k];
  rows::round_pack<T>(residual.type, a);
}

// Whether a block of this kernel may have so much dynamic shared memory; then it is allowed.
template <class Kernel>
bool allow_shared(Kernel kernel, std::size_t bytes) {
  int device = 0, most = 0;
  return hipGetDevice(&device) == hipSuccess &&
         hipDeviceGetAttribute(&most, hipDeviceAttributeSharedMemPerBlockOptin, device) == hipSuccess &&
         bytes <= static_cast<std::size_t>(most) &&
         hipFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             hipFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)) == hipSuccess;
}

}  // namespace rlk::simt::rms_norm
