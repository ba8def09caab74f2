// Fixed-shape oneDNN products, each one thread wide and each held against its rule before it is used.
//
// A [rows, K] x [K, kPanel] -> fp32 product exists for a few heights; rows of a call are cut into these
// heights (the last one filled with zero rows), columns into panels. Which height computes a row does not
// matter because every one of them has reproduced the rule. Rejected: one primitive of the caller's shape,
// whose bits change with M and with the number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <dnnl.hpp>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "onednn/rules.hpp"

namespace rlk::onednn {

// Rows of a product. Which of them hold a rule is found out on the processor at hand; a set of heights is a
// bit each.
inline constexpr std::array<std::int64_t, 13> kHeights{128, 96, 64, 48, 36, 32, 24, 16, 12, 10, 8, 4, 1};
using HeightSet = std::uint32_t;
constexpr bool has(HeightSet set, std::size_t i) { return (set >> i & 1u) != 0; }
constexpr HeightSet set_of(std::initializer_list<std::int64_t> heights) {
  HeightSet set = 0;
  for (const std::int64_t h : heights)
    for (std::size_t i = 0; i < kHeights.size(); ++i) set |= HeightSet{kHeights[i] == h} << i;
  return set;
}

// Results that a worker may hold at a time, side by side.
inline constexpr std::int64_t kPlaces = 4;
inline constexpr std::size_t kResultBytes = sizeof(float) * kHeights[0] * kPanel;

// How rows are cut into the heights at hand: the tallest as often as it fits, then the lowest that holds what
// is left, filled up with zero rows. (Two low ones instead would read the weight twice.)
struct Cut {
  std::int64_t rows, count, tallest = 0;
  Cut(std::int64_t m, HeightSet heights) {
    for (std::size_t i = kHeights.size(); i-- > 0;)
      if (has(heights, i)) tallest = kHeights[i];
    if (tallest == 0) {  // refused
      rows = count = 0;
      return;
    }
    const std::int64_t tall = m / tallest * tallest;
    rows = tall;
    for (std::size_t i = 0; i < kHeights.size(); ++i)
      if (has(heights, i) && m > tall && kHeights[i] >= m - tall) rows = tall + kHeights[i];
    count = (rows + tallest - 1) / tallest;
  }
  std::int64_t row(std::int64_t i) const { return i * tallest; }
  std::int64_t height(std::int64_t i) const { return std::min(tallest, rows - row(i)); }
};

// oneDNN at one OpenMP thread for a scope, on this thread only: the setting belongs to the calling thread and
// is put back.
class OneThread {
 public:
  OneThread() noexcept;
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int saved_;
};

struct Product {
  dnnl::matmul primitive;
  dnnl::memory::desc source, weights, result, scratchpad;
};

// Everything for one rule, operand type, K and row stride of the weight.
class Products {
 public:
  Rule rule;
  Float type;
  std::int64_t depth;          // K
  std::int64_t padded;         // K as the primitives see it: a multiple of 32 for 16-bit types
  std::int64_t weight_stride;  // in elements
  HeightSet heights = 0;       // that reproduced the rule
  std::string refusal;         // why none may be used; empty: those above may

  std::size_t panel_bytes() const { return packed_[0].weights.get_size(); }
  std::size_t scratch_bytes() const { return room_.total; }  // per worker

  // `count` <= kPanel rows of a weight in the layout of packed products.
  void pack(const void* rows, std::int64_t count, void* panel, std::byte* room) const;

  // The same of a matrix whose columns are next to each other: `steps` <= padded lines of `count` <= kPanel
  // columns.
  void pack_columns(const void* lines, std::int64_t stride, std::int64_t steps, std::int64_t count,
                    void* panel, std::byte* room) const;

  // The result of `height` (one of kHeights) dense source rows against `count` rows of the weight, of which
  // `panel` is the packed form where there is one: [height][kPanel] at `to`, or in the room until that is used
  // again.
  const float* run(std::int64_t height, const void* source, const void* rows, std::int64_t count,
                   const void* panel, std::byte* room, float* to = nullptr) const;

  // Whether run without a panel reads the rows as they lie; otherwise it packs them first, each time.
  bool reads_in_place(std::int64_t height, std::int64_t count) const {
    return count == kPanel && in_place_[index_of(height)] && (!one_row() || height <= kInPlace);
  }

  // One row needs no product: row_times_panel and row_times_rows keep the rule, and are faster.
  bool one_row() const { return rule == Rule::kb256 && turned_ != 0; }

  // The combination's products, made and held against the rule on first use; they live for ever.
  static const Products& of(Rule rule, Float type, std::int64_t depth, std::int64_t weight_stride);

 private:
  Products(Rule rule, Float type, std::int64_t depth, std::int64_t weight_stride);
  void build();
  void certify();
  bool reproduces(std::size_t height, const std::byte* panel, std::span<const std::byte> source,
                  const std::byte* weight, std::span<const float> expected, std::byte* room) const;
  bool takes_pairs(std::byte* room);
  std::int64_t turned_width(const std::byte* rows, const std::byte* panel) const;
  // A panel as 32-bit words: numbers of an fp32 weight, pairs of steps of a bf16 one.
  void turn_words(const void* rows, std::int64_t width, void* panel) const;

  static std::size_t index_of(std::int64_t height) {
    std::size_t i = 0;
    while (kHeights[i] != height) ++i;
    return i;
  }

  struct Room {
    std::size_t result = 0, panel = 0, rows = 0, scratchpad = 0, total = 0;
  };
  std::array<Product, kHeights.size()> packed_;
  std::array<Product, kHeights.size()> plain_;    // on the weight as it lies
  std::array<bool, kHeights.size()> in_place_{};  // which of those reproduced the rule
  // Beyond so many rows a panel turned by our own code is worth it.
  static constexpr std::int64_t kInPlace = 48;
  std::int64_t turned_ = 0;  // width of the columns of a panel that turn() makes; 0: it has another layout
  bool pairs_ = false;       // pack_columns knows the layout of a panel
  dnnl::memory::desc rows_, dense_rows_, dense_columns_;
  dnnl::reorder pack_rows_, pack_dense_rows_, pack_dense_columns_;
  Room room_;
};

}  // namespace rlk::onednn
