// The chain product's loops, written once and compiled once per instruction set. The including file provides
// RLK_ISA (a target attribute, so that no compiler flag and no other file is affected) and two lane types:
//
//   struct Lanes {
//     using Scalar, Vec;
//     kLanes, kVecs, kRows   a register tile is kRows x (kVecs * kLanes)
//     kLaneRows              up to so many rows lie in the lanes, b's elements broadcast (rows_in_lanes)
//     kDirectRows            up to so many rows b is not packed (direct); both 0 where there is no such path
//     zero, load, store, broadcast, fma, add
//     kStep (optional)       elements of the depth that a step takes: 1, or pairs
//     upcast_run(src, type, count, dst)                                neighbours to Scalar; of pairs pair_run(even, odd, ...)
//     kTile, pack_tile(rows, type, k, count, dst, stride) -> steps     transposes kTile columns of b
//     ChainMode (optional)   lives while chains run, and not where their sums are joined
//     store_row(...) -> columns written                                the vector part of finish_element
//   };
//
// Where things live: a block of a (kRowBlock x kDepthBlock) is upcast once into L2; b is transposed on the
// fly in chunks of kChunk x kPanel that stay in L1 while every row of the block uses them; running sums stay
// in scratch until finished. b is therefore read from memory once per kRowBlock rows, a once per kColBlock
// columns. Only the blocks of the fp32 arithmetic and how their sums join show in the bits; chunks and pieces of
// long blocks only carry a chain on, and fp64 carries its chain through everything.
#pragma once

#include <algorithm>

#include "native/lm_head/chain.hpp"
#include "native/lm_head/float.hpp"

