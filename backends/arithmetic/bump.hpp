// A bump allocator over a caller's scratch, for host and device.
#pragma once

#include <cstdint>

#include "arithmetic/half.hpp"

namespace rlk::simt {

// Every piece is a multiple of `Unit` elements. With a null base it only counts.
template <class T, std::int64_t Unit = 1>
struct Bump {
  T* base;
  std::int64_t used = 0;

  RLK_HD T* take(std::int64_t n) {
    T* piece = base ? base + used : nullptr;
    used += (n + Unit - 1) / Unit * Unit;
    return piece;
  }
};

}  // namespace rlk::simt
