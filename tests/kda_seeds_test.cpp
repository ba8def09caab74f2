// labels: conformance
// KDA with the gate inside, on five seeds a case: every result against the fp64 reference.
#include "kda_seeds.hpp"

namespace {
using namespace kda_test;
}

TEST_CASE("kda with a gate inside keeps its bounds on every seed, sums that cancel included") {
  for (int width : {32, 128})
    for (const Seeded& s : seeded(width, width))
      for (Float type : {Float::f32, Float::bf16, Float::f16})
        for (std::uint32_t seed : kSeeds) {
          CAPTURE(s.name);
          CAPTURE(width);
          CAPTURE(seed);
          Shape shape = s.shape;
          shape.type = type;
          Case c = seeded_case(shape, seed);
          REQUIRE(run(c, "native.fma32"));
          for (const auto& [result, error] : errors_of(c, exact_case(shape, seed))) {
            CAPTURE(result);
            CHECK(error <= (type == Float::f32 ? 1e-4 : bound16(result)));
          }
        }
}

// The measure itself: what it divides by is the gradient where nothing cancels, and more where terms do.
TEST_CASE("the scale of d_a_log is the sum of its terms where these have one sign") {
  Shape shape{.tokens = 1, .k = 1, .v = 1, .gate = rlk::kda::Gate::softplus};
  for (std::uint32_t seed : kSeeds) {
    const Case exact = exact_case(shape, seed);
    CHECK(a_log_scale(exact) == doctest::Approx(std::fabs(double(exact.d_a_log[0]))).epsilon(1e-5));
    shape.gate = rlk::kda::Gate::bounded;
  }
}
