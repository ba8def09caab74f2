// The rope family on a GPU: one launch for q and k, 16-byte accesses, at the pace of a copy.
#include "rlk/ops.hpp"

#include "arithmetic/rope/table_math.hpp"
#include "arithmetic/rope/verdict.hpp"
#include "simt/portable.hpp"
#include "simt/rope/launchers.hpp"

namespace rlk::simt::rope {
namespace {

using rotary::Form;

template <class Args>
const rlk_slot* slots(const Args& a) {
  return reinterpret_cast<const rlk_slot*>(&a);
}

template <class Args, Form F>
rlk_code rotate(const Args& a, const Call& call) {
  rotary::Geometry g;
  if (const auto error = read_rope(slots(a), F, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  return finished(call, Args::kName, run_rotate(g, call.stream(), call.device().id));
}

template <class Args, bool Backward>
rlk_code rotate_mla_q(const Args& a, const Call& call) {
  rotary::Geometry g;
  if (const auto error = read_mla_q(slots(a), Backward, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  return finished(call, Args::kName, run_rotate(g, call.stream(), call.device().id));
}

template <class Args, bool Backward>
rlk_code split_mla_kv(const Args& a, const Call& call) {
  rotary::KvGeometry g;
  if (const auto error = read_mla_kv(slots(a), Backward, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  return finished(call, Args::kName, run_split(g, Backward, call.stream(), call.device().id));
}

rlk_code build_tables(const RopeTables& a, const Call& call) {
  rotary::RotaryTable t;
  if (const auto error = read_tables(slots(a), t); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  return finished(call, "rope_tables", run_tables(t, call.stream(), call.device().id));
}

constexpr Facts facts(const char* doc, const char* arithmetic = "rope32") {
  return {.id = kId,
          .doc = doc,
          .priority = 200,
          .arithmetic = arithmetic,
          .dtypes = kFloats,
          .traits = kPinned | RLK_CAPTURE_SAFE | RLK_GOLDEN,
          .device_type = kDevice};
}

constexpr rlk_implementation kImplementations[] = {
    implement<Rope, rotate<Rope, Form::out_of_place>>(facts("q and k in one launch")),
    implement<RopeBwd, rotate<RopeBwd, Form::backward>>(facts("the transposed rotation")),
    implement<RopeInPlace, rotate<RopeInPlace, Form::in_place>>(facts("touches only the rotary dims")),
    implement<RopeMlaQ, rotate_mla_q<RopeMlaQ, false>>(facts("the trailing dims turn")),
    implement<RopeMlaQBwd, rotate_mla_q<RopeMlaQBwd, true>>(facts("the transposed rotation")),
    implement<RopeMlaKv, split_mla_kv<RopeMlaKv, false>>(facts("copies, and one rotation per token")),
    implement<RopeMlaKvBwd, split_mla_kv<RopeMlaKvBwd, true>>(facts("copies, and an fp32 sum over heads")),
    implement<RopeTables, build_tables, rotary::takes>(facts("fp64 on the device", "rope_tables64")),
};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::rope
