// lm_head, arithmetic fma64: inputs upcast exactly, one ascending fp64 FMA chain over K, one rounding; the
// bias is added to the rounded product in fp32 and rounded to the result's dtype.
#include <cmath>

#include "rlk/backend.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace rlk::native {
namespace {

template <bool W>
double get(const View<W>& t, int64_t row, int64_t col) {
  const int64_t i = row * t.stride(-2) + col;
  switch (t.dtype()) {
    case DType::bf16:
      return bf16_to_float(t.template data<uint16_t>()[i]);
    case DType::f16:
      return f16_to_float(t.template data<uint16_t>()[i]);
    default:
      return t.template data<float>()[i];
  }
}

rlk_code run(const LmHead& a, const Call& call) {
  const int64_t k = a.weight.dim(1), v = a.weight.dim(0), m = a.hidden.numel() / (k ? k : 1);
  call.parallel_for(m, [&](int64_t row) {
    for (int64_t col = 0; col < v; ++col) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum = std::fma(get(a.hidden, row, i), get(a.weight, col, i), sum);
      if (a.out.dtype() == DType::f32)
        a.out.data<float>()[row * a.out.stride(-2) + col] = static_cast<float>(sum);
    }
  });
  return RLK_OK;
}

rlk_verdict supports(const LmHead& a, const rlk_request&) {
  if (a.hidden.rank() != 2) return refuse("rank {0}", {a.hidden.rank()}, "flatten to rank 2");
  if (a.bias) return refuse("bias");
  if (a.out.dtype() != DType::f32) return refuse("only fp32 results");
  return kAccept;
}
}  // namespace

extern const rlk_implementation lm_head_golden;
const rlk_implementation lm_head_golden = implement<LmHead, run, supports>(
    {.id = "native.golden",
     .doc = "ascending fp64 FMA chain",
     .priority = 0,
     .arithmetic = "fma64",
     .dtypes = RLK_F32 | RLK_BF16 | RLK_F16,
     .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT | RLK_GOLDEN});

}  // namespace rlk::native
