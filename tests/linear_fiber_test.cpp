// labels: conformance fibers
// quick: yes
// The portable GPU kernels of linear and tp_sum on fibers: the bits of the native backend, at both wave sizes and in any
// thread order.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "arithmetic/tp_sum/bind.hpp"
#include "lm_head_simt.hpp"
#include "registry/linear/geometry.hpp"
#include "simt/linear/bind.hpp"
#include "simt/linear/kernels.hpp"
#include "simt/tp_sum/kernels.hpp"

namespace {

using namespace lm_head_simt;
namespace linear = rlk::simt::linear;

// launch() at every wave size and order gives the bytes of `want`, which native left there.
template <class Launch>
void same_on_fibers(std::vector<Array*> results, const Launch& launch) {
  std::vector<std::vector<std::uint8_t>> want;
  for (Array* r : results) want.push_back(r->bytes);
  const auto turn = [&](int wave, rlk_fiber::Order order) {
    for (Array* r : results) std::fill(r->bytes.begin(), r->bytes.end(), 0xff);
    rlk_fiber::wave_size = wave;
    rlk_fiber::order = order;
    launch();
    CAPTURE(wave);
    for (std::size_t i = 0; i < results.size(); ++i) CHECK(results[i]->bytes == want[i]);
  };
  turn(32, rlk_fiber::Order::shuffled);
  turn(64, rlk_fiber::Order::descending);
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

void run(const Product& p) { REQUIRE(linear::launch(p, nullptr) == hipSuccess); }

// The first of a matrix.
Tensor rows(Array& a, std::int64_t n) { return {a.bytes.data(), {n, a.shape[1]}, a.type}; }

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
const rlk::Options kNative{.backend = "native", .arithmetic = "fma32/tree8"};

}  // namespace

TEST_CASE(
    "linear on fibers is native's bits: leaves short, empty and long, whole and in part, with what is "
    "added") {
  struct Size {
    std::int64_t m, k, n;
  };
  for (const DType type : kTypes)
    for (const auto& [m, k, n] : {Size{1, 1, 1}, Size{3, 300, 70}, Size{17, 1050, 3}, Size{66, 33, 130},
                                  Size{5, 0, 7}, Size{2, 8300, 3}})
      for (const bool added : {false, true}) {
        CAPTURE(rlk::name_of(type));
        CAPTURE(k);
        Array x = normal(type, {m, k}, 1), weight = normal(type, {n, k}, 2), bias = normal(type, {n}, 3),
              residual = normal(type, {m, n}, 4, {n + 5, 1});
        Array y(added ? type : DType::f32, {m, n}, {n + 3, 1});
        const Tensor tx = x.view(), tw = weight.view(), tb = bias.view(), tr = residual.view(), ty = y.view();
        rlk::Linear a{.x = tx, .weight = tw, .y = ty};
        if (added) a.bias = tb, a.residual = tr;
        REQUIRE(rlk::linear(a, kNative));
        same_on_fibers({&y}, [&] { run(linear::forward_product(a)); });
      }
  for (const std::int64_t count : {1, 2, 4}) {
    CAPTURE(count);
    const std::int64_t k = rlk::leaves::length(100, 8 - count, count);  // the last leaf is empty
    Array x = normal(DType::f32, {3, k}, 1), weight = normal(DType::f32, {9, k}, 2), y(DType::f32, {3, 9});
    const Tensor tx = x.view(), tw = weight.view(), ty = y.view();
    rlk::Linear a{.x = tx, .weight = tw, .y = ty};
    a.leaf_first = 8 - count, a.leaf_count = count, a.k_total = 100;
    REQUIRE(rlk::linear(a, kNative));
    same_on_fibers({&y}, [&] { run(linear::forward_product(a)); });
  }
}

TEST_CASE("linear with swiglu on fibers is native's bits, stacked and interleaved") {
  struct Size {
    std::int64_t m, k, width;
  };
  for (const DType type : kTypes)
    for (const auto& [m, k, width] :
         {Size{1, 1, 1}, Size{3, 300, 70}, Size{17, 96, 192}, Size{66, 33, 64}, Size{5, 0, 33}})
      for (const bool interleaved : {false, true}) {
        if (interleaved && width % 64 != 0) continue;
        CAPTURE(rlk::name_of(type));
        CAPTURE(width);
        CAPTURE(interleaved);
        Array x = normal(type, {m, k}, 1), weight = normal(type, {2 * width, k}, 2, {k + 2, 1}),
              bias = normal(type, {2 * width}, 3), y(type, {m, width}, {width + 3, 1});
        const Tensor tx = x.view(), tw = weight.view(), tb = bias.view(), ty = y.view();
        rlk::Linear a{.x = tx, .weight = tw, .y = ty};
        a.activation = rlk::Linear::Activation::swiglu;
        if (interleaved) a.gate_up = rlk::Linear::GateUp::interleaved64;
        if (m % 2 != 0) a.bias = tb;
        if (m == 17) a.roundings = rlk::Linear::Roundings::twice;
        REQUIRE(rlk::linear(a, kNative));
        same_on_fibers({&y}, [&] { run(linear::forward_product(a)); });
      }
}

TEST_CASE("linear_bwd on fibers is native's bits, over more tokens than one block") {
  struct Size {
    std::int64_t m, k, n;
  };
  for (const DType type : kTypes)
    for (const auto& [m, k, n] : {Size{5, 70, 300}, Size{4100, 2, 3}, Size{0, 4, 5}}) {
      CAPTURE(rlk::name_of(type));
      CAPTURE(m);
      Array d_y = normal(type, {m, n}, 1), x = normal(type, {m, k}, 2), weight = normal(type, {n, k}, 3),
            d_x(type, {m, k}), d_weight(DType::f32, {n, k}), d_bias(type, {n}), d_residual(type, {m, n});
      const Tensor t1 = d_y.view(), t2 = x.view(), t3 = weight.view(), t4 = d_x.view(), t5 = d_weight.view(),
                   t6 = d_bias.view(), t7 = d_residual.view();
      const rlk::LinearBwd a{
          .d_y = t1, .x = t2, .weight = t3, .d_x = t4, .d_weight = t5, .d_bias = t6, .d_residual = t7};
      REQUIRE(rlk::linear_bwd(a, kNative));
      same_on_fibers({&d_x, &d_weight, &d_bias, &d_residual}, [&] {
        run(linear::d_x_product(a));
        run(linear::d_weight_product(a));
        run(linear::d_bias_product(a));
        run(linear::d_residual_product(a));
      });
    }
}

TEST_CASE("linear_bwd of fused projections, added to gradients so far, on fibers is native's bits") {
  std::vector<std::int64_t> sizes{150, 40, 3};
  const Tensor segments(sizes.data(), {3}, DType::i64);
  for (const DType type : kTypes)
    for (const std::int64_t count : {8, 2}) {
      CAPTURE(rlk::name_of(type));
      CAPTURE(count);
      constexpr std::int64_t m = 18, k = 70;
      std::int64_t n = 0;
      for (const std::int64_t size : sizes) n += rlk::leaves::length(size, 0, count);
      Array d_y = normal(type, {m, n}, 1), x = normal(type, {m, k}, 2), weight = normal(type, {n, k}, 3),
            w = normal(DType::f32, {n, k}, 4, {k + 1, 1}), b = normal(DType::f32, {n}, 5),
            d_x(DType::f32, {m, k}), d_weight(DType::f32, {n, k}), d_bias(DType::f32, {n});
      const Tensor t1 = d_y.view(), t2 = x.view(), t3 = weight.view(), t4 = w.view(), t5 = b.view(),
                   t6 = d_x.view(), t7 = d_weight.view(), t8 = d_bias.view();
      rlk::LinearBwd a{.d_y = t1,
                       .x = t2,
                       .weight = t3,
                       .d_x = t6,
                       .d_weight = t7,
                       .d_bias = t8,
                       .d_weight_before = t4,
                       .d_bias_before = t5,
                       .segments = segments};
      a.d_x_leaf_count = count, a.n_total = 193;
      REQUIRE(rlk::linear_bwd(a, kNative));
      same_on_fibers({&d_x, &d_weight, &d_bias}, [&] {
        run(linear::d_x_product(a));
        run(linear::d_weight_product(a));
        run(linear::d_bias_product(a));
      });
    }
}

TEST_CASE("tp_sum on fibers is native's bits, at every number of partial sums") {
  for (const DType type : kTypes)
    for (const std::int64_t ranks : {1, 2, 4, 8})
      // Beside rows in any place, rows in whole fours: of one tile and of several.
      for (const auto& [n, beside] : {std::pair{5, 2}, {1100, 2}, {8, 4}, {1024, 4}, {4804, 8}}) {
        CAPTURE(rlk::name_of(type));
        CAPTURE(ranks);
        CAPTURE(n);
        constexpr std::int64_t m = 3;
        Array partials = normal(DType::f32, {ranks, m, n}, 1, {m * (n + beside) + 3 * beside, n + beside, 1}),
              bias = normal(type, {n}, 2), residual = normal(type, {m, n}, 3), y(type, {m, n});
        const Tensor tp = partials.view(), tb = bias.view(), tr = residual.view(), ty = y.view();
        const rlk::TpSum a{.partials = tp, .bias = tb, .residual = tr, .y = ty};
        REQUIRE(rlk::tp_sum(a, {.backend = "native.tiles"}));
        same_on_fibers({&y}, [&] { rlk::simt::tp_sum::launch(rlk::tree8::problem_of(a), nullptr); });
      }
}

TEST_CASE("tp_sum on fibers takes rows that start one number off whole fours") {
  constexpr std::int64_t m = 3, n = 64, wide = n + 4;
  for (const DType type : kTypes)
    for (int off = 0; off < 3; ++off) {  // a partial sum, the residual, y
      CAPTURE(rlk::name_of(type));
      CAPTURE(off);
      Array p0 = normal(DType::f32, {m, wide}, 1), p1 = normal(DType::f32, {m, wide}, 2),
            residual = normal(type, {m, wide}, 3), y(type, {m, wide});
      const auto shifted = [&](Array& a, DType t, int which) {
        const Tensor all = a.view();
        char* const data = static_cast<char*>(all.dl().data) + (off == which ? rlk::size_of(t) : 0);
        return Tensor(data, {m, n}, t, all.dl().device, {wide, 1});
      };
      const Tensor t0 = shifted(p0, DType::f32, -1), t1 = shifted(p1, DType::f32, 0),
                   tr = shifted(residual, type, 1), ty = shifted(y, type, 2);
      const rlk::TpSum a{.partials = t0, .residual = tr, .y = ty, .p1 = t1};
      REQUIRE(rlk::tp_sum(a, {.backend = "native.tiles"}));
      same_on_fibers({&y}, [&] { rlk::simt::tp_sum::launch(rlk::tree8::problem_of(a), nullptr); });
    }
}

TEST_CASE(
    "tp_sum of tensors of their own and its gradients on fibers are native's bits, with a slice of rows") {
  for (const DType type : kTypes)
    for (const std::int64_t n : {5, 1100}) {
      CAPTURE(rlk::name_of(type));
      CAPTURE(n);
      constexpr std::int64_t m = 6, first = 1, count = 4;
      Array p0 = normal(DType::f32, {m, n}, 1), p1 = normal(DType::f32, {m, n}, 2, {n + 2, 1}),
            y(type, {count, n});
      const Tensor t0 = p0.view(), t1 = p1.view(), ty = y.view();
      rlk::TpSum a{.partials = t0, .y = ty, .p1 = t1};
      a.row_first = first, a.row_count = count;
      REQUIRE(rlk::tp_sum(a, {.backend = "native.tiles"}));
      same_on_fibers({&y}, [&] { rlk::simt::tp_sum::launch(rlk::tree8::problem_of(a), nullptr); });

      Array d_y = normal(type, {count, n}, 3), d0(DType::f32, {m, n}), d1(DType::f32, {m, n}, {n + 2, 1}),
            d_residual(type, {count, n});
      const Tensor td = d_y.view(), g0 = d0.view(), g1 = d1.view(), gr = d_residual.view();
      rlk::TpSumBwd b{.d_y = td, .partials = t0, .d_partials = g0, .d_p1 = g1, .d_residual = gr};
      b.row_first = first, b.row_count = count;
      REQUIRE(rlk::tp_sum_bwd(b, {.backend = "native.tiles"}));
      same_on_fibers({&d0, &d1, &d_residual},
                     [&] { rlk::simt::tp_sum::launch(rlk::tree8::spread_of(b), nullptr); });
    }
}

TEST_CASE("linear on fibers gives a row the same bits among one to 130 rows") {
  constexpr std::int64_t most = 130, k = 150, n = 70;
  for (const DType type : kTypes) {
    CAPTURE(rlk::name_of(type));
    Array x = normal(type, {most, k}, 1), weight = normal(type, {n, k}, 2), want(DType::f32, {most, n});
    const Tensor all = x.view(), w = weight.view(), y = want.view();
    REQUIRE(rlk::linear({.x = all, .weight = w, .y = y}, kNative));
    for (const std::int64_t m : {1, 2, 7, 16, 17, 33, 64, 65, 130}) {
      CAPTURE(m);
      Array got(DType::f32, {m, n});
      const Tensor part = rows(x, m), to = got.view();
      run(linear::forward_product(rlk::Linear{.x = part, .weight = w, .y = to}));
      CHECK(std::equal(got.bytes.begin(), got.bytes.end(), want.bytes.begin()));
    }
  }
}
