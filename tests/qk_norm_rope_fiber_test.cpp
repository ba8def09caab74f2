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

// Makes NaN of what turns of a token, whose position the tables do not have.
void spoil(const Case& c, std::int64_t token, std::vector<Bytes>& expected) {
  const auto heads = [&](Bytes& bytes, DType type, std::int64_t row, std::int64_t count, std::int64_t step) {
    const auto size = static_cast<std::size_t>(rlk::size_of(type));
    const std::uint32_t nan = type == DType::f32 ? 0x7fffffffu : type == DType::f8_e4m3 ? 0x7fu : 0x7fffu;
    for (std::int64_t h = 0; h < count; ++h)
      for (std::int64_t i = 0; i < c.size.turned; ++i)
        std::memcpy(bytes.data() + static_cast<std::size_t>((row * count + h) * step + i) * size, &nan, size);
  };
  heads(expected[0], c.type, token, c.q_heads, c.step);
  if (c.form.keys) heads(expected[1], c.type, token, c.k_heads, c.size.dims);
  const std::int64_t slot = c.slot[static_cast<std::size_t>(token)];
  if (c.form.cached && slot >= 0 && slot < kPlaces) heads(expected[2], c.cache, slot, c.k_heads, c.step);
}

// A table whose rows are some elements further apart.
struct Apart : Memory {
  const std::int64_t width, step;

  Apart(const Memory& table, std::int64_t width_, std::int64_t by)
      : Memory(kRows * (width_ + by), table.type), width(width_), step(width_ + by) {
    const auto size = static_cast<std::size_t>(rlk::size_of(type));
    for (std::int64_t row = 0; row < kRows; ++row)
      std::memcpy(bytes.data() + static_cast<std::size_t>(row * step) * size,
                  table.bytes.data() + static_cast<std::size_t>(row * width) * size,
                  static_cast<std::size_t>(width) * size);
  }
  Tensor rows() { return view({kRows, width}, {step, 1}); }
};

// What the kernel for several tokens a block has.
struct Several {
  std::int64_t tokens, q_heads, k_heads, blocks;
};
constexpr Several kSeveral[] = {{13, 5, 1, 1}, {9, 16, 8, 2}, {6, 16, 4, 1},
                                {21, 9, 2, 2}, {5, 33, 3, 3}, {2, 1, 1, 1}};
constexpr Form kSeveralForms[] = {
    {.name = "cached"},
    {.name = "padded", .early = true, .offset = true, .pad = 8},
    {.name = "no norm", .norm = false, .pad = 16},
    {.name = "no norm, no cache", .norm = false, .cached = false},
    {.name = "keys alone", .keys = false, .values = false},
    {.name = "queries alone", .offset = true, .keys = false, .cached = false},
    {.name = "fp8", .keys = false, .pad = 8, .f8 = Fp8::each},
    {.name = "fp8, no norm", .norm = false, .f8 = Fp8::plain},
    {.name = "fp8 keys alone", .values = false, .f8 = Fp8::one},
};
constexpr Heads kSeveralHeads[] = {{128, 128, 128}, {128, 128, 72}, {256, 256, 192}};

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
    for (std::int64_t token : {0, 2}) spoil(c, token, expected);
    same_on_fibers(c, expected, [&] { rlk::simt::qk_norm_rope::launch_forward(problem_of(a), nullptr); });
  }
}

TEST_CASE("several tokens a block are native's bits, and NaN where the tables have no row") {
  std::mt19937 random(17);
  for (const Several& several : kSeveral)
    for (const Heads& size : kSeveralHeads)
      for (const Form& form : kSeveralForms) {
        CAPTURE(several.tokens);
        CAPTURE(size.dims);
        CAPTURE(form.name);
        Case c(form, size, DType::bf16, several.tokens, random, several.q_heads, several.k_heads);
        Tensors t(c);
        rlk::QkNormRope a = t.call(form);
        REQUIRE(rlk::qk_norm_rope(a, {.backend = "native.rows"}));
        auto expected = written(c);
        Memory positions(c.tokens, DType::i64);
        for (std::int64_t i = 0; i < c.tokens; ++i) {
          const double none[] = {kRows, -1, -4294967296.0, 4294967297.0};
          std::int32_t drawn = 0;
          std::memcpy(&drawn, c.positions.bytes.data() + 4 * i, 4);
          positions.set(i, i % 3 == 1 ? none[i / 3 % 4] : drawn);
          if (i % 3 == 1) spoil(c, i, expected);
          if (i % 10 == 3) c.slots.set(i, i == 3 ? -4294967296.0 : -4294967295.0);  // below 0 before
        }
        const Tensor wide = positions.view({c.tokens});
        const std::int64_t half = size.turned / 2;
        Apart cos(c.cos, half, 4), sin(c.sin, half, 12), off_16(c.sin, half, 3);
        const Tensor cosines = cos.rows(), sines = sin.rows(), odd = off_16.rows();
        a.positions = wide, a.cos = cosines, a.sin = odd;
        CHECK_FALSE(rlk::simt::qk_norm_rope::turns_whole(problem_of(a)));
        a.sin = sines;
        const auto p = problem_of(a);
        REQUIRE(rlk::simt::qk_norm_rope::lies_whole(p));
        REQUIRE(rlk::simt::qk_norm_rope::turns_whole(p));
        same_on_fibers(c, expected, [&] {
          const bool launched = size.dims == 128
                                    ? rlk::simt::qk_norm_rope::launch_tokens<8>(p, nullptr, several.blocks)
                                    : rlk::simt::qk_norm_rope::launch_tokens<16>(p, nullptr, several.blocks);
          REQUIRE(launched);
        });
      }
}
