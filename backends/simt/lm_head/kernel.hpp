// The products of lm_head and linear by fused multiply-add chains: arithmetic fma32/kb1024, fma32/tree8 and fma64.
// Portable: HIP, CUDA and host fibers.
//
//   fma32/kb1024   ascending fp32 chain inside each block of 1024 along the depth, every block from +0; the
//                  first block's sum is the total, later ones are added to it in order
//   fma32/tree8    blocks are leaves, whose sums are added as a pairwise tree; an empty leaf is +0
//   fma64          operands upcast exactly, one ascending fp64 chain, one rounding
//
// Tiles: 64 columns by 64 rows (16 where there are no more rows than that) for 256 threads of 4 x 4 (1 x 4)
// outputs, the depth in steps of 16 through shared memory, upcast on the way in. An operand is read from
// memory once per tile row or column. Neighbouring threads load along whichever index is contiguous. Element
// types and strides are values, not template arguments: every thread of a block takes the same branch, and
// six kernels serve everything. Lines past the end are computed and dropped; the depth is never padded,
// since a zero added to a chain that has underflowed to -0 would turn it into +0.
#pragma once

#include "arithmetic/activation.hpp"
#include "simt/lm_head/product.hpp"
#include "simt/simt.hpp"

namespace rlk::simt::lm_head {

inline constexpr int kThreads = 256;
inline constexpr int kSide = 64, kDepth = 16;

__device__ __forceinline__ float load_element(const void* data, Float type, std::int64_t at) {
  if (data == nullptr) return 1;
  switch (type) {
    case Float::f32:
      return static_cast<const float*>(data)[at];
    case Float::bf16:
      return to_float(static_cast<const bf16*>(data)[at]);
    default:
      return to_float(static_cast<const fp16*>(data)[at]);
  }
}

// fp64 to fp32 with what is lost kept in the last place: rounding that to 16 bits is one rounding from fp64.
__device__ __forceinline__ float to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  if (back == x || x != x) return nearest;
  const bool away = (x > 0) == (back > x);
  return bits_float((float_bits(nearest) - (away ? 1u : 0u)) | 1u);
}

template <class Out>
__device__ __forceinline__ Out round_to(float sum) {
  return from_float<Out>(sum);
}
template <class Out>
__device__ __forceinline__ Out round_to(double sum) {
  return from_float<Out>(to_odd(sum));
}
template <>
__device__ __forceinline__ float round_to<float>(double sum) {
  return from_float<float>(static_cast<float>(sum));
}

// Where a row of results lies: found once for all of a thread's columns.
struct RowAt {
  std::int64_t out, residual;
  __device__ __forceinline__ RowAt(const Product& p, std::int64_t row)
      : out(p.out_row.at(row)), residual(p.residual == nullptr ? 0 : p.residual_row.at(row)) {}
};

template <class Out, class Acc>
__device__ __forceinline__ void store_as(const Product& p, const RowAt& row, std::int64_t col, Acc sum) {
  Out y = round_to<Out>(sum);
  if (p.bias != nullptr) y = from_float<Out>(add_rn(to_float(y), load_element(p.bias, p.bias_type, col)));
  if (p.residual != nullptr)
    y = from_float<Out>(add_rn(to_float(y), load_element(p.residual, p.residual_type, row.residual + col)));
  static_cast<Out*>(p.out)[row.out + col] = y;
}
template <class Acc>
__device__ __forceinline__ void store_sum(const Product& p, const RowAt& row, std::int64_t col, Acc sum) {
  if (col >= p.cols) return;
  switch (p.out_type) {
    case Float::f32:
      return store_as<float>(p, row, col, sum);
    case Float::bf16:
      return store_as<bf16>(p, row, col, sum);
    default:
      return store_as<fp16>(p, row, col, sum);
  }
}

// swiglu of two sums, of columns p.gate(col) and so much further.
template <class Out>
__device__ __forceinline__ void store_gated_as(const Product& p, const RowAt& row, std::int64_t col,
                                               float gate, float up) {
  const std::int64_t at = p.gate(col);
  const auto held = [&](float sum, std::int64_t i) {
    Out y = from_float<Out>(sum);
    if (p.bias != nullptr) y = from_float<Out>(add_rn(to_float(y), load_element(p.bias, p.bias_type, i)));
    return to_float(y);
  };
  const float g = held(gate, at), u = held(up, at + p.up);
  float value = activation::gated<float>(g, g);
  if (p.twice) value = to_float(from_float<Out>(value));
  static_cast<Out*>(p.out)[row.out + col] = from_float<Out>(value * u);
}
__device__ __forceinline__ void store_gated(const Product& p, const RowAt& row, std::int64_t col, float gate,
                                            float up) {
  if (col >= p.cols) return;
  switch (p.out_type) {
    case Float::f32:
      return store_gated_as<float>(p, row, col, gate, up);
    case Float::bf16:
      return store_gated_as<bf16>(p, row, col, gate, up);
    default:
      return store_gated_as<fp16>(p, row, col, gate, up);
  }
}

