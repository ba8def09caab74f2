// The seam between the rope implementations of a GPU backend, compiled by the host compiler, and their
// kernels, compiled by the device compiler. Every function returns null, or the runtime's words for what went
// wrong.
#pragma once

#include "registry/rope/geometry.hpp"

namespace rlk::simt {

struct RotaryTable;

namespace rope {

const char* run_rotate(const rotary::Geometry& g, void* stream, int device);
const char* run_split(const rotary::KvGeometry& g, bool backward, void* stream, int device);
const char* run_tables(const RotaryTable& t, void* stream, int device);

}  // namespace rope
}  // namespace rlk::simt
