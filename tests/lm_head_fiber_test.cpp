// labels: conformance fibers
// The portable GPU kernels of lm_head on fibers: the bits of the native backend, at both wave sizes and in
// any thread order, for every layout the op allows; and the indexing of the matrix-core kernel, with the
// instruction played by its published rule.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "lm_head_simt.hpp"
#include "simt/lm_head/mfma.hpp"

namespace {

using namespace lm_head_simt;

void on_fibers(const Product& p, Sum sum) {
  REQUIRE((sum == Sum::mfma ? kernels::launch_mfma(p, nullptr) : kernels::launch(p, sum, nullptr)) ==
          hipSuccess);
}

// Wave sizes and thread orders, one combination after the other.
struct Executor {
  int turn = 0;
  void next() {
    constexpr rlk_fiber::Order kOrders[] = {rlk_fiber::Order::ascending, rlk_fiber::Order::shuffled,
                                            rlk_fiber::Order::descending};
    rlk_fiber::order = kOrders[turn % 3];
    rlk_fiber::wave_size = turn++ % 2 == 0 ? 64 : 32;
  }
  ~Executor() {
    rlk_fiber::order = rlk_fiber::Order::ascending;
    rlk_fiber::wave_size = RLK_FIBER_WAVE;
  }
};

// The same call on both, into results of the same layout.
void check_forward(Array& hidden, Array& weight, Array* bias, const Array& out, Sum sum) {
  Array want = out, got = out;
  const Tensor h = hidden.view(), w = weight.view(), b = bias ? bias->view() : Tensor(), y = want.view(),
               z = got.view();
  rlk::LmHead args{.hidden = h, .weight = w, .out = y};
  if (bias) args.bias = b;
  const rlk::Status status = rlk::lm_head(args, {.backend = native(sum)});
  REQUIRE_MESSAGE(status, status.message());
  args.out = z;
  on_fibers(kernels::forward_product(args), sum);
  CHECK(want.bytes == got.bytes);
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

}  // namespace

TEST_CASE(
    "lm_head on fibers: both chains have the bits of the native backend, at every dtype, tail and bias") {
  Executor executor;
  struct Size {
    std::int64_t m, k, v;
  };
  for (const DType type : kTypes)
    for (const Sum sum : {Sum::fma32, Sum::fma64})
      for (const auto& [m, k, v] : {Size{1, 1, 1}, Size{3, 1029, 70}, Size{17, 2050, 3}, Size{16, 48, 65},
                                    Size{70, 33, 130}, Size{5, 0, 7}}) {
        Array hidden = normal(type, {m, k}, 1), weight = normal(type, {v, k}, 2), bias = normal(type, {v}, 3);
        for (const DType out : {DType::f32, type})
          for (Array* b : {static_cast<Array*>(nullptr), &bias}) {
            executor.next();
            INFO(rlk::name_of(type), "->", rlk::name_of(out), " m=", m, " k=", k, " v=", v, " wave ",
                 rlk_fiber::wave_size, b ? " bias" : "");
            check_forward(hidden, weight, b, Array(out, {m, v}), sum);
          }
      }
}

TEST_CASE("lm_head on fibers: extreme numbers keep their bits: subnormal, huge, infinite, NaN, cancelling") {
  Executor executor;
  for (const DType type : kTypes)
    for (const Sum sum : {Sum::fma32, Sum::fma64}) {
      executor.next();
      std::mt19937 engine(7);
      const auto wild = [&]() -> float {
        const auto r = engine();
        switch (r % 64) {
          case 0:
            return r & 64 ? INFINITY : -INFINITY;
          case 1:
            return std::nanf("");
          case 2:
            return -0.0f;
          default:
            return std::ldexp(static_cast<float>(static_cast<int>(r >> 8 & 0xffff) - 0x8000),
                              static_cast<int>(r >> 24) % (type == DType::f16 ? 24 : 140) -
                                  (type == DType::f16 ? 32 : 100));
        }
      };
      Array hidden = Array(type, {19, 75}).fill(wild), weight = Array(type, {67, 75}).fill(wild);
      INFO(rlk::name_of(type));
      check_forward(hidden, weight, nullptr, Array(DType::f32, {19, 67}), sum);
      check_forward(hidden, weight, nullptr, Array(type, {19, 67}), sum);
      Array tiny = Array(type, {2, 20}).fill([&] { return engine() & 1 ? 0x1p-70f : -0x1p-70f; });
      check_forward(tiny, tiny, nullptr, Array(DType::f32, {2, 2}), sum);
    }
}

TEST_CASE("lm_head on fibers: any leading strides, uneven, broadcast or reversed order of dimensions") {
  Executor executor;
  for (const DType type : kTypes)
    for (const Sum sum : {Sum::fma32, Sum::fma64}) {
      executor.next();
      // [2, 3, 5, K]: no single stride walks hidden, and out runs through its rows in another order.
      Array hidden = normal(type, {2, 3, 5, 37}, 4, {40, 500, 90, 1}),
            weight = normal(type, {66, 37}, 5, {41, 1});
      check_forward(hidden, weight, nullptr, Array(type, {2, 3, 5, 66}, {70, 1500, 150, 1}), sum);
      Array repeated = normal(type, {3, 4, 37}, 6, {37, 0, 1}), vector = normal(type, {37}, 7);
      check_forward(repeated, weight, nullptr, Array(DType::f32, {3, 4, 66}), sum);
      check_forward(vector, weight, nullptr, Array(DType::f32, {66}), sum);
    }
}

TEST_CASE("lm_head on fibers: the backward's three results have the bits of the native backend") {
  Executor executor;
  for (const DType type : kTypes)
    for (const DType gradient : {type, DType::f32})
      for (const Sum sum : {Sum::fma32, Sum::fma64})
        for (const DType result : {type, DType::f32}) {
          executor.next();
          INFO(rlk::name_of(type), " ", rlk::name_of(gradient), " ", rlk::name_of(result));
          const std::int64_t v = result == type ? 1030 : 70, k = 35;  // d_hidden: more than one block of V
          Array d_out = normal(gradient, {2, 3, 3, v}, 8, {4 * v, 9 * v, v + 1, 1}),
                hidden = normal(type, {2, 3, 3, k}, 9, {k, 2 * k + 1, 400, 1}),
                weight = normal(type, {v, k}, 10, {k + 3, 1});
          Array want[] = {Array(result, {2, 3, 3, k}), Array(result, {v, k}, {k + 5, 1}), Array(result, {v})};
          Array got[] = {want[0], want[1], want[2]};
          const Tensor a = d_out.view(), b = hidden.view(), c = weight.view();
          const Tensor x[] = {want[0].view(), want[1].view(), want[2].view()};
          const Tensor y[] = {got[0].view(), got[1].view(), got[2].view()};
          rlk::LmHeadBwd args{
              .d_out = a, .hidden = b, .weight = c, .d_hidden = x[0], .d_weight = x[1], .d_bias = x[2]};
          const rlk::Status status = rlk::lm_head_bwd(args, {.backend = native(sum)});
          REQUIRE_MESSAGE(status, status.message());
          args.d_hidden = y[0], args.d_weight = y[1], args.d_bias = y[2];
          on_fibers(kernels::d_hidden_product(args), sum);
          on_fibers(kernels::d_weight_product(args), sum);
          on_fibers(kernels::d_bias_product(args), sum);
          for (int i = 0; i < 3; ++i) CHECK(want[i].bytes == got[i].bytes);
        }
}

TEST_CASE("lm_head on fibers: an empty result starts nothing, and a sum over nothing is +0") {
  Array hidden(DType::bf16, {1, 4}), weight(DType::bf16, {1, 4}), out(DType::bf16, {1, 1});
  Product p;
  p.depth = 4;
  for (const Sum sum : {Sum::fma32, Sum::fma64, Sum::mfma}) {
    p.rows = 0, p.cols = 5;
    on_fibers(p, sum);
    p.rows = 5, p.cols = 0;
    on_fibers(p, sum);
  }
  rlk_fiber::wave_size = 64;
  const Tensor h = hidden.view(), w = weight.view(), y = out.view();
  for (const Sum sum : {Sum::fma32, Sum::fma64, Sum::mfma}) {
    Product none = kernels::forward_product({.hidden = h, .weight = w, .out = y});
    none.depth = 0;
    out.set(0, NAN);
    on_fibers(none, sum);
    CHECK(out.bytes == std::vector<std::uint8_t>{0, 0});
  }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
}

// ---- matrix cores -----------------------------------------------------------------------------------------

namespace {

float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// cdna2/k4, as the page says it.
float cdna2(const std::vector<float>& a, const std::vector<float>& b) {
  float sum = 0;
  for (std::size_t r = 0; r < a.size(); r += 4) {
    float p[4] = {};
    for (std::size_t i = 0; i < 4 && r + i < a.size(); ++i)
      p[i] = flush((flush(a[r + i]) + 0.0f) * (flush(b[r + i]) + 0.0f));
    sum = flush(sum + flush(flush(p[0] + p[1]) + flush(p[2] + p[3])));
  }
  return sum;
}

std::vector<float> line(const Array& m, std::int64_t start, std::int64_t count, std::int64_t stride) {
  std::vector<float> x;
  for (std::int64_t i = 0; i < count; ++i) x.push_back(m.get(start + i * stride));
  return x;
}

struct Wave64 {
  Wave64() { rlk_fiber::wave_size = 64; }
  ~Wave64() {
    rlk_fiber::wave_size = RLK_FIBER_WAVE;
    rlk_fiber::order = rlk_fiber::Order::ascending;
  }
};

}  // namespace

TEST_CASE("lm_head on matrix cores, played: every lane has the right operands, forward and backward") {
  const Wave64 wave;
  for (const auto order : {rlk_fiber::Order::ascending, rlk_fiber::Order::shuffled})
    for (const std::int64_t m : {1, 16, 33, 70}) {
      rlk_fiber::order = order;
      INFO("m=", m);
      const std::int64_t k = 53, v = 75;
      // Small integers, all sums exact: only a wrong index could show.
      std::mt19937 engine(11);
      const auto small = [&] { return static_cast<float>(static_cast<int>(engine() % 17) - 8); };
      Array hidden = Array(DType::bf16, {m, k}, {k + 2, 1}).fill(small),
            weight = Array(DType::bf16, {v, k}, {k + 1, 1}).fill(small),
            d_out = Array(DType::bf16, {m, v}).fill(small), bias = Array(DType::bf16, {v}).fill(small);
      check_forward(hidden, weight, &bias, Array(DType::f32, {m, v}), Sum::fma32);
      Array want(DType::f32, {m, v}), got = want;
      const Tensor h = hidden.view(), w = weight.view(), b = bias.view(), dy = d_out.view(), y = want.view(),
                   z = got.view();
      on_fibers(kernels::forward_product({.hidden = h, .weight = w, .bias = b, .out = y}), Sum::fma32);
      on_fibers(kernels::forward_product({.hidden = h, .weight = w, .bias = b, .out = z}), Sum::mfma);
      CHECK(want.bytes == got.bytes);

      Array dh(DType::f32, {m, k}), dw(DType::f32, {v, k}), dh_got = dh, dw_got = dw;
      const Tensor tensors[] = {dh.view(), dw.view(), dh_got.view(), dw_got.view()};
      for (int i : {0, 2}) {
        rlk::LmHeadBwd args{
            .d_out = dy, .hidden = h, .weight = w, .d_hidden = tensors[i], .d_weight = tensors[i + 1]};
        on_fibers(kernels::d_hidden_product(args), i ? Sum::mfma : Sum::fma32);
        on_fibers(kernels::d_weight_product(args), i ? Sum::mfma : Sum::fma32);
      }
      CHECK(dh.bytes == dh_got.bytes);
      CHECK(dw.bytes == dw_got.bytes);
    }
}

TEST_CASE("lm_head on matrix cores, played: the sums are those of cdna2/k4, whatever the batch") {
  const Wave64 wave;
  const std::int64_t k = 70, v = 20;
  std::mt19937 engine(12);
  std::normal_distribution<float> next;
  const auto wide = [&] { return std::ldexp(next(engine), static_cast<int>(engine() % 60) - 90); };
  Array hidden = Array(DType::bf16, {40, k}).fill(wide), weight = Array(DType::bf16, {v, k}).fill(wide);
  const Tensor w = weight.view();
  for (const std::int64_t m : {3, 16, 40}) {
    Array part(DType::bf16, {m, k}), out(DType::f32, {m, v});
    std::memcpy(part.bytes.data(), hidden.bytes.data(), part.bytes.size());
    const Tensor h = part.view(), y = out.view();
    on_fibers(kernels::forward_product({.hidden = h, .weight = w, .out = y}), Sum::mfma);
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < v; ++j)
        REQUIRE(out.get(i * v + j) == cdna2(line(part, i * k, k, 1), line(weight, j * k, k, 1)));
  }
}

TEST_CASE("lm_head on fibers: both chains give a row the same bits among one to 130 rows") {
  Executor executor;
  constexpr std::int64_t most = 130, k = 150, v = 70;
  for (const DType type : kTypes)
    for (const Sum sum : {Sum::fma32, Sum::fma64}) {
      Array hidden = normal(type, {most, k}, 1), weight = normal(type, {v, k}, 2),
            want(DType::f32, {most, v});
      const Tensor all = hidden.view(), w = weight.view(), y = want.view();
      REQUIRE(rlk::lm_head({.hidden = all, .weight = w, .out = y}, {.backend = native(sum)}));
      for (const std::int64_t m : {1, 2, 7, 16, 17, 33, 64, 65, 130}) {
        executor.next();
        INFO(rlk::name_of(type), " m=", m, " wave ", rlk_fiber::wave_size);
        Array got(DType::f32, {m, v});
        const Tensor part(hidden.bytes.data(), {m, k}, type), to = got.view();
        on_fibers(kernels::forward_product(rlk::LmHead{.hidden = part, .weight = w, .out = to}), sum);
        CHECK(std::equal(got.bytes.begin(), got.bytes.end(), want.bytes.begin()));
      }
    }
}
