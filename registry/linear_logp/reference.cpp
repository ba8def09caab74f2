// linear_logp in fp64: the references of lm_head and logp, one after another.
#include "registry/reference.hpp"

#include "registry/linear_logp/composed.hpp"

namespace rlk::registry {

int32_t lm_head_reference(const rlk_slot* slots, const rlk_host*);
int32_t linear_bwd_reference(const rlk_slot* slots, const rlk_host*);
int32_t logp_reference(const rlk_slot* slots, const rlk_host*);
int32_t logp_bwd_reference(const rlk_slot* slots, const rlk_host*);

namespace {

template <class Args>
int32_t run(int32_t (*reference)(const rlk_slot*, const rlk_host*), const Args& a) {
  return reference(reinterpret_cast<const rlk_slot*>(&a), nullptr);
}

// In the rows of a gradient that belong to no entry of the call: +0, added to what they were before.
void clear_from(const Out& t, const In& before, int64_t row) {
  if (!t) return;
  const auto clear = [&](int64_t r, int64_t i) {
    Rows(t).set(r, i, before ? Rows(before).get(r, i) + 0.0 : 0.0);
  };
  for (int64_t r = row; t.rank() == 2 && r < t.dim(0); ++r)
    for (int64_t i = 0; i < t.dim(1); ++i) clear(r, i);
  for (int64_t i = row; t.rank() == 1 && i < t.dim(0); ++i) clear(0, i);
}

}  // namespace

int32_t linear_logp_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LinearLogp*>(slots);
  const Composed call(a, DType::f64);
  const int32_t code = run(lm_head_reference, call.head());
  return code ? code : run(logp_reference, call.rows());
}

int32_t linear_logp_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const LinearLogpBwd*>(slots);
  const Composed call(a, DType::f64);
  clear_from(a.d_weight, a.d_weight_before, call.here());
  clear_from(a.d_bias, a.d_bias_before, call.here());
  if (const int32_t code = run(lm_head_reference, call.head())) return code;
  if (const int32_t code = run(logp_bwd_reference, call.rows_bwd())) return code;
  return run(linear_bwd_reference, call.product_bwd());
}

}  // namespace rlk::registry
