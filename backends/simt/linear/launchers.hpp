// The seam between linear's implementations on a GPU and their kernel, which is lm_head's. A launch returns the error's text,
// or null.
#pragma once

#include "simt/lm_head/product.hpp"

namespace rlk::simt::linear {

using lm_head::Product;

const char* run(const Product& p, void* stream, int device);

}  // namespace rlk::simt::linear
