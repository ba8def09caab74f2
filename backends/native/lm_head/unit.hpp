// Intel's matrix unit (AMX) for lm_head and linear, arithmetic amx/k32, and what computes the same on other processors: tiles of
// 16 x 16 fp32 sums from bf16 operands.
//
// A tile product takes 16 rows of a *first* operand, 32 steps of depth each, where they lie at any stride,
// and a *second* operand as 16 pairs of steps, 16 columns each, the two steps of a pair beside each other. As
// 32-bit words one is the transpose of the other, so whatever is summed over can be brought into either: from
// rows (depth is contiguous) or from lines (columns are).
#pragma once

#include <algorithm>
#include <cstring>

#include "native/levels.hpp"
#include "native/lm_head/chain.hpp"
#include "native/lm_head/float.hpp"

namespace rlk::native {

inline constexpr const char* kNoUnit = "this build lacks the instruction set";

namespace {

constexpr std::int64_t kSide = 16;                // rows of a tile
constexpr std::int64_t kStep = 32;                // depth of a tile
constexpr std::int64_t kTile = kSide * 64;        // bytes of one
constexpr std::int64_t kDepthBlock = 4096;        // summed apart
constexpr std::int64_t kWidth = 2 * kSide;        // two tiles by two are multiplied at a time
constexpr std::int64_t kBlock = kWidth * kWidth;  // sums made at a time

inline std::int64_t up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

inline std::int64_t steps_of(const Piece& piece) { return up(piece.depth, kStep) / kStep; }
inline bool has_tail(const Piece& piece) { return piece.depth % kStep != 0; }

// A piece's last step, of `count` rows `stride` bytes apart, zeros beside and below: `rows` rows of 64 bytes.
inline void copy_tail(const std::byte* from, std::int64_t stride, const Piece& piece, std::int64_t count,
                      std::int64_t rows, std::byte* to) {
  const std::int64_t bytes = 2 * (piece.depth % kStep);
  from += 2 * (piece.first + piece.depth) - bytes;
  std::memset(to, 0, static_cast<std::size_t>(64 * rows));
  for (std::int64_t i = 0; i < std::min(rows, count); ++i)
    std::memcpy(to + 64 * i, from + i * stride, static_cast<std::size_t>(bytes));
}

}  // namespace

// Two tiles of a first operand, or four below each other: rows `stride` bytes apart, the next step `step` bytes on. One more step
// may follow, of which a copy is held for the zeros in it, rows of 64 bytes.
struct First {
  const std::byte *top, *below;
  std::int64_t stride, step;
  const std::byte* tail = nullptr;
};
namespace {
inline First rows_as_they_lie(const std::byte* rows, std::int64_t stride) {
  return {rows, rows + kSide * stride, stride, 64, nullptr};
}
inline First packed_rows(const std::byte* tiles, std::int64_t group_bytes) {
  return {tiles, tiles + group_bytes, 64, kTile, nullptr};
}
}  // namespace

struct MatrixUnit {
  // A worker's tiles.
  void (*begin)();
  void (*end)();
  // sums[32][32], rows `pitch` floats apart, of 32 rows and two groups of 16 columns; from +0, or added to what
  // is there.
  void (*multiply)(const First& first, const std::byte* second, std::int64_t group_bytes, std::int64_t steps,
                   float* sums, std::int64_t pitch, bool more);
  // sums[64][16] of 64 rows and one group.
  void (*multiply_alone)(const First& first, const std::byte* group, std::int64_t steps, float* sums,
                         bool more);
  // Up to 16 rows of `depth` as second operands, a tile a step, zeros where nothing is.
  void (*pack_rows)(const std::uint16_t* from, std::int64_t stride, std::int64_t rows, std::int64_t depth,
                    std::byte* to);
  // `steps` lines of columns, zeros behind them to a multiple of 32, as tiles [groups of 16 columns, `group_bytes` each][steps];
  // `turned`: first operands, else second ones.
  void (*pack_lines)(const std::uint16_t* from, std::int64_t stride, std::int64_t steps, std::int64_t columns,
                     bool turned, std::byte* to, std::int64_t group_bytes);
  // A tile of sums transposed.
  void (*turn)(const float* from, std::int64_t stride, float* to, std::int64_t to_stride);
  // The sums that a block ends with: its chain, and the levels that it meets, from the lowest up (chain.hpp has the buffers).
  void (*join)(float* const* buffers, int meets, int to);
  // to = to + from; a multiple of 16.
  void (*add)(const float* from, float* to, std::int64_t count);
  // The end of a row of sums, of a multiple of 16 places: round, add the bias, round again, and the residual likewise.
  void (*store_sums)(const ChainProduct& p, void* out, std::int64_t col, std::int64_t cols, const float* sums,
                     const void* residual);
};

const MatrixUnit* amx_unit();  // null where this build lacks it
const MatrixUnit& replay_unit_scalar();
const MatrixUnit* replay_unit_avx2();    // likewise
const MatrixUnit* replay_unit_avx512();  // likewise
template <Isa I>
const MatrixUnit* replay_unit() {
  if constexpr (I == Isa::avx512) return replay_unit_avx512();
  if constexpr (I == Isa::avx2) return replay_unit_avx2();
  return &replay_unit_scalar();
}

// The unit's tiles while a task computes.
class InUse {
 public:
  explicit InUse(const MatrixUnit& unit) : unit_(unit) {
    if (unit_.begin) unit_.begin();
  }
  ~InUse() {
    if (unit_.end) unit_.end();
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  const DefaultFloatMode floats_;
  const MatrixUnit& unit_;
};

}  // namespace rlk::native
