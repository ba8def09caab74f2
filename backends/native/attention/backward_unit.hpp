// Gradients on a matrix unit, bf16 (arithmetic amx/k32/attn128): the five products are 32 rows by 32 columns at a time, all else is
// the vector code of backward.hpp.
//
// Whatever is summed over has to be a second operand's depth: keys lie packed by rows for scores and by lines for d_q, queries
// and d_out by lines for d_k and d_v, beside P and dS turned.
#pragma once

#include "native/attention/backward.hpp"
#include "native/attention/unit.hpp"

namespace rlk::native::attention {

template <class L, int W, const MatrixUnit* (*Unit)()>
class UnitPairs : public OfHead {
  using Row = native::Row<L, W>;
  static constexpr std::int64_t kUnitBytes = native::kTile, kUnitFloats = kUnitBytes / 4;
  static constexpr std::int64_t kKeySteps = attention::kTile / kStep, kGroups = attention::kTile / kSide,
                                kRowSteps = kRows / kStep;
  static_assert(kRows % kWidth == 0);

 public:
  static constexpr std::int64_t kAligned = kStep;
  static constexpr std::int64_t kSpare = kWidth - 1;
  static constexpr std::int64_t kAll = kRows + kSpare;
  std::int64_t count = 0;  // keys of the tile

  UnitPairs(const Backward& b, std::int64_t sequence, std::int64_t head, float*& scratch)
      : OfHead(b, sequence, head),
        unit_(*Unit()),
        tiles_(unit_),
        d_(pitch(p.width)),
        dv_(pitch(p.value_width)) {
    const auto take = [&scratch](std::int64_t floats) { return std::exchange(scratch, scratch + floats); };
    keys_ = bytes(take(attention::kTile * d_ / 2)), values_ = bytes(take(attention::kTile * dv_ / 2));
    key_lines_ = bytes(take(attention::kTile * d_ / 2));
    q_lines_ = bytes(take(kRows * d_ / 2)), d_out_lines_ = bytes(take(kRows * dv_ / 2));
    q_ = halves(take(kAll * d_ / 2)), d_out_ = halves(take(kAll * dv_ / 2));
    lines_ = halves(take(kStep * std::max(d_, dv_) / 2));
    ds_ = halves(take(kAll * attention::kTile / 2));
    turned_p_ = halves(take(attention::kTile * kRows / 2));
    turned_ds_ = halves(take(attention::kTile * kRows / 2));
    weights_ = take(kAll * attention::kTile), slopes_ = take(kAll * attention::kTile);
    turned_ = take(attention::kTile * kRows), wide_ = take(dv_);
  }
  static std::int64_t scratch_floats(const Problem& p) {
    constexpr std::int64_t kKeys = attention::kTile;
    const std::int64_t d = pitch(p.width), dv = pitch(p.value_width);
    return (2 * kKeys * d + kKeys * dv + (kRows + kAll) * (d + dv) + kStep * std::max(d, dv)) / 2 +
           kAll * kKeys / 2 + kKeys * kRows + 2 * kAll * kKeys + kKeys * kRows + dv;
  }
  static std::int64_t pitch(std::int64_t width) { return up(width, kWidth); }
  std::int64_t room() const { return attention::kTile; }

  // Keys [at, at + kTile) as far as there are; zeros behind the last.
  void load_keys(std::int64_t at) {
    count = std::min<std::int64_t>(attention::kTile, keys - at);
    const auto rows_of = [&](const attn128::Tensor& t, std::int64_t first, std::int64_t rows,
                             std::int64_t width, std::int64_t room) {
      for (std::int64_t i = 0; i < rows; ++i)
        copy_row(first + i < count ? p.key(t, n, key_rows, at + first + i, h) : nullptr, width,
                 lines_ + i * room, room);
    };
    for (std::int64_t s = 0; s < kKeySteps; ++s) {
      rows_of(p.k, s * kStep, kStep, p.width, d_);
      for (std::int64_t half = 0; half < 2; ++half)
        unit_.pack_rows(lines_ + half * kSide * d_, d_, kSide, d_,
                        keys_ + (2 * s + half) * d_ / kStep * kUnitBytes);
      unit_.pack_lines(lines_, d_, kStep, d_, false, key_lines_ + s * kUnitBytes, kKeySteps * kUnitBytes);
      rows_of(p.v, s * kStep, kStep, p.value_width, dv_);
      for (std::int64_t half = 0; half < 2; ++half)
        unit_.pack_rows(lines_ + half * kSide * dv_, dv_, kSide, dv_,
                        values_ + (2 * s + half) * dv_ / kStep * kUnitBytes);
    }
  }
  void load_row(int r, std::int64_t i, std::int64_t head) {
    const std::int64_t token = p.q_begin(n) + i;
    copy_row(p.q.at(n, token, head), p.width, q_ + r * d_, d_);
    copy_row(g.d_out.at(n, token, head), p.value_width, d_out_ + r * dv_, dv_);
  }
  const float* row_of_d_out(int r) {
    Row::widen(rows::Type::bf16, d_out_ + r * dv_, wide_, p.value_width);
    return wide_;
  }

