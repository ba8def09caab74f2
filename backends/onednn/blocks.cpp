#include "onednn/blocks.hpp"

#include <cstring>

#include "onednn/wide.hpp"

namespace rlk::onednn {
namespace {

std::int64_t full_block(Rule rule, std::int64_t depth) {
  const std::int64_t block = depth_block(rule);
  return block == 0 ? depth : std::min(depth, block);
}

RLK_WIDE void add_sums(float* total, const float* part, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) total[i] += part[i];
}

// bf16 is the upper half of the fp32 number.
RLK_WIDE void upper_halves(const std::uint32_t* from, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::uint16_t>(from[i] >> 16);
}

}  // namespace

Blocks::Blocks(Rule r, Float t, std::int64_t k, std::int64_t stride)
    : rule(r),
      element(t),
      type(operand_of(r, t)),
      depth(k),
      weight_stride(stride),
      count((k + full_block(r, k) - 1) / full_block(r, k)),
      full_depth(full_block(r, k)),
      full(Products::of(r, type, full_depth, upcasts() ? full_depth : stride)),
      last(Products::of(r, type, k - (count - 1) * full_depth,
                        upcasts() ? k - (count - 1) * full_depth : stride)) {}

std::size_t Blocks::panel_bytes() const {
  return static_cast<std::size_t>(count - 1) * full.panel_bytes() + last.panel_bytes();
}

// A worker's room: totals of several blocks, a panel packed on the spot, one block upcast, the products' own.
std::size_t Blocks::products_room() const {
  const std::int64_t elements = kPanel * full_depth;
  return wide_room() +
         (upcasts() ? line(std::max(full.panel_bytes(), static_cast<std::size_t>(elements) * sizeof(float)))
                    : 0);
}
std::size_t Blocks::scratch_bytes() const {
  return products_room() + std::max(full.scratch_bytes(), last.scratch_bytes());
}

const void* Blocks::rows_of(std::int64_t b, const void* rows, std::int64_t columns, std::byte* room) const {
  const auto* from = static_cast<const std::byte*>(rows) + b * full_depth * bytes_of(element);
  if (!upcasts()) return from;
  auto* wide = reinterpret_cast<float*>(room + wide_room());
  const std::int64_t width = block(b).depth;
  for (std::int64_t j = 0; j < columns; ++j)
    upcast(element, from + j * weight_stride * bytes_of(element), width, wide + j * width);
  return wide;
}

const std::byte* Blocks::panel_of(std::int64_t b, Panel panel, std::byte* room) const {
  const std::size_t at = static_cast<std::size_t>(b) * full.panel_bytes();
  if (!panel.narrow) return panel.data + at;
  std::byte* wide = room + wide_room();
  upcast(element, panel.data + at / 2, static_cast<std::int64_t>(block(b).panel_bytes() / sizeof(float)),
         reinterpret_cast<float*>(wide));
  return wide;
}

Panel Blocks::pack_here(const void* rows, std::int64_t columns, std::byte* room) const {
  std::byte* panel = room + kPlaces * kResultBytes;
  for (std::int64_t b = 0; b < count; ++b)
    block(b).pack(rows_of(b, rows, columns, room), columns,
                  panel + static_cast<std::size_t>(b) * full.panel_bytes(), room + products_room());
  return {panel, false};
}

void Blocks::keep(const void* rows, std::int64_t columns, std::byte* kept, std::byte* room) const {
  const Panel panel = pack_here(rows, columns, room);
  if (upcasts())
    upper_halves(reinterpret_cast<const std::uint32_t*>(panel.data),
                 static_cast<std::int64_t>(panel_bytes() / sizeof(float)),
                 reinterpret_cast<std::uint16_t*>(kept));
  else
    std::memcpy(kept, panel.data, panel_bytes());
}

void Blocks::add(float* total, const float* part, std::int64_t height) {
  add_sums(total, part, height * kPanel);
}

}  // namespace rlk::onednn
