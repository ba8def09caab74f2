// Where kda_step's cache of one sequence and value head holds what (page of kda): by what lies here checks, the rule and
// kernels agree.
#pragma once

#include <cstdint>

namespace rlk::kda {

inline constexpr std::int64_t kCacheBlock = 16;

// Offsets in floats. Rows are `keys` or `values` wide: K and V rounded up to 16, zeros behind them.
struct CacheLayout {
  std::int64_t keys = 0, values = 0, chunk = 0;
  std::int64_t k = 0, decay = 0;  // [C, keys]
  std::int64_t y = 0, n = 0;      // [C, values]
  std::int64_t inverse = 0;       // [C, C], of row i the columns up to i
  std::int64_t tail = 0;          // [keys, C], keys decayed to the end of their block
  std::int64_t start = 0;         // [C / 16, keys], the decay before a block
  std::int64_t whole = 0;         // [C / 16, keys], the decay over a block
  std::int64_t size = 0;
};

constexpr CacheLayout cache_layout(std::int64_t K, std::int64_t V, std::int64_t C) {
  CacheLayout c;
  const auto take = [&c](std::int64_t& at, std::int64_t floats) {
    at = c.size;
    c.size += floats;
  };
  c.keys = (K + 15) / 16 * 16, c.values = (V + 15) / 16 * 16, c.chunk = C;
  take(c.k, C * c.keys), take(c.decay, C * c.keys);
  take(c.y, C * c.values), take(c.n, C * c.values);
  take(c.inverse, C * C), take(c.tail, c.keys * C);
  take(c.start, C / kCacheBlock * c.keys), take(c.whole, C / kCacheBlock * c.keys);
  return c;
}

}  // namespace rlk::kda
