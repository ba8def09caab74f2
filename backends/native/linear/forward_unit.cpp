// linear on a matrix unit, bf16, arithmetic amx/k32/tree8: lm_head's product, its depth cut into leaves.
#include "native/linear/gate.hpp"
#include "native/lm_head/product_unit.hpp"

namespace rlk::native {
namespace {

UnitProduct product_of(const Linear& a) {
  const std::int64_t total = a.k_total == 0 ? a.weight.dim(1) : a.k_total;
  return {a.x, a.weight, a.bias, a.residual, a.y, leaves::width(total), static_cast<int>(a.leaf_count)};
}

// swiglu of what rows of gate and of up give, rounded as y would hold them.
struct GatedUnitRows {
  static constexpr int kParts = 2;
  static constexpr std::int64_t kColumns = 2 * kUnit;  // of both
  static constexpr std::uint64_t kBytes = sizeof(float) * kWidth * kColumns;
  gate_up::Layout layout;
  bool twice;
  Activate engine;

  GatedUnitRows(const Linear& a, Activate by)
      : layout(interleaved(a), a.weight.dim(0) / 2),
        twice(a.roundings == Linear::Roundings::twice),
        engine(by) {}
  std::int64_t weight_row(std::int64_t col, int part) const { return layout.gate(col) + part * layout.up; }
  void store(const MatrixUnit& unit, const UnitProduct& a, std::int64_t row, std::int64_t n, std::int64_t col,
             std::int64_t count, const float* sums, std::int64_t stride, std::byte* room) const {
    const ChainProduct& p = a.sums;
    const std::int64_t bytes = bytes_of(p.out_type);
    for (std::int64_t i = 0; i < n; ++i) {
      std::byte* const products = room + i * kColumns * bytes;
      for (int part = 0; part < kParts; ++part)
        unit.store_sums(p, products + part * count * bytes, weight_row(col, part), count,
                        sums + i * stride + part * kUnit, nullptr);
      GatedRows{p.out_type,
                1,
                count,
                count,
                products,
                kColumns,
                a.out.data<std::byte>() + (row_offset(a.out, row + i) + col) * bytes,
                0,
                twice}
          .activate(engine);
    }
  }
};

template <const MatrixUnit* (*Unit)(), Isa I>
struct Forms {
  static rlk_code run(const Linear& a, const Call& call) {
    if (gated(a))
      return run_product(*Unit(), product_of(a), GatedUnitRows(a, swiglu::engine_for(I).forward), call);
    return run_product(*Unit(), product_of(a), PlainRows{}, call);
  }
  static std::uint64_t workspace(const Linear& a, const rlk_request& r) {
    return gated(a) ? product_workspace<GatedUnitRows>(product_of(a), r)
                    : product_workspace<PlainRows>(product_of(a), r);
  }
  static rlk_verdict supports(const Linear&, const rlk_request&) {
    return Unit() ? kAccept : refuse(kNoUnit);
  }
  static constexpr rlk_implementation of(const Facts& facts) {
    return implement<Linear, run, supports, workspace>(facts);
  }
};

}  // namespace

extern const rlk_implementation linear_amx;
constinit const rlk_implementation linear_amx = Forms<amx_unit, Isa::avx512>::of(
    amx_facts("Intel's matrix unit, the weight read as it lies", "amx/k32/tree8"));
extern const Levels linear_replay_amx;
constinit const Levels linear_replay_amx = by_level([]<Isa I>() {
  return Forms<replay_unit<I>, I>::of(facts_at<"native.replay_amx", I>(amx_replay_facts("amx/k32/tree8")));
});

}  // namespace rlk::native
