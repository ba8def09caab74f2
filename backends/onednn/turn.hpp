// A panel of the weight turned for fp32 products: `rows` have kPanel rows of `depth` numbers, `to` becomes
// [kPanel / width][depth][width]. oneDNN's own way there takes three times as long.
//
// And one row against such a panel, or against the rows themselves, in one ascending FMA chain a column: memory
// is all that takes time then, where a call of a product for each short block costs a third on top.
#pragma once

#include <cstdint>

namespace rlk::onednn {

bool can_turn();
void turn(const float* rows, std::int64_t stride, std::int64_t depth, std::int64_t width, float* to);

void row_times_panel(const float* row, const float* panel, std::int64_t depth, std::int64_t width,
                     float* sums);

inline constexpr std::int64_t kRowColumns = 16;  // columns that row_times_rows computes
void row_times_rows(const float* row, const float* rows, std::int64_t stride, std::int64_t depth,
                    float* sums);

}  // namespace rlk::onednn
