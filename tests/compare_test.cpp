// labels: unit
// How the harness measures a result's distance from the truth.
#include "src/harness/compare.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "registry/reference.hpp"

namespace {

using rlk::DType;
using rlk::harness::Array;
using rlk::harness::Peaks;
using rlk::registry::Bound;

Array rows(DType type, std::vector<int64_t> shape, const std::vector<double>& values) {
  Array a;
  a.dtype = type, a.shape = std::move(shape);
  a.bytes.resize(values.size() * static_cast<std::size_t>(rlk::size_of(type)));
  for (std::size_t i = 0; i < values.size(); ++i)
    rlk::registry::store(type, a.bytes.data(), static_cast<int64_t>(i), values[i]);
  return a;
}
std::string problem(const Array& got, const Array& truth, const Bound& bound, const Peaks& peaks = {}) {
  rlk::harness::Difference where{};
  return rlk::harness::Distance("out", got.dtype, bound).add(got, truth, bound, 0, where, peaks);
}

}  // namespace

TEST_CASE("a sum within its bound may round to the other side of a middle, and no farther") {
  // Between 77.125 and 77.1875 lies 77.15625; a sum of 77.1562 is 2.6e-6 of the peak from the truth.
  const Array truth = rows(DType::f64, {1, 2}, {77.1564, 80}), got = rows(DType::f16, {1, 2}, {77.125, 80});
  const Bound with{.value = 0.00026, .ulps = 1, .unrounded = 4e-6}, without{.value = 0.00026, .ulps = 1};
  CHECK(problem(got, truth, with).empty());
  CHECK_FALSE(problem(got, truth, without).empty());
  CHECK_FALSE(problem(got, rows(DType::f64, {1, 2}, {77.157, 80}), with).empty());
  CHECK_FALSE(problem(rows(DType::f16, {1, 2}, {77.0625, 80}), truth, with).empty());
}

TEST_CASE("a row whose few sums have cancelled is measured by what such sums are") {
  const Bound bound{.value = 1e-5};
  const Array truth = rows(DType::f64, {2, 1}, {0.5, 40}), got = rows(DType::f32, {2, 1}, {0.50002, 40});
  const Array terms = rows(DType::f64, {2, 1}, {2600, 2600});
  CHECK_FALSE(problem(got, truth, bound).empty());
  CHECK(problem(got, truth, bound, {.terms = &terms, .part = 2.0 / 64}).empty());
  CHECK_FALSE(
      problem(rows(DType::f32, {2, 1}, {0.502, 40}), truth, bound, {.terms = &terms, .part = 2.0 / 64})
          .empty());
  // A part of less than the row's own peak changes nothing.
  CHECK_FALSE(problem(got, truth, bound, {.terms = &truth, .part = 0.5}).empty());
}

TEST_CASE("an fp8 result is a number, with places of its own") {
  const Bound bound{.metric = Bound::elementwise, .ulps = 1};
  const Array truth = rows(DType::f8_e4m3, {1, 3}, {1, 0x1p-9, 448});
  CHECK(problem(rows(DType::f8_e4m3, {1, 3}, {1.125, 0x1p-8, 416}), truth, bound).empty());
  CHECK_FALSE(problem(rows(DType::f8_e4m3, {1, 3}, {1.25, 0x1p-9, 448}), truth, bound).empty());
  CHECK_FALSE(problem(rows(DType::f8_e4m3, {1, 3}, {1, 0x3p-9, 448}), truth, bound).empty());
  CHECK_FALSE(problem(rows(DType::f8_e4m3, {1, 3}, {1, 0x1p-9, 384}), truth, bound).empty());
  CHECK_FALSE(problem(rows(DType::f8_e4m3, {1, 3}, {1, 0x1p-9, NAN}), truth, bound).empty());
}

TEST_CASE("peaks of another result take the place of the truth's") {
  const Bound bound{.value = 1e-5};
  const Array truth = rows(DType::f64, {1, 2}, {1e-3, -2e-3}),
              got = rows(DType::f32, {1, 2}, {1.001e-3, -2e-3});
  const Array scale = rows(DType::f64, {1, 2}, {1, 2});
  CHECK_FALSE(problem(got, truth, bound).empty());
  CHECK(problem(got, truth, bound, {.instead = &scale}).empty());
}
