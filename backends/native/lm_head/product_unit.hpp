// rows times a weight on a matrix unit, bf16: the forward of lm_head and of linear. Sums are those of ChainProduct, blocks
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

#include "native/lm_head/run.hpp"
#include "native/lm_head/unit.hpp"

namespace rlk::native {
namespace {

// `sums` says how blocks join, and what is added to a rounded sum but the residual.
struct UnitProduct {
  const In& rows;    // [..., K]
  const In& weight;  // [N, K]
  const In& residual;
  const Out& out;
  ChainProduct sums;

  UnitProduct(const In& a, const In& b, const In& bias, const In& added, const Out& to, std::int64_t block,
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

// A panel is `parts` runs of the weight's rows, of the same columns of the result.
struct UnitBlocking {
  std::int64_t rows, cols;
  int parts;
  std::int64_t steps = 0, tails = 0, groups, panel, width, panels, ranges;

  UnitBlocking(const ChainProduct& p, int parts_of_panel, std::int32_t threads)
      : rows(p.rows),
        cols(p.cols / parts_of_panel),
        parts(parts_of_panel),
        groups(up(rows, kSide) / kSide),
        panel(parts == 1 && p.depth > kDepthBlock ? kUnit : 2 * kUnit),
        width(panel / parts),
        panels(up(cols, width) / width) {
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
  std::uint64_t room(const ChainProduct& p) const { return kSums + kLevels + tail_bytes() + copy_bytes(p); }
};

// Sums as they are: a row of the result from a row of the weight.
struct PlainRows {
  static constexpr int kParts = 1;
  static constexpr std::uint64_t kBytes = 0;
  static std::int64_t weight_row(std::int64_t col, int) { return col; }
  static void store(const MatrixUnit& unit, const UnitProduct& a, std::int64_t row, std::int64_t n,
                    std::int64_t col, std::int64_t count, const float* sums, std::int64_t stride,
                    std::byte*) {
    const ChainProduct& p = a.sums;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::byte* added = a.residual
                                   ? a.residual.data<std::byte>() +
                                         (row_offset(a.residual, row + i) + col) * bytes_of(p.residual_type)
                                   : nullptr;
      unit.store_sums(p, a.out.data<std::byte>() + (row_offset(a.out, row + i) + col) * bytes_of(p.out_type),
                      col, count, sums + i * stride, added);
    }
  }
};

// 16 rows from `first` on as second operands, one tile per step.
inline void pack_group(const MatrixUnit& unit, const ChainProduct& p, const ReadRows& rows,
                       std::int64_t first, std::byte* to) {
  const auto* from = static_cast<const std::uint16_t*>(rows.data) + first * rows.stride;
  for_steps(p, [&](const Piece& piece, std::int64_t at) {
    unit.pack_rows(from + piece.first, rows.stride, rows.rows - first, piece.depth, to + at * kTile);
  });
}

// Rows of the weight, and the last steps of pieces with zeros in them: [piece][row][64 bytes].
struct UnitWeight {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;  // in bytes
  const std::byte* tails = nullptr;
};

// sums[32][panel]: `count` rows of the weight, of one part, with one group of rows or two.
inline void multiply_panel(const MatrixUnit& unit, const ChainProduct& p, const UnitBlocking& b,
                           const UnitWeight& w, std::int64_t count, const std::byte* group, bool alone,
                           float* levels, float* sums) {
  float* buffers[kChain + 1];
  for (int n = 0; n <= kChain; ++n) buffers[n] = levels + n * kBlock;
  for (std::int64_t j = 0; j < count; j += alone ? kUnit : kWidth) {
    const std::byte* tail = w.tails + 64 * j;
    for_steps(p, [&](const Piece& piece, std::int64_t at) {
      First first = rows_as_they_lie(w.data + j * w.stride + 2 * piece.first, w.stride);
      const std::byte* with = group + at * kTile;
      if (has_tail(piece)) first.tail = tail, tail += 64 * b.panel;
      float* to = buffers[piece.chain];
      if (alone)
        unit.multiply_alone(first, with, piece.depth / kStep, to, piece.resumes);
      else
        unit.multiply(first, with, b.group_bytes(), piece.depth / kStep, to, kWidth, piece.resumes);
      if (piece.ends && piece.meets > 0) unit.join(buffers, piece.meets, piece.to);
    });
    if (alone)
      for (std::int64_t i = 0; i < kUnit; i += kSide)
        unit.turn(levels + i * kSide, kSide, sums + j + i, b.panel);
    else
      for (std::int64_t i = 0; i < kWidth; i += kSide)
        for (std::int64_t n = 0; n < kWidth; n += kSide)
          unit.turn(levels + i * kWidth + n, kWidth, sums + n * b.panel + j + i, b.panel);
  }
}

// The last steps of pieces, `count` rows of each, of one part.
inline void copy_tails(const ChainProduct& p, const UnitBlocking& b, const UnitWeight& w, std::int64_t count,
                       std::byte* to) {
  for_steps(p, [&](const Piece& piece, std::int64_t) {
    if (!has_tail(piece)) return;
    copy_tail(w.data, w.stride, piece, count, b.width, to);
    to += 64 * b.panel;
  });
}

// `count` rows of the weight and zeros below them.
inline UnitWeight copy_rows(const ChainProduct& p, const UnitWeight& w, std::int64_t count, std::byte* to) {
  const std::int64_t stride = up(2 * p.depth, 64);
  std::memset(to, 0, static_cast<std::size_t>(up(count, kUnit) * stride));
  if (p.depth == 0) return {to, stride, w.tails};  // the weight may have no memory at all
  for (std::int64_t j = 0; j < count; ++j)
    std::memcpy(to + j * stride, w.data + j * w.stride, static_cast<std::size_t>(2 * p.depth));
  return {to, stride, w.tails};
}

// A part of a panel, with what has to be copied of it in `room`.
inline UnitWeight part_of(const UnitProduct& a, const UnitBlocking& b, int part, std::int64_t weight_row,
                          std::int64_t count, std::byte* room) {
  const ChainProduct& p = a.sums;
  std::byte* tails = room + part * b.width * 64;
  const UnitWeight w{a.weight.data<std::byte>() + 2 * weight_row * a.weight.stride(0), 2 * a.weight.stride(0),
                     tails};
  copy_tails(p, b, w, count, tails);
  if (count % kUnit == 0) return w;
  return copy_rows(p, w, count,
                   room + b.tail_bytes() + static_cast<std::uint64_t>(part) * b.copy_bytes(p) / 2);
}

// Rows: how a panel's rows lie in the weight, and where its sums go.
template <class Rows>
rlk_code run_product(const MatrixUnit& unit, const UnitProduct& a, const Rows& to, const Call& call) {
  const ChainProduct& p = a.sums;
  const UnitBlocking b(p, Rows::kParts, call.threads());
  if (b.rows == 0 || b.cols == 0) return RLK_OK;
  std::byte* room = shared_workspace(call);
  const ReadRows rows(a.rows, room);
  std::byte* packed = shared_workspace(call) + line(RowSet(a.rows).copy_bytes());
  const std::uint64_t shared = b.shared(a.rows), each_room = b.room(p) + Rows::kBytes;
  run_tasks(call, b.groups, each_room, shared, [&](std::int64_t group, std::byte*) {
    pack_group(unit, p, rows, group * kSide, packed + group * b.group_bytes());
  });

  const std::int64_t each = up((b.groups + b.ranges - 1) / b.ranges, kGroups);
  run_tasks(call, b.panels * b.ranges, each_room, shared, [&](std::int64_t task, std::byte* scratch) {
    const InUse tiles(unit);
    auto* sums = reinterpret_cast<float*>(scratch);
    auto* levels = reinterpret_cast<float*>(scratch + UnitBlocking::kSums);
    std::byte* copies = scratch + UnitBlocking::kSums + UnitBlocking::kLevels;
    const std::int64_t col = task / b.ranges * b.width, count = std::min(b.width, b.cols - col);
    const std::int64_t begin = task % b.ranges * each, end = std::min(b.groups, begin + each);
    UnitWeight parts[Rows::kParts];
    for (int i = 0; i < Rows::kParts; ++i) parts[i] = part_of(a, b, i, to.weight_row(col, i), count, copies);
    for (std::int64_t group = begin; group < end; group += kGroups) {
      for (int i = 0; i < Rows::kParts; ++i)
        multiply_panel(unit, p, b, parts[i], count, packed + group * b.group_bytes(), group + 1 == end,
                       levels, sums + i * b.width);
      const std::int64_t row = group * kSide;
      to.store(unit, a, row, std::min(kWidth, std::min(end * kSide, b.rows) - row), col, count, sums, b.panel,
               scratch + b.room(p));
    }
  });
  return RLK_OK;
}

template <class Rows>
std::uint64_t product_workspace(const UnitProduct& a, const rlk_request& r) {
  const UnitBlocking b(a.sums, Rows::kParts, r.threads);
  return workspace_for(r.threads, std::max(b.groups, b.panels * b.ranges), b.room(a.sums) + Rows::kBytes,
                       b.shared(a.rows));
}

}  // namespace
}  // namespace rlk::native
