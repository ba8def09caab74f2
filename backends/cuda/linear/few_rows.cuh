// linear of at most 32 tokens on Hopper: arithmetic sm90/t25k16/tree8, the bits of tree_kernel.cuh. The chains are those of
// mma.sync, which has the bits of wgmma.
//
// Such a product is its weight's way from memory. A block is eight warps, and each has one leaf of the same rows of weight,
// or of other rows where a part of a sum has fewer leaves. A warp brings its lines and the tokens' by cp.async into a ring of
// its own, and multiplies: tokens are the 16 rows of a fragment, rows of weight its columns. No warp waits for another but
// where the leaves of a tile meet, once, in shared memory; what the ring has under way by then are lines of the tiles that
// follow.
//
// It may begin while the kernel before it ends; for that both must find room on an SM, which is why a block takes no more than
// half of one where it can.
//
// The tokens' lines stay in shared memory from tile to tile where they fit, and else come again beside the weight's.
#pragma once

#include <algorithm>

#include "cuda/hopper/copy.cuh"
#include "cuda/hopper/launch.h"
#include "cuda/hopper/mma.cuh"
#include "cuda/linear/tree.h"
#include "cuda/linear/tree_epilogue.cuh"

namespace rlk::cuda::linear {

using namespace hopper;

inline constexpr int kFewChunk = 64;  // of k: a line of 128 bytes of every row
inline constexpr int kFewWarps = 8, kFewThreads = 32 * kFewWarps;
inline constexpr int kFewHalf = 113 * 1024, kFewMost = 227 * 1024;  // shared memory: of a half, of a whole SM

// Hints for L2, as createpolicy encodes them: evict first, evict as usual.
inline constexpr std::uint64_t kReadOnce = 0x12F0000000000000, kReadAgain = 0x1000000000000000;

// A warp's stage has `Depth` chunks of `Rows` rows of weight.
template <class T, int Tokens, int Rows, int Depth, int Stages>
struct FewTraits {
  using Element = T;
  static constexpr int kTokens = Tokens, kTokenTiles = Tokens / 16, kRows = Rows, kDepth = Depth,
                       kStages = Stages;
  static constexpr int kK = Depth * kFewChunk, kChunkBytes = Rows * 128, kStageBytes = Depth * kChunkBytes,
                       kRingBytes = Stages * kStageBytes;
};

struct FewParams {
  Product product;
  int m, n, run, step, up;                       // as the product's
  int columns;                                   // of c, that a warp's rows make: half as many with swiglu
  int groups, tiles;                             // such columns side by side, where leaves are few; of a tile
  std::int64_t weight_fours, x_fours, up_bytes;  // bytes from a line to the fourth after it, from gate to up
  int x_lines;                                   // chunks of x in a warp's ring
  bool resident;                                 // they are all that its leaf has
  std::uint64_t hint;                            // of L2, for weights
  bool aligned;                                  // lines of c, bias and residual, for four at once
};

// The first column of c, of a tile's rows of number `group`.
__device__ __forceinline__ int few_column(const FewParams& p, int tile, int group) {
  return (tile * p.groups + group) * p.columns;
}
// The row of weight of a column of c, the gate's with swiglu.
template <class T>
__device__ __forceinline__ const T* few_row(const FewParams& p, int column) {
  const int row = p.up > 0 ? column / p.run * p.step + column % p.run : column;
  return static_cast<const T*>(p.product.b.data) + row * p.product.b.ld;
}

// ---- a warp

// 16 bytes as copy16, with a hint for L2.
__device__ __forceinline__ void copy16_by(std::uint32_t to, const void* from, std::uint64_t hint) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(hint)
               : "memory");
}

// A warp's leaf: what it brings, in the order of all its tiles, and what it multiplies. Stages are lines of 128 bytes, whose
// pieces of 16 lie exchanged by the line's number, so that no two of a matrix meet in a bank.
template <class P>
class FewWarp {
  using T = typename P::Element;
  static constexpr int kFours = P::kRows / 4;  // a warp asks for four lines at a time

