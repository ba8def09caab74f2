// rows times a weight on Intel's matrix unit, bf16: the forward of lm_head and of linear. Sums are those of ChainProduct, blocks
// in order or leaves of a tree, each a chain of the matrix unit.
//
// Rows of the weight are the first operand and are read as they lie; of leaves that end amid a step the last steps are copied,
// for the zeros in them. The activations are small and are packed once per
// call, 16 rows a group. So the tile of results lies transposed and is turned on its way out. Rejected:
// oneDNN's way round, which packs the weight.
//
// A task is a panel of the weight, which stays in the second-level cache while every group of rows passes
// over it. Rows of either operand never meet, so neither the panels nor the threads can move a bit.
#pragma once

#include "native/lm_head/amx.hpp"
#include "native/lm_head/run.hpp"

#if RLK_HAS_AMX

namespace rlk::native {
namespace {

// `sums` says how blocks join, and what is added to a rounded sum but the residual.
struct AmxProduct {
  const In& rows;    // [..., K]
  const In& weight;  // [N, K]
  const In& residual;
  const Out& out;
  ChainProduct sums;

  AmxProduct(const In& a, const In& b, const In& bias, const In& added, const Out& to, std::int64_t block,
             int leaves)
      : rows(a), weight(b), residual(added), out(to) {
    sums.rows = RowSet(a).rows, sums.cols = b.dim(0), sums.depth = b.dim(1);
    sums.block = block;
    sums.leaves = sums.depth == 0 ? 1 : leaves;    // no depth at all is a block of nothing
    if (to) sums.out_type = float_of(to.dtype());  // absent where only the workspace is asked
    if (bias) sums.bias = bias.data<void>(), sums.bias_type = float_of(bias.dtype());
    if (added) sums.residual_type = float_of(added.dtype());
  }
};

// body(piece, its first step), every piece filled up to whole steps.
template <class Body>
void for_steps(const ChainProduct& p, Body body) {
  std::int64_t at = 0;
  for_pieces(p, kDepthBlock, [&](const Piece& piece) {
    body(piece, at);
    at += steps_of(piece);
  });
}

constexpr std::int64_t kUnit = 4 * kSide;  // rows of the weight are taken in these
constexpr std::int64_t kGroups = kWidth / kSide;

struct AmxBlocking {
  std::int64_t rows, cols;
  std::int64_t steps = 0, tails = 0, groups, panel, panels, ranges;

  AmxBlocking(const ChainProduct& p, std::int32_t threads)
      : rows(p.rows),
        cols(p.cols),
        groups(up(rows, kSide) / kSide),
        panel(p.depth > kDepthBlock ? kUnit : 2 * kUnit),
        panels(up(cols, panel) / panel) {
    for_steps(p, [&](const Piece& piece, std::int64_t at) {
      steps = at + steps_of(piece);
      tails += has_tail(piece) ? 1 : 0;
    });
    // With few panels the groups are cut into ranges as well.
    const std::int64_t tasks = 4 * workers_for(threads, std::int64_t{1} << 30);
    const std::int64_t wanted = (tasks + panels - 1) / std::max<std::int64_t>(panels, 1);
    ranges = std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, up(groups, kGroups) / kGroups));
  }
  std::int64_t group_bytes() const { return steps * kTile; }
  std::uint64_t shared(const In& a) const {
    return line(RowSet(a).copy_bytes()) + static_cast<std::uint64_t>(groups * group_bytes());
  }
  // The sums of a panel, those that a block of them passes through, and what is copied of the weight: the last steps of
  // pieces, and the last panel where rows are missing in it.
  static constexpr std::uint64_t kSums = sizeof(float) * kWidth * 2 * kUnit,
                                 kLevels = sizeof(float) * (kChain + 1) * kBlock;
  std::uint64_t tail_bytes() const { return static_cast<std::uint64_t>(tails * panel * 64); }
  std::uint64_t copy_bytes(const ChainProduct& p) const {
    return cols % kUnit == 0 ? 0 : static_cast<std::uint64_t>(panel * up(2 * p.depth, 64));
  }
  std::uint64_t scratch(const ChainProduct& p) const {
    return kSums + kLevels + tail_bytes() + copy_bytes(p);
  }
};

