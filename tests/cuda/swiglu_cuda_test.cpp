// labels: plugins gpu
// links: registry
// swiglu and its gradients on a GPU: native's bits for every bf16 gate, where most results come from the special function units.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "array.hpp"
#include "rlk/rlk.hpp"

namespace {

using cuda_test::Array;
using cuda_test::check;
using cuda_test::first_channels;
using cuda_test::hopper;
using rlk::DType;
using rlk::Tensor;

// Every 16-bit number, `times` over, in rows that have `beside` more behind them.
Array every_gate(int64_t times, int64_t beside, int64_t width) {
  const int64_t rows = times * 65536 / width, wide = width + beside;
  Array a({rows, wide}, DType::bf16);
  for (int64_t i = 0; i < rows * wide; ++i) {
    const auto bits = static_cast<uint16_t>(i / wide * width + i % wide);
    std::memcpy(a.bytes.data() + 2 * i, &bits, 2);
  }
  return a;
}
struct Case {
  Array gate, up, d_out, out, d_gate, d_up;
  int64_t width;

  Case(int64_t times, int64_t beside, int64_t columns, double scale, std::mt19937& random)
      : gate(every_gate(times, beside, columns)), width(columns) {
    for (Array* a : {&up, &d_out, &out, &d_gate, &d_up}) *a = Array(gate.shape, DType::bf16);
    up.draw(random, 0, gate.count(), 1, scale);
    d_out.draw(random, 0, gate.count(), 1, scale);
    for (int64_t i = 0; i < gate.count(); i += 5) d_out.set(i, i % 2 ? 0.0 : -0.0);
  }
  template <class View>
  void call(View view, const std::string& backend) {
    const auto of = [&](Array& a) { return first_channels(view(a), a.type, a.shape, width); };
    const Tensor g = of(gate), u = of(up), d = of(d_out), y = of(out), dg = of(d_gate), du = of(d_up);
    const rlk::Status forward = rlk::swiglu({.gate = g, .up = u, .out = y}, {.backend = backend});
    REQUIRE_MESSAGE(forward, std::string(forward.message()));
    const rlk::Status backward =
        rlk::swiglu_bwd({.d_out = d, .gate = g, .up = u, .d_gate = dg, .d_up = du}, {.backend = backend});
    REQUIRE_MESSAGE(backward, std::string(backward.message()));
  }
};

}  // namespace

TEST_CASE("swiglu and its gradients are native's bits for every gate, by up and d_out of all sizes") {
  if (!hopper()) return;
  std::mt19937 random(1);
  for (const int64_t beside : {0, 8})
    for (const double scale : {1.0, 1e-18, 1e-36, 1e18}) {
      CAPTURE(beside);
      CAPTURE(scale);
      Case c(scale == 1.0 ? 32 : 4, beside, beside == 0 ? 2048 : 1024, scale, random);
      c.call([](Array& a) { return a.on_gpu(); }, "cuda.simt");
      check(cudaDeviceSynchronize());
      c.call([](Array& a) { return a.on_cpu(); }, "native.tiles");
      for (Array* result : {&c.out, &c.d_gate, &c.d_up}) CHECK(result->same());
    }
}