 public:
  using Sums = float[P::kTokenTiles][P::kRows / 8][4];

  __device__ __forceinline__ FewWarp(const FewParams& params, std::uint32_t shared)
      : p(params), tile_(static_cast<int>(blockIdx.x)) {
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = this->lane();
    const int width = static_cast<int>(p.product.width), leaf = warp % p.product.leaves;
    group_ = warp / p.product.leaves;
    start_ = leaf * width;
    const int left = static_cast<int>(p.product.k) - start_;
    real_ = left < 0 ? 0 : left < width ? left : width;
    length_ = (real_ + 15) / 16 * 16;
    weights_ = shared + warp * P::kRingBytes, weights_end_ = weights_ + P::kRingBytes;
    x_ = shared + kFewWarps * P::kRingBytes + warp * p.x_lines * p.m * 128;
    to_ = lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    to_weights_ = weights_ + to_, to_x_ = x_ + to_, at_weights_ = weights_, at_x_ = x_;
    x_from_ = static_cast<const T*>(p.product.a.data) + lane / 8 * p.product.a.ld + start_ + lane % 8 * 8;
    if (length_ == 0) tile_ = p.tiles;
    place_tile();
  }
  __device__ __forceinline__ int length() const { return length_; }

  // Asks for the next stage, where there is one.
  __device__ __forceinline__ void fetch() {
    if (tile_ < p.tiles) {
      if (k_ + P::kK <= real_)
        fetch_whole();
      else
        fetch_edge();
      from_ += P::kDepth * 128, k_ += P::kK;
      if (k_ >= length_) k_ = 0, tile_ += static_cast<int>(gridDim.x), place_tile();
    }
    copy_commit();
    to_weights_ += P::kStageBytes, to_x_ += P::kDepth * p.m * 128;
    if (to_weights_ == weights_end_ + to_) {
      to_weights_ = weights_ + to_;
      if (!p.resident) to_x_ = x_ + to_;
    }
  }

  // acc += the next stage, of k from `k` of the leaf on.
  __device__ __forceinline__ void multiply(Sums& acc, int k) {
    if (p.resident && k == 0) at_x_ = x_;
    const int groups = (length_ - k) / 16;
    if (groups >= P::kK / 16)
      multiply_groups<true>(acc, groups);
    else
      multiply_groups<false>(acc, groups);
    at_weights_ += P::kStageBytes, at_x_ += P::kDepth * p.m * 128;
    if (at_weights_ == weights_end_) {
      at_weights_ = weights_;
      if (!p.resident) at_x_ = x_;
    }
  }

 private:
  const FewParams& p;
  int group_, start_, real_, length_;        // of its leaf: what exists of it, and that in whole groups
  std::uint32_t weights_, weights_end_, x_;  // its rings
  // This lane's places in the stage that is asked for next. By places of the warp, with the lane's added at each copy, CUDA 13.0
  // makes an illegal instruction of a copy that has a hint.
  std::uint32_t to_weights_, to_x_;
  std::uint32_t at_weights_, at_x_;  // and the one that is multiplied next
  std::uint32_t to_;                 // this lane's 16 bytes of the first four lines
  const T* x_from_;                  // where they come from
  const char* from_ = nullptr;
  int tile_, k_ = 0, lines_ = 0;  // what is asked for next; of a tile, its lines behind this lane's first