// 16 rows from `first` on as second operands, one tile per step.
RLK_ISA inline void pack_group(const ChainProduct& p, const ReadRows& rows, std::int64_t first,
                               std::byte* to) {
  const auto* from = static_cast<const std::uint16_t*>(rows.data) + first * rows.stride;
  for_steps(p, [&](const Piece& piece, std::int64_t at) RLK_ISA {
    std::byte* tiles = to + at * kTile;
    for (std::int64_t k = 0; k < piece.depth; k += kStep, tiles += kTile) {
      __m512 tile[kSide];
      load_rows(tile, from + piece.first + k, rows.stride, rows.rows - first, piece.depth - k);
      transpose_16x16(tile);
      store_tile(tile, tiles);
    }
  });
}

// [64 rows of the weight][16 rows]: four tiles by one, for a group that has no neighbour.
RLK_AMX inline void multiply_alone(const First& first, const std::byte* group, std::int64_t steps,
                                   float* sums, bool more) {
  operands_written();
  if (more) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kSide * kSide, 64);
    _tile_loadd(2, sums + 2 * kSide * kSide, 64);
    _tile_loadd(3, sums + 3 * kSide * kSide, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const std::int64_t stride = first.stride, down = kSide * stride;
  for (std::int64_t s = 0; s < steps; ++s) {
    const std::byte* from = first.top + first.step * s;
    _tile_loadd(4, group + kTile * s, 64);
    _tile_loadd(5, from, stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, from + down, stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, from + 2 * down, stride);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, from + 3 * down, stride);
    _tile_dpbf16ps(3, 5, 4);
  }
  if (first.tail) {
    _tile_loadd(4, group + kTile * steps, 64);
    _tile_loadd(5, first.tail, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, first.tail + kTile, 64);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, first.tail + 2 * kTile, 64);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, first.tail + 3 * kTile, 64);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + 2 * kSide * kSide, 64);
  _tile_stored(3, sums + 3 * kSide * kSide, 64);
}

// A tile of results turned into rows of sums.
RLK_ISA inline void turn(const float* from, std::int64_t stride, float* to, std::int64_t to_stride) {
  __m512 tile[kSide];
  for (std::int64_t i = 0; i < kSide; ++i) tile[i] = _mm512_loadu_ps(from + i * stride);
  transpose_16x16(tile);
  for (std::int64_t i = 0; i < kSide; ++i) _mm512_storeu_ps(to + i * to_stride, tile[i]);
}

// Rows of the weight, and the last steps of pieces with zeros in them: [piece][row][64 bytes].
struct AmxWeight {
  const std::byte* data;
  std::int64_t stride;  // in bytes
  const std::byte* tails;
};

// sums[32][panel]: `count` rows of the weight with one group of rows or two.
inline void multiply_panel(const ChainProduct& p, const AmxBlocking& b, const AmxWeight& w,
                           std::int64_t count, const std::byte* group, bool alone, float* levels,
                           float* sums) {
  for (std::int64_t j = 0; j < count; j += alone ? kUnit : kWidth) {
    const std::byte* tail = w.tails + 64 * j;
    for_steps(p, [&](const Piece& piece, std::int64_t at) {
      First first = rows_as_they_lie(w.data + j * w.stride + 2 * piece.first, w.stride);
      const std::byte* with = group + at * kTile;
      if (has_tail(piece)) first.tail = tail, tail += 64 * b.panel;
      float* to = levels + piece.chain * kBlock;
      if (alone)
        multiply_alone(first, with, piece.depth / kStep, to, piece.resumes);
      else
        multiply(first, with, b.group_bytes(), piece.depth / kStep, to, kWidth, piece.resumes);
      if (piece.ends && piece.meets > 0) join(levels, levels + kChain * kBlock, piece.meets, piece.to);
    });
    if (alone)
      for (std::int64_t i = 0; i < kUnit; i += kSide) turn(levels + i * kSide, kSide, sums + j + i, b.panel);
    else
      for (std::int64_t i = 0; i < kWidth; i += kSide)
        for (std::int64_t n = 0; n < kWidth; n += kSide)
          turn(levels + i * kWidth + n, kWidth, sums + n * b.panel + j + i, b.panel);
  }
}

