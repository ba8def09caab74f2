// The rope ops of a GPU backend on its launchers, compiled by the host compiler: a template of each
// implementation.
#pragma once

#include <string>

#include "arithmetic/rope/table_math.hpp"
#include "arithmetic/rope/verdict.hpp"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"
#include "simt/rope/launchers.hpp"

namespace rlk::rope_gpu {

using rotary::Form;

template <class Args>
const rlk_slot* slots(const Args& a) {
  return reinterpret_cast<const rlk_slot*>(&a);
}

inline rlk_code finished(const Call& call, const char* op, const char* error) {
  return error != nullptr ? call.fail(RLK_BACKEND_ERROR, std::string(op) + ": " + error) : RLK_OK;
}

template <class Backend, class Args, Form F>
rlk_code run_rope(const Args& a, const Call& call) {
  rotary::Geometry g;
  if (const auto error = read_rope(slots(a), F, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  return finished(call, Args::kName, Backend::launchers().rotate(g, call.stream(), call.device().id));
}

template <class Backend, class Args, bool Backward>
rlk_code run_mla_q(const Args& a, const Call& call) {
  rotary::Geometry g;
  if (const auto error = read_mla_q(slots(a), Backward, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  return finished(call, Args::kName, Backend::launchers().rotate(g, call.stream(), call.device().id));
}

template <class Backend, class Args, bool Backward>
rlk_code run_mla_kv(const Args& a, const Call& call) {
  rotary::KvGeometry g;
  if (const auto error = read_mla_kv(slots(a), Backward, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  return finished(call, Args::kName,
                  Backend::launchers().split(g, Backward, call.stream(), call.device().id));
}

template <class Backend>
rlk_code run_tables(const RopeTables& a, const Call& call) {
  simt::RotaryTable t;
  if (const auto error = simt::read_tables(slots(a), t); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  return finished(call, "rope_tables", Backend::launchers().tables(t, call.stream(), call.device().id));
}

template <class Backend>
constexpr Facts facts(const char* doc, const char* arithmetic = "rope32") {
  return {.id = Backend::kId,
          .doc = doc,
          .priority = 200,
          .arithmetic = arithmetic,
          .dtypes = RLK_F32 | RLK_BF16 | RLK_F16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT | RLK_GOLDEN,
          .device_type = Backend::kDevice};
}

template <class Backend>
constexpr rlk_implementation rope() {
  return implement<Rope, run_rope<Backend, Rope, Form::out_of_place>>(
      facts<Backend>("q and k in one launch"));
}
template <class Backend>
constexpr rlk_implementation rope_bwd() {
  return implement<RopeBwd, run_rope<Backend, RopeBwd, Form::backward>>(
      facts<Backend>("the transposed rotation"));
}
template <class Backend>
constexpr rlk_implementation rope_in_place() {
  return implement<RopeInPlace, run_rope<Backend, RopeInPlace, Form::in_place>>(
      facts<Backend>("touches only the rotary dims"));
}
template <class Backend>
constexpr rlk_implementation mla_q() {
  return implement<RopeMlaQ, run_mla_q<Backend, RopeMlaQ, false>>(facts<Backend>("the trailing dims turn"));
}
template <class Backend>
constexpr rlk_implementation mla_q_bwd() {
  return implement<RopeMlaQBwd, run_mla_q<Backend, RopeMlaQBwd, true>>(
      facts<Backend>("the transposed rotation"));
}
template <class Backend>
constexpr rlk_implementation mla_kv() {
  return implement<RopeMlaKv, run_mla_kv<Backend, RopeMlaKv, false>>(
      facts<Backend>("copies, and one rotation per token"));
}
template <class Backend>
constexpr rlk_implementation mla_kv_bwd() {
  return implement<RopeMlaKvBwd, run_mla_kv<Backend, RopeMlaKvBwd, true>>(
      facts<Backend>("copies, and an fp32 sum over heads"));
}
template <class Backend>
constexpr rlk_implementation tables() {
  return implement<RopeTables, run_tables<Backend>, simt::takes>(
      facts<Backend>("fp64 on the device", "rope_tables64"));
}

}  // namespace rlk::rope_gpu
