// Fixed-shape oneDNN products, each one thread wide and each held against its rule before it is used.
//
// A [rows, K] x [K, kPanel] -> fp32 product exists for a few heights; rows of a call are cut into these
// heights (the last one filled with zero rows), columns into panels. Which height computes a row does not
// matter because every one of them has reproduced the rule. Rejected: one primitive of the caller's shape,
// whose bits change with M and with the number of threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <dnnl.hpp>
#include <memory>
#include <string>

#include "rules.hpp"

namespace rlk::onednn {

inline constexpr std::int64_t kPanel = 128;
inline constexpr std::array<std::int64_t, 3> kHeights{128, 64, 32};

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

  // The result of `height` (one of kHeights) dense source rows against `count` rows of the weight, of which
  // `panel` is the packed form where there is one: [height][kPanel], valid until the next use of room.
  const float* run(std::int64_t height, const void* source, const void* rows, std::int64_t count,
                   const void* panel, std::byte* room) const;

  // A panel packed into room, for several runs.
  const void* pack_here(const void* rows, std::int64_t count, std::byte* room) const;

  // Whether run without a panel reads the rows as they lie; otherwise it packs them first, each time.
  bool reads_in_place(std::int64_t height, std::int64_t count) const {
    return height <= kHeights[1] && count == kPanel && padded == depth;
  }

  // The combination's products, made and held against the rule on first use; they live for ever.
  static const Products& of(Type type, std::int64_t depth, std::int64_t weight_stride);

 private:
  Products(Type type, std::int64_t depth, std::int64_t weight_stride);
  void build();
  std::string certify() const;

  struct Room {
    std::size_t result = 0, panel = 0, rows = 0, scratchpad = 0, total = 0;
  };
  std::array<Product, kHeights.size()> packed_;
  std::array<Product, kHeights.size()> plain_;  // on the weight as it lies; not for the tallest
  dnnl::memory::desc rows_, dense_rows_;
  dnnl::reorder pack_rows_, pack_dense_rows_;
  Room room_;
};

}  // namespace rlk::onednn
