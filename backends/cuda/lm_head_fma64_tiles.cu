// lm_head products in arithmetic fma64 on Hopper's FP64 tensor cores, for more rows than lm_head_fma64_few.cu
// takes and every layout of the operands.
//
// One warpgroup brings operands from global memory in their own dtype, upcasts each number once per tile and
// leaves it in shared memory in the order in which fragments are read; two others do nothing but read
// fragments, 16 bytes a thread and without bank conflicts, and multiply. So the FP64 tensor cores, which are
// the bound, never wait for an address or a conversion. Rejected: every warp upcasting on its way into the
// fragments, where between two barriers the tensor cores idled for a fifth of the time; two warpgroups that
// bring, which leaves each too few registers; tiles of 64 rows, for which bringing takes longer than
// multiplying.
//
// Tiles: 128x128 by 8 warps of 64x32 (128 registers of sums a thread; the next fragments arrive while the
// last multiply, four of k at a time, which is what the registers leave room for), k in steps of 16, 7 stages
// of 32 KB.
#include "lm_head_fma64.cuh"
#include "lm_head_hopper.cuh"

namespace rlk::cuda {
namespace {

using hopper::barrier_arrive;
using hopper::barrier_init;
using hopper::barrier_wait;

constexpr int kSide = 128, kDepth = 16, kMultipliers = 256, kFeeders = kSide,
              kThreads = kMultipliers + kFeeders;

// A block of 16 rows x 16 k in fp64: pairs of rows (g, g + 8), four quads of k. Within a quad the place of a
// pair makes both sides conflict-free: eight neighbouring threads read two g of all four k, and write eight g
// of one k or one g of eight k.
constexpr int kBlockPairs = 128;
__device__ constexpr int place_of(int quad, int k, int g) {
  return quad * 32 + k * 8 + (g ^ k * 2 ^ quad % 2);
}

// What one thread brings in one step: eight numbers of each of two lines, in a block of 16 rows x 16 k: half
// of rows g and g + 8 of a k-contiguous operand, all rows of one k otherwise.
template <class T>
struct alignas(16) Line {
  T x[8];
};

template <class T, bool KContiguous>
class Feeder {
 public:
  using Piece = Line<T>[2];

  __device__ Feeder(const Operand& o, int thread, std::int64_t row0, std::int64_t rows, std::int64_t depth,
                    bool vector)
      : row_(thread / 16 * 16 + (KContiguous ? thread % 8 : 0)),
        k_(KContiguous ? thread / 8 % 2 * 8 : thread % 16),
        rows_(static_cast<int>(rows - row0 < 2048 ? rows - row0 : 2048) - row_),
        second_(KContiguous ? 8 * o.ld : 8),
        step_(KContiguous ? kDepth : kDepth * o.ld),
        depth_(depth - k_),
        from_(static_cast<const T*>(o.data) +
              (KContiguous ? (row0 + row_) * o.ld + k_ : k_ * o.ld + row0 + row_)),
        fast_(vector && rows_ >= (KContiguous ? 9 : 16)) {}

  // To be called for the steps in order.
  __device__ void load(Piece& to) {
    if (fast_ && depth_ >= (KContiguous ? 8 : 1)) {
      load_line(to[0], from_), load_line(to[1], from_ + second_);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const bool inside = KContiguous ? i / 8 * 8 < rows_ && i % 8 < depth_ : i < rows_ && depth_ > 0;
        to[i / 8].x[i % 8] = inside ? from_[i / 8 * second_ + i % 8] : T(0.0f);
      }
    }
    from_ += step_;
    depth_ -= kDepth;
  }
  __device__ void put(const Piece& piece, double2* block) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int k = KContiguous ? k_ + i : k_;
      block[row_ / 16 * kBlockPairs + place_of(k / 4, k % 4, KContiguous ? row_ % 8 : i)] =
          make_double2(to_float(piece[0].x[i]), to_float(piece[1].x[i]));
    }
  }

 private:
  __device__ static void load_line(Line<T>& to, const T* from) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(to)) / 16; ++i)
      reinterpret_cast<int4*>(&to)[i] = __ldg(reinterpret_cast<const int4*>(from) + i);
  }

  int row_, k_, rows_;  // in the tile, in the step; rows from this one on
  std::int64_t second_, step_, depth_;
  const T* from_;
  bool fast_;
};

struct Ring {
  static constexpr int kOperandPairs = kSide / 16 * kBlockPairs, kPairs = 2 * kOperandPairs;
  static constexpr int kStageBytes = kPairs * static_cast<int>(sizeof(double2)),
                       kStages = 227 * 1024 / (kStageBytes + 16), kBytes = kStages * (kStageBytes + 16);
  double2* pairs;
  std::uint64_t *full, *empty;
  int stage = 0, phase = 0;