// A thread's part in bringing Lines lines of an operand by Depth steps into a tile: which elements it
// carries, and where their lines start, which is found once per tile.
template <int Lines, int Depth>
class Reader {
 public:
  static constexpr int kEach = Lines * Depth / kThreads;

  // The tile's lines from `line0` on, of which `left` exist, or `left` in every `period` of them.
  __device__ __forceinline__ Reader(const Operand& from, bool along_depth, std::int64_t line0,
                                    std::int64_t left, int period = Lines)
      : from_(from), along_depth_(along_depth), left_(left), within_(period - 1) {
    RLK_UNROLL(8)
    for (int e = 0; e < kEach; ++e) start_[e] = from.line.at(line0 + line(e));
  }

  // put(line, step, inside, at) for each of its elements; what lies outside the matrix must not be read.
  template <class Put>
  __device__ __forceinline__ void each(std::int64_t r0, std::int64_t depth, Put&& put) const {
    RLK_UNROLL(8)
    for (int e = 0; e < kEach; ++e) {
      const std::int64_t r = r0 + step(e);
      put(line(e), step(e), (line(e) & within_) < left_ && r < depth,
          start_[e] + (along_depth_ ? r : from_.depth.at(r)));
    }
  }

 private:
  __device__ __forceinline__ int line(int e) const {
    const int i = static_cast<int>(threadIdx.x) + e * kThreads;
    return along_depth_ ? i / Depth : i % Lines;
  }
  __device__ __forceinline__ int step(int e) const {
    const int i = static_cast<int>(threadIdx.x) + e * kThreads;
    return along_depth_ ? i % Depth : i / Lines;
  }

  const Operand& from_;
  const bool along_depth_;  // the depth is what is contiguous
  const std::int64_t left_;
  const int within_;
  std::int64_t start_[kEach];
};

// f for each output of a thread: row i * 16 and column j * 16 from its first.
template <int Tall, class F>
__device__ __forceinline__ void each_output(F&& f) {
  RLK_UNROLL(4)
  for (int i = 0; i < Tall; ++i) {
    RLK_UNROLL(4)
    for (int j = 0; j < kSide / 16; ++j) f(i, j);
  }
}

// What a thread sums.
template <class Acc, int Tall>
using Outputs = Acc[Tall][kSide / 16];

template <class Acc, int Tall>
__device__ __forceinline__ void copy(const Outputs<Acc, Tall>& from, Outputs<Acc, Tall>& to) {
  each_output<Tall>([&](int i, int j) { to[i][j] = from[i][j]; });
}

// Sums of leaves as they come: leaf n is added to the sums that wait on the levels of the trailing ones of n, as a
// binary counter carries, and the last one's result is the total.
template <class Acc, int Tall>
struct Tree {
  static constexpr bool kGates = true;
  Outputs<Acc, Tall> level[3];
  __device__ __forceinline__ void join(int n, const Outputs<Acc, Tall>& leaf, Outputs<Acc, Tall>& total) {
    copy<Acc, Tall>(leaf, total);
    RLK_UNROLL(3)
    for (int l = 0; l < 3; ++l) {
      if ((n >> l & 1) == 0) return copy<Acc, Tall>(total, level[l]);
      each_output<Tall>([&](int i, int j) { total[i][j] = add_rn(level[l][i][j], total[i][j]); });
    }
  }
};
// Sums of blocks in order: the first one's is the total as it is.
template <class Acc, int Tall>
struct Row {
  static constexpr bool kGates = false;
  __device__ __forceinline__ void join(int n, const Outputs<Acc, Tall>& block, Outputs<Acc, Tall>& total) {
    if (n == 0) return copy<Acc, Tall>(block, total);
    each_output<Tall>([&](int i, int j) { total[i][j] = add_rn(total[i][j], block[i][j]); });
  }
};

// Blocks along the depth: leaves, or at least one.
__device__ __forceinline__ int blocks_of(const Product& p) {
  if (p.leaves > 0) return p.leaves;
  return p.depth <= p.block ? 1 : static_cast<int>((p.depth + p.block - 1) / p.block);
}
// The part of block n that lies in segment s, where there are segments.
struct Stretch {
  std::int64_t begin, end;
};
__device__ __forceinline__ Stretch stretch(const Product& p, int n, int s) {
  const bool whole = s < 0 || p.segments.count == 0;
  const std::int64_t length = whole ? p.depth : p.segments.length[s],
                     width = whole ? p.block : p.segments.width[s], start = whole ? 0 : p.segments.start[s],
                     begin = n * width < length ? n * width : length;
  return {start + begin, start + (begin + width < length ? begin + width : length)};
}

