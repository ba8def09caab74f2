// labels: conformance fibers
// embedding: shards of the vocabulary, gradients in the order of tokens whatever the number of threads, and the portable GPU
// kernels on fibers with the bits of the native backend.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "arithmetic/embedding/bind.hpp"
#include "lm_head_simt.hpp"
#include "simt/embedding/kernels.hpp"

namespace {

using namespace lm_head_simt;
using Ids = std::vector<std::int64_t>;

Ids random_ids(std::size_t count, std::int64_t from, std::int64_t to, unsigned seed) {
  std::mt19937 engine(seed);
  Ids ids(count);
  for (std::int64_t& id : ids) id = from + static_cast<std::int64_t>(engine()) % (to - from);
  return ids;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

// launch() at both wave sizes gives the bytes of `want`, which native left there.
template <class Launch>
void same_on_fibers(Array& result, const Launch& launch) {
  const std::vector<std::uint8_t> want = result.bytes;
  for (int wave : {32, 64})
    for (auto order : {rlk_fiber::Order::descending, rlk_fiber::Order::shuffled}) {
      std::fill(result.bytes.begin(), result.bytes.end(), 0xff);
      rlk_fiber::wave_size = wave;
      rlk_fiber::order = order;
      launch();
      CHECK(result.bytes == want);
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

TEST_CASE("shards of the vocabulary, joined by tp_sum, are the rows of the whole") {
  constexpr std::int64_t v = 40, h = 70, n = 33, ranks = 4;
  for (const DType type : {DType::f32, DType::bf16}) {
    Ids ids = random_ids(n, 0, v, 1);
    Array weight = normal(type, {v, h}, 2), whole(type, {n, h}), y(type, {n, h});
    std::vector<float> partials(ranks * n * h);
    const Tensor ti(ids.data(), {n}, DType::i64), tw = weight.view(), to = whole.view(), ty = y.view();
    REQUIRE(rlk::embedding({.ids = ti, .weight = tw, .out = to}));
    for (std::int64_t r = 0; r < ranks; ++r) {
      Array part(type, {n, h});
      const Tensor shard(weight.bytes.data() + r * v / ranks * h * rlk::size_of(type), {v / ranks, h}, type),
          tp = part.view();
      rlk::Embedding a{.ids = ti, .weight = shard, .out = tp};
      a.vocab_start = r * v / ranks;
      REQUIRE(rlk::embedding(a));
      for (std::int64_t i = 0; i < n * h; ++i)
        partials[static_cast<std::size_t>(r * n * h + i)] = part.get(i);
    }
    const Tensor all(partials.data(), {ranks, n, h}, DType::f32);
    REQUIRE(rlk::tp_sum({.partials = all, .y = ty}));
    CHECK(y.bytes == whole.bytes);
  }
}

TEST_CASE("gradients of embedding add in the order of tokens, on 1, 3 and 16 threads") {
  constexpr std::int64_t v = 50, h = 1100, n = 400;
  Ids ids = random_ids(n, -3, v + 3, 3);
  for (std::size_t t = 0; t < n; t += 3) ids[t] = 17;  // one id has a third of them
  Array d_out = normal(DType::bf16, {n, h}, 4), weight(DType::bf16, {v, h});
  const Tensor ti(ids.data(), {n}, DType::i64), td = d_out.view(), tw = weight.view();
  for (const char* backend : {"native.rows.scalar", "native.rows"})
    for (const int threads : {1, 3, 16}) {
      CAPTURE(threads);
      Array d_weight(DType::f32, {v, h});
      const Tensor tg = d_weight.view();
      rlk::EmbeddingBwd a{.ids = ti, .d_out = td, .weight = tw, .d_weight = tg};
      a.scale = 1.25, a.padding_idx = 9;
      REQUIRE(rlk::embedding_bwd(a, {.backend = backend, .threads = threads}));
      for (std::int64_t i = 0; i < v * h; i += 7) {
        float sum = 0;
        for (std::int64_t t = 0; t < n && i / h != 9; ++t)
          if (ids[static_cast<std::size_t>(t)] == i / h) sum += d_out.get(t * h + i % h);
        REQUIRE(d_weight.get(i) == sum * 1.25f);
      }
    }
}

TEST_CASE(
    "a gradient of embedding goes on from one so far, in place too; rows without tokens stay as they lie") {
  constexpr std::int64_t v = 12, h = 300, n = 9;
  for (const DType type : kTypes)
    for (const bool in_place : {false, true}) {
      CAPTURE(rlk::name_of(type));
      CAPTURE(in_place);
      Ids ids = random_ids(n, -1, v - 3, 8);
      Array weight(type, {v, h}), d_out = normal(type, {n, h}, 9), sum(DType::f32, {v, h}),
                                  before = normal(DType::f32, {v, h}, 10), d_weight(DType::f32, {v, h});
      const std::uint32_t odd = 0xff812345;  // a NaN of no arithmetic
      std::memcpy(before.bytes.data() + before.bytes.size() - 4, &odd, 4);
      const std::vector<std::uint8_t> so_far = before.bytes;
      const Tensor ti(ids.data(), {n}, DType::i64), td = d_out.view(), tw = weight.view(), ts = sum.view(),
                                                    tb = before.view(),
                                                    tg = in_place ? before.view() : d_weight.view();
      rlk::EmbeddingBwd a{.ids = ti, .d_out = td, .weight = tw, .d_weight = ts};
      a.scale = 0.7;
      REQUIRE(rlk::embedding_bwd(a, {.backend = "native.rows"}));
      rlk::EmbeddingBwd b{.ids = ti, .d_out = td, .weight = tw, .d_weight = tg, .d_weight_before = tb};
      b.scale = 0.7;
      Array& result = in_place ? before : d_weight;
      std::vector<float> want(v * h);
      std::memcpy(want.data(), so_far.data(), so_far.size());
      std::vector<std::uint8_t> expected = so_far;
      for (std::int64_t i = 0; i < v * h; ++i)
        if (std::find(ids.begin(), ids.end(), i / h) != ids.end()) {
          const float x = want[static_cast<std::size_t>(i)] + sum.get(i);
          std::memcpy(expected.data() + i * 4, &x, 4);
        }
      const auto check = [&](const auto& run) {
        before.bytes = so_far;
        run();
        CHECK(result.bytes == expected);
      };
      for (const char* backend : {"native.rows", "native.rows.scalar"})
        check([&] { REQUIRE(rlk::embedding_bwd(b, {.backend = backend})); });
      for (int wave : {32, 64}) {
        rlk_fiber::wave_size = wave;
        check([&] {
          std::vector<std::int64_t> workspace(
              static_cast<std::size_t>(rlk::simt::embedding::backward_bytes(n)) / 8, -7);
          rlk::simt::embedding::launch_backward(rlk::embed32::problem_of(b), workspace.data(), nullptr);
        });
      }
      rlk_fiber::wave_size = RLK_FIBER_WAVE;
    }
}

TEST_CASE("what a gradient of embedding cannot be added to is refused by name") {
  Ids ids{0, 1};
  Array weight(DType::bf16, {3, 8}), d_out(DType::bf16, {2, 8}), result(DType::bf16, {3, 8}),
      narrow(DType::f32, {3, 7}), before(DType::f32, {3, 8});
  const Tensor ti(ids.data(), {2}, DType::i64), td = d_out.view(), tw = weight.view(), tg = result.view(),
                                                tn = narrow.view(), tb = before.view();
  const rlk::Status size =
      rlk::embedding_bwd({.ids = ti, .d_out = td, .weight = tw, .d_weight = tg, .d_weight_before = tn});
  CHECK(size.message() == "embedding_bwd: d_weight_before has size 7 in dimension 1, weight has 8");
  const rlk::Status dtype =
      rlk::embedding_bwd({.ids = ti, .d_out = td, .weight = tw, .d_weight = tg, .d_weight_before = tb});
  CHECK(!dtype);
  CHECK(dtype.message().find("d_weight") != std::string_view::npos);
}

TEST_CASE("embedding and its gradient on fibers are native's bits") {
  for (const DType type : kTypes)
    for (const bool wide : {false, true}) {
      CAPTURE(rlk::name_of(type));
      CAPTURE(wide);
      constexpr std::int64_t v = 12, h = 300, b = 4, s = 9;
      Ids ids = random_ids(b * s, -1, v + 1, 5);
      std::vector<std::int32_t> narrow(ids.begin(), ids.end());
      Array weight = normal(type, {v, h}, 6, {h + 4, 1}), d_out = normal(type, {b, s, h}, 7),
            out(type, {b, s, h}, {s * (h + 3), h + 3, 1}), d_weight(wide ? DType::f32 : type, {v, h});
      const Tensor ti =
          wide ? Tensor(ids.data(), {b, s}, DType::i64) : Tensor(narrow.data(), {b, s}, DType::i32);
      const Tensor tw = weight.view(), td = d_out.view(), to = out.view(), tg = d_weight.view();
      Array bad(DType::i32, {1});
      const Tensor tc = bad.view();
      rlk::Embedding a{.ids = ti, .weight = tw, .out = to, .bad_count = tc};
      rlk::EmbeddingBwd g{.ids = ti, .d_out = td, .weight = tw, .d_weight = tg};
      if (wide) a.scale = g.scale = 3.7, g.padding_idx = 5;
      REQUIRE(rlk::embedding(a, {.backend = "native.rows"}));
      REQUIRE(rlk::embedding_bwd(g, {.backend = "native.rows"}));
      same_on_fibers(out,
                     [&] { rlk::simt::embedding::launch_forward(rlk::embed32::problem_of(a), nullptr); });
      std::int32_t count = 0, want = 0;
      for (const std::int64_t id : ids) want += id < 0 || id >= v;
      std::memcpy(&count, bad.bytes.data(), sizeof count);
      CHECK(count == want);
      CHECK(want > 0);
      same_on_fibers(bad,
                     [&] { rlk::simt::embedding::launch_forward(rlk::embed32::problem_of(a), nullptr); });
      same_on_fibers(d_weight, [&] {
        std::vector<std::int64_t> workspace(
            static_cast<std::size_t>(rlk::simt::embedding::backward_bytes(b * s)) / 8, -7);
        rlk::simt::embedding::launch_backward(rlk::embed32::problem_of(g), workspace.data(), nullptr);
      });
    }
}
