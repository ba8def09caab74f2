// KDA on the CPU, each op twice:
//
//   native.fma32     fma32/kda  chunks in fp32, lanes over channels; an implementation per instruction set
//   native.golden    fma64      token by token with the state in fp64
#include "native/kda/chunk.hpp"
#include "native/kda/recurrent.hpp"
#include "native/kda/run.hpp"
#include "native/levels.hpp"

namespace rlk::native {
namespace {

using namespace rlk::kda;
using namespace kda;

template <class Args>
rlk_verdict supports(const Args& a, const rlk_request&) {
  return check(a);
}

constexpr Facts fma32(const char* doc) {
  return {
      .id = "", .doc = doc, .priority = 100, .arithmetic = "fma32/kda", .dtypes = kTypes, .traits = kTraits};
}
constexpr Facts golden(const char* doc) {
  return {.id = "native.golden",
          .doc = doc,
          .priority = 0,
          .arithmetic = "fma64",
          .dtypes = kTypes,
          .traits = kTraits | RLK_GOLDEN};
}

// ---- fma32/kda

template <Isa I>
constexpr const Engine& kEngine = engine_for(I);

std::uint64_t forward_bytes(const KdaFwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, forward_task_count(p), forward_scratch_bytes(p));
}
template <Isa I>
rlk_code forward(const KdaFwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  run_tasks(call, forward_task_count(p), forward_scratch_bytes(p), 0, [&](std::int64_t task, void* scratch) {
    kEngine<I>.forward(p, task, static_cast<float*>(scratch));
  });
  return RLK_OK;
}

std::uint64_t backward_bytes(const KdaBwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, backward_task_count(p), backward_scratch_bytes(p), partials_bytes(p));
}
template <Isa I>
rlk_code backward(const KdaBwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  double* partials = shared_part(call);
  run_tasks(call, backward_task_count(p), backward_scratch_bytes(p), partials_bytes(p),
            [&](std::int64_t task, void* scratch) {
              kEngine<I>.backward(p, task, static_cast<float*>(scratch), partials);
            });
  kEngine<I>.finish(p, partials);
  return RLK_OK;
}

template <Isa I>
rlk_code decode(const KdaDecode& a, const Call& call) {
  const Problem p = problem_of(a);
  call.parallel_for(p.batch * p.value_heads, [&](std::int64_t task) { kEngine<I>.decode(p, task); });
  return RLK_OK;
}

// Every sequence's rows are in its chunk, and its tokens find room behind them.
rlk_code check_rows(const Step& p, const Call& call) {
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    if (p.fits(n)) continue;
    const std::int64_t rows = p.cached(n), most = p.cache ? p.chunk : 0;
    const std::string who = "kda_step: rows[" + std::to_string(n) + "] is " + std::to_string(rows);
    if (rows < 0 || rows > most)
      return call.fail(RLK_INVALID_ARGUMENT, who + (p.cache ? ", expected 0 to " + std::to_string(most)
                                                            : ", expected 0 without a cache"));
    return call.fail(RLK_INVALID_ARGUMENT, who + " and " + std::to_string(p.length(n)) +
                                               " tokens follow, the chunk has room for " +
                                               std::to_string(p.chunk - rows % p.chunk));
  }
  return RLK_OK;
}
std::uint64_t step_bytes(const KdaStep& a, const rlk_request& request) {
  const Step p = step_of(a);
  return workspace_for(request.threads, p.sequences * p.value_heads, step_scratch_bytes(p));
}
template <Isa I>
rlk_code step(const KdaStep& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Step p = step_of(a);
  if (const rlk_code code = check_rows(p, call)) return code;
  run_tasks(
      call, p.sequences * p.value_heads, step_scratch_bytes(p), 0,
      [&](std::int64_t task, void* scratch) { kEngine<I>.step(p, task, static_cast<float*>(scratch)); });
  return RLK_OK;
}

template <Isa I>
rlk_code gate(const KdaGate& a, const Call& call) {
  const Problem p = gate_problem_of(a);
  call.parallel_for(gate_block_count(p), [&](std::int64_t block) { kEngine<I>.gate(p, block); });
  return RLK_OK;
}

// The partials of the gate's backward are one per block of tokens.
Problem gate_blocks_of(const KdaGateBwd& a) {
  Problem p = gate_problem_of(a);
  p.sequences = gate_block_count(p);
  return p;
}
std::uint64_t gate_backward_bytes(const KdaGateBwd& a, const rlk_request&) {
  return 64 + partials_bytes(gate_blocks_of(a));
}
template <Isa I>
rlk_code gate_backward(const KdaGateBwd& a, const Call& call) {
  const Problem p = gate_blocks_of(a);
  double* partials = shared_part(call);
  call.parallel_for(p.sequences, [&](std::int64_t block) { kEngine<I>.gate_backward(p, block, partials); });
  kEngine<I>.finish(p, partials);
  return RLK_OK;
}

// ---- fma64

template <class Args>
std::uint64_t golden_forward_bytes(const Args& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, recurrent::forward_tasks(p), recurrent::forward_scratch(p));
}
template <class Args>
rlk_code golden_forward(const Args& a, const Call& call) {
  if constexpr (std::is_same_v<Args, KdaFwd>)
    if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  run_tasks(call, recurrent::forward_tasks(p), recurrent::forward_scratch(p), 0,
            [&](std::int64_t task, void* scratch) { recurrent::forward(p, task, scratch); });
  return RLK_OK;
}

