// lm_head_bwd on a matrix unit, bf16, arithmetic amx/k32 (gradients_unit.hpp); d_bias is fma32/kb1024 (a chain with ones).
#include "native/lm_head/gradients_unit.hpp"

namespace rlk::native {
namespace {

struct Gradients {
  RowGradient hidden;
  WeightGradient weight;
  UnitRoom room;
  Gradients(const MatrixUnit& unit, const ChainKernels& plain, const LmHeadBwd& a)
      : hidden(unit, a.d_out, a.weight, a.d_hidden, kDepthBlock, 0),
        weight(unit, a.d_out, a.hidden, nothing(), a.d_weight),
        room(backward_copies(a), plain.scratch_bytes, most_tiles(a, plain), a.d_hidden ? &hidden : nullptr,
             a.d_weight ? &weight : nullptr) {}
  static const In& nothing() {
    static const In none;
    return none;
  }
};

template <const MatrixUnit* (*Unit)(), Isa I>
struct Forms {
  static rlk_code run(const LmHeadBwd& a, const Call& call) {
    const ChainKernels& plain = *chain_kernels<I>();
    const Gradients g(*Unit(), plain, a);
    const UnitRoom& r = g.room;
    std::byte* room = shared_workspace(call);
    const ReadRows d_out(a.d_out, room), hidden(a.hidden, room);
    if (a.d_hidden) g.hidden.run(call, d_out, r.shared, r.scratch);
    if (a.d_weight) g.weight.run(call, d_out, hidden, shared_workspace(call) + r.copies, r.shared, r.scratch);
    if (a.d_bias) bias_gradient(a, call, d_out, plain, Chain::fma32, r.shared);
    return RLK_OK;
  }
  static std::uint64_t workspace(const LmHeadBwd& a, const rlk_request& r) {
    return Gradients(*Unit(), *chain_kernels<I>(), a).room.bytes(r);
  }
  static rlk_verdict supports(const LmHeadBwd& a, const rlk_request&) {
    if (!Unit() || !chain_kernels<I>()) return refuse(kNoUnit);
    if (a.d_out.dtype() != a.hidden.dtype())
      return refuse("the matrix unit takes two operands of one 16-bit dtype, d_out is fp32", {},
                    "round d_out to hidden's dtype", 0);
    if (RowSet(a.d_out).rows == 0 || a.weight.dim(0) == 0 || a.weight.dim(1) == 0)
      return refuse("an empty product");
    return kAccept;
  }
  static constexpr rlk_implementation of(const Facts& facts) {
    return implement<LmHeadBwd, run, supports, workspace>(facts);
  }
};

}  // namespace

extern const rlk_implementation lm_head_bwd_amx;
constinit const rlk_implementation lm_head_bwd_amx =
    Forms<amx_unit, Isa::avx512>::of(amx_facts("Intel's matrix unit", "amx/k32"));
extern const Levels lm_head_bwd_replay_amx;
constinit const Levels lm_head_bwd_replay_amx = by_level([]<Isa I>() {
  return Forms<replay_unit<I>, I>::of(facts_at<"native.replay_amx", I>(amx_replay_facts("amx/k32")));
});

}  // namespace rlk::native
