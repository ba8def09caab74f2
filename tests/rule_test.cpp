// labels: conformance
// The written rules of the arithmetic ids: what the harness holds everybody against.
#include "src/harness/rule.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "rlk/half.hpp"
#include "src/harness/compare.hpp"

using rlk::DType;
using rlk::harness::Problem;
using rlk::registry::Fill;

namespace {

Problem product(DType type, int64_t m, int64_t k, int64_t v, Fill fill, DType out = DType::f32) {
  rlk::registry::Case c;
  c.name = "rule";
  c.inputs = {{"hidden", {m, k}, type, fill}, {"weight", {v, k}, type, fill}};
  c.results = {{"out", out}};
  return *rlk::harness::materialise(*rlk::registry::find("lm_head"), c, 7);
}

float first(const Problem& p, const char* arithmetic) {
  const auto ruled = rlk::harness::by_rule(p, arithmetic);
  REQUIRE(ruled);
  CHECK(ruled->written);
  float x = 0;
  std::memcpy(&x, ruled->outcome.results[3].bytes.data(), 4);
  return x;
}

Problem with(DType type, std::vector<double> a, std::vector<double> b) {
  rlk::registry::Case c;
  c.name = "rule";
  const auto k = static_cast<int64_t>(a.size());
  c.inputs = {{"hidden", {1, k}, type, {Fill::values, 0, 0, std::move(a)}},
              {"weight", {1, k}, type, {Fill::values, 0, 0, std::move(b)}}};
  c.results = {{"out", DType::f32}};
  return *rlk::harness::materialise(*rlk::registry::find("lm_head"), c, 7);
}

}  // namespace

TEST_CASE("each id's rule rounds where its page says") {
  // 2^24 + 1 + 1: a fp32 chain loses both ones, fp64 keeps them, blocks of 1024 meet only at the end.
  const Problem ones = with(DType::f32, {0x1p24, 1, 1}, {1, 1, 1});
  CHECK(first(ones, "fma32/kb1024") == 0x1p24f);
  CHECK(first(ones, "fma64") == 0x1p24f + 2);
  std::vector<double> a(1026, 0.0), b(1026, 1.0);
  a[0] = 0x1p24, a[1024] = a[1025] = 1;
  CHECK(first(with(DType::f32, a, b), "fma32/kb1024") == 0x1p24f + 2);
  // A tensor core keeps 25 fraction bits inside a group of 16 and truncates.
  CHECK(first(with(DType::bf16, {0x1p24, 1, 1, 1}, {1, 1, 1, 1}), "sm90/t25k16") == 0x1p24f + 2);
  CHECK(first(with(DType::bf16, {0x1p26, 1, 1, 1}, {1, 1, 1, 1}), "sm90/t25k16") == 0x1p26f);
  CHECK(first(with(DType::bf16, {INFINITY, 0}, {0, 1}), "sm90/t25k16") != 0);
  // The matrix unit counts subnormals as zero.
  CHECK(first(with(DType::bf16, {0x1p-130}, {0x1p120}), "amx/k32") == 0);
  CHECK(first(with(DType::bf16, {0x1p-130}, {0x1p120}), "fma32/kb1024") == 0x1p-10f);
  // So do pairs, whose odd position comes first, and of whose results none is below 2^-126.
  constexpr const char* kPairs = "avx512bf16/kb1024";
  CHECK(first(with(DType::bf16, {0x1p-130}, {0x1p120}), kPairs) == 0);
  CHECK(first(with(DType::bf16, {0, -0x1p25, 0x1p25, 1}, {1, 1, 1, 1}), kPairs) == 0);
  CHECK(first(with(DType::bf16, {0, -0x1p25, 1, 0x1p25}, {1, 1, 1, 1}), kPairs) == 1);
  CHECK(first(with(DType::bf16, {-0x1p-75, 0x1p-63}, {0x1p-75, 0x1p-63}), kPairs) == 0);
  CHECK(first(with(DType::bf16, {-0x1p-76, 0x1p-63}, {0x1p-75, 0x1p-63}), kPairs) == 0x1p-126f);
  // -0 meets the zeros that fill a block of 32.
  std::vector<double> tiny(32, 0x1p-70), minus(32, -0x1p-70);
  CHECK(std::signbit(first(with(DType::bf16, tiny, minus), kPairs)));
  tiny.resize(30), minus.resize(30);
  CHECK_FALSE(std::signbit(first(with(DType::bf16, tiny, minus), kPairs)));
  // Blocks of 512 up to K = 1024, of 1024 beyond.
  for (const std::size_t k : {std::size_t{1024}, std::size_t{1026}}) {
    std::vector<double> x(k, 0.0);
    x[0] = 0x1p24, x[512] = x[514] = 1;
    CHECK(first(with(DType::bf16, x, std::vector<double>(k, 1.0)), kPairs) == 0x1p24f + (k == 1024 ? 2 : 0));
  }
}

