// Whether the tables have a row for every token.
#pragma once

#include <string>

#include "arithmetic/qk_norm_rope/problem.hpp"

namespace rlk::native::qk_norm_rope {

inline std::string check_positions(const rlk::rms32_rope32::Problem& p) {
  for (std::int64_t token = 0; token < p.tokens; ++token)
    if (const std::int64_t at = p.position(token); at < 0 || at >= p.rows)
      return "qk_norm_rope: token " + std::to_string(token) + " is at position " + std::to_string(at) +
             ", cos has " + std::to_string(p.rows) + " rows";
  return {};
}

}  // namespace rlk::native::qk_norm_rope