  __device__ explicit Ring(unsigned char* shared)
      : pairs(reinterpret_cast<double2*>(shared)),
        full(reinterpret_cast<std::uint64_t*>(pairs + kStages * kPairs)),
        empty(full + kStages) {}
  __device__ double2* a() const { return pairs + stage * kPairs; }
  __device__ double2* b() const { return a() + kOperandPairs; }
  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// A step's numbers are asked for this many steps ahead: what registers hold of the 16-bit types.
template <class T>
inline constexpr int kAhead = sizeof(T) == 2 ? 2 : 1;

template <class TA, class TB, bool KA, bool KB>
__device__ void feed(Ring ring, const Gemm& p, std::int64_t row0, std::int64_t column0, int steps,
                     bool vector) {
  const int thread = static_cast<int>(threadIdx.x) - kMultipliers;
  Feeder<TA, KA> from_a(p.a, thread, row0, p.m, p.k, vector);
  Feeder<TB, KB> from_b(p.b, thread, column0, p.n, p.k, vector);
  struct {
    typename Feeder<TA, KA>::Piece a;
    typename Feeder<TB, KB>::Piece b;
  } pieces[kAhead<TA>];
#pragma unroll
  for (auto& piece : pieces) from_a.load(piece.a), from_b.load(piece.b);  // past the last step they are zeros
  for (int step = 0; step < steps;) {
#pragma unroll
    for (auto& piece : pieces) {
      if (step++ == steps) break;
      barrier_wait(ring.empty + ring.stage, ring.phase ^ 1);
      from_a.put(piece.a, ring.a()), from_b.put(piece.b, ring.b());
      from_a.load(piece.a), from_b.load(piece.b);
      barrier_arrive(ring.full + ring.stage);
      ring.advance();
    }
  }
}

template <class TA, class TB, bool KA, bool KB>
__global__ void __launch_bounds__(kThreads, 1) tiles(Gemm p, bool vector) {
  constexpr int kWarpRows = 64, kWarpColumns = 32, kRows = kWarpRows / 16, kColumns = kWarpColumns / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  Ring ring(shared);
  const TilePosition tile = place(blockIdx.x, (p.m + kSide - 1) / kSide, (p.n + kSide - 1) / kSide);
  const std::int64_t row0 = tile.m * kSide, column0 = tile.n * kSide;
  const int steps = static_cast<int>((p.k + kDepth - 1) / kDepth);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0),
            lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Ring::kStages; ++s) {
      // Every thread arrives: a step lasts over a thousand cycles, and racecheck follows no warp's spokesman.
      barrier_init(ring.full + s, kFeeders);
      barrier_init(ring.empty + s, kMultipliers);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();

  if (warp >= kMultipliers / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    feed<TA, TB, KA, KB>(ring, p, row0, column0, steps, vector);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    constexpr int kAcross = kSide / kWarpColumns;
    const int group = lane / 4, member = lane % 4, warp_row = warp / kAcross * kWarpRows,
              warp_column = warp % kAcross * kWarpColumns;
    struct Fragments {
      double2 a[kRows], b[kColumns / 2];  // b: columns g and g + 8 of 16
    };
    auto fetch = [&](Fragments& to, int quad) {
      const int at = place_of(quad, member, group);
#pragma unroll
      for (int i = 0; i < kRows; ++i) to.a[i] = ring.a()[(warp_row / 16 + i) * kBlockPairs + at];
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) to.b[j] = ring.b()[(warp_column / 16 + j) * kBlockPairs + at];
    };
    double acc[kRows][kColumns][4] = {};
    Fragments fragments[2];
    if (steps > 0) {
      barrier_wait(ring.full, 0);
      fetch(fragments[0], 0);
    }
    for (int step = 0; step < steps; ++step) {
      std::uint64_t* const done = ring.empty + ring.stage;
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {
        if (quad < 3) {
          fetch(fragments[(quad + 1) % 2], quad + 1);
        } else {
          ring.advance();
          if (step + 1 < steps) {
            barrier_wait(ring.full + ring.stage, ring.phase);
            fetch(fragments[0], 0);
          }
        }
        const Fragments& now = fragments[quad % 2];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < kColumns; ++j)
            mma_f64(acc[i][j], now.a[i].x, now.a[i].y, j % 2 ? now.b[j / 2].y : now.b[j / 2].x);
      }
      barrier_arrive(done);
    }
    auto store = [&](auto type) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const std::int64_t row = row0 + warp_row + i * 16 + group + e / 2 * 8,
                               column = column0 + warp_column + j * 8 + member * 2 + e % 2;
            if (row < p.m && column < p.n) store_rounded<decltype(type)>(p, row, column, acc[i][j][e]);
          }
    };
    if (std::is_same_v<TB, float> || p.out == Dtype::f32)
      store(float{});
    else
      store(TB{});
  }
}

template <class TA, class TB, bool KA, bool KB>
cudaError_t start(const Gemm& p, cudaStream_t stream) {
  auto kernel = tiles<TA, TB, KA, KB>;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Ring::kBytes);
      e != cudaSuccess)
    return e;
  const std::int64_t blocks = ((p.m + kSide - 1) / kSide) * ((p.n + kSide - 1) / kSide);
  kernel<<<static_cast<unsigned>(blocks), kThreads, Ring::kBytes, stream>>>(p,
                                                                            aligned16(p.a) && aligned16(p.b));
  return cudaGetLastError();
}

template <class TA, class TB>
cudaError_t start_layout(const Gemm& p, cudaStream_t stream) {
  if (!p.a.k_contiguous) return start<TA, TB, false, false>(p, stream);
  if constexpr (std::is_same_v<TA, TB>)  // the logits' operands have one dtype
    if (p.b.k_contiguous) return start<TA, TB, true, true>(p, stream);
  return start<TA, TB, true, false>(p, stream);
}

}  // namespace

cudaError_t launch_fma64_tiles(const Gemm& p, cudaStream_t stream) {
  return with_float_type(p.b.type, [&](auto type) {
    using T = decltype(type);
    return p.a.type == p.b.type ? start_layout<T, T>(p, stream) : start_layout<float, T>(p, stream);
  });
}

}  // namespace rlk::cuda
