// lm_head products in arithmetic fma64 on Hopper's FP64 tensor cores, for more rows than fma64_rows32_sm90.cu
// takes and every layout of the operands.
//
// One warpgroup brings operands from global memory in their own dtype, upcasts each number once per tile and
// leaves it in shared memory in the order in which fragments are read; two others do nothing but read
// fragments, 16 bytes a thread and without bank conflicts, and multiply. So the FP64 tensor cores, which are
// the bound, never wait for an address or a conversion. Rejected: every warp upcasting on its way into the
// fragments, where between two barriers the tensor cores idled for a fifth of the time; two warpgroups that
// bring, which leaves each too few registers.
//
// Tiles, k in steps of 16, the next fragments arriving while the last multiply, four of k at a time:
//   128x128 by warps of 64x32, 128 registers of sums a thread
//   64x192  by warps of 32x48, for up to 64 rows: as many numbers to bring for three quarters of the products
//   64x32   by warps of 16x16, where larger ones leave SMs idle: d_hidden of few rows
#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/mma.cuh"
#include "cuda/lm_head/device.cuh"

namespace rlk::cuda::lm_head {
namespace {

constexpr int kDepth = 16, kMultipliers = 256, kFeeders = 128, kThreads = kMultipliers + kFeeders;

template <int kTileRows, int kTileColumns, int kRowsOfWarp, int kColumnsOfWarp>
struct Shape {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kWarpRows = kRowsOfWarp,
                       kWarpColumns = kColumnsOfWarp;
  static_assert(kRows / kWarpRows * (kColumns / kWarpColumns) == kMultipliers / 32);
  static constexpr int kBlocksA = kRows / 16, kBlocks = (kRows + kColumns) / 16;
  // The largest needs registers that its feeders give up.
  static constexpr bool kRedistribute = kWarpRows * kWarpColumns > 1536;
};
using Square = Shape<128, 128, 64, 32>;
using Few = Shape<64, 192, 32, 48>;
using Narrow = Shape<64, 32, 16, 16>;

// A block of 16 rows x 16 k in fp64: pairs of rows (g, g + 8), four quads of k. Within a quad the place of a
// pair makes both sides conflict-free: eight neighbouring threads read two g of all four k, and write eight g
// of one k or one g of eight k.
constexpr int kBlockPairs = 128;
__device__ constexpr int place_of(int quad, int k, int g) {
  return quad * 32 + k * 8 + (g ^ k * 2 ^ quad % 2);
}

// What one thread brings of one block in one step, sixteen threads a block: eight numbers of each of two
// lines, half of rows g and g + 8 of a k-contiguous operand, all rows of one k otherwise.
template <class T>
struct alignas(16) Line {
  T x[8];
};

template <class T, bool KContiguous>
class Feeder {
 public:
  using Piece = Line<T>[2];

  // Of the operand's block at `row0`, which is block `place` of a stage.
  __device__ Feeder(const Operand& o, int thread, int place, std::int64_t row0, std::int64_t rows,
                    std::int64_t depth, bool vector)
      : row_(KContiguous ? thread % 8 : 0),
        k_(KContiguous ? thread / 8 % 2 * 8 : thread % 16),
        place_(place),
        rows_(static_cast<int>(rows - row0 < 2048 ? rows - row0 : 2048) - row_),
        second_(KContiguous ? 8 * o.ld : 8),
        step_(KContiguous ? kDepth : kDepth * o.ld),
        depth_(depth - k_),
        from_(static_cast<const T*>(o.data) +
              (KContiguous ? (row0 + row_) * o.ld + k_ : k_ * o.ld + row0 + row_)),
        vector_(vector) {}

  // To be called for the steps in order.
  __device__ void load(Piece& to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* const line = from_ + half * second_;
      const int rows = rows_ - half * 8;
      const bool none = (KContiguous ? rows : depth_) <= 0;
      const int inside = none ? 0 : KContiguous ? depth() : rows;
      if (vector_ && inside >= 8) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Line<T>)) / 16; ++i)
          reinterpret_cast<int4*>(&to[half])[i] = __ldg(reinterpret_cast<const int4*>(line) + i);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[half].x[i] = i < inside ? line[i] : T(0.0f);
      }
    }
    from_ += step_;
    depth_ -= kDepth;
  }
  __device__ void put(const Piece& piece, double2* stage) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int k = KContiguous ? k_ + i : k_;
      stage[place_ * kBlockPairs + place_of(k / 4, k % 4, KContiguous ? row_ : i)] =
          make_double2(to_float(piece[0].x[i]), to_float(piece[1].x[i]));
    }
  }

 private:
  __device__ int depth() const { return static_cast<int>(depth_ < kDepth ? depth_ : kDepth); }

  int row_, k_, place_, rows_;  // in the block, in the step; in the stage; rows from this one on
  std::int64_t second_, step_, depth_;
  const T* from_;
  bool vector_;
};

