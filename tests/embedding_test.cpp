// labels: conformance fibers
// embedding: shards of the vocabulary, gradients in the order of tokens whatever the number of threads, and the portable GPU
// kernels on fibers with the bits of the native backend.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "arithmetic/embedding/bind.hpp"
#include "lm_head_simt.hpp"
#include "simt/embedding/kernels.hpp"

namespace {

using namespace lm_head_simt;
namespace gpu = rlk::simt::embedding;
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

// The portable kernels on fibers; `few`: up to how many tokens are compared with each other.
void backward(const rlk::EmbeddingBwd& a, std::uint32_t few = gpu::kFew) {
  std::vector<std::int64_t> workspace(
      static_cast<std::size_t>(gpu::backward_bytes(a.ids.numel(), a.weight.dim(0))) / 8, -7);
  gpu::launch_backward(rlk::embed32::problem_of(a), workspace.data(), nullptr, few);
}

// Some ids in a row, in a fixed shuffled order or as they are.
Ids runs_of(const std::vector<std::int64_t>& lengths, bool shuffled) {
  Ids ids;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    ids.insert(ids.end(), static_cast<std::size_t>(lengths[i]), static_cast<std::int64_t>(3 * i));
  if (shuffled) std::shuffle(ids.begin(), ids.end(), std::mt19937(11));
  return ids;
}

__global__ void find(gpu::Sorted sorted, std::uint32_t key, std::uint32_t* place) {
  const std::uint32_t at = gpu::lower_bound(sorted, key);
  if (threadIdx.x == 0) *place = at;
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
        check([&] { backward(b); });
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
      same_on_fibers(d_weight, [&] { backward(g); });
    }
}

// A key of 1 to 22 bits is sorted in one to three passes; chunks of one round, of two, and one that is not whole.
TEST_CASE("tokens are sorted by row, those of a row as they come") {
  for (const std::int64_t v : {1, 5, 1023, 1024, 70001, 1 << 20, 4000000})
    for (const std::int64_t n : {1, 63, 64, 65, 255, 256, 257, 1000, 16500})
      for (const bool many : {false, true}) {
        if (n > 1000 && (v == 5 || v == 1024 || v == 1 << 20)) continue;
        if (n > gpu::kFew && !many) continue;
        CAPTURE(v);
        CAPTURE(n);
        CAPTURE(many);
        Ids ids = random_ids(static_cast<std::size_t>(n), -1 - v / 8, v + v / 8 + 2, 12);
        for (std::size_t t = 0; t < ids.size(); t += 3) ids[t] = v / 2;
        rlk::embed32::Problem p;
        p.vocab = v, p.width = 1, p.wide_ids = true, p.padding = 0;
        p.ids.data = ids.data(), p.ids.stride[0] = 1;
        p.axes.count = 1, p.axes.size[0] = p.axes.rows = n;
        std::vector<std::int32_t> tokens(ids.size());
        std::iota(tokens.begin(), tokens.end(), 0);
        const auto key = [&](std::int32_t t) { return gpu::key_of(p, t); };
        std::stable_sort(tokens.begin(), tokens.end(),
                         [&](std::int32_t a, std::int32_t b) { return key(a) < key(b); });
        for (int wave : {32, 64}) {
          rlk_fiber::wave_size = wave;
          rlk_fiber::order = wave == 32 ? rlk_fiber::Order::shuffled : rlk_fiber::Order::descending;
          std::vector<std::uint8_t> workspace(static_cast<std::size_t>(gpu::backward_bytes(n, v)), 0xaa);
          const gpu::Sorted sorted =
              gpu::launch_sort(p, gpu::Order(n, v).in(workspace.data()), many ? 0 : gpu::kFew, nullptr);
          REQUIRE(std::equal(tokens.begin(), tokens.end(), sorted.tokens));
          for (std::size_t i = 0; i < tokens.size(); ++i) REQUIRE(sorted.keys[i] == key(tokens[i]));
        }
        rlk_fiber::wave_size = RLK_FIBER_WAVE;
        rlk_fiber::order = rlk_fiber::Order::ascending;
      }
}

TEST_CASE("the first place of a row among sorted keys, before all of them and behind the last") {
  for (const std::uint32_t count : {0, 1, 2, 255, 256, 257, 512, 3000, 65536, 70001})
    for (const bool equal : {false, true}) {
      CAPTURE(count);
      CAPTURE(equal);
      std::vector<std::uint32_t> keys(count);
      for (std::uint32_t i = 0; i < count; ++i) keys[i] = equal ? 7 : 3 * (i / 2) + 1;
      const gpu::Sorted sorted{keys.data(), nullptr, count};
      const std::uint32_t last = count == 0 ? 0 : keys.back();
      for (const std::uint32_t key : {0u, 1u, 2u, 7u, 8u, last / 2, last / 3 + 1, last, last + 1}) {
        CAPTURE(key);
        std::uint32_t place = ~0u;
        hipLaunchKernelGGL(find, dim3(1), dim3(gpu::kBlock), 0, nullptr, sorted, key, &place);
        CHECK(place == std::lower_bound(keys.begin(), keys.end(), key) - keys.begin());
      }
    }
}