  __device__ static __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void place_tile() {
    const int column = few_column(p, tile_, group_);
    lines_ = p.n - column - lane() / 8;
    from_ = reinterpret_cast<const char*>(few_row<T>(p, column) + lane() / 8 * p.product.b.ld + start_ +
                                          lane() % 8 * 8);
  }
  // The lines of a stage's chunk by `copy`, which takes where to, where from and a hint.
  template <class Copy>
  __device__ __forceinline__ void fetch_chunk(int chunk, const Copy& copy) const {
    const bool gated = p.up > 0;
    const char* const first = from_ + chunk * 128;
    const char* from = first;
    const std::uint32_t weights = to_weights_ + chunk * P::kChunkBytes;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (gated && i == kFours / 2) from = first + p.up_bytes;
      const int line = gated && i >= kFours / 2 ? 4 * i - P::kRows / 2 : 4 * i;
      if (line < lines_) copy((weights ^ i % 2 * 64) + i * 512, from, p.hint);
      from += p.weight_fours;
    }
    if (p.resident && tile_ != static_cast<int>(blockIdx.x)) return;
    const std::uint32_t x = to_x_ + chunk * p.m * 128;
    from = reinterpret_cast<const char*>(x_from_ + k_ + chunk * kFewChunk);
#pragma unroll
    for (int i = 0; i < P::kTokens / 4; ++i, from += p.x_fours) {
      if (4 * i >= p.m) break;
      if (4 * i + lane() / 8 < p.m) copy((x ^ i % 2 * 64) + i * 512, from, kReadAgain);
    }
  }
  __device__ __forceinline__ void fetch_whole() const {
#pragma unroll
    for (int chunk = 0; chunk < P::kDepth; ++chunk)
      fetch_chunk(chunk,
                  [](std::uint32_t to, const char* from, std::uint64_t hint) { copy16_by(to, from, hint); });
  }
  // Behind the end of k there are zeros, and what is behind the end of a leaf is never multiplied.
  __device__ __forceinline__ void fetch_edge() const {
#pragma unroll 1
    for (int chunk = 0; chunk < P::kDepth; ++chunk) {
      const int at = k_ + chunk * kFewChunk + lane() % 8 * 8, left = real_ - at;
      const int bytes = left >= 8 ? 16 : left > 0 ? 2 * left : 0;
      if (at < length_)
        fetch_chunk(chunk,
                    [bytes](std::uint32_t to, const char* from, std::uint64_t) { copy16(to, from, bytes); });
    }
  }

  // Two groups of 16 a turn: four pieces of every line. Tokens that are not there are the last one again.
  template <bool Whole>
  __device__ __forceinline__ void multiply_groups(Sums& acc, int groups) const {
    const int lane = this->lane(), last = p.m - 1;
    const std::uint32_t weights = at_weights_ + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    std::uint32_t x[P::kTokenTiles];
#pragma unroll
    for (int t = 0; t < P::kTokenTiles; ++t) {
      const int token = t * 16 + lane % 16 < last ? t * 16 + lane % 16 : last;
      x[t] = at_x_ + token * 128 + (lane / 16 ^ token % 8) * 16;
    }
#pragma unroll
    for (int two = 0; two < 2 * P::kDepth; ++two) {
      if (!Whole && 2 * two >= groups) return;
      const int piece = two % 2 * 64;  // in bytes of a line
      const std::uint32_t x_chunk = two / 2 * p.m * 128, chunk = two / 2 * P::kChunkBytes;
      std::uint32_t a[2][P::kTokenTiles][4], b[P::kRows / 8][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int t = 0; t < P::kTokenTiles; ++t) ldmatrix(a[i][t], (x[t] ^ (piece + i * 32)) + x_chunk);
#pragma unroll
      for (int n = 0; n < P::kRows / 8; ++n) ldmatrix(b[n], (weights ^ piece) + chunk + n * 1024);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (Whole || two * 2 + i < groups)
#pragma unroll
          for (int t = 0; t < P::kTokenTiles; ++t)
#pragma unroll
            for (int n = 0; n < P::kRows / 8; ++n) {
              if constexpr (std::is_same_v<T, __half>)
                mma_f16(acc[t][n], a[i][t], b[n][i * 2], b[n][i * 2 + 1]);
              else
                mma_bf16(acc[t][n], a[i][t], b[n][i * 2], b[n][i * 2 + 1]);
            }
    }
  }
};

// ---- where leaves meet