namespace rlk::native {
namespace {

// Elements of the depth in a step of the chains.
template <class Lanes>
inline constexpr std::int64_t kStep = 1;
template <class Lanes>
  requires(Lanes::kStep > 1)
inline constexpr std::int64_t kStep<Lanes> = Lanes::kStep;
template <class Lanes>
constexpr std::int64_t steps(std::int64_t depth) {
  return (depth + kStep<Lanes> - 1) / kStep<Lanes>;
}

// Depths are steps here.
template <class Lanes>
struct Blocking {
  using Scalar = typename Lanes::Scalar;
  static constexpr bool kWide = sizeof(Scalar) == 8;  // fp64: one chain through all depth blocks
  static constexpr int kPanel = Lanes::kLanes * Lanes::kVecs;
  static constexpr std::int64_t kDepthBlock = kWide ? 512 : 1024;
  static constexpr std::int64_t kChunk = 256;
  static constexpr std::int64_t kColBlock = kWide ? 256 : 512;
  static constexpr std::int64_t kRowBlock = 252;
  // a is packed per register tile, depth-major: one stream of kRows values per step. The transposing store
  // writes kTile values and the next step overwrites the excess, hence the slack.
  static constexpr std::int64_t kTileA = kDepthBlock * Lanes::kRows;
  static constexpr std::int64_t kPackedA = kRowBlock * kDepthBlock + 64;
  static constexpr std::int64_t kPackedB = kChunk * kPanel;
  static constexpr std::int64_t kSums = kRowBlock * kColBlock;
  static constexpr std::int64_t kPartial = kRowBlock * kPanel;
  static constexpr std::size_t kScratchBytes = sizeof(Scalar) * (kPackedA + kPackedB + kSums + kPartial);
  // With room for kChain + 1 buffers of sums, of which an order without joints needs the first alone.
  static constexpr std::size_t kJoinedBytes = kScratchBytes + (kWide ? 0 : sizeof(Scalar) * 3 * kSums);
  static_assert(kRowBlock % Lanes::kRows == 0 && kColBlock % kPanel == 0 && kDepthBlock % kChunk == 0);
};

inline const char* element_address(const MatrixView& view, std::int64_t row, std::int64_t col) {
  return static_cast<const char*>(view.data) +
         (row * view.row_stride + col * view.col_stride) * bytes_of(view.type);
}

// The numbers of one step that lie `stride` elements apart. Those of the depth are `deeper` apart, and of a pair the second may
// be past its end: a zero.
template <class Lanes>
RLK_ISA inline void pack_step(const char* first, Float type, std::int64_t stride, std::int64_t deeper,
                              std::int64_t depth_left, std::int64_t count, typename Lanes::Scalar* dst) {
  if constexpr (kStep<Lanes> == 2) {
    const char* second = depth_left > 1 ? first + deeper * bytes_of(type) : nullptr;
    if (stride == 1) return Lanes::pair_run(first, second, count, dst);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = i * stride * bytes_of(type);
      Lanes::pair_run(first + at, second ? second + at : nullptr, 1, dst + i);
    }
  } else {
    if (stride == 1) return Lanes::upcast_run(first, type, count, dst);
    for (std::int64_t i = 0; i < count; ++i) dst[i] = load_element(first, type, i * stride);
  }
}

// One register tile's rows of a, k0 <= k < k0+depth: dst[step][kRows].
template <class Lanes>
RLK_ISA void pack_a(const MatrixView& a, std::int64_t row, std::int64_t rows, std::int64_t k0,
                    std::int64_t depth, typename Lanes::Scalar* dst) {
  constexpr int kParts = (Lanes::kRows + Lanes::kTile - 1) / Lanes::kTile;
  if (a.col_stride != 1) {
    for (std::int64_t k = 0; k < depth; k += kStep<Lanes>, dst += Lanes::kRows)
      pack_step<Lanes>(element_address(a, row, k0 + k), a.type, a.row_stride, a.col_stride, depth - k, rows,
                       dst);
    return;
  }
  const char* lines[kParts * Lanes::kTile];
  for (int i = 0; i < kParts * Lanes::kTile; ++i)
    lines[i] = element_address(a, row + (i < rows ? i : rows - 1), k0);
  for (std::int64_t k = 0; k < depth;) {
    std::int64_t packed = 0;
    for (int part = 0; part < kParts; ++part)
      packed = Lanes::pack_tile(lines + part * Lanes::kTile, a.type, k, depth - k, dst + part * Lanes::kTile,
                                Lanes::kRows);
    k += packed * kStep<Lanes>, dst += packed * Lanes::kRows;
  }
}

// One panel of b: dst[step][0 .. kPanel) for k0 <= k < k0+depth. Columns past col_end repeat the last one: they
// are computed and dropped, and no memory outside the matrix is read.
template <class Lanes>
RLK_ISA void pack_b(const MatrixView& b, std::int64_t col, std::int64_t cols, std::int64_t k0,
                    std::int64_t depth, typename Lanes::Scalar* dst) {
  using B = Blocking<Lanes>;
  if (b.row_stride != 1) {
    for (std::int64_t k = 0; k < depth; k += kStep<Lanes>, dst += B::kPanel) {
      pack_step<Lanes>(element_address(b, k0 + k, col), b.type, b.col_stride, b.row_stride, depth - k, cols,
                       dst);
      for (std::int64_t j = cols; j < B::kPanel; ++j) dst[j] = 0;
    }
    return;
  }
  const char* columns[B::kPanel];
  for (int j = 0; j < B::kPanel; ++j) columns[j] = element_address(b, k0, col + (j < cols ? j : cols - 1));
  for (std::int64_t k = 0; k < depth;) {
    std::int64_t packed = 0;
    for (int part = 0; part < B::kPanel; part += Lanes::kTile)
      packed = Lanes::pack_tile(columns + part, b.type, k, depth - k, dst + part, B::kPanel);
    k += packed * kStep<Lanes>, dst += packed * B::kPanel;
  }
}

// The lines of the chunk of b that comes next, asked for one per step while this one is in use: a row of the
// weight gives one short run per chunk, too short for the hardware to get ahead of, and all at once they
// would stall.
struct Fetch {
  const char* row = nullptr;
  std::ptrdiff_t row_bytes = 0;
  std::int64_t run_bytes = 0;  // per row
  std::int64_t byte = 0;
  std::int64_t rows = 0;  // left; 0: nothing to ask for
};

// Where a finished sum of a block goes: `lowest` is its place in the lowest level, it meets so many and goes to one. Nowhere:
// its chain goes on.
template <class Lanes>
struct Join {
  typename Lanes::Scalar* lowest = nullptr;
  int meets = 0, to = 0;
};

// sums[Rows][kPanel] += over `depth` steps, each sum continuing its chain (or starting it from +0). Steps of b are b_pitch apart.
template <class Lanes, int Rows>
RLK_ISA void register_tile(std::int64_t depth, const typename Lanes::Scalar* a,
                           const typename Lanes::Scalar* b, std::int64_t b_pitch,
                           typename Lanes::Scalar* sums, std::int64_t pitch, bool start,
                           const Join<Lanes>& join, Fetch& next) {
  using Vec = typename Lanes::Vec;
  using B = Blocking<Lanes>;
  Vec sum[Rows][Lanes::kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < Lanes::kVecs; ++v)
      sum[i][v] = start ? Lanes::zero() : Lanes::load(sums + i * pitch + v * Lanes::kLanes);
  Fetch fetch = next;
  for (std::int64_t k = 0; k < depth; ++k) {
    if (fetch.rows > 0) {
      __builtin_prefetch(fetch.row + fetch.byte, 0, 2);
      fetch.byte += 64;
      if (fetch.byte >= fetch.run_bytes) {
        fetch.byte = 0;
        fetch.row += fetch.row_bytes;
        --fetch.rows;
      }
    }
    Vec column[Lanes::kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < Lanes::kVecs; ++v) column[v] = Lanes::load(b + v * Lanes::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const Vec value = Lanes::broadcast(a + i);
#pragma GCC unroll 4
      for (int v = 0; v < Lanes::kVecs; ++v) sum[i][v] = Lanes::fma(value, column[v], sum[i][v]);
    }
    a += Lanes::kRows;
    b += b_pitch;
  }
  next = fetch;
  if (join.lowest) {
    for (int level = 0; level < join.meets; ++level)
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < Lanes::kVecs; ++v)
          sum[i][v] = Lanes::add(
              Lanes::load(join.lowest + level * B::kSums + i * B::kColBlock + v * Lanes::kLanes), sum[i][v]);
    sums = join.lowest + join.to * B::kSums, pitch = B::kColBlock;
  }
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < Lanes::kVecs; ++v) Lanes::store(sums + i * pitch + v * Lanes::kLanes, sum[i][v]);
}

