// The chain product: the one engine behind every pinned matrix product of the native backend.
//
//   out[i, j] = round(chain over r = 0 .. depth-1 of a[i, r] * b[r, j])   (+ bias[j])   (+ residual[i, j])
//
// "Chain" is the whole point: for each output the additions happen in ascending r, each a fused multiply-add,
// so an output depends on its own row of a and its own column of b and on nothing else. Vector lanes run over
// j, never over r; tiles, threads and instruction sets only decide *when* an output is computed.
//
//   fma32/kb1024   fp32 chain inside each block of 1024 along r, every block starting from +0; the first
//                  block's sum is the total, later block sums are added to it in order, one fp32
//                  addition each
//   fma32/kb256    the same with blocks of 256: ChainProduct::block
//   fma32/tree8    blocks are leaves, of which there are 1, 2, 4 or 8, empty ones (+0) included; their sums are
//                  added as a pairwise tree: ChainProduct::leaves
//   fma64          one fp64 chain over the whole depth starting from +0, then one rounding to the output type
//
// Shared by all: operands are upcast exactly; the bias is upcast exactly, added to the rounded result and
// rounded once more to the output type, and then the residual likewise; a NaN is always written as the canonical
// one (0x7fffffff in fp32, 0x7fff in 16 bits), because x86, ARM and GPUs disagree on which operand's payload
// survives.
//
// Forward, d_hidden and d_weight are three readings of the same engine: only the strides differ.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "registry/linear/geometry.hpp"
#include "rlk/float.hpp"

namespace rlk::native {

// A matrix somebody else owns. Strides count elements and may be anything, zero and negative included.
struct MatrixView {
  const void* data = nullptr;
  Float type = Float::f32;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 0;
};

struct ChainProduct {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t depth = 0;
  std::int64_t block = 1024;  // of fp32 chains along depth
  int leaves = 0;             // 0: block sums are added in order; else that many blocks, joined as a tree
  rlk::leaves::Segments segments;  // of leaves
  MatrixView a;                    // [rows, depth]
  MatrixView b;                    // [depth, cols]

  void* out = nullptr;  // [rows, cols]
  Float out_type = Float::f32;
  std::int64_t out_row_stride = 0;
  std::int64_t out_col_stride = 1;

  const void* bias = nullptr;  // [cols], or null
  Float bias_type = Float::f32;
  std::int64_t bias_stride = 1;

  const void* residual = nullptr;  // [rows, cols] with dense rows, or null
  Float residual_type = Float::f32;
  std::int64_t residual_row_stride = 0;

  // Blocks in order and no longer than this need the least scratch.
  static constexpr std::int64_t kPlainBlock = 1024;
  bool joins() const { return leaves > 0 || block > kPlainBlock; }

  // Few rows, or few steps in one block, by lines of fp32 that are read as they lie: little is done with each number.
  static constexpr std::int64_t kFewRows = 8, kFewSteps = 64, kThinColumns = 4096;  // of a tile at most
  bool few_rows() const { return rows <= kFewRows; }
  bool thin() const {
    const bool few_steps = depth > 0 && depth <= std::min(kFewSteps, block) && leaves == 0;
    return b.type == Float::f32 && b.col_stride == 1 && (few_rows() || few_steps);
  }
};

// A stretch of the depth done in one go, and where the sum that it ends goes. Buffers 0 to 2 are levels of the
// tree, kChain holds a chain between the pieces of a block: a block of which nothing but +0 is known stands where
// the counter of blocks in binary has its lowest zero, so its sum meets those of all levels below.
inline constexpr int kChain = 3;
struct Piece {
  std::int64_t first = 0, depth = 0;
  bool resumes = false;  // continues the chain of the piece before
  int meets = 0;         // so many levels are added to the sum, from the lowest up
  int to = 0;
  // Where the chain may lie: at its place at once where it meets nothing.
  int chain = kChain;
  bool ends = false;
};

// The depth of block n: one stretch, which may be empty, or those of its segments that are not.
struct Stretch {
  std::int64_t begin = 0, end = 0;
};
inline int stretches(const ChainProduct& p, std::int64_t n, Stretch (&all)[leaves::Segments::kMost]) {
  const leaves::Segments& s = p.segments;
  if (s.count == 0) {
    const std::int64_t begin = std::min(p.depth, n * p.block);
    all[0] = {begin, std::min(p.depth, begin + p.block)};
    return 1;
  }
  int count = 0;
  for (int i = 0; i < s.count; ++i) {
    const std::int64_t begin = std::min(s.length[i], n * s.width[i]),
                       end = std::min(s.length[i], begin + s.width[i]);
    if (begin < end) all[count++] = {s.start[i] + begin, s.start[i] + end};
  }
  if (count == 0) all[count++] = {};
  return count;
}

template <class Body>
void for_pieces(const ChainProduct& p, std::int64_t longest, Body body) {
  const std::int64_t blocks = p.leaves > 0 ? p.leaves : (p.depth + p.block - 1) / p.block;
  for (std::int64_t n = 0; n < blocks; ++n) {
    const int ones = std::countr_one(static_cast<std::uint64_t>(n));
    const int meets = p.leaves > 0 ? ones : n > 0 ? 1 : 0;
    const int to = p.leaves == 0 || n + 1 == blocks ? 0 : ones;
    const int chain = meets == 0 ? to : kChain;
    Stretch all[leaves::Segments::kMost];
    const int count = stretches(p, n, all);
    bool resumes = false;
    for (int s = 0; s < count; ++s) {
      const auto [begin, end] = all[s];
      std::int64_t first = begin;
      do {
        const std::int64_t depth = std::min(longest, end - first);
        const bool last = s + 1 == count && first + depth == end;
        body(Piece{first, depth, resumes, last ? meets : 0, last ? to : kChain, chain, last});
        first += depth, resumes = true;
      } while (first < end);
    }
  }
}

// A rectangle of the output. Any partition of the output into tiles gives the same bits.
struct ChainTile {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t col_begin = 0;
  std::int64_t col_end = 0;
};

// One instruction set's kernels. `scratch` is per worker, aligned to 64 bytes, at least scratch_bytes long, or
// joined_scratch_bytes where the product joins().
struct ChainKernels {
  const char* isa = "";
  std::size_t scratch_bytes = 0;
  std::size_t joined_scratch_bytes = 0;
  std::int64_t col_step = 0;  // widths that are multiples of this waste no lanes
  void (*fma32)(const ChainProduct&, const ChainTile&, void* scratch) = nullptr;
  void (*fma64)(const ChainProduct&, const ChainTile&, void* scratch) = nullptr;
};

const ChainKernels& chain_kernels_scalar();
const ChainKernels* chain_kernels_avx2();    // null where the build lacks it
const ChainKernels* chain_kernels_avx512();  // likewise

// How a product is cut into tiles for `workers` workers: enough tiles to keep them busy, each wide enough to
// reuse what it packs. Tile `index` of `tile_count`.
struct ChainPlan {
  std::int64_t tile_rows = 0;
  std::int64_t tile_cols = 0;
  std::int64_t row_tiles = 0;
  std::int64_t col_tiles = 0;

  std::int64_t tile_count() const { return row_tiles * col_tiles; }
  ChainTile tile(const ChainProduct& product, std::int64_t index) const;
};
ChainPlan plan_chain(const ChainProduct& product, const ChainKernels& kernels, std::int64_t workers);
// No plan of a product of this size, or of fewer rows, has more tiles: workers beyond them need no scratch.
std::int64_t most_tiles(std::int64_t rows, std::int64_t cols, const ChainKernels& kernels);

}  // namespace rlk::native