TEST_CASE(
    "attention's rules differ where their chains do: subnormal values, and terms far below a group's "
    "largest") {
  using namespace rlk::harness;
  // 128 keys of equal scores, and what they have in one channel.
  const auto mean = [](const std::vector<double>& values, const char* id) {
    rlk::registry::Case c;
    c.name = "mean";
    std::vector<double> v(128 * 16, 0.0);
    for (std::size_t j = 0; j < values.size(); ++j) v[16 * j] = values[j];
    const Fill zeros{Fill::values, 0, 0, {0}};
    c.inputs = {{"q", {1, 1, 1, 16}, DType::bf16, zeros},
                {"k", {1, 128, 1, 16}, DType::bf16, zeros},
                {"v", {1, 128, 1, 16}, DType::bf16, {Fill::values, 0, 0, v}}};
    c.results = {{"out", DType::f32}};
    const auto ruled = by_rule(*materialise(*rlk::registry::find("attention"), c, 7), id);
    REQUIRE(ruled);
    float x = -1;
    for (const auto& result : ruled->outcome.results)  // `out` alone
      if (!result.bytes.empty()) std::memcpy(&x, result.bytes.data(), 4);
    return x;
  };
  CHECK(mean({0x1p-130}, "fma32/attn128/s1024") == 0x1p-137);
  CHECK(mean({0x1p-130}, "sm90/t25k16/ex2/h8/attn128/s1024") == 0x1p-137);
  CHECK(mean({0x1p-130}, "amx/k32/attn128/s1024") == 0);
  // One chain loses the ones, even and odd keys of 32 have chains of their own, a tensor core keeps 25 bits of its 16.
  const std::vector<double> ones{0x1p24, 1, 1, 1, 1};
  CHECK(mean(ones, "fma32/attn128/s1024") == 0x1p17);
  CHECK(mean(ones, "amx/k32/attn128/s1024") == 0x1p17 + 0x1p-6);
  CHECK(mean(ones, "sm90/t25k16/ex2/h8/attn128/s1024") == 0x1p17 + 0x1p-5);
  CHECK(mean({0x1p26, 1, 1, 1, 1}, "sm90/t25k16/ex2/h8/attn128/s1024") == 0x1p19);
}

TEST_CASE("a sampled problem is judged at the elements that the whole would have there") {
  using namespace rlk::harness;
  const Problem p = product(DType::bf16, 50, 130, 370, {});
  Problem sampled = p;
  sampled.sampled = true;
  for (const char* id :
       {"fma64", "fma32/kb1024", "sm90/t25k16", "sm90/t25k16/r4", "amx/k32", "avx512bf16/kb1024"}) {
    const auto whole = by_rule(p, id), part = by_rule(sampled, id);
    REQUIRE((whole && part));
    const Array& all = whole->outcome.results[3];
    CHECK(part->outcome.results[3].numel() > 200);
    CHECK_FALSE(first_difference(on_grid(all, grid_of(sampled, 3, all.shape)), part->outcome.results[3]));
  }
  CHECK_FALSE(
      first_difference(execute_reference(sampled, true).results[3],
                       on_grid(execute_reference(p, true).results[3], grid_of(sampled, 3, {50, 370}))));
}

TEST_CASE("every built-in implementation of lm_head has the bits of its id's written rule") {
  using namespace rlk::harness;
  const Fill fills[] = {{}, {Fill::powers_of_two, -130, 120}, {Fill::cancellation}};
  std::size_t compared = 0;
  for (const rlk::OpEntry& op : rlk::snapshot().ops) {
    const std::string_view name = op.schema->name;
    if (name != "lm_head") continue;
    for (const rlk::ImplementationEntry& e : op.implementations) {
      if (e.backend->name != "native") continue;
      for (const DType type : {DType::f32, DType::bf16, DType::f16})
        for (const Fill& fill : fills) {
          const Problem p = product(type, 3, 2100, 19, fill);
          const Outcome got =
              execute(p, {op.schema, e.implementation, e.backend, e.backend->devices().front(), nullptr});
          if (got.code != RLK_OK) continue;
          const auto rule = by_rule(p, e.implementation->arithmetic);
          REQUIRE(rule);
          INFO(e.implementation->id << " " << rlk::name_of(type) << " fill " << fill.kind);
          const auto d = first_difference(rule->outcome.results[3], got.results[3]);
          if (d) CHECK_MESSAGE(false, d->index << ": " << d->expected << " " << d->got);
          ++compared;
        }
    }
  }
  CHECK(compared >= 20);
}

TEST_CASE("an id that nobody wrote down has no rule, and one that a built-in carries has its bits") {
  CHECK_FALSE(rlk::harness::by_rule(product(DType::f32, 1, 4, 1, {}), "mine/1"));
  CHECK_FALSE(rlk::harness::by_rule(product(DType::f32, 1, 4, 1, {}), "sm90/t25k16"));
}