template <class Lanes, int Rows = Lanes::kRows>
RLK_ISA void register_tile_of(std::int64_t rows, std::int64_t depth, const typename Lanes::Scalar* a,
                              const typename Lanes::Scalar* b, std::int64_t b_pitch,
                              typename Lanes::Scalar* sums, std::int64_t pitch, bool start,
                              const Join<Lanes>& join, Fetch& next) {
  if (rows == Rows) return register_tile<Lanes, Rows>(depth, a, b, b_pitch, sums, pitch, start, join, next);
  if constexpr (Rows > 1)
    register_tile_of<Lanes, Rows - 1>(rows, depth, a, b, b_pitch, sums, pitch, start, join, next);
}

// Nothing, where the lanes want no mode of their own.
template <class Lanes>
concept Modal = requires { typename Lanes::ChainMode; };
template <class Lanes>
struct ChainMode {
  ChainMode() {}
};
template <Modal Lanes>
struct ChainMode<Lanes> : Lanes::ChainMode {};

// One panel over one depth block, chunk by chunk: transpose a chunk of b, use it for every row. The last chunk's sums join.
template <class Lanes>
RLK_ISA void run_panel(const MatrixView& b, std::int64_t rows, std::int64_t col, std::int64_t cols,
                       std::int64_t cols_after, std::int64_t k0, std::int64_t depth,
                       const typename Lanes::Scalar* packed_a, typename Lanes::Scalar* packed_b,
                       typename Lanes::Scalar* sums, std::int64_t pitch, bool start,
                       const Join<Lanes>& join) {
  using B = Blocking<Lanes>;
  const std::int64_t tiles = (rows + Lanes::kRows - 1) / Lanes::kRows;
  const ChainMode<Lanes> mode;
  constexpr std::int64_t kChunk = B::kChunk * kStep<Lanes>;
  for (std::int64_t k = 0; k < depth; k += kChunk) {
    const std::int64_t chunk = depth - k < kChunk ? depth - k : kChunk;
    pack_b<Lanes>(b, col, cols, k0 + k, chunk, packed_b);
    // What comes next is this panel's next chunk, or the next panel's first.
    Fetch next;
    const std::int64_t left = depth - k - chunk;
    const std::int64_t run = left > 0 ? left : depth;
    const std::int64_t rows_next = left > 0 ? cols : cols_after < B::kPanel ? cols_after : B::kPanel;
    if (b.row_stride == 1 && rows_next > 0)
      next = {left > 0 ? element_address(b, k0 + k + chunk, col) : element_address(b, k0, col + cols),
              b.col_stride * bytes_of(b.type), (run < kChunk ? run : kChunk) * bytes_of(b.type), 0,
              rows_next};
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t i = tile * Lanes::kRows;
      const std::int64_t height = rows - i < Lanes::kRows ? rows - i : Lanes::kRows;
      register_tile_of<Lanes>(
          height, steps<Lanes>(chunk), packed_a + tile * B::kTileA + k / kStep<Lanes> * Lanes::kRows,
          packed_b, B::kPanel, sums + i * pitch, pitch, start && k == 0,
          left > 0 || !join.lowest ? Join<Lanes>{}
                                   : Join<Lanes>{join.lowest + i * B::kColBlock, join.meets, join.to},
          next);
    }
  }
}

