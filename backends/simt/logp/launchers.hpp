// The seam between logp's implementations on a GPU and their kernels, which different compilers build. A launch returns the
// error's text, or null.
#pragma once

#include "arithmetic/logp/logp.hpp"

namespace rlk::simt::logp {

using lse128::Merge;
using lse128::Problem;
using lse128::State;

// Bytes of what the leaves of all rows leave.
inline std::int64_t states_bytes(const Problem& p) {
  return p.rows * p.count * static_cast<std::int64_t>(sizeof(State));
}

const char* run_forward(const Problem& p, void* states, void* stream, int device);
const char* run_backward(const Problem& p, void* states, void* stream, int device);
const char* run_merge(const Merge& m, void* stream, int device);

}  // namespace rlk::simt::logp