// The last steps of pieces, `count` rows of each.
inline void copy_tails(const ChainProduct& p, const AmxBlocking& b, const AmxWeight& w, std::int64_t count,
                       std::byte* to) {
  for_steps(p, [&](const Piece& piece, std::int64_t) {
    if (!has_tail(piece)) return;
    copy_tail(w.data, w.stride, piece, count, b.panel, to);
    to += 64 * b.panel;
  });
}

// `count` rows of the weight and zeros below them.
inline AmxWeight copy_rows(const ChainProduct& p, const AmxWeight& w, std::int64_t count, std::byte* to) {
  const std::int64_t stride = up(2 * p.depth, 64);
  std::memset(to, 0, static_cast<std::size_t>(up(count, kUnit) * stride));
  if (p.depth == 0) return {to, stride, w.tails};  // the weight may have no memory at all
  for (std::int64_t j = 0; j < count; ++j)
    std::memcpy(to + j * stride, w.data + j * w.stride, static_cast<std::size_t>(2 * p.depth));
  return {to, stride, w.tails};
}

inline rlk_code run_amx(const AmxProduct& a, const Call& call) {
  const ChainProduct& p = a.sums;
  const AmxBlocking b(p, call.threads());
  if (b.rows == 0 || b.cols == 0) return RLK_OK;
  std::byte* room = shared_workspace(call);
  const ReadRows rows(a.rows, room);
  std::byte* packed = shared_workspace(call) + line(RowSet(a.rows).copy_bytes());
  const std::uint64_t shared = b.shared(a.rows);
  run_tasks(call, b.groups, b.scratch(p), shared, [&](std::int64_t group, std::byte*) {
    pack_group(p, rows, group * kSide, packed + group * b.group_bytes());
  });

  const std::int64_t out_bytes = bytes_of(p.out_type),
                     each = up((b.groups + b.ranges - 1) / b.ranges, kGroups);
  run_tasks<Tiles>(
      call, b.panels * b.ranges, b.scratch(p), shared, [&](std::int64_t task, std::byte* scratch) {
        auto* sums = reinterpret_cast<float*>(scratch);
        auto* levels = reinterpret_cast<float*>(scratch + AmxBlocking::kSums);
        const std::int64_t col = task / b.ranges * b.panel, count = std::min(b.panel, b.cols - col);
        const std::int64_t begin = task % b.ranges * each, end = std::min(b.groups, begin + each);
        std::byte* tails = scratch + AmxBlocking::kSums + AmxBlocking::kLevels;
        AmxWeight w{a.weight.data<std::byte>() + 2 * col * a.weight.stride(0), 2 * a.weight.stride(0), tails};
        copy_tails(p, b, w, count, tails);
        if (count % kUnit != 0) w = copy_rows(p, w, count, tails + b.tail_bytes());
        for (std::int64_t group = begin; group < end; group += kGroups) {
          multiply_panel(p, b, w, count, packed + group * b.group_bytes(), group + 1 == end, levels, sums);
          const std::int64_t row = group * kSide, n = std::min(kWidth, std::min(end * kSide, b.rows) - row);
          for (std::int64_t i = 0; i < n; ++i) {
            const std::byte* added =
                a.residual ? a.residual.data<std::byte>() +
                                 (row_offset(a.residual, row + i) + col) * bytes_of(p.residual_type)
                           : nullptr;
            store_sums(p, a.out.data<std::byte>() + (row_offset(a.out, row + i) + col) * out_bytes, col,
                       count, sums + i * b.panel, added);
          }
        }
      });
  return RLK_OK;
}

inline std::uint64_t amx_workspace(const AmxProduct& a, const rlk_request& r) {
  const AmxBlocking b(a.sums, r.threads);
  return workspace_for(r.threads, std::max(b.groups, b.panels * b.ranges), b.scratch(a.sums),
                       b.shared(a.rows));
}

}  // namespace
}  // namespace rlk::native

#endif
