// The portable lm_head kernels compiled by nvcc, on a real GPU: the bits of the native backend.
#include "lm_head_nvcc.hpp"

#include <doctest/doctest.h>

#include <cstdio>

#include "lm_head_simt.hpp"

namespace {

using namespace lm_head_simt;

bool skipped() {
  if (gpu_is_here()) return false;
  std::puts("[skip] no NVIDIA GPU");
  return true;
}

void on_gpu(const Product& p, const Bytes& bytes, Sum sum) {
  const char* error = run_on_gpu(p, bytes, sum);
  REQUIRE_MESSAGE(error == nullptr, error);
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

}  // namespace

TEST_CASE("lm_head by nvcc: the forward has the bits of the native backend at every dtype, tail and stride") {
  if (skipped()) return;
  struct Size {
    std::int64_t m, k, v;
  };
  for (const DType type : kTypes)
    for (const Sum sum : {Sum::fma32, Sum::fma64})
      for (const auto& [m, k, v] :
           {Size{1, 1, 1}, Size{3, 1029, 70}, Size{17, 4100, 300}, Size{70, 33, 1000}})
        for (const DType result : {DType::f32, type}) {
          INFO(rlk::name_of(type), "->", rlk::name_of(result), " m=", m, " k=", k, " v=", v);
          Array hidden = normal(type, {m, k}, 1, {k + 3, 1}), weight = normal(type, {v, k}, 2, {k + 1, 1}),
                bias = normal(type, {v}, 3);
          Array want(result, {m, v}, {v + 2, 1}), got = want;
          const Tensor h = hidden.view(), w = weight.view(), b = bias.view(), y = want.view(), z = got.view();
          const rlk::Status status =
              rlk::lm_head({.hidden = h, .weight = w, .bias = b, .out = y}, {.backend = native(sum)});
          REQUIRE_MESSAGE(status, status.message());
          on_gpu(kernels::forward_product({.hidden = h, .weight = w, .bias = b, .out = z}),
                 {hidden.bytes.size(), weight.bytes.size(), got.bytes.size(), bias.bytes.size()}, sum);
          CHECK(want.bytes == got.bytes);
        }
}

TEST_CASE("lm_head by nvcc: the backward's three results have the bits of the native backend") {
  if (skipped()) return;
  for (const DType type : kTypes)
    for (const Sum sum : {Sum::fma32, Sum::fma64}) {
      const std::int64_t v = 1100, k = 77;
      Array d_out = normal(type, {3, 5, v}, 4, {7 * v, v + 1, 1}), hidden = normal(type, {3, 5, k}, 5),
            weight = normal(type, {v, k}, 6);
      Array want[] = {Array(type, {3, 5, k}), Array(type, {v, k}), Array(type, {v})};
      Array got[] = {want[0], want[1], want[2]};
      const Tensor a = d_out.view(), b = hidden.view(), c = weight.view();
      const Tensor x[] = {want[0].view(), want[1].view(), want[2].view()};
      const Tensor y[] = {got[0].view(), got[1].view(), got[2].view()};
      rlk::LmHeadBwd args{
          .d_out = a, .hidden = b, .weight = c, .d_hidden = x[0], .d_weight = x[1], .d_bias = x[2]};
      const rlk::Status status = rlk::lm_head_bwd(args, {.backend = native(sum)});
      REQUIRE_MESSAGE(status, status.message());
      args.d_hidden = y[0], args.d_weight = y[1], args.d_bias = y[2];
      const std::size_t gradient = d_out.bytes.size();
      on_gpu(kernels::d_hidden_product(args), {gradient, weight.bytes.size(), got[0].bytes.size(), 0}, sum);
      on_gpu(kernels::d_weight_product(args), {gradient, hidden.bytes.size(), got[1].bytes.size(), 0}, sum);
      on_gpu(kernels::d_bias_product(args), {0, gradient, got[2].bytes.size(), 0}, sum);
      for (int i = 0; i < 3; ++i) CHECK(want[i].bytes == got[i].bytes);
    }
}
