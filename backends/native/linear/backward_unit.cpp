// linear_bwd on a matrix unit, bf16, arithmetic amx/k32/tree8 (lm_head/gradients_unit.hpp); d_bias and d_residual are those of
// fma32/tree8.
#include "arithmetic/linear/segments.hpp"
#include "native/linear/run.hpp"
#include "native/lm_head/gradients_unit.hpp"

namespace rlk::native {
namespace {

struct Gradients {
  RowGradient x;
  WeightGradient weight;
  UnitRoom room;
  Gradients(const MatrixUnit& unit, const ChainKernels& plain, const LinearBwd& a)
      : x(unit, a.d_y, a.weight, a.d_x, leaves::width(a.n_total == 0 ? a.weight.dim(0) : a.n_total),
          static_cast<int>(a.d_x_leaf_count)),
        weight(unit, a.d_y, a.x, a.d_weight_before, a.d_weight),
        room(copies(a), plain.joined_scratch_bytes, most_tiles(a, plain), a.d_x ? &x : nullptr,
             a.d_weight ? &weight : nullptr) {
    x.sums.segments = leaves::segments_of(a);
  }
};

template <const MatrixUnit* (*Unit)(), Isa I>
struct Forms {
  static rlk_code run(const LinearBwd& a, const Call& call) {
    if (const rlk_code code = leaves::check_segments(a, call); code != RLK_OK) return code;
    const ChainKernels& plain = *chain_kernels<I>();
    const Gradients g(*Unit(), plain, a);
    const UnitRoom& r = g.room;
    std::byte* room = shared_workspace(call);
    const ReadRows d_y(a.d_y, room), x(a.x, room);
    if (a.d_x) g.x.run(call, d_y, r.shared, r.scratch);
    if (a.d_weight) g.weight.run(call, d_y, x, shared_workspace(call) + r.copies, r.shared, r.scratch);
    if (a.d_bias) bias_gradient(a, d_y, call, plain, Chain::fma32, r.shared);
    if (a.d_residual) residual_gradient(a, d_y, call, plain, Chain::fma32, r.shared);
    return RLK_OK;
  }
  static std::uint64_t workspace(const LinearBwd& a, const rlk_request& r) {
    return Gradients(*Unit(), *chain_kernels<I>(), a).room.bytes(r);
  }
  static rlk_verdict supports(const LinearBwd& a, const rlk_request&) {
    if (!Unit() || !chain_kernels<I>()) return refuse(kNoUnit);
    if (a.d_y.dtype() != a.x.dtype())
      return refuse("the matrix unit takes two operands of one 16-bit dtype, d_y is fp32", {},
                    "round d_y to x's dtype", 0);
    return kAccept;
  }
  static constexpr rlk_implementation of(const Facts& facts) {
    return implement<LinearBwd, run, supports, workspace>(facts);
  }
};

}  // namespace

extern const rlk_implementation linear_bwd_amx;
constinit const rlk_implementation linear_bwd_amx =
    Forms<amx_unit, Isa::avx512>::of(amx_facts("Intel's matrix unit", "amx/k32/tree8"));
extern const Levels linear_bwd_replay_amx;
constinit const Levels linear_bwd_replay_amx = by_level([]<Isa I>() {
  return Forms<replay_unit<I>, I>::of(facts_at<"native.replay_amx", I>(amx_replay_facts("amx/k32/tree8")));
});

}  // namespace rlk::native
