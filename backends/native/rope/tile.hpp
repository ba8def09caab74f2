// The seam between the rope driver and its vector kernels: one pair of functions per instruction set, chosen
// at run time. All of them compute arithmetic "rope32" (arithmetic/rope/math.hpp), so the choice never
// changes a bit.
#pragma once

#include <cstdint>

#include "registry/rope/geometry.hpp"

namespace rlk::native::rope {

// A box of work: tokens [token, token_end) of one batch row, heads [head, head_end) of all parts' heads in
// their order (the key-value split takes every head).
struct Tile {
  std::int64_t batch = 0, token = 0, token_end = 0, head = 0, head_end = 0;
  bool stream = false;  // write around the caches: the result is larger than they are
};

// Rotation factors held at once, 4 KiB of each of four kinds: they share the first-level cache with the rows
// that stream past. At 64 pairs they are those of 16 tokens.
inline constexpr int kFactors = 1024;
inline constexpr int kPairs = 256;  // of one token

inline int factor_stride(int pairs) { return pairs < kPairs ? (pairs + 15) / 16 * 16 : kPairs; }

// Memory runs on along the tokens of a head (bhsd), not along the heads of a token.
inline bool heads_are_far(const rlk::rotary::Part& part) { return part.x_head > part.x_token; }

struct Kernels {
  void (*tile)(const rlk::rotary::Geometry&, const Tile&);
  void (*kv_tile)(const rlk::rotary::KvGeometry&, const Tile&, bool backward);
};
extern const Kernels kScalar, kAvx2, kAvx512;  // null where the compiler cannot make them

}  // namespace rlk::native::rope