// x and the sums of so many levels, lowest first. sums: where x's place is in the lowest level.
template <class Lanes>
RLK_ISA inline typename Lanes::Vec joined(typename Lanes::Vec x, const typename Lanes::Scalar* sums,
                                          int meets) {
  for (int level = 0; level < meets; ++level)
    x = Lanes::add(Lanes::load(sums + level * Blocking<Lanes>::kSums), x);
  return x;
}

// A panel of finished block sums joins those before it.
template <class Lanes>
RLK_ISA void join_panel(std::int64_t rows, const typename Lanes::Scalar* block, std::int64_t pitch,
                        typename Lanes::Scalar* sums, const Piece& piece) {
  using B = Blocking<Lanes>;
  for (std::int64_t i = 0; i < rows; ++i)
    for (int j = 0; j < B::kPanel; j += Lanes::kLanes) {
      typename Lanes::Scalar* at = sums + i * B::kColBlock + j;
      Lanes::store(at + piece.to * B::kSums,
                   joined<Lanes>(Lanes::load(block + i * pitch + j), at, piece.meets));
    }
}

template <class Lanes>
RLK_ISA void finish_row(const ChainProduct& p, std::int64_t row, std::int64_t col, std::int64_t cols,
                        const typename Lanes::Scalar* sums) {
  char* out =
      static_cast<char*>(p.out) + (row * p.out_row_stride + col * p.out_col_stride) * bytes_of(p.out_type);
  const char* residual = p.residual == nullptr
                             ? nullptr
                             : static_cast<const char*>(p.residual) +
                                   (row * p.residual_row_stride + col) * bytes_of(p.residual_type);
  std::int64_t j = Lanes::store_row(p, out, col, cols, sums, residual);
  for (; j < cols; ++j)
    finish_element(out, p.out_type, j * p.out_col_stride, sums[j], p.bias, p.bias_type,
                   (col + j) * p.bias_stride, residual, p.residual_type, j);
}

// A block of rows of a, from `first` on, as register tiles take them.
template <class Lanes>
RLK_ISA void pack_rows(const MatrixView& a, std::int64_t row, std::int64_t rows, std::int64_t first,
                       std::int64_t depth, typename Lanes::Scalar* packed) {
  for (std::int64_t i = 0; i < rows; i += Lanes::kRows)
    pack_a<Lanes>(a, row + i, rows - i < Lanes::kRows ? rows - i : Lanes::kRows, first, depth,
                  packed + i / Lanes::kRows * Blocking<Lanes>::kTileA);
}