// The same four sums of `Leaves` leaves, `pitch` apart, joined as a tree.
template <int Leaves>
__device__ __forceinline__ float4 join_leaves(const float* at, int pitch) {
  float4 x[Leaves];
#pragma unroll
  for (int i = 0; i < Leaves; ++i) x[i] = *reinterpret_cast<const float4*>(at + i * pitch);
#pragma unroll
  for (int half = 1; half < Leaves; half *= 2)
#pragma unroll
    for (int i = 0; i < Leaves; i += 2 * half)
      x[i] = make_float4(__fadd_rn(x[i].x, x[i + half].x), __fadd_rn(x[i].y, x[i + half].y),
                         __fadd_rn(x[i].z, x[i + half].z), __fadd_rn(x[i].w, x[i + half].w));
  return x[0];
}
__device__ __forceinline__ float4 join_leaves(const float* at, int pitch, int leaves) {
  return leaves == 8   ? join_leaves<8>(at, pitch)
         : leaves == 4 ? join_leaves<4>(at, pitch)
         : leaves == 2 ? join_leaves<2>(at, pitch)
                       : join_leaves<1>(at, pitch);
}

// Four columns of a token's row of c, and what is added to them, which is loaded while the sums are made.
template <class T>
struct FewFour {
  int group, token, four;
  float bias[4] = {}, residual[4] = {};

  __device__ __forceinline__ FewFour(const FewParams& p, int number) {
    const int fours = p.columns / 4;
    four = number % fours, token = number / fours % p.m, group = number / (fours * p.m);
  }
  __device__ __forceinline__ int column(const FewParams& p, int tile) const {
    return few_column(p, tile, group) + four * 4;
  }
  __device__ __forceinline__ void load(const FewParams& p, int tile) {
    const Product& g = p.product;
    const int at = column(p, tile), count = p.n - at < 4 ? p.n - at : 4;
    if (count <= 0 || p.up > 0) return;
    if (g.bias) load_four(bias, g.bias, g.bias_type, at, count, p.aligned);
    if (g.residual)
      load_four(residual, g.residual, g.residual_type, token * g.residual_ld + at, count, p.aligned);
  }
  template <class Out>
  __device__ __forceinline__ void store_as(const FewParams& p, int at, float4 sum) const {
    const Product& g = p.product;
    Four<Out> out;
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    const auto add = [](Out y, float more) {
      return lm_head::round_to<Out>(__fadd_rn(lm_head::to_float(y), more));
    };
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      out.y[e] = lm_head::round_to<Out>(sums[e]);
      if (g.bias) out.y[e] = add(out.y[e], bias[e]);
      if (g.residual) out.y[e] = add(out.y[e], residual[e]);
    }
    store(out, g, p.aligned, token, at, p.n - at < 4 ? p.n - at : 4);
  }
  // `sums`: of a token's columns, leaf after leaf, `pitch` apart.
  __device__ __forceinline__ void finish(const FewParams& p, int tile, const float* sums, int pitch) const {
    const int at = column(p, tile), leaves = p.product.leaves;
    if (at >= p.n) return;
    const float4 sum = join_leaves(sums + four * 4, pitch, leaves);
    if (p.up > 0)
      store_gated<T>(p.product, p.aligned, token, at, sum,
                     join_leaves(sums + p.columns + four * 4, pitch, leaves));
    else if (p.product.out == Float::f32)
      store_as<float>(p, at, sum);
    else
      store_as<T>(p, at, sum);
  }
};

// A warp's sums as rows of tokens.
template <class P>
__device__ __forceinline__ void keep(float* sums, int m, const typename FewWarp<P>::Sums& acc) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int t = 0; t < P::kTokenTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int token = t * 16 + lane / 4 + i * 4;
      if (token >= m) continue;
#pragma unroll
      for (int n = 0; n < P::kRows / 8; ++n)
        *reinterpret_cast<float2*>(sums + token * P::kRows + n * 8 + lane % 4 * 2) =
            make_float2(acc[t][n][i], acc[t][n][i + 1]);
    }
}

