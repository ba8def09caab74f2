// The rope ops on the CPU, below the registry: from a Geometry to tiles that any thread may run in any order.
#pragma once

#include <string>

#include "native/levels.hpp"
#include "native/rope/tile.hpp"

namespace rlk::native::rope {

// Stores around the caches, where the results' alignment allows them: when the result is large, always, or
// never.
enum class Stores { by_size, streamed, cached };

struct TilePlan {
  const Kernels* kernels = nullptr;
  std::int64_t tokens_per_tile = 1, heads_per_tile = 1, tiles_per_batch = 0, head_tiles = 1, tiles = 0;
  std::int64_t heads = 0;
  bool stream = false;
};

TilePlan plan(const rlk::rotary::Geometry& g, Isa isa, Stores stores = Stores::by_size);
void run_tile(const rlk::rotary::Geometry& g, const TilePlan& plan, std::int64_t index);

TilePlan plan(const rlk::rotary::KvGeometry& g, Isa isa, Stores stores = Stores::by_size);
void run_tile(const rlk::rotary::KvGeometry& g, bool backward, const TilePlan& plan, std::int64_t index);

// Table rows that positions, starts or cu_seqlens ask for, against the rows there are. Empty if all exist.
std::string check_rows(const char* op, const rlk::rotary::Geometry& g);

}  // namespace rlk::native::rope