// The panels of one piece. The sum of a block in one piece passes through `partial`, that of several through the
// chain's buffer. Sums join as they leave the registers, but in a mode that is the chains' alone.
template <class Lanes>
RLK_ISA void run_piece(const ChainProduct& p, const Piece& piece, std::int64_t rows, std::int64_t col,
                       std::int64_t cols, const typename Lanes::Scalar* packed_a,
                       typename Lanes::Scalar* packed_b, typename Lanes::Scalar* partial,
                       typename Lanes::Scalar* sums) {
  using B = Blocking<Lanes>;
  const bool ends = piece.to != kChain, whole = ends && !piece.resumes;
  const bool at_once = ends && piece.depth > 0 && !Modal<Lanes>;
  if (piece.depth == 0) std::fill_n(partial, rows * B::kPanel, 0.0f);
  for (std::int64_t j = 0; j < cols; j += B::kPanel) {
    const std::int64_t width = cols - j < B::kPanel ? cols - j : B::kPanel;
    typename Lanes::Scalar* to = whole ? partial : sums + kChain * B::kSums + j;
    const std::int64_t pitch = whole ? B::kPanel : B::kColBlock;
    run_panel<Lanes>(p.b, rows, col + j, width, cols - j - width, piece.first, piece.depth, packed_a,
                     packed_b, to, pitch, !piece.resumes,
                     at_once ? Join<Lanes>{sums + j, piece.meets, piece.to} : Join<Lanes>{});
    if (ends && !at_once) join_panel<Lanes>(rows, to, pitch, sums + j, piece);
  }
}

// Depths of so few steps are mostly results: the rows of a register tile are summed across all columns and written while
// their sums are in the nearest cache (those of a whole block fill the next one). All of b has its place at once.
template <class Lanes>
inline constexpr std::int64_t kShallow =
    std::min<std::int64_t>(4, Blocking<Lanes>::kPackedB / Blocking<Lanes>::kColBlock);

template <class Lanes>
RLK_ISA void run_shallow(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                         std::int64_t cols, typename Lanes::Scalar* packed_a,
                         typename Lanes::Scalar* packed_b, typename Lanes::Scalar* sums) {
  using B = Blocking<Lanes>;
  const std::int64_t depth = steps<Lanes>(p.depth);
  pack_rows<Lanes>(p.a, row, rows, 0, p.depth, packed_a);
  for (std::int64_t j = 0; j < cols; j += B::kPanel)
    pack_b<Lanes>(p.b, col + j, std::min<std::int64_t>(B::kPanel, cols - j), 0, p.depth,
                  packed_b + j * depth);
  for (std::int64_t i = 0; i < rows; i += Lanes::kRows) {
    const std::int64_t height = std::min<std::int64_t>(Lanes::kRows, rows - i);
    Fetch nothing;
    for (std::int64_t j = 0; j < cols; j += B::kPanel)
      register_tile_of<Lanes>(height, depth, packed_a + i / Lanes::kRows * B::kTileA, packed_b + j * depth,
                              B::kPanel, sums + j, B::kColBlock, true, Join<Lanes>{}, nothing);
    for (std::int64_t r = 0; r < height; ++r)
      finish_row<Lanes>(p, row + i + r, col, cols, sums + r * B::kColBlock);
  }
}

