// The seam between the rope implementations of a GPU backend, compiled by the host compiler, and their
// kernels, compiled by the device compiler. Every function returns null, or the runtime's words for what went
// wrong.
#pragma once

#include "arithmetic/rope/table_math.hpp"

namespace rlk::simt::rope {

const char* run_rotate(const rotary::Geometry& g, void* stream, int device);
const char* run_split(const rotary::KvGeometry& g, bool backward, void* stream, int device);
const char* run_tables(const rotary::RotaryTable& t, void* stream, int device);

}  // namespace rlk::simt::rope
