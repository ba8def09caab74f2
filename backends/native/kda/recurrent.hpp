// KDA token by token with a state in fp64: the golden form (arithmetic fma64), forward, backward and decode.
//
// Inputs are upcast exactly, every dot product is one ascending fp64 fma chain, each result is rounded once.
// Backward replays 64 tokens at a time from states kept at every 64th token; nothing is ever divided by a
// decay.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arithmetic/bump.hpp"
#include "arithmetic/kda/problem.hpp"

namespace rlk::native::kda::recurrent {

using namespace rlk::kda;

// Work comes in independent tasks: forward one per (sequence, value head), backward one per (sequence, q/k
// head). Tasks may run in any order on any number of threads, each with its own scratch (8-byte aligned).
std::int64_t forward_tasks(const Problem& p);
std::size_t forward_scratch(const Problem& p);
void forward(const Problem& p, std::int64_t task, void* scratch);

// Backward also fills `partials`, one per call: sums for d_a_log and d_dt_bias by sequence. finish() adds
// them up in order after all tasks are done.
std::int64_t backward_tasks(const Problem& p);
std::size_t backward_scratch(const Problem& p);
std::size_t partials_bytes(const Problem& p);
void backward(const Problem& p, std::int64_t task, void* scratch, double* partials);
void finish(const Problem& p, const double* partials);

// The tokens after the open chunk's rows; a task is one (sequence, value head).
std::size_t step_scratch(const Step& p);
void step(const Step& p, std::int64_t task, void* scratch);

// The gate alone, one token at a time; its gradients, one value head at a time.
void gate(const Problem& p, std::int64_t token);
void gate_backward(const Problem& p, int value_head);

// ---- what the files of this form share

// One token of one value head, upcast, normalised and activated.
struct Token {
  double *q, *k, *v, *decay;
  double beta, q_norm, k_norm;
};
Token take_token(const Problem& p, simt::Bump<double>& bump);
void read_token(const Problem& p, std::int64_t row, std::int64_t t, int hv, Token& token);

// States as [K, V] in fp64; a result is rounded once.
void read_state(const Problem& p, const States& s, std::int64_t n, int hv, double* out);
void write_state(const Problem& p, const States& s, std::int64_t n, int hv, const double* in);
void store64(void* p, Float type, std::int64_t i, double x);

}  // namespace rlk::native::kda::recurrent
