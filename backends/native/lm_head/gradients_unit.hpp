// Gradients of a product of rows and a weight on a matrix unit, bf16: those of lm_head and of linear. Sums are those of
// ChainProduct, each chain one of the matrix unit.
//
//   rows      a task is 256 columns and up to 512 rows: up to 1024 lines of the weight at a time are packed as the
//             second operand, the cotangent's rows are the first as they lie, sums wait in fp32
//   weight    the activations are packed once as the second operand; a task turns 256 columns of the cotangent into rows
#pragma once

#include "native/lm_head/run.hpp"
#include "native/lm_head/unit.hpp"

namespace rlk::native {
namespace {

constexpr std::int64_t kPanel = 256;       // columns of a result that a task takes at a time
constexpr std::int64_t kRowsAtOnce = 512;  // of a gradient of rows
constexpr std::int64_t kChunk = 1024;      // lines of the weight that are packed at a time

inline std::int64_t panels_for(std::int64_t columns) { return up(columns, kPanel) / kPanel; }

// Pieces whose lines are packed together. Of a tree's buffers (chain.hpp), bit by bit: those in which pieces before them left
// what these take, and those in which these leave something.
struct PieceRun {
  static constexpr int kMost = 8;
  Piece pieces[kMost];
  int count = 0;
  std::int64_t lines = 0, steps = 0;
  unsigned takes = 0, leaves = 0;
  bool last = false;

  void add(const Piece& piece) {
    pieces[count++] = piece;
    lines += piece.depth, steps += steps_of(piece);
    const unsigned chain = 1u << piece.chain, met = (1u << piece.meets) - 1;
    takes |= ((piece.resumes ? chain : 0) | met) & ~leaves;
    leaves = piece.ends ? (leaves & ~(met | chain)) | 1u << piece.to : leaves | chain;
  }
};
// body(run)
template <class Body>
void for_piece_runs(const ChainProduct& p, Body body) {
  PieceRun run;
  for_pieces(p, kChunk, [&](const Piece& piece) {
    const bool follows =
        run.count == 0 || piece.first == run.pieces[0].first + run.lines;  // segments lie apart
    if (run.count == PieceRun::kMost || !follows || (run.count > 0 && run.lines + piece.depth > kChunk)) {
      body(run);
      run = {};
    }
    run.add(piece);
  });
  run.last = true;
  if (run.count > 0) body(run);
}

// ---- to[m, k] = sum over v of cotangent[m, v] * weight[v, k]

struct RowGradient {
  const MatrixUnit& unit;
  const In &cotangent, &weight;
  const Out& to;
  ChainProduct sums;  // how they join

  RowGradient(const MatrixUnit& by, const In& d, const In& w, const Out& out, std::int64_t block,
              int leaf_count)
      : unit(by), cotangent(d), weight(w), to(out) {
    sums.rows = RowSet(d).rows, sums.cols = w.dim(1), sums.depth = w.dim(0);
    sums.block = block;
    sums.leaves = sums.depth == 0 ? 1 : leaf_count;  // no depth at all is a block of nothing
    sums.out_type = out ? float_of(out.dtype()) : Float::f32;
  }

  // Lines packed, the last steps of pieces, a copy of 32 rows, the buffers of the block of sums at hand; then what
  // runs leave in those of every block.
  static constexpr std::uint64_t kPacked = kPanel / kSide * (kChunk / kStep + PieceRun::kMost) * kTile,
                                 kTails = PieceRun::kMost * kWidth * 64, kCopy = kWidth * kChunk * 2,
                                 kLevels = sizeof(float) * (kChain + 1) * kBlock;
  std::int64_t rows_at_once() const { return std::min(kRowsAtOnce, up(sums.rows, kWidth)); }
  int levels() const { return sums.leaves > 0 ? kChain + 1 : 2; }
  std::uint64_t scratch() const {
    return kPacked + kTails + kCopy + kLevels +
           sizeof(float) * static_cast<std::uint64_t>(rows_at_once() * kPanel * levels());
  }

  std::int64_t parts() const { return up(sums.rows, kRowsAtOnce) / kRowsAtOnce; }
  std::int64_t tasks() const { return panels_for(sums.cols) * parts(); }

  void run(const Call& call, const ReadRows& d, std::uint64_t shared, std::uint64_t scratch_bytes) const {
    const std::int64_t parts = this->parts();
    run_tasks(call, tasks(), scratch_bytes, shared, [&](std::int64_t task, std::byte* scratch) {
      const InUse tiles(unit);
      panel(d, task / parts * kPanel, task % parts * kRowsAtOnce, scratch);
    });
  }