  void multiply(int from, int to) {
    for (std::int64_t r = from; r < to; r += kWidth)
      for (std::int64_t group = 0; group < kGroups; group += 2) {
        const std::int64_t at = r * attention::kTile + group * kSide;
        product(q_ + r * d_, d_, keys_, group, d_ / kStep, weights_ + at, attention::kTile, false);
        product(d_out_ + r * dv_, dv_, values_, group, dv_ / kStep, slopes_ + at, attention::kTile, false);
      }
  }
  void weigh(int r, std::int64_t i, std::int64_t at, Stat stat) {
    float *w = weights_ + r * attention::kTile, *s = slopes_ + r * attention::kTile;
    slopes<L, W>(p, stat, attention::kTile, w, s);
    hide(p.visible(offset + i, keys), at, attention::kTile, w, s);
    Row::narrow(rows::Type::bf16, s, ds_ + r * attention::kTile, attention::kTile);
  }
  void multiply_keys(int from, int to, float* part) const {
    for (std::int64_t r = from; r < to; r += kWidth)
      for (std::int64_t c = 0; c < d_; c += kWidth)
        product(ds_ + r * attention::kTile, attention::kTile, key_lines_, c / kSide, kKeySteps,
                part + (r - from) * d_ + c, d_, false);
  }
  void add_rows(int depth, float* d_k, float* d_v) {
    const std::int64_t steps = up(depth, kStep) / kStep;
    if (d_k) {
      turn(slopes_, depth, turned_ds_);
      pack(q_, d_, depth, q_lines_);
      add(turned_ds_, q_lines_, d_, steps, d_k);
    }
    if (d_v) {
      turn(weights_, depth, turned_p_);
      pack(d_out_, dv_, depth, d_out_lines_);
      add(turned_p_, d_out_lines_, dv_, steps, d_v);
    }
  }

 private:
  // 32 rows by the 32 columns from `group` on, of `steps` of depth.
  void product(const std::uint16_t* rows, std::int64_t stride, const std::byte* second, std::int64_t group,
               std::int64_t steps, float* sums, std::int64_t sums_pitch, bool more) const {
    unit_.multiply(rows_as_they_lie(reinterpret_cast<const std::byte*>(rows), 2 * stride),
                   second + group * steps * kUnitBytes, steps * kUnitBytes, steps, sums, sums_pitch, more);
  }
  // [rows, keys] as first operands [keys, rows], rounded; zeros where a step has no row.
  void turn(float* from, int depth, std::uint16_t* to) {
    const std::int64_t rows = up(depth, kStep);
    std::fill_n(from + depth * attention::kTile, (rows - depth) * attention::kTile, 0.0f);
    for (std::int64_t r = 0; r < rows; r += kSide)
      for (std::int64_t j = 0; j < attention::kTile; j += kSide)
        unit_.turn(from + r * attention::kTile + j, attention::kTile, turned_ + j * kRows + r, kRows);
    for (std::int64_t j = 0; j < attention::kTile; ++j)
      Row::narrow(rows::Type::bf16, turned_ + j * kRows, to + j * kRows, rows);
  }
  // Rows as second operands whose depth they are.
  void pack(std::uint16_t* from, std::int64_t width, int depth, std::byte* to) const {
    const std::int64_t rows = up(depth, kStep), steps = rows / kStep;
    std::fill_n(from + depth * width, (rows - depth) * width, std::uint16_t{0});
    for (std::int64_t s = 0; s < steps; ++s)
      unit_.pack_lines(from + s * kStep * width, width, kStep, width, false, to + s * kUnitBytes,
                       steps * kUnitBytes);
  }
  void add(const std::uint16_t* turned, const std::byte* lines, std::int64_t width, std::int64_t steps,
           float* sums) const {
    for (std::int64_t j = 0; j < count; j += kWidth)
      for (std::int64_t c = 0; c < width; c += kWidth)
        product(turned + j * kRows, kRows, lines, c / kSide, steps, sums + j * width + c, width, true);
  }

  const MatrixUnit& unit_;
  const InUse tiles_;
  const std::int64_t d_, dv_;  // channels, whole tiles of them
  std::byte *keys_, *values_, *key_lines_, *q_lines_, *d_out_lines_;
  std::uint16_t *q_, *d_out_, *lines_, *ds_, *turned_p_, *turned_ds_;
  float *weights_, *slopes_, *turned_, *wide_;
};

template <class L, int W, const MatrixUnit* (*Unit)()>
inline constexpr BackwardEngine kUnitBackward = backward_engine<L, W, UnitPairs<L, W, Unit>>();

}  // namespace rlk::native::attention
