// lm_head_bwd on Intel's matrix unit, bf16, arithmetic amx/k32 (gradients_amx.hpp); d_bias is fma32/kb1024 (a chain with ones).
#include "native/lm_head/gradients_amx.hpp"

namespace rlk::native {
namespace {

#if RLK_HAS_AMX

struct Gradients {
  RowGradient hidden;
  WeightGradient weight;
  AmxRoom room;
  explicit Gradients(const LmHeadBwd& a)
      : hidden(a.d_out, a.weight, a.d_hidden, kDepthBlock, 0),
        weight(a.d_out, a.hidden, a.d_weight),
        room(backward_copies(a), chain_kernels_avx512()->scratch_bytes,
             most_tiles(a, *chain_kernels_avx512()), a.d_hidden ? &hidden : nullptr,
             a.d_weight ? &weight : nullptr) {}
};

rlk_code run(const LmHeadBwd& a, const Call& call) {
  const Gradients g(a);
  const AmxRoom& r = g.room;
  std::byte* room = shared_workspace(call);
  const ReadRows d_out(a.d_out, room), hidden(a.hidden, room);
  if (a.d_hidden) g.hidden.run(call, d_out, r.shared, r.scratch);
  if (a.d_weight) g.weight.run(call, d_out, hidden, shared_workspace(call) + r.copies, r.shared, r.scratch);
  if (a.d_bias) bias_gradient(a, call, d_out, *chain_kernels_avx512(), Chain::fma32, r.shared);
  return RLK_OK;
}

std::uint64_t workspace(const LmHeadBwd& a, const rlk_request& r) { return Gradients(a).room.bytes(r); }
rlk_verdict supports(const LmHeadBwd& a, const rlk_request&) {
  if (a.d_out.dtype() != a.hidden.dtype())
    return refuse("the matrix unit takes two operands of one 16-bit dtype, d_out is fp32", {},
                  "round d_out to hidden's dtype", 0);
  if (RowSet(a.d_out).rows == 0 || a.weight.dim(0) == 0 || a.weight.dim(1) == 0)
    return refuse("an empty product");
  return kAccept;
}

#else

rlk_code run(const LmHeadBwd&, const Call&) { return RLK_UNSUPPORTED; }
std::uint64_t workspace(const LmHeadBwd&, const rlk_request&) { return 0; }
rlk_verdict supports(const LmHeadBwd&, const rlk_request&) { return refuse(kNoAmx); }

#endif

}  // namespace

extern const rlk_implementation lm_head_bwd_amx;
const rlk_implementation lm_head_bwd_amx =
    implement<LmHeadBwd, run, supports, workspace>(amx_facts("Intel's matrix unit", "amx/k32"));

}  // namespace rlk::native
