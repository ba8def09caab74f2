// The seam between logp's implementations on a GPU and their kernels, which different compilers build. A launch returns the
// error's text, or null.
#pragma once

#include "arithmetic/logp/logp.hpp"

namespace rlk::simt::logp {

using lse128::Matrix;
using lse128::Merge;
using lse128::Problem;
using lse128::State;

// Columns [begin, end) of the call's leaf number `leaf`, from its start or whole tiles behind it; or all leaves of the call.
struct Panel {
  Matrix logits;
  std::int64_t begin, end;
  int leaf;

  RLK_HD std::int64_t width() const { return end - begin; }
};
inline Panel whole(const Problem& p) { return {p.logits, 0, p.here, 0}; }

// Bytes of what the leaves of all rows leave.
inline std::int64_t states_bytes(const Problem& p) {
  return p.rows * p.count * static_cast<std::int64_t>(sizeof(State));
}

const char* run_forward(const Problem& p, void* states, void* stream, int device);
const char* run_backward(const Problem& p, void* states, void* stream, int device);
const char* run_merge(const Merge& m, void* stream, int device);

// The pieces of those, for who has a panel of logits at a time. A panel goes on from the one before it in its leaf; the first
// of the first leaf also sets the `targets`, of which each panel writes those that it has. Columns of `to` beyond the panel's
// are +0.
const char* run_fold(const Problem& p, const Panel& panel, State* states, float* targets, void* stream,
                     int device);
const char* run_finish(const Problem& p, State* states, const float* targets, void* stream, int device);
const char* run_count(const Problem& p, void* stream, int device);
const char* run_gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                         const State* states, void* stream, int device);

}  // namespace rlk::simt::logp
