// labels: conformance fibers
// The portable GPU kernel of qk_norm_rope, on fibers: the bits of the native backend, at both wave sizes and in any thread order.
#include <doctest/doctest.h>

#include "arithmetic/qk_norm_rope/bind.hpp"
#include "qk_norm_rope_case.hpp"
#include "simt/qk_norm_rope/kernels.hpp"

namespace {

using namespace qknr;
using rlk::rms32_rope32::problem_of;

std::vector<std::vector<std::byte>> written(const Case& c) {
  return {c.q_out.bytes, c.k_out.bytes, c.k_cache.bytes, c.v_cache.bytes};
}

// launch() leaves this, at every wave size and order.
template <class Launch>
void same_on_fibers(Case& c, const std::vector<std::vector<std::byte>>& expected, const Launch& launch) {
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
    const auto spoil = [&](std::vector<std::byte>& bytes, std::size_t first) {
      for (std::size_t i = 0; i < 16; ++i) std::memcpy(bytes.data() + first + i * size, &nan, size);
    };
    for (std::int64_t token : {0, 2}) {
      const auto at = [&](const Memory& m, std::int64_t row, std::int64_t heads, std::int64_t h) {
        return m.skip + static_cast<std::size_t>((row * heads + h) * 32) * size;
      };
      for (std::int64_t h = 0; h < c.q_heads; ++h) spoil(expected[0], at(c.q_out, token, c.q_heads, h));
      for (std::int64_t h = 0; h < c.k_heads; ++h) {
        spoil(expected[1], at(c.k_out, token, c.k_heads, h));
        spoil(expected[2], at(c.k_cache, c.slot[static_cast<std::size_t>(token)], c.k_heads, h));
      }
    }
    same_on_fibers(c, expected, [&] { rlk::simt::qk_norm_rope::launch_forward(problem_of(a), nullptr); });
  }
}
