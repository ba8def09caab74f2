// The end of every product: fp32 sums rounded to the result's dtype, a bias added and rounded again, a NaN
// written as the canonical one (0x7fffffff, in 16 bits 0x7fff).
#pragma once

#include <cstdint>

#include "rlk/tensor.hpp"

namespace rlk::onednn {

void finish(const float* sums, std::int64_t count, const float* bias, DType type, void* out);

}  // namespace rlk::onednn
