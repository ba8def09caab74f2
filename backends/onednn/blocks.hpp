// A whole K: one product per depth block, their results added in order. Where the rule upcasts its operands
// and the weight has 16 bits, a block of the weight is upcast on its way to the product.
#pragma once

#include "onednn/products.hpp"
#include "onednn/turn.hpp"

namespace rlk::onednn {

// A panel of the weight in oneDNN's layout: upcast already, or with the elements' own 16 bits in the places
// of the upcast ones (how a weight is kept: half the memory).
struct Panel {
  const std::byte* data = nullptr;
  bool narrow = false;
};

class Blocks {
 public:
  Blocks(Rule rule, Float element, std::int64_t depth, std::int64_t weight_stride);

  Rule rule;
  Float element, type;  // as the weight lies; as the products take it
  std::int64_t depth, weight_stride;
  std::int64_t count;       // of blocks
  std::int64_t full_depth;  // of every block but the last
  const Products& full;
  const Products& last;

  const Products& block(std::int64_t b) const { return b + 1 == count ? last : full; }
  const std::string& refusal() const { return full.refusal.empty() ? last.refusal : full.refusal; }
  HeightSet heights() const { return full.heights & last.heights; }
  bool upcasts() const { return element != type; }
  std::size_t scratch_bytes() const;

  std::size_t kept_bytes() const { return upcasts() ? panel_bytes() / 2 : panel_bytes(); }
  void keep(const void* rows, std::int64_t columns, std::byte* kept, std::byte* room) const;
  Panel kept(const std::byte* data) const { return {data, upcasts()}; }

  // Packs into the worker's room, for several heights.
  Panel pack_here(const void* rows, std::int64_t columns, std::byte* room) const;

  // sources(b): dense rows of block b, `height` of them, each block(b).padded wide. Without a panel the
  // weight's rows are read.
  template <class Sources>
  const float* run(std::int64_t height, Sources sources, const void* rows, std::int64_t columns, Panel panel,
                   std::byte* room, std::int64_t place) const {
    float* total = reinterpret_cast<float*>(room + place * kResultBytes);
    if (height == 1 && panel.data == nullptr && columns == kPanel && full.one_row() && last.one_row())
      return run_row(sources, rows, total, room);
    for (std::int64_t b = 0; b < count; ++b) {
      const std::byte* part_panel = panel.data == nullptr ? nullptr : panel_of(b, panel, room);
      const void* part_rows = panel.data == nullptr ? rows_of(b, rows, columns, room) : nullptr;
      const float* part = block(b).run(height, sources(b), part_rows, columns, part_panel,
                                       room + products_room(), b == 0 ? total : nullptr);
      if (b != 0) add(total, part, height);
    }
    return total;
  }

 private:
  std::size_t panel_bytes() const;  // with upcast elements
  std::size_t wide_room() const { return kPlaces * kResultBytes + line(panel_bytes()); }
  std::size_t products_room() const;
  static std::size_t line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

  // A few columns at a time through the whole of K, so that the weight's rows are read from end to end.
  template <class Sources>
  const float* run_row(Sources sources, const void* rows, float* total, std::byte* room) const {
    for (std::int64_t j = 0; j < kPanel; j += kRowColumns) {
      const std::byte* group = static_cast<const std::byte*>(rows) + j * weight_stride * bytes_of(element);
      for (std::int64_t b = 0; b < count; ++b) {
        float part[kRowColumns];
        row_times_rows(reinterpret_cast<const float*>(sources(b)),
                       static_cast<const float*>(rows_of(b, group, kRowColumns, room)),
                       block(b).weight_stride, block(b).depth, b == 0 ? total + j : part);
        for (std::int64_t i = 0; b != 0 && i < kRowColumns; ++i) total[j + i] += part[i];
      }
    }
    return total;
  }

  static void add(float* total, const float* part, std::int64_t height);
  // Block b's columns of the weight's rows: as they lie, or upcast into the room.
  const void* rows_of(std::int64_t b, const void* rows, std::int64_t columns, std::byte* room) const;
  const std::byte* panel_of(std::int64_t b, Panel panel, std::byte* room) const;
};

}  // namespace rlk::onednn