std::uint64_t golden_backward_bytes(const KdaBwd& a, const rlk_request& request) {
  const Problem p = problem_of(a);
  return workspace_for(request.threads, recurrent::backward_tasks(p), recurrent::backward_scratch(p),
                       recurrent::partials_bytes(p));
}
rlk_code golden_backward(const KdaBwd& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Problem p = problem_of(a);
  double* partials = shared_part(call);
  run_tasks(call, recurrent::backward_tasks(p), recurrent::backward_scratch(p), recurrent::partials_bytes(p),
            [&](std::int64_t task, void* scratch) { recurrent::backward(p, task, scratch, partials); });
  recurrent::finish(p, partials);
  return RLK_OK;
}

std::uint64_t golden_step_bytes(const KdaStep& a, const rlk_request& request) {
  const Step p = step_of(a);
  return workspace_for(request.threads, recurrent::forward_tasks(p), recurrent::step_scratch(p));
}
rlk_code golden_step(const KdaStep& a, const Call& call) {
  if (const rlk_code code = check_bounds(a, call)) return code;
  const Step p = step_of(a);
  if (const rlk_code code = check_rows(p, call)) return code;
  run_tasks(call, recurrent::forward_tasks(p), recurrent::step_scratch(p), 0,
            [&](std::int64_t task, void* scratch) { recurrent::step(p, task, scratch); });
  return RLK_OK;
}

rlk_code golden_gate(const KdaGate& a, const Call& call) {
  const Problem p = gate_problem_of(a);
  call.parallel_for(p.tokens, [&](std::int64_t token) { recurrent::gate(p, token); });
  return RLK_OK;
}
rlk_code golden_gate_backward(const KdaGateBwd& a, const Call& call) {
  const Problem p = gate_problem_of(a);
  call.parallel_for(p.value_heads,
                    [&](std::int64_t hv) { recurrent::gate_backward(p, static_cast<int>(hv)); });
  return RLK_OK;
}

}  // namespace

extern const Levels kda_fwd_chunked, kda_bwd_chunked, kda_decode_vector, kda_step_chunked, kda_gate_vector,
    kda_gate_bwd_vector;
constinit const Levels kda_fwd_chunked = by_level([]<Isa I>() {
  return implement<KdaFwd, forward<I>, supports<KdaFwd>, forward_bytes>(
      facts_at<"native.fma32", I>(fma32("chunks of 64 or 32 tokens in fp32")));
});
constinit const Levels kda_bwd_chunked = by_level([]<Isa I>() {
  return implement<KdaBwd, backward<I>, supports<KdaBwd>, backward_bytes>(
      facts_at<"native.fma32", I>(fma32("chunks of 64 or 32 tokens in fp32")));
});
constinit const Levels kda_decode_vector = by_level([]<Isa I>() {
  return implement<KdaDecode, decode<I>, supports<KdaDecode>>(
      facts_at<"native.fma32", I>(fma32("one token in fp32")));
});
constinit const Levels kda_step_chunked = by_level([]<Isa I>() {
  return implement<KdaStep, step<I>, supports<KdaStep>, step_bytes>(
      facts_at<"native.fma32", I>(fma32("rows of the open chunk in fp32")));
});
constinit const Levels kda_gate_vector = by_level([]<Isa I>() {
  return implement<KdaGate, gate<I>, supports<KdaGate>>(
      facts_at<"native.fma32", I>(fma32("the gate in fp32")));
});
constinit const Levels kda_gate_bwd_vector = by_level([]<Isa I>() {
  return implement<KdaGateBwd, gate_backward<I>, supports<KdaGateBwd>, gate_backward_bytes>(
      facts_at<"native.fma32", I>(fma32("the gate's gradients in fp32, parameter sums in fp64")));
});

extern const rlk_implementation kda_fwd_golden, kda_bwd_golden, kda_decode_golden, kda_step_golden,
    kda_gate_golden, kda_gate_bwd_golden;
const rlk_implementation kda_fwd_golden =
    implement<KdaFwd, golden_forward<KdaFwd>, supports<KdaFwd>, golden_forward_bytes<KdaFwd>>(
        golden("token by token with the state in fp64"));
const rlk_implementation kda_bwd_golden =
    implement<KdaBwd, golden_backward, supports<KdaBwd>, golden_backward_bytes>(
        golden("token by token with states in fp64, replayed from every 64th"));
const rlk_implementation kda_decode_golden =
    implement<KdaDecode, golden_forward<KdaDecode>, supports<KdaDecode>, golden_forward_bytes<KdaDecode>>(
        golden("one token, computed in fp64"));
const rlk_implementation kda_step_golden =
    implement<KdaStep, golden_step, supports<KdaStep>, golden_step_bytes>(
        golden("rows of the open chunk, computed in fp64 from its cache"));
const rlk_implementation kda_gate_golden =
    implement<KdaGate, golden_gate, supports<KdaGate>>(golden("the gate in fp64, rounded once"));
const rlk_implementation kda_gate_bwd_golden =
    implement<KdaGateBwd, golden_gate_backward, supports<KdaGateBwd>>(
        golden("the gate's gradients in fp64, one ascending sum each"));

}  // namespace rlk::native
