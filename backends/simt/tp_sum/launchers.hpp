// The seam between tp_sum's implementation on a GPU and its kernel, which different compilers build. A launch returns the
// error's text, or null.
#pragma once

#include "arithmetic/tp_sum/sum.hpp"

namespace rlk::simt::tp_sum {

using rlk::tree8::Problem;
using rlk::tree8::Spread;

const char* run(const Problem& p, void* stream, int device);
const char* run(const Spread& p, void* stream, int device);

}  // namespace rlk::simt::tp_sum