 private:
  struct Held {
    std::byte *packed, *tails, *copy;
    float *levels, *kept;
    explicit Held(std::byte* scratch)
        : packed(scratch),
          tails(packed + kPacked),
          copy(tails + kTails),
          levels(reinterpret_cast<float*>(copy + kCopy)),
          kept(levels + kLevels / sizeof(float)) {}
  };
  // Where a run finds and leaves the sums of a block: what it neither takes nor leaves may stay in the first cache.
  struct Buffers {
    float* at[kChain + 1];
  };
  Buffers buffers_of(const Held& held, const PieceRun& run, std::int64_t i, std::int64_t j) const {
    float* kept = held.kept + (i / kWidth * (kPanel / kWidth) + j / kWidth) * levels() * kBlock;
    const unsigned shared = run.takes | (run.last ? 0 : run.leaves);
    Buffers b;
    for (int n = 0; n <= kChain; ++n)
      b.at[n] = (shared >> n & 1) != 0 ? kept + (n == kChain ? levels() - 1 : n) * kBlock
                                       : held.levels + n * kBlock;
    return b;
  }

  void panel(const ReadRows& d, std::int64_t col, std::int64_t row, std::byte* scratch) const {
    const std::int64_t count = std::min(kRowsAtOnce, sums.rows - row),
                       width = std::min(kPanel, sums.cols - col);
    const Held held(scratch);
    for_piece_runs(sums, [&](const PieceRun& run) {
      std::byte* packed = held.packed;
      for (int n = 0; n < run.count; ++n) {
        const Piece& piece = run.pieces[n];
        if (piece.depth == 0) continue;  // of a weight that is null, perhaps
        unit.pack_lines(weight.data<std::uint16_t>() + piece.first * weight.stride(0) + col, weight.stride(0),
                        piece.depth, width, false, packed, run.steps * kTile);
        packed += steps_of(piece) * kTile;
      }
      for (std::int64_t i = 0; i < count; i += kWidth) {
        const std::int64_t rows = std::min(kWidth, count - i);
        First firsts[PieceRun::kMost];
        first_operands(d, row + i, rows, run, held, firsts);
        std::byte* out[kWidth];
        for (std::int64_t r = 0; run.last && r < rows; ++r)
          out[r] = to.data<std::byte>() + (row_offset(to, row + i + r) + col) * bytes_of(sums.out_type);
        for (std::int64_t j = 0; j < width; j += kWidth) {
          const Buffers buffers = buffers_of(held, run, i, j);
          multiply(firsts, held.packed + j / kSide * run.steps * kTile, run, buffers.at);
          for (std::int64_t r = 0; run.last && r < rows; ++r)
            unit.store_sums(sums, out[r] + j * bytes_of(sums.out_type), 0, std::min(kWidth, width - j),
                            buffers.at[0] + r * kWidth, nullptr);
        }
      }
    });
  }

  // `count` rows of the cotangent from `row` on, of a run's pieces; up to 32 are read.
  void first_operands(const ReadRows& d, std::int64_t row, std::int64_t count, const PieceRun& run,
                      const Held& held, First* firsts) const {
    std::int64_t stride = 2 * d.stride;
    const std::int64_t begin = run.pieces[0].first;
    const std::byte* from = held.copy;
    if (run.lines > 0) from = static_cast<const std::byte*>(d.data) + row * stride + 2 * begin;
    if (count < kWidth && run.lines > 0) {
      std::memset(held.copy, 0, kCopy);
      for (std::int64_t r = 0; r < count; ++r)
        std::memcpy(held.copy + r * 2 * kChunk, from + r * stride, static_cast<std::size_t>(2 * run.lines));
      from = held.copy, stride = 2 * kChunk;
    }
    std::byte* tail = held.tails;
    for (int n = 0; n < run.count; ++n) {
      Piece piece = run.pieces[n];
      piece.first -= begin;
      firsts[n] = rows_as_they_lie(from + 2 * piece.first, stride);
      if (!has_tail(piece)) continue;
      copy_tail(from, stride, piece, kWidth, kWidth, tail);
      firsts[n].tail = tail, tail += kWidth * 64;
    }
  }

  void multiply(const First* firsts, const std::byte* second, const PieceRun& run,
                float* const* buffers) const {
    for (int n = 0; n < run.count; ++n) {
      const Piece& piece = run.pieces[n];
      unit.multiply(firsts[n], second, run.steps * kTile, piece.depth / kStep, buffers[piece.chain], kWidth,
                    piece.resumes);
      if (piece.ends && piece.meets > 0) unit.join(buffers, piece.meets, piece.to);
      second += steps_of(piece) * kTile;
    }
  }
};

// ---- to[v, k] = sum over m of cotangent[m, v] * rows[m, k], in blocks of 4096

struct WeightGradient {
  const MatrixUnit& unit;
  const Out& to;
  const In& before;  // to which it is added, in fp32
  const std::int64_t rows, cols, depth;
  const std::int64_t steps = up(depth, kStep) / kStep, group_bytes = steps * kTile;

  WeightGradient(const MatrixUnit& by, const In& cotangent, const In& activations, const In& so_far,
                 const Out& out)
      : unit(by),
        to(out),
        before(so_far),
        rows(cotangent.dim(-1)),
        cols(activations.dim(-1)),
        depth(RowSet(cotangent).rows) {}