template <class Lanes>
RLK_ISA void run_block(const ChainProduct& p, std::int64_t row, std::int64_t rows, std::int64_t col,
                       std::int64_t cols, typename Lanes::Scalar* scratch) {
  using B = Blocking<Lanes>;
  using Scalar = typename Lanes::Scalar;
  Scalar* packed_a = scratch;
  Scalar* packed_b = packed_a + B::kPackedA;
  Scalar* partial = packed_b + B::kPackedB;
  Scalar* sums = partial + B::kPartial;
  if (p.depth == 0) std::fill_n(sums, rows * B::kColBlock, Scalar{0});
  const bool plain = p.leaves == 0 && p.block == B::kDepthBlock;
  if constexpr (Lanes::kLaneRows > 0)
    if (plain && rows > Lanes::kRows && rows <= Lanes::kLaneRows && p.b.row_stride == 1 &&
        p.b.type == Float::f32 && p.a.col_stride == 1)
      return Lanes::rows_in_lanes(p, row, rows, col, cols, packed_a, sums);
  if constexpr (Lanes::kDirectRows > 0)
    if ((p.leaves > 0 || p.block <= B::kDepthBlock * kStep<Lanes>) && p.segments.count == 0 &&
        rows <= Lanes::kDirectRows && p.b.row_stride == 1 && (kStep<Lanes> == 1 || p.a.col_stride == 1))
      return Lanes::direct(p, row, rows, col, cols, packed_a, sums);

  if constexpr (!Modal<Lanes> && Lanes::kLanes > 1)
    if (p.leaves == 0 && p.depth > 0 && p.depth <= p.block && steps<Lanes>(p.depth) <= kShallow<Lanes>)
      return run_shallow<Lanes>(p, row, rows, col, cols, packed_a, packed_b, sums);

  if constexpr (B::kWide) {
    for (std::int64_t k0 = 0; k0 < p.depth; k0 += B::kDepthBlock) {
      const std::int64_t depth = p.depth - k0 < B::kDepthBlock ? p.depth - k0 : B::kDepthBlock;
      pack_rows<Lanes>(p.a, row, rows, k0, depth, packed_a);
      for (std::int64_t j = 0; j < cols; j += B::kPanel) {
        const std::int64_t width = cols - j < B::kPanel ? cols - j : B::kPanel;
        run_panel<Lanes>(p.b, rows, col + j, width, cols - j - width, k0, depth, packed_a, packed_b, sums + j,
                         B::kColBlock, k0 == 0, Join<Lanes>{});
      }
    }
  } else {
    for_pieces(p, B::kDepthBlock * kStep<Lanes>, [&](const Piece& piece) RLK_ISA {
      pack_rows<Lanes>(p.a, row, rows, piece.first, piece.depth, packed_a);
      run_piece<Lanes>(p, piece, rows, col, cols, packed_a, packed_b, partial, sums);
    });
  }
  for (std::int64_t i = 0; i < rows; ++i) finish_row<Lanes>(p, row + i, col, cols, sums + i * B::kColBlock);
}

// thin.hpp, for lanes of fp32 whose steps are single elements.
template <class Lanes>
inline constexpr bool kHasThin =
    sizeof(typename Lanes::Scalar) == 4 && Lanes::kLanes > 1 && kStep<Lanes> == 1;
template <class Lanes>
void run_thin(const ChainProduct& p, const ChainTile& tile, float* scratch);

template <class Lanes>
RLK_ISA void run_tile(const ChainProduct& p, const ChainTile& tile, void* scratch) {
  using B = Blocking<Lanes>;
  const DefaultFloatMode mode;
  if constexpr (kHasThin<Lanes>)
    if (p.thin()) return run_thin<Lanes>(p, tile, static_cast<float*>(scratch));
  // Row blocks of equal height: a last block of a few rows would read all of b for itself.
  const std::int64_t height = tile.row_end - tile.row_begin;
  const std::int64_t blocks = (height + B::kRowBlock - 1) / B::kRowBlock;
  const std::int64_t step =
      blocks == 0 ? 1 : ((height + blocks - 1) / blocks + Lanes::kRows - 1) / Lanes::kRows * Lanes::kRows;
  for (std::int64_t col = tile.col_begin; col < tile.col_end; col += B::kColBlock) {
    const std::int64_t cols = tile.col_end - col < B::kColBlock ? tile.col_end - col : B::kColBlock;
    for (std::int64_t row = tile.row_begin; row < tile.row_end; row += step) {
      const std::int64_t rows = tile.row_end - row < step ? tile.row_end - row : step;
      run_block<Lanes>(p, row, rows, col, cols, static_cast<typename Lanes::Scalar*>(scratch));
    }
  }
}

template <class F32, class F64>
constexpr ChainKernels kernels_of(const char* isa, std::int64_t col_step) {
  using A = Blocking<F32>;
  using B = Blocking<F64>;
  return {isa,
          std::max(A::kScratchBytes, B::kScratchBytes),
          std::max(A::kJoinedBytes, B::kJoinedBytes),
          col_step,
          &run_tile<F32>,
          &run_tile<F64>};
}

// Chains of one kind alone.
template <class Lanes>
constexpr ChainKernels kernels_of(const char* isa, std::int64_t col_step) {
  using B = Blocking<Lanes>;
  return {isa, B::kScratchBytes, B::kJoinedBytes, col_step, &run_tile<Lanes>, nullptr};
}

}  // namespace
}  // namespace rlk::native

#include "native/lm_head/thin.hpp"
