// labels: plugins gpu
// links: registry
// rms_norm's gradients on Hopper: native's bits for calls of every kernel and for those that it hands on, in memory that held NaN.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "array.hpp"
#include "rlk/rlk.hpp"

namespace {

using cuda_test::Array;
using cuda_test::check;
using cuda_test::hopper;
using cuda_test::Shape;
using rlk::DType;
using rlk::Tensor;

constexpr std::size_t kWorkspace = 64 << 20;

struct Form {
  const char* name;
  bool d_sum, rstd, d_x, d_residual;
  DType d_weight;
  bool offset;
};
constexpr Form kForms[] = {
    {"plain", false, false, true, false, DType::bf16, false},
    {"d_sum, rstd, offset", true, true, true, false, DType::bf16, true},
    {"d_x and d_residual, d_weight in fp32", false, false, true, true, DType::f32, false},
    {"d_residual alone, d_sum", true, false, false, true, DType::bf16, false},
};

// Some rows are drawn, and those after them are the same again.
Array drawn(int64_t rows, int64_t width, std::mt19937& random, double scale = 1) {
  constexpr int64_t kDrawn = 251;
  Array a({rows, width}, DType::bf16);
  const int64_t some = std::min(rows, kDrawn), bytes = 2 * width;
  a.draw(random, 0, some, width, scale);
  for (int64_t row = some; row < rows; ++row)
    std::memcpy(a.bytes.data() + row * bytes, a.bytes.data() + row % some * bytes,
                static_cast<std::size_t>(bytes));
  return a;
}

// Tensors that are absent have no shape.
struct Held {
  Array d_y, x, weight, d_sum, rstd, d_x, d_residual, d_weight;
  bool offset = false;

  Held(int64_t rows, int64_t width, const Form& form, std::mt19937& random)
      : d_y(drawn(rows, width, random)),
        x(drawn(rows, width, random, 3)),
        weight({width}, DType::bf16),
        d_weight({width}, form.d_weight),
        offset(form.offset) {
    const Shape shape{rows, width};
    weight.draw(random);
    if (form.d_sum) d_sum = drawn(rows, width, random);
    if (form.rstd) {
      Array y(shape, DType::bf16);
      rstd = Array({rows, 1}, DType::f32);
      const Tensor of = x.on_cpu(), to = y.on_cpu(), r = rstd.on_cpu();
      REQUIRE(rlk::rms_norm({.x = of, .y = to, .rstd = r}, {.backend = "native.rows"}));
    }
    if (form.d_x) d_x = Array(shape, DType::bf16);
    if (form.d_residual) d_residual = Array(shape, DType::bf16);
  }
  template <class View>
  rlk::Status call(View view, const std::string& backend, void* workspace = nullptr) {
    const auto there = [&](Array& a) { return a.shape.empty() ? Tensor() : view(a); };
    const Tensor views[] = {view(d_y),   view(x),    view(weight),      there(d_sum),
                            there(rstd), there(d_x), there(d_residual), view(d_weight)};
    rlk::RmsNormBwd a{.d_y = views[0], .x = views[1]};
    a.weight = views[2], a.weight_offset = offset, a.d_weight = views[7];
    if (!d_sum.shape.empty()) a.d_sum = views[3];
    if (!rstd.shape.empty()) a.rstd = views[4];
    if (!d_x.shape.empty()) a.d_x = views[5];
    if (!d_residual.shape.empty()) a.d_residual = views[6];
    return rlk::rms_norm_bwd(
        a, {.backend = backend, .workspace = workspace, .workspace_bytes = workspace ? kWorkspace : 0});
  }
};

}  // namespace

// Rows that are many enough for clusters of each form, the last share with few of them, and widths with packs left over; then
// too few rows, and too narrow ones.
TEST_CASE("rms_norm's gradients on Hopper are native's bits") {
  if (!hopper()) return;
  std::mt19937 random(1);
  void* data = nullptr;
  check(cudaMalloc(&data, kWorkspace));
  const std::shared_ptr<void> workspace(data, [](void* of) { cudaFree(of); });
  for (const auto& [rows, width] : std::vector<std::pair<int64_t, int64_t>>{{7170, 2048},
                                                                            {9857, 1544},
                                                                            {5890, 4096},
                                                                            {8191, 2888},
                                                                            {5900, 8192},
                                                                            {6017, 5128},
                                                                            {1000, 4096},
                                                                            {16500, 1024}})
    for (const Form& form : kForms) {
      CAPTURE(rows);
      CAPTURE(width);
      CAPTURE(form.name);
      Held h(rows, width, form, random);
      const rlk::Status ran = h.call([](Array& a) { return a.on_gpu(); }, "cuda.sm90", workspace.get());
      REQUIRE_MESSAGE(ran, std::string(ran.message()));
      check(cudaDeviceSynchronize());
      REQUIRE(h.call([](Array& a) { return a.on_cpu(); }, "native.rows"));
      for (Array* result : {&h.d_x, &h.d_residual, &h.d_weight}) CHECK(result->same());
    }
}
