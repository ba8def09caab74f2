// kda_step on Hopper: the call that a sampler makes for every token, and the way from the typed arguments to its kernel.
#include "cuda/kda/step.h"

#include <cstdint>

#include "arithmetic/kda/bind.hpp"
#include "cuda/device.hpp"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::cuda {
namespace {

using ::rlk::kda::States;
using ::rlk::kda::Step;

// Bulk copies bring 16 bytes and more of what begins on 16 bytes.
bool fits(const States& s) {
  return reinterpret_cast<std::uintptr_t>(s.data) % 16 == 0 && s.row % 4 == 0 && s.head % 4 == 0;
}

rlk_verdict supports(const KdaStep& a, const rlk_request&) {
  if (const rlk_verdict v = ::rlk::kda::check(a); v.code != RLK_OK) return v;
  const Step p = ::rlk::kda::step_of(a);
  if (p.k_dim != 128 || p.v_dim != 128)
    return refuse("K={0}, V={1}: the kernel is cut for K = V = 128", {p.k_dim, p.v_dim},
                  "cuda.simt takes every K and V, with the same bits");
  if (p.chunk != 64) return refuse("chunk_size {0}", {p.chunk}, "chunk_size 64");
  if (p.cu_seqlens || p.tokens != 1)
    return refuse("{0} tokens: this is for one of every sequence, not packed", {p.tokens},
                  "cuda.simt takes several and packed ones, with the same bits");
  if (!p.cache) return refuse("no cache", {}, "give one: rlk::infer says how large");
  if (p.v_first) return refuse("a [V, K] state", {}, "keep it as [K, V]");
  if (!fits(p.initial) || !fits(p.cache))
    return refuse("a state or cache that does not begin at multiples of 16 bytes", {},
                  "align them and their strides");
  if (p.sequences * p.value_heads > INT32_MAX / 4)
    return refuse("{0} sequences times {1} heads are more than one grid", {p.sequences, p.value_heads});
  return kAccept;
}

rlk_code run(const KdaStep& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  return check(call, "kda_step", kda::launch_step(::rlk::kda::step_of(a), call.device().id, stream_of(call)));
}

}  // namespace

extern const rlk_implementation kda_step_sm90;
const rlk_implementation kda_step_sm90 = implement<KdaStep, run, supports>(
    {.id = "cuda.sm90",
     .doc = "Hopper: one token of every sequence, states and caches brought ahead by bulk copies",
     .priority = 300,
     .arithmetic = "fma32/kda",
     .dtypes = RLK_F32 | RLK_BF16 | RLK_F16,
     .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
     .device_type = kDLCUDA,
     .min_arch = 90,
     .max_arch = 90});

}  // namespace rlk::cuda