template <class P>
__device__ __forceinline__ void finish_tile(const FewParams& p, int tile, const float* sums,
                                            const FewFour<typename P::Element>& mine) {
  const int pitch = p.m * P::kRows, all = p.groups * p.m * p.columns / 4;
  FewFour<typename P::Element> four = mine;
  for (int i = static_cast<int>(threadIdx.x); i < all;) {
    four.finish(p, tile, sums + (four.group * p.product.leaves * p.m + four.token) * P::kRows, pitch);
    if ((i += kFewThreads) < all) four = FewFour<typename P::Element>(p, i), four.load(p, tile);
  }
}

template <class P>
__global__ void __launch_bounds__(kFewThreads, 2) few_rows(const __grid_constant__ FewParams p) {
  extern __shared__ __align__(128) unsigned char shared[];
  // The next kernel in the stream may begin where this one leaves room, and this one waits for the one before it.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  FewWarp<P> warp(p, shared_address(shared));
  FewFour<typename P::Element> mine(p, static_cast<int>(threadIdx.x));
  const int all_sums = kFewWarps * p.m * P::kRows;
  float* sums = reinterpret_cast<float*>(shared + kFewWarps * (P::kRingBytes + p.x_lines * p.m * 128));
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < P::kStages - 1; ++i) warp.fetch();
  bool odd = false;  // two tiles' sums in turn, so that warps meet once a tile
  for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles;
       tile += static_cast<int>(gridDim.x), odd = !odd) {
    if (mine.group < p.groups) mine.load(p, tile);
    typename FewWarp<P>::Sums acc = {};
    for (int k = 0; k < warp.length(); k += P::kK) {
      copy_wait<P::kStages - 2>();
      __syncwarp();
      warp.fetch();
      warp.multiply(acc, k);
    }
    float* const here = sums + (odd ? all_sums : 0);
    keep<P>(here + static_cast<int>(threadIdx.x) / 32 * p.m * P::kRows, p.m, acc);
    __syncthreads();
    finish_tile<P>(p, tile, here, mine);
  }
}

// ---- the launch

template <class P>
FewParams few_params(const Product& g, std::int64_t blocks) {
  FewParams p{};
  p.product = g;
  p.m = static_cast<int>(g.m), p.n = static_cast<int>(g.n), p.groups = kFewWarps / g.leaves;
  p.columns = g.up > 0 ? P::kRows / 2 : P::kRows;
  p.run = static_cast<int>(g.run), p.step = static_cast<int>(g.step), p.up = static_cast<int>(g.up);
  p.weight_fours = 8 * g.b.ld, p.up_bytes = 2 * g.up * g.b.ld, p.x_fours = 8 * g.a.ld;
  const int of_tile = p.columns * p.groups;
  p.tiles = (p.n + of_tile - 1) / of_tile;
  p.aligned = fours_aligned(g), p.hint = kReadOnce;
  const std::int64_t chunks = (std::min(g.width, g.k) + P::kK - 1) / P::kK * P::kDepth,
                     line = kFewWarps * g.m * 128,
                     fixed = kFewWarps * (P::kRingBytes + 2 * g.m * P::kRows * 4);
  p.resident = chunks <= P::kStages * P::kDepth || (p.tiles > blocks && fixed + chunks * line <= kFewHalf);
  p.x_lines = p.resident ? static_cast<int>(chunks) : P::kStages * P::kDepth;
  return p;
}

template <class P>
cudaError_t start_few_rows(const Product& g, int multiprocessors, cudaStream_t stream) {
  const FewParams p = few_params<P>(g, multiprocessors);
  const std::int64_t bytes = kFewWarps * (P::kRingBytes + g.m * (p.x_lines * 128 + 2 * P::kRows * 4));
  if (bytes > kFewMost || g.m > P::kTokens) return cudaErrorInvalidValue;
  const auto kernel = few_rows<P>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFewMost);
      e != cudaSuccess)
    return e;
  // All that an SM has: the next kernel's blocks find room beside this one's.
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
      e != cudaSuccess)
    return e;
  return launch_early(kernel, std::min(p.tiles, multiprocessors), kFewThreads, static_cast<int>(bytes),
                      stream, p);
}

}  // namespace rlk::cuda::linear
