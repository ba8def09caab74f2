// linear_bwd on Intel's matrix unit, bf16, arithmetic amx/k32/tree8 (lm_head/gradients_amx.hpp); d_bias and d_residual are those of
// fma32/tree8.
#include "native/linear/run.hpp"
#include "native/lm_head/gradients_amx.hpp"

namespace rlk::native {
namespace {

#if RLK_HAS_AMX

struct Gradients {
  RowGradient x;
  WeightGradient weight;
  AmxRoom room;
  explicit Gradients(const LinearBwd& a)
      : x(a.d_y, a.weight, a.d_x, leaves::width(a.n_total == 0 ? a.weight.dim(0) : a.n_total),
          static_cast<int>(a.d_x_leaf_count)),
        weight(a.d_y, a.x, a.d_weight),
        room(copies(a), chain_kernels_avx512()->joined_scratch_bytes, most_tiles(a, *chain_kernels_avx512()),
             a.d_x ? &x : nullptr, a.d_weight ? &weight : nullptr) {}
};

rlk_code run(const LinearBwd& a, const Call& call) {
  const Gradients g(a);
  const AmxRoom& r = g.room;
  const ChainKernels& kernels = *chain_kernels_avx512();
  std::byte* room = shared_workspace(call);
  const ReadRows d_y(a.d_y, room), x(a.x, room);
  if (a.d_x) g.x.run(call, d_y, r.shared, r.scratch);
  if (a.d_weight) g.weight.run(call, d_y, x, shared_workspace(call) + r.copies, r.shared, r.scratch);
  if (a.d_bias) bias_gradient(a, d_y, call, kernels, Chain::fma32, r.shared);
  if (a.d_residual) residual_gradient(a, d_y, call, kernels, Chain::fma32, r.shared);
  return RLK_OK;
}

std::uint64_t workspace(const LinearBwd& a, const rlk_request& r) { return Gradients(a).room.bytes(r); }
rlk_verdict supports(const LinearBwd& a, const rlk_request&) {
  if (a.d_y.dtype() != a.x.dtype())
    return refuse("the matrix unit takes two operands of one 16-bit dtype, d_y is fp32", {},
                  "round d_y to x's dtype", 0);
  if (a.segments)
    return refuse("segments are given, the matrix unit walks the rows of one weight", {},
                  "leave segments out");
  if (a.d_weight_before)
    return refuse("d_weight_before is given, the matrix unit's sums are stored as they are", {},
                  "leave d_weight_before out, and add");
  return kAccept;
}

#else

rlk_code run(const LinearBwd&, const Call&) { return RLK_UNSUPPORTED; }
std::uint64_t workspace(const LinearBwd&, const rlk_request&) { return 0; }
rlk_verdict supports(const LinearBwd&, const rlk_request&) { return refuse(kNoAmx); }

#endif

}  // namespace

extern const rlk_implementation linear_bwd_amx;
const rlk_implementation linear_bwd_amx =
    implement<LinearBwd, run, supports, workspace>(amx_facts("Intel's matrix unit", "amx/k32/tree8"));

}  // namespace rlk::native