// Acc is the type of the chain, Joint where blocks meet, Tall the rows of a thread. `tiles` of them are dealt to the
// blocks in turn.
template <class Acc, template <class, int> class Joint, int Tall>
__global__ void __launch_bounds__(kThreads)
    chain_product(const Product p, std::int64_t tiles, bool a_along_depth, bool b_along_depth) {
  constexpr bool kWide = sizeof(Acc) == 8;
  constexpr int kRows = 16 * Tall;
  Acc* a_tile = dynamic_shared<Acc>();
  Acc* b_tile = a_tile + kDepth * (kRows + 1);
  const int ty = static_cast<int>(threadIdx.x) / 16, tx = static_cast<int>(threadIdx.x) % 16;
  const std::int64_t tall = (p.rows + kRows - 1) / kRows;
  const int blocks = blocks_of(p);
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const bool gated = Joint<Acc, Tall>::kGates && p.up > 0;
    const std::int64_t row0 = tile % tall * kRows, line0 = tile / tall * kSide,
                       col0 = gated ? line0 / 2 : line0;
    Outputs<Acc, Tall> total, chain;
    Joint<Acc, Tall> joint;
    each_output<Tall>([&](int i, int j) { total[i][j] = chain[i][j] = 0; });
    const Reader<kRows, kDepth> a_reader(p.a, a_along_depth, row0, p.rows - row0);
    const Reader<kSide, kDepth> b_reader(p.b, b_along_depth, line0, p.cols - col0, gated ? kSide / 2 : kSide);
    const auto multiply_step = [&](std::int64_t r0, std::int64_t end) {
      a_reader.each(r0, end, [&](int line, int r, bool inside, std::int64_t at) {
        a_tile[r * (kRows + 1) + line] = inside ? load_element(p.a.data, p.a.type, at) : 0.0f;
      });
      b_reader.each(r0, end, [&](int line, int r, bool inside, std::int64_t at) {
        b_tile[r * (kSide + 1) + line] = inside ? load_element(p.b.data, p.b.type, at) : 0.0f;
      });
      __syncthreads();
      const auto multiply = [&](int r) {
        const Acc* a = a_tile + r * (kRows + 1) + ty;
        const Acc* b = b_tile + r * (kSide + 1) + tx;
        each_output<Tall>([&](int i, int j) { chain[i][j] = fused(a[i * 16], b[j * 16], chain[i][j]); });
      };
      if (r0 + kDepth <= end) {
        RLK_UNROLL(16)
        for (int r = 0; r < kDepth; ++r) multiply(r);
      } else {
        for (int r = 0; r < static_cast<int>(end - r0); ++r) multiply(r);
      }
      __syncthreads();
    };
    for (int n = 0; n < blocks; ++n) {
      const int stretches = Joint<Acc, Tall>::kGates && p.segments.count > 0 ? p.segments.count : 1;
      for (int s = 0; s < stretches; ++s) {
        const Stretch at = stretch(p, n, Joint<Acc, Tall>::kGates ? s : -1);
        for (std::int64_t r0 = at.begin; r0 < at.end; r0 += kDepth) multiply_step(r0, at.end);
      }
      if constexpr (!kWide) {
        joint.join(n, chain, total);
        each_output<Tall>([&](int i, int j) { chain[i][j] = 0; });
      }
    }
    RLK_UNROLL(4)
    for (int i = 0; i < Tall; ++i) {
      if (row0 + ty + i * 16 >= p.rows) break;
      const RowAt row(p, row0 + ty + i * 16);
      if constexpr (Joint<Acc, Tall>::kGates)
        if (gated) {
          RLK_UNROLL(2)
          for (int j = 0; j < kSide / 32; ++j)
            store_gated(p, row, col0 + tx + j * 16, total[i][j], total[i][j + kSide / 32]);
          continue;
        }
      RLK_UNROLL(4)
      for (int j = 0; j < kSide / 16; ++j)
        store_sum(p, row, col0 + tx + j * 16, kWide ? chain[i][j] : total[i][j]);
    }
  }
}

inline std::int64_t tiles_of(const Product& p, int rows) {
  static_assert(Product::kPaired == kSide / 2);
  const std::int64_t side = p.up > 0 ? kSide / 2 : kSide;
  return (p.rows + rows - 1) / rows * ((p.cols + side - 1) / side);
}
// A launch of more blocks would not fit every GPU's counters; what is left over is dealt to the same blocks.
inline unsigned blocks_for(std::int64_t tiles) {
  return static_cast<unsigned>(tiles < (1 << 22) ? tiles : 1 << 22);
}

template <class Acc, template <class, int> class Joint, int Tall>
hipError_t launch_chain(const Product& p, hipStream_t stream) {
  const std::int64_t tiles = tiles_of(p, 16 * Tall);
  constexpr std::size_t kShared = sizeof(Acc) * kDepth * (16 * Tall + 1 + kSide + 1);
  hipLaunchKernelGGL((chain_product<Acc, Joint, Tall>), dim3(blocks_for(tiles)), dim3(kThreads), kShared,
                     stream, p, tiles, p.a.depth.unit(), p.b.depth.unit());
  return hipGetLastError();
}

template <class Acc, template <class, int> class Joint>
hipError_t launch_joined(const Product& p, hipStream_t stream) {
  return p.rows <= 16 ? launch_chain<Acc, Joint, 1>(p, stream) : launch_chain<Acc, Joint, 4>(p, stream);
}

}  // namespace rlk::simt::lm_head
