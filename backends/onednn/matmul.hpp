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
#include <memory>
#include <string>

#include "rules.hpp"

namespace rlk::onednn {

inline constexpr std::int64_t kPanel = 128;
inline constexpr std::int64_t kDepthBlock = 4096;  // of 16-bit products: beyond it oneDNN cuts K its own way
inline constexpr std::array<std::int64_t, 6> kHeights{128, 96, 64, 32, 16, 8};

// Results that a worker may hold at a time, side by side.
inline constexpr std::int64_t kPlaces = 4;
inline constexpr std::size_t kResultBytes = sizeof(float) * kHeights[0] * kPanel;

// How rows are cut into heights: the tallest as often as it fits, then the lowest that holds what is left,
// filled up with zero rows. (Two low ones instead would read the weight twice.)
struct Cut {
  std::int64_t rows, count;
  explicit Cut(std::int64_t m) {
    const std::int64_t tall = m / kHeights[0] * kHeights[0];
    rows = tall;
    for (const std::int64_t h : kHeights)
      if (m > tall && h >= m - tall) rows = tall + h;
    count = (rows + kHeights[0] - 1) / kHeights[0];
  }
  std::int64_t row(std::int64_t i) const { return i * kHeights[0]; }
  std::int64_t height(std::int64_t i) const { return std::min(kHeights[0], rows - row(i)); }
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

// Everything for one dtype, K and row stride of the weight.
class Products {
 public:
  Type type;
  std::int64_t depth;          // K
  std::int64_t padded;         // K as the primitives see it: a multiple of 32 for 16-bit types
  std::int64_t weight_stride;  // in elements
  std::string refusal;         // why this combination may not be used; empty: it reproduced its rule

  std::size_t panel_bytes() const { return packed_[0].weights.get_size(); }
  std::size_t scratch_bytes() const { return room_.total; }  // per worker

  // `count` <= kPanel rows of a weight in the layout of packed products.
  void pack(const void* rows, std::int64_t count, void* panel, std::byte* room) const;

  // The same of a matrix whose columns are next to each other: `steps` <= padded lines of `count` <= kPanel
  // columns.
  void pack_columns(const void* lines, std::int64_t stride, std::int64_t steps, std::int64_t count,
                    void* panel, std::byte* room) const;

  // The result of `height` (one of kHeights) dense source rows against `count` rows of the weight, of which
  // `panel` is the packed form where there is one: [height][kPanel], at `place` of the room's kPlaces, valid
  // until that is used again.
  const float* run(std::int64_t height, const void* source, const void* rows, std::int64_t count,
                   const void* panel, std::byte* room, std::int64_t place = 0) const;

  // Whether run without a panel reads the rows as they lie; otherwise it packs them first, each time.
  bool reads_in_place(std::int64_t height, std::int64_t count) const {
    return count == kPanel && in_place_[index_of(height)];
  }

  // The combination's products, made and held against the rule on first use; they live for ever.
  static const Products& of(Type type, std::int64_t depth, std::int64_t weight_stride);

 private:
  Products(Type type, std::int64_t depth, std::int64_t weight_stride);
  void build();
  std::string certify();
  bool takes_pairs(std::byte* room);

  static std::size_t index_of(std::int64_t height) {
    std::size_t i = 0;
    while (kHeights[i] != height) ++i;
    return i;
  }

  struct Room {
    std::size_t result = 0, panel = 0, rows = 0, scratchpad = 0, total = 0;
  };
  std::array<Product, kHeights.size()> packed_;
  std::array<Product, kHeights.size()> plain_;    // on the weight as it lies; not for the tallest
  std::array<bool, kHeights.size()> in_place_{};  // which of those reproduced the rule
  bool pairs_ = false;                            // pack_columns knows the layout of a panel
  dnnl::memory::desc rows_, dense_rows_, dense_columns_;
  dnnl::reorder pack_rows_, pack_dense_rows_, pack_dense_columns_;
  Room room_;
};

// A whole K: one product per depth block, their results added in order.
class Blocks {
 public:
  Blocks(Type type, std::int64_t depth, std::int64_t weight_stride);

  Type type;
  std::int64_t depth, weight_stride;
  std::int64_t count;       // of blocks
  std::int64_t full_depth;  // of every block but the last
  const Products& full;
  const Products& last;

  const Products& block(std::int64_t b) const { return b + 1 == count ? last : full; }
  const std::string& refusal() const { return full.refusal.empty() ? last.refusal : full.refusal; }
  std::size_t panel_bytes() const;
  std::size_t scratch_bytes() const;

  void pack(const void* rows, std::int64_t columns, std::byte* panel, std::byte* room) const;
  const std::byte* pack_here(const void* rows, std::int64_t columns, std::byte* room) const;

  // sources(b): dense rows of block b, `height` of them, each block(b).padded wide.
  template <class Sources>
  const float* run(std::int64_t height, Sources sources, const void* rows, std::int64_t columns,
                   const std::byte* panel, std::byte* room, std::int64_t place) const {
    float* total = reinterpret_cast<float*>(room + place * kResultBytes);
    for (std::int64_t b = 0; b < count; ++b) {
      const auto* part_rows = static_cast<const std::byte*>(rows) + b * full_depth * bytes_of(type);
      const std::byte* part_panel =
          panel == nullptr ? nullptr : panel + static_cast<std::size_t>(b) * full.panel_bytes();
      const float* part =
          block(b).run(height, sources(b), part_rows, columns, part_panel, room + products_room(), place);
      if (count == 1) return part;
      add(total, part, height, b == 0);
    }
    return total;
  }

 private:
  static void add(float* total, const float* part, std::int64_t height, bool first);
  std::size_t products_room() const;
};

}  // namespace rlk::onednn
