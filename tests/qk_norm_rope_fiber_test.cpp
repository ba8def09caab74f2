// labels: conformance fibers
// The portable GPU kernel of qk_norm_rope, on fibers: the bits of the native backend, at both wave sizes and in any thread order.
#include <doctest/doctest.h>

#include "arithmetic/qk_norm_rope/bind.hpp"
#include "qk_norm_rope_case.hpp"
#include "simt/qk_norm_rope/kernels.hpp"

namespace {

using namespace qknr;
using rlk::rms32_rope32::problem_of;

std::vector<Bytes> written(const Case& c) {
  return {c.q_out.bytes, c.k_out.bytes, c.k_cache.bytes, c.v_cache.bytes};
}

// launch() leaves this, at every wave size and order.
template <class Launch>
void same_on_fibers(Case& c, const std::vector<Bytes>& expected, const Launch& launch) {
  using rlk_fiber::Order;
  for (int wave : {32, 64})
    for (Order order : {Order::ascending, Order::descending, Order::shuffled}) {
      CAPTURE(wave);
      c.forget();
      rlk_fiber::wave_size = wave, rlk_fiber::order = order;
      launch();
      CHECK(written(c) == expected);
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE, rlk_fiber::order = Order::ascending;
}

}  // namespace

TEST_CASE("qk_norm_rope on fibers is native's bits, with every option") {
  std::mt19937 random(15);
  for (DType type : kTypes)
    for (const Heads& size : kHeads)
      for (const Form& form : kForms) {
        CAPTURE(rlk::name_of(type));
        CAPTURE(size.dims);
        CAPTURE(form.name);
        Case c(form, size, type, 5, random);
        Tensors t(c);
        const rlk::QkNormRope a = t.call(form);
        REQUIRE(rlk::qk_norm_rope(a, {.backend = "native.rows"}));
        const auto expected = written(c);
        for (std::int64_t many : {1, 1 << 20})  // two heads a team, and one
          same_on_fibers(c, expected,
                         [&] { rlk::simt::qk_norm_rope::launch_forward(problem_of(a), nullptr, many); });
      }
}

TEST_CASE("on fibers a position without a row in the tables makes its token's heads NaN, and no other's") {
  std::mt19937 random(16);
  for (DType type : kTypes) {
    Case c(kForms[0], {32, 16, 32}, type, 6, random);
    Tensors t(c);
    const rlk::QkNormRope a = t.call(c.form);
    REQUIRE(rlk::qk_norm_rope(a, {.backend = "native.rows"}));
    auto expected = written(c);
    c.positions.set(0, kRows), c.positions.set(2, -1);
    const auto size = static_cast<std::size_t>(rlk::size_of(type));
    const std::uint32_t nan = type == DType::f32 ? 0x7fffffffu : 0x7fffu;
    const auto spoil = [&](Bytes& bytes, std::int64_t row, std::int64_t heads) {
      for (std::int64_t i = 0; i < 16; ++i)
        for (std::int64_t h = 0; h < heads; ++h)
          std::memcpy(bytes.data() + static_cast<std::size_t>((row * heads + h) * 32 + i) * size, &nan, size);
    };
    for (std::int64_t token : {0, 2}) {
      spoil(expected[0], token, c.q_heads);
      spoil(expected[1], token, c.k_heads);
      spoil(expected[2], c.slot[static_cast<std::size_t>(token)], c.k_heads);
    }
    same_on_fibers(c, expected, [&] { rlk::simt::qk_norm_rope::launch_forward(problem_of(a), nullptr); });
  }
}