template <class S>
struct Ring {
  static constexpr int kPairs = S::kBlocks * kBlockPairs;
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
  __device__ double2* b() const { return a() + S::kBlocksA * kBlockPairs; }
  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// What a thread without a second block brings.
struct Nothing {
  struct Piece {};
  __device__ void load(Piece&) {}
  __device__ void put(const Piece&, double2*) const {}
};

// One thread's steps. Numbers are asked for as many steps ahead as registers hold.
template <class S, class First, class Second>
__device__ void feed(Ring<S> ring, int steps, First first, Second second) {
  struct Pieces {
    typename First::Piece first;
    typename Second::Piece second;
  };
  constexpr int kAhead = (S::kRedistribute ? 128 : 256) / static_cast<int>(sizeof(Pieces));
  Pieces pieces[kAhead > 0 ? kAhead : 1];
#pragma unroll
  for (auto& piece : pieces) first.load(piece.first), second.load(piece.second);  // zeros past the last step
  for (int step = 0; step < steps;) {
#pragma unroll
    for (auto& piece : pieces) {
      if (step++ == steps) break;
      barrier_wait(ring.empty + ring.stage, ring.phase ^ 1);
      first.put(piece.first, ring.a()), second.put(piece.second, ring.a());
      first.load(piece.first), second.load(piece.second);
      barrier_arrive(ring.full + ring.stage);
      ring.advance();
    }
  }
}

// Sixteen threads a block of the stage: one block each, or two.
constexpr int kFeedingGroups = kFeeders / 16;
template <class S>
constexpr int kFeeding = (S::kBlocks < kFeedingGroups ? S::kBlocks : kFeedingGroups) * 16;

template <class S, class TA, class TB, bool KA, bool KB>
__device__ void feed_blocks(const Ring<S>& ring, const Gemm& p, std::int64_t row0, std::int64_t column0,
                            int steps, bool vector) {
  const int thread = (static_cast<int>(threadIdx.x) - kMultipliers) % 16,
            block = (static_cast<int>(threadIdx.x) - kMultipliers) / 16;
  auto a = [&](int at) { return Feeder<TA, KA>(p.a, thread, at, row0 + at * 16, p.m, p.k, vector); };
  auto b = [&](int at) {
    return Feeder<TB, KB>(p.b, thread, at, column0 + (at - S::kBlocksA) * 16, p.n, p.k, vector);
  };
  if constexpr (S::kBlocksA == kFeedingGroups) {
    feed(ring, steps, a(block), b(block + kFeedingGroups));
  } else if constexpr (S::kBlocks > kFeedingGroups) {
    if (block < S::kBlocksA)
      feed(ring, steps, a(block), b(block + kFeedingGroups));
    else
      feed(ring, steps, b(block), b(block + kFeedingGroups));
  } else if (block < S::kBlocksA) {
    feed(ring, steps, a(block), Nothing{});
  } else if (block < S::kBlocks) {
    feed(ring, steps, b(block), Nothing{});
  }
}

template <class S, class TA, class TB, bool KA, bool KB>
__global__ void __launch_bounds__(kThreads, 1) tiles(Gemm p, bool vector) {
  constexpr int kRows = S::kWarpRows / 16, kColumns = S::kWarpColumns / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  Ring<S> ring(shared);
  const TilePosition tile =
      place(blockIdx.x, (p.m + S::kRows - 1) / S::kRows, (p.n + S::kColumns - 1) / S::kColumns);
  const std::int64_t row0 = tile.m * S::kRows, column0 = tile.n * S::kColumns;
  const int steps = static_cast<int>((p.k + kDepth - 1) / kDepth);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0),
            lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < ring.kStages; ++s) {
      // Every thread arrives: a step lasts over a thousand cycles, and racecheck follows no warp's spokesman.
      barrier_init(ring.full + s, kFeeding<S>);
      barrier_init(ring.empty + s, kMultipliers);
    }
    fence_barrier_init();
  }
  __syncthreads();

  if (warp >= kMultipliers / 32) {
    if constexpr (S::kRedistribute) asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    feed_blocks<S, TA, TB, KA, KB>(ring, p, row0, column0, steps, vector);
  } else {
    if constexpr (S::kRedistribute) asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    constexpr int kAcross = S::kColumns / S::kWarpColumns;
    const int group = lane / 4, member = lane % 4, warp_row = warp / kAcross * S::kWarpRows,
              warp_column = warp % kAcross * S::kWarpColumns;
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
    if (std::is_same_v<TB, float> || p.out == Float::f32)
      store(float{});
    else
      store(TB{});
  }
}

template <class S, class TA, class TB, bool KA, bool KB>
cudaError_t start(const Gemm& p, cudaStream_t stream) {
  constexpr int kBytes = Ring<S>::kBytes;
  const std::int64_t blocks = ((p.m + S::kRows - 1) / S::kRows) * ((p.n + S::kColumns - 1) / S::kColumns);
  return launch(tiles<S, TA, TB, KA, KB>, static_cast<unsigned>(blocks), kThreads, kBytes, stream, p,
                aligned16(p.a) && aligned16(p.b));
}

template <class TA, class TB>
cudaError_t start_layout(const Gemm& p, Fma64Tile tile, cudaStream_t stream) {
  if (!p.a.k_contiguous) return start<Square, TA, TB, false, false>(p, stream);
  if constexpr (std::is_same_v<TA, TB>)  // the logits' operands have one dtype
    if (p.b.k_contiguous)
      return tile == Fma64Tile::few ? start<Few, TA, TB, true, true>(p, stream)
                                    : start<Square, TA, TB, true, true>(p, stream);
  return tile == Fma64Tile::narrow ? start<Narrow, TA, TB, true, false>(p, stream)
                                   : start<Square, TA, TB, true, false>(p, stream);
}

}  // namespace

cudaError_t launch_fma64_tiles(const Gemm& p, Fma64Tile tile, cudaStream_t stream) {
  return with_float_type(p.b.type, [&](auto type) {
    using T = decltype(type);
    return p.a.type == p.b.type ? start_layout<T, T>(p, tile, stream)
                                : start_layout<float, T>(p, tile, stream);
  });
}

}  // namespace rlk::cuda::lm_head
