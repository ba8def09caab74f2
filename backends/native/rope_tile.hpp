// The seam between the rope driver and its vector kernels: one function per instruction set, chosen at run
// time. All of them compute arithmetic "rope32" (backends/simt/rope_math.hpp), so the choice never changes a
// bit.
#pragma once

#include <cstdint>

#include "rlk/rope_geometry.hpp"

namespace rlk::native::rope {

// A box of work: tokens [token, token_end) of one batch row, all heads of all parts.
struct Tile {
  std::int64_t batch = 0, token = 0, token_end = 0;
  bool stream = false;  // write around the caches: the result is larger than they are
};

using TileFunction = void (*)(const rlk::rotary::Geometry&, const Tile&);

void tile_scalar(const rlk::rotary::Geometry&, const Tile&);
void tile_avx2(const rlk::rotary::Geometry&, const Tile&);
void tile_avx512(const rlk::rotary::Geometry&, const Tile&);

using KvTileFunction = void (*)(const rlk::rotary::KvGeometry&, const Tile&, bool backward);

void kv_tile_scalar(const rlk::rotary::KvGeometry&, const Tile&, bool backward);
void kv_tile_avx2(const rlk::rotary::KvGeometry&, const Tile&, bool backward);
void kv_tile_avx512(const rlk::rotary::KvGeometry&, const Tile&, bool backward);

}  // namespace rlk::native::rope