  static constexpr std::int64_t kGroups = kPanel / kSide;
  // Columns whose sums leave together: more would leave the first cache.
  static constexpr std::int64_t kStrip = 128;
  static constexpr std::uint64_t kSums = sizeof(float) * kWidth * kStrip, kTiles = 4 * kTile;
  std::int64_t tasks() const { return std::max(panels_for(cols), panels_for(rows)); }
  std::uint64_t scratch() const { return kSums + kTiles + static_cast<std::uint64_t>(kGroups * group_bytes); }
  std::uint64_t packed_bytes() const {
    return static_cast<std::uint64_t>(panels_for(cols) * kGroups * group_bytes);
  }

  void run(const Call& call, const ReadRows& d, const ReadRows& activations, std::byte* packed,
           std::uint64_t shared, std::uint64_t scratch_bytes) const {
    run_tasks(call, depth > 0 ? panels_for(cols) : 0, scratch_bytes, shared,
              [&](std::int64_t task, std::byte*) {
                unit.pack_lines(static_cast<const std::uint16_t*>(activations.data) + task * kPanel,
                                activations.stride, depth, std::min(kPanel, cols - task * kPanel), false,
                                packed + task * kGroups * group_bytes, group_bytes);
              });
    run_tasks(call, panels_for(rows), scratch_bytes, shared, [&](std::int64_t task, std::byte* scratch) {
      const InUse tiles(unit);
      const std::int64_t row = task * kPanel, count = std::min(kPanel, rows - row);
      std::byte* turned = scratch + kSums + kTiles;
      if (depth > 0)
        unit.pack_lines(static_cast<const std::uint16_t*>(d.data) + row, d.stride, depth, count, true, turned,
                        group_bytes);
      auto* sums = reinterpret_cast<float*>(scratch);
      auto* block_sums = reinterpret_cast<float*>(scratch + kSums);
      for (std::int64_t col = 0; col < cols; col += kPanel) {
        const std::int64_t width = std::min(kPanel, cols - col);
        for (std::int64_t i = 0; i < count; i += kWidth) {
          for (std::int64_t j = 0; j < width; j += kWidth) {
            block(turned + i / kSide * group_bytes, packed + (col + j) / kSide * group_bytes,
                  sums + j % kStrip, block_sums);
            const std::int64_t behind = std::min(j + kWidth, width), begin = j / kStrip * kStrip;
            if (behind % kStrip == 0 || behind == width)
              store(row + i, std::min(kWidth, count - i), col + begin, behind - begin, sums);
          }
        }
      }
    });
  }

 private:
  void block(const std::byte* first, const std::byte* second, float* sums, float* tiles) const {
    constexpr std::int64_t kSteps = kDepthBlock / kStep;
    unit.multiply(packed_rows(first, group_bytes), second, group_bytes, std::min(kSteps, steps), sums, kStrip,
                  false);
    for (std::int64_t s = kSteps; s < steps; s += kSteps) {
      unit.multiply(packed_rows(first + s * kTile, group_bytes), second + s * kTile, group_bytes,
                    std::min(kSteps, steps - s), tiles, kWidth, false);
      for (std::int64_t i = 0; i < kWidth; ++i) unit.add(tiles + i * kWidth, sums + i * kStrip, kWidth);
    }
  }

  void store(std::int64_t row, std::int64_t count, std::int64_t col, std::int64_t width,
             const float* sums) const {
    ChainProduct finish;
    finish.out_type = float_of(to.dtype());
    const std::int64_t pitch = to.stride(0) * bytes_of(finish.out_type);
    std::byte* out = to.data<std::byte>() + row * pitch + col * bytes_of(finish.out_type);
    const float* added = before ? before.data<float>() + row * before.stride(0) + col : nullptr;
    for (std::int64_t i = 0; i < count; ++i, out += pitch, added += added ? before.stride(0) : 0)
      unit.store_sums(finish, out, 0, width, sums + i * kStrip, added);
  }
};

// What every call of a backward holds: uneven rows copied, the activations packed, each worker's room. The other gradients are
// chains of at most `chain_tiles` tiles in `chain_bytes` each.
struct UnitRoom {
  std::uint64_t copies, shared, scratch;
  std::int64_t tasks;
  UnitRoom(std::uint64_t copied, std::uint64_t chain_bytes, std::int64_t chain_tiles,
           const RowGradient* to_rows, const WeightGradient* to_weight)
      : copies(line(copied)), shared(copies), scratch(chain_bytes), tasks(chain_tiles) {
    if (to_rows) scratch = std::max(scratch, to_rows->scratch()), tasks = std::max(tasks, to_rows->tasks());
    if (!to_weight) return;
    shared += to_weight->packed_bytes();
    scratch = std::max(scratch, to_weight->scratch()), tasks = std::max(tasks, to_weight->tasks());
  }
  std::uint64_t bytes(const rlk_request& r) const { return workspace_for(r.threads, tasks, scratch, shared); }
};

}  // namespace
}  // namespace rlk::native