// Runs of a block's threads and of its shared memory, to the token; behind each other, so that they begin anywhere between the
// windows that make a run long. Rows that lie whole and others, of a part of a tile of columns, of one and of several.
TEST_CASE("gradients of embedding with long runs of tokens on fibers are native's bits") {
  const std::vector<std::int64_t> lengths{1,  31, 1, 32,  33,  2,   62,  63,  64,  65,  0, 66,  1,  95,
                                          96, 97, 3, 127, 128, 129, 255, 256, 257, 400, 1, 512, 513};
  for (const bool shuffled : {false, true})
    for (const std::int64_t h : {5, 8, 70, 264, 4104})
      for (const DType type : kTypes) {
        if (h > 70 && (shuffled || type == DType::f16)) continue;
        CAPTURE(shuffled);
        CAPTURE(h);
        CAPTURE(rlk::name_of(type));
        Ids ids = runs_of(lengths, shuffled);
        const auto n = static_cast<std::int64_t>(ids.size()),
                   v = 3 * static_cast<std::int64_t>(lengths.size()) + 2;
        Array weight(type, {v, h}), d_out = normal(type, {n, h}, 13), d_weight(type, {v, h});
        const Tensor ti(ids.data(), {n}, DType::i64), td = d_out.view(), tw = weight.view(),
                                                      tg = d_weight.view();
        rlk::EmbeddingBwd g{.ids = ti, .d_out = td, .weight = tw, .d_weight = tg};
        if (shuffled) g.scale = 0.3, g.padding_idx = 3 * 26;
        REQUIRE(rlk::embedding_bwd(g, {.backend = "native.rows"}));
        if (h <= 70)
          same_on_fibers(d_weight, [&] { backward(g); });
        else
          same_on_fibers(d_weight, [&] { backward(g, 0); });
      }
}

TEST_CASE("gradients of embedding where all tokens have one id, none has a row, or every row has one") {
  constexpr std::int64_t v = 2100, h = 16;
  for (const std::int64_t n : {1, 255, 256, 257, 1025})
    for (int kind = 0; kind < 4; ++kind) {
      CAPTURE(n);
      CAPTURE(kind);
      Ids ids(static_cast<std::size_t>(n), kind == 0 ? 0 : kind == 1 ? v - 1 : -1);
      for (std::size_t t = 0; kind == 3 && t < ids.size(); ++t)
        ids[t] = v - 1 - static_cast<std::int64_t>(2 * t);
      Array weight(DType::bf16, {v, h}), d_out = normal(DType::bf16, {n, h}, 14),
                                         d_weight(DType::bf16, {v, h});
      const Tensor ti(ids.data(), {n}, DType::i64), td = d_out.view(), tw = weight.view(),
                                                    tg = d_weight.view();
      const rlk::EmbeddingBwd g{.ids = ti, .d_out = td, .weight = tw, .d_weight = tg};
      REQUIRE(rlk::embedding_bwd(g, {.backend = "native.rows"}));
      same_on_fibers(d_weight, [&] { backward(g); });
    }
}

TEST_CASE("a gradient of many tokens goes on from one so far, in place too, on fibers as on native") {
  constexpr std::int64_t v = 700, h = 24, n = 1500;
  Ids ids = random_ids(n, -5, v, 15);
  for (std::size_t t = 0; t < n; t += 4) ids[t] = t < 800 ? 600 : 13;
  for (const bool in_place : {false, true})
    for (const std::uint32_t few : {0u, gpu::kFew}) {
      CAPTURE(in_place);
      CAPTURE(few);
      Array weight(DType::bf16, {v, h}), d_out = normal(DType::bf16, {n, h}, 16),
                                         before = normal(DType::f32, {v, h}, 17),
                                         d_weight(DType::f32, {v, h});
      const std::vector<std::uint8_t> so_far = before.bytes;
      const Tensor ti(ids.data(), {n}, DType::i64), td = d_out.view(), tw = weight.view(), tb = before.view(),
                                                    tg = in_place ? before.view() : d_weight.view();
      rlk::EmbeddingBwd g{.ids = ti, .d_out = td, .weight = tw, .d_weight = tg, .d_weight_before = tb};
      g.scale = 1.7;
      REQUIRE(rlk::embedding_bwd(g, {.backend = "native.rows"}));
      const std::vector<std::uint8_t> want = in_place ? before.bytes : d_weight.bytes;
      before.bytes = so_far;
      if (!in_place) std::fill(d_weight.bytes.begin(), d_weight.bytes.end(), 0xff);
      backward(g, few);
      CHECK((in_place ? before.bytes : d_weight.bytes) == want);
    }
}

TEST_CASE("d_weight of strided rows, and tokens of more axes than one stride walks") {
  constexpr std::int64_t v = 40, h = 48, b = 3, s = 100;
  Ids ids = random_ids(b * s, -1, v + 1, 18);
  for (const std::int64_t gap : {8, 3}) {
    Array weight(DType::bf16, {v, h}),
        d_out = normal(DType::bf16, {b, s, h}, 19, {s * (h + 8) + 16, h + 8, 1}),
        d_weight(DType::bf16, {v, h}, {h + gap, 1});
    const Tensor ti(ids.data(), {b, s}, DType::i64), td = d_out.view(), tw = weight.view(),
                                                     tg = d_weight.view();
    const rlk::EmbeddingBwd g{.ids = ti, .d_out = td, .weight = tw, .d_weight = tg};
    REQUIRE(rlk::embedding_bwd(g, {.backend = "native.rows"}));
    same_on_fibers(d_weight, [&] { backward(g); });
  }
}
