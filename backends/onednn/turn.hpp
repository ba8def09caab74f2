// A panel of the weight turned for fp32 products: `rows` have kPanel rows of `depth` numbers, `to` becomes
// [kPanel / width][depth][width]. oneDNN's own way there takes three times as long.
#pragma once

#include <cstdint>

namespace rlk::onednn {

bool can_turn();
void turn(const float* rows, std::int64_t stride, std::int64_t depth, std::int64_t width, float* to);

}  // namespace rlk::onednn
