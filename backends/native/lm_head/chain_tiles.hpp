// Pieces of the chain product's loops (chain_kernels.hpp): what is packed, the register tile, and how a row ends.
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

// sums[Rows][kPanel] += over `depth` steps, each sum continuing its chain (or starting it from +0). Steps of b are a
// panel apart where it is packed, else b_pitch.
template <class Lanes, bool Packed, int Rows>
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
    b += Packed ? B::kPanel : b_pitch;
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

template <class Lanes, bool Packed = true, int Rows = Lanes::kRows>
RLK_ISA void register_tile_of(std::int64_t rows, std::int64_t depth, const typename Lanes::Scalar* a,
                              const typename Lanes::Scalar* b, std::int64_t b_pitch,
                              typename Lanes::Scalar* sums, std::int64_t pitch, bool start,
                              const Join<Lanes>& join, Fetch& next) {
  if (rows == Rows)
    return register_tile<Lanes, Packed, Rows>(depth, a, b, b_pitch, sums, pitch, start, join, next);
  if constexpr (Rows > 1)
    register_tile_of<Lanes, Packed, Rows - 1>(rows, depth, a, b, b_pitch, sums, pitch, start, join, next);
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

// x and the sums of so many levels, lowest first, `apart` from one to the next. sums: where x's place is in the lowest level.
template <class Lanes>
RLK_ISA inline typename Lanes::Vec joined(typename Lanes::Vec x, const typename Lanes::Scalar* sums,
                                          int meets, std::int64_t apart = Blocking<Lanes>::kSums) {
  for (int level = 0; level < meets; ++level) x = Lanes::add(Lanes::load(sums + level * apart), x);
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

}  // namespace
}  // namespace rlk::native
