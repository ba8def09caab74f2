// labels: plugins gpu
// links: registry
// qk_norm_rope into fp8 caches on a GPU: native's bits for values of every sign, exponent and high fraction, by its kernels for few
// and for many tokens.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>

#include "array.hpp"
#include "rlk/rlk.hpp"

namespace {

using cuda_test::Array;
using rlk::DType;
using rlk::Tensor;

constexpr int64_t kPositions = 64;

// Every 16-bit pattern, or in fp32 these with low bits around the middle of two fp8 numbers, NaNs of every kind among them.
Array every_value(DType type, int64_t tokens, int64_t width) {
  constexpr uint32_t kLow[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  Array a({tokens, 1, width}, type);
  for (int64_t i = 0; i < a.count(); ++i) {
    const auto high = static_cast<uint32_t>(i & 0xffff);
    const uint32_t bits = type == DType::f32 ? high << 16 | kLow[(i >> 16) % 6] : high;
    std::memcpy(a.bytes.data() + i * rlk::size_of(type), &bits, static_cast<std::size_t>(rlk::size_of(type)));
  }
  return a;
}

struct Case {
  Array q, k, v, cos, sin, positions, slots, q_weight, k_weight, k_scale, v_scale, k_cache, v_cache, q_out;

  Case(DType type, int64_t tokens, int64_t width, std::mt19937& random)
      : v(every_value(type, tokens, width)) {
    for (Array* a : {&q, &k}) *a = Array(v.shape, type), a->draw(random);
    for (Array* a : {&cos, &sin}) *a = Array({kPositions, width / 2}, DType::f32), a->draw(random);
    for (Array* a : {&q_weight, &k_weight}) *a = Array({width}, type), a->draw(random);
    for (Array* a : {&k_scale, &v_scale}) *a = Array({1}, DType::f32);
    k_scale.set(0, 0.0047), v_scale.set(0, 0.7317);
    for (Array* a : {&k_cache, &v_cache}) *a = Array(v.shape, DType::f8_e4m3);
    q_out = Array(v.shape, type);
    std::vector<int32_t> at, to;
    for (int64_t t = 0; t < tokens; ++t) {
      at.push_back(static_cast<int32_t>(random() % kPositions));
      to.push_back(static_cast<int32_t>(tokens - 1 - t));
    }
    positions = Array(at), slots = Array(to);
  }
  template <class View>
  void call(View view, bool scaled, const std::string& backend) {
    const Tensor tq = view(q), tk = view(k), tv = view(v), c = view(cos), s = view(sin), p = view(positions),
                 to = view(slots), wq = view(q_weight), wk = view(k_weight), ks = view(k_scale),
                 vs = view(v_scale), keys = view(k_cache), values = view(v_cache), out = view(q_out);
    rlk::QkNormRope a{.q = tq, .k = tk, .cos = c, .sin = s, .positions = p, .v = tv};
    a.q_weight = wq, a.k_weight = wk, a.slots = to, a.k_cache = keys, a.v_cache = values, a.q_out = out;
    if (scaled) a.k_scale = ks, a.v_scale = vs;
    cuda_test::ran(rlk::qk_norm_rope(a, {.backend = backend}));
  }
};

}  // namespace

TEST_CASE("qk_norm_rope on a GPU writes the fp8 that native writes, for every value") {
  if (!cuda_test::hopper()) return;
  std::mt19937 random(1);
  for (const DType type : {DType::f32, DType::bf16, DType::f16})
    for (const int64_t width : {64, 128, 256})
      for (const int64_t tokens : {1024, 20000})
        for (const bool scaled : {false, true}) {
          CAPTURE(rlk::name_of(type));
          CAPTURE(width);
          CAPTURE(tokens);
          CAPTURE(scaled);
          Case c(type, tokens, width, random);
          c.call([](Array& a) { return a.on_gpu(); }, scaled, "cuda.simt");
          cuda_test::check(cudaDeviceSynchronize());
          c.call([](Array& a) { return a.on_cpu(); }, scaled, "native.rows");
          for (Array* result : {&c.k_cache, &c.v_cache, &c.q_out}) CHECK(result->same());
        }
}
