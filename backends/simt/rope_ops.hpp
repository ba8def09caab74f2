// The rope implementations of a GPU backend on its launchers. A backend's file includes this, compiled by the
// host compiler, and names its facts:
//
//   struct Portable {
//     static constexpr std::int32_t kDevice = kDLCUDA;
//     static constexpr const char* kId = "cuda.simt";
//     static simt::RopeLaunchers launchers() { return rope_portable(); }
//   };
//   const rlk_implementation rope_simt = rope::gpu::forward<Portable>();
#pragma once

#include <string>

#include "rlk/backend.hpp"
#include "rlk/ops.hpp"
#include "rope_launchers.hpp"
#include "rope_table_math.hpp"

namespace rlk::rope_gpu {

using rotary::Form;

template <class Args>
const rlk_slot* slots(const Args& a) {
  return reinterpret_cast<const rlk_slot*>(&a);
}

inline rlk_code finished(const Call& call, const char* op, const char* error) {
  return error != nullptr ? call.fail(RLK_INTERNAL, std::string(op) + ": " + error) : RLK_OK;
}

template <class Backend, class Args, Form F>
rlk_code run_rope(const Args& a, const Call& call) {
  rotary::Geometry g;
  if (const auto error = read_rope(slots(a), F, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  return finished(call, Args::kName, Backend::launchers().rotate(g, call.stream(), call.device().id));
}

template <class Backend, class Args, bool Backward>
rlk_code run_mla_q(const Args& a, const Call& call) {
  rotary::Geometry g;
  if (const auto error = read_mla_q(slots(a), Backward, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  return finished(call, Args::kName, Backend::launchers().rotate(g, call.stream(), call.device().id));
}

template <class Backend, class Args, bool Backward>
rlk_code run_mla_kv(const Args& a, const Call& call) {
  rotary::KvGeometry g;
  if (const auto error = read_mla_kv(slots(a), Backward, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
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

template <class Backend, class Args, Form F>
constexpr rlk_implementation rope(const char* doc) {
  return implement<Args, run_rope<Backend, Args, F>>(facts<Backend>(doc));
}
template <class Backend, class Args, bool Backward>
constexpr rlk_implementation mla_q(const char* doc) {
  return implement<Args, run_mla_q<Backend, Args, Backward>>(facts<Backend>(doc));
}
template <class Backend, class Args, bool Backward>
constexpr rlk_implementation mla_kv(const char* doc) {
  return implement<Args, run_mla_kv<Backend, Args, Backward>>(facts<Backend>(doc));
}
template <class Backend>
constexpr rlk_implementation tables() {
  return implement<RopeTables, run_tables<Backend>>(facts<Backend>("fp64 on the device", "rope_tables64"));
}

}  // namespace rlk::rope_gpu
