// A block of rows on a matrix unit, bf16 (arithmetic amx/k32/attn128/s<S>): its products are 32 rows by 32 columns at a time, all
// else is the vector code of block.hpp.
//
// Rows of q and weights are the first operand and lie as the matrix unit reads them; keys and values are the second, packed once
// a tile for all rows of the block. Rows that a product takes beyond those that see the tile are put back as they were.
#pragma once

#include "native/attention/block.hpp"
#include "native/attention/unit.hpp"

namespace rlk::native::attention {

template <class L, int W, const MatrixUnit* (*Unit)()>
class UnitTile {
  using Row = native::Row<L, W>;
  static constexpr std::int64_t kUnitBytes = native::kTile, kUnitFloats = kUnitBytes / 4;
  static constexpr std::int64_t kSteps = attention::kTile / kStep, kGroups = attention::kTile / kSide,
                                kPacked = 256;  // columns at a time

 public:
  // A product of fewer rows than it takes reads and writes beyond them.
  static constexpr int kSpare = kWidth - 1;
  static constexpr std::int64_t kAll = kRows + kSpare;

  UnitTile(const Problem& p, float*& scratch)
      : unit_(*Unit()),
        tiles_(unit_),
        p_(p),
        steps_(steps_of(p)),
        depth_(steps_ * kStep),
        columns_(columns_of(p)) {
    const auto take = [&scratch](std::int64_t floats) { return std::exchange(scratch, scratch + floats); };
    keys_ = bytes(take(kGroups * steps_ * kUnitFloats));
    values_ = bytes(take(columns_ / kSide * kSteps * kUnitFloats));
    q_ = halves(take(kAll * depth_ / 2)), weights_ = halves(take(kAll * attention::kTile / 2));
    some_ = halves(take(kStep * std::max(depth_, columns_) / 2));
    kept_ = take(kWidth * columns_);
  }
  static std::int64_t pitch(const Problem& p) { return columns_of(p); }

  void query(int r, const void* q) { copy_row(q, p_.width, q_ + r * depth_, depth_); }
  template <class Key>
  void load(Key key) {
    for (std::int64_t g = 0; g < kGroups; ++g) {
      const Lines from =
          lines([&](std::int64_t i) { return key(p_.k, g * kSide + i); }, kSide, p_.width, depth_);
      unit_.pack_rows(from.first, from.stride, kSide, depth_, keys_ + g * steps_ * kUnitBytes);
    }
    for (std::int64_t s = 0; s < kSteps; ++s) {
      const Lines from =
          lines([&](std::int64_t i) { return key(p_.v, s * kStep + i); }, kStep, p_.value_width, columns_);
      for (std::int64_t c = 0; c < columns_; c += kPacked)
        unit_.pack_lines(from.first + c, from.stride, kStep, std::min(kPacked, columns_ - c), false,
                         values_ + (c / kSide * kSteps + s) * kUnitBytes, kSteps * kUnitBytes);
    }
  }
  void scores(int from, int to, float* scores) const {
    for (std::int64_t r = from; r < to; r += kWidth)
      for (std::int64_t g = 0; g < kGroups; g += 2)
        unit_.multiply(rows_as_they_lie(bytes(q_ + r * depth_), 2 * depth_), keys_ + g * steps_ * kUnitBytes,
                       steps_ * kUnitBytes, steps_, scores + r * attention::kTile + g * kSide,
                       attention::kTile, false);
  }
  void round(int r, const float* weights) {
    Row::narrow(rows::Type::bf16, weights, weights_ + r * attention::kTile, attention::kTile);
  }
  void add_values(int from, int to, const float*, float* o) {
    for (std::int64_t r = from; r < to; r += kWidth) {
      const std::int64_t others = std::max<std::int64_t>(0, r + kWidth - to) * columns_;
      float* const behind = o + to * columns_;
      std::copy_n(behind, others, kept_);
      for (std::int64_t c = 0; c < columns_; c += kWidth)
        unit_.multiply(rows_as_they_lie(bytes(weights_ + r * attention::kTile), 2 * attention::kTile),
                       values_ + c / kSide * kSteps * kUnitBytes, kSteps * kUnitBytes, kSteps,
                       o + r * columns_ + c, columns_, true);
      std::copy_n(kept_, others, behind);
    }
  }

 private:
  // `count` rows of `width` where they lie, if they do so as those of a matrix of `room` columns; else a copy.
  struct Lines {
    const std::uint16_t* first;
    std::int64_t stride;
  };
  template <class At>
  Lines lines(At at, std::int64_t count, std::int64_t width, std::int64_t room) const {
    const auto place = [&](std::int64_t i) { return reinterpret_cast<std::intptr_t>(at(i)); };
    const std::int64_t step = place(1) - place(0);
    std::int64_t n = width == room && place(0) != 0 && place(1) != 0 ? 2 : 0;
    while (n > 0 && n < count && place(n) == place(0) + n * step) ++n;
    if (n == count) return {static_cast<const std::uint16_t*>(at(0)), step / 2};
    for (std::int64_t i = 0; i < count; ++i) copy_row(at(i), width, some_ + i * room, room);
    return {some_, room};
  }

  const MatrixUnit& unit_;
  const InUse tiles_;
  const Problem& p_;
  const std::int64_t steps_, depth_, columns_;
  std::byte *keys_, *values_;
  std::uint16_t *q_, *weights_, *some_;
  float* kept_;
};

template <class L, int W, const MatrixUnit* (*Unit)()>
inline constexpr Engine kUnitEngine = engine<L, W, UnitTile<L, W, Unit>>();

}  // namespace rlk::native::attention
