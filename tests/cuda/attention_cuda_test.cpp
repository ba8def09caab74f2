// labels: plugins gpu
// links: registry
// attention on Hopper: the bits of the CPU replay for drawn shapes and options, whichever way tokens are reached, and a
// captured graph that is replayed with other lengths.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
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
using cuda_test::one_of;
using cuda_test::Shape;
using rlk::Attention;
using rlk::DType;
using rlk::Tensor;

std::string id_of(const char* family, int64_t split) {
  return family + (split == 0 ? std::string("none") : std::to_string(split));
}

// The tensors of a call; those that are absent have no shape.
struct Held {
  Array q, k, v, cu_q, cu_k, kv_len, table, prefix_of, sinks, k_scale, v_scale, out, lse;
  Attention options{};
  int64_t values_of_keys = 0;  // v is so many first channels of k
  bool same_factors = false;   // of an fp8 cache

  template <class View>
  rlk::Status call(View view, const rlk::Options& how) {
    const auto there = [&](Array& a) { return a.shape.empty() ? Tensor() : view(a); };
    const Tensor views[] = {
        there(q),
        there(k),
        values_of_keys != 0 ? first_channels(view(k), k.type, k.shape, values_of_keys) : there(v),
        there(cu_q),
        there(cu_k),
        there(kv_len),
        there(table),
        there(prefix_of),
        there(sinks),
        there(out),
        there(lse),
        there(k_scale),
        there(v_scale)};
    Attention a = options;
    a.q = views[0], a.k = views[1], a.v = views[2], a.out = views[9], a.lse = views[10];
    if (!cu_q.shape.empty()) a.cu_q = views[3];
    if (!cu_k.shape.empty()) a.cu_k = views[4];
    if (!kv_len.shape.empty()) a.kv_len = views[5];
    if (!table.shape.empty()) a.block_table = views[6];
    if (!prefix_of.shape.empty()) a.prefix_of = views[7];
    if (!sinks.shape.empty()) a.sinks = views[8];
    if (!k_scale.shape.empty()) a.k_scale = views[11];
    if (!v_scale.shape.empty()) a.v_scale = same_factors ? views[11] : views[12];
    return rlk::attention(a, how);
  }
  rlk::Status replay() {
    const std::string id = id_of("native.replay_sm90_ex2_s", options.split);
    return call([](Array& a) { return a.on_cpu(); }, {.backend = id});
  }
  rlk::Status run(cudaStream_t stream = nullptr) {
    static const std::shared_ptr<void> workspace = [] {
      void* data = nullptr;
      check(cudaMalloc(&data, kWorkspace));
      return std::shared_ptr<void>(data, [](void* p) { cudaFree(p); });
    }();
    const std::string id = id_of("cuda.sm90_ex2_s", options.split);
    return call(
        [](Array& a) { return a.on_gpu(); },
        {.stream = stream, .backend = id, .workspace = workspace.get(), .workspace_bytes = kWorkspace});
  }
  bool same() const { return out.brought() == out.bytes && lse.brought() == lse.bytes; }

  static constexpr std::size_t kWorkspace = std::size_t{256} << 20;
};

enum class Layout { dense, packed, paged };

struct Sizes {
  Layout layout;
  int64_t sequences, queries, keys, heads, group, d, dv, page;
  DType type, out;
};

// Keys and values of nobody are NaN. f8: they are fp8, with factors for each head, for all or without any.
Held make(const Sizes& s, const Attention& options, bool sinks, std::mt19937& random, bool f8 = false) {
  Held h;
  h.options = options;
  const int64_t most = (s.keys + s.page - 1) / s.page, all = s.heads * s.group;
  std::vector<int32_t> lengths, cu_q{0}, cu_k{0};
  for (int64_t n = 0; n < s.sequences; ++n) {
    lengths.push_back(static_cast<int32_t>(n == 0 ? s.keys : random() % static_cast<unsigned>(s.keys + 1)));
    const auto queries =
        static_cast<int32_t>(n == 0 ? s.queries : random() % static_cast<unsigned>(s.queries + 1));
    cu_q.push_back(cu_q.back() + queries), cu_k.push_back(cu_k.back() + lengths.back());
  }
  Shape q{s.sequences, s.queries, all}, keys{s.sequences, s.keys, s.heads};
  if (s.layout == Layout::packed) {
    q = {cu_q.back() + 3, all}, keys = {cu_k.back() + 2, s.heads};
    h.cu_q = Array(cu_q, {s.sequences + 1}), h.cu_k = Array(cu_k, {s.sequences + 1});
    if (!f8 && random() % 2 == 0) h.prefix_of = Array(cuda_test::prefixes(s.sequences, random));
  } else {
    h.kv_len = Array(lengths, {s.sequences});
  }
  std::vector<int32_t> pages;
  if (s.layout == Layout::paged) {
    keys = {2 * s.sequences * most, s.page, s.heads};
    for (int32_t i = 0; i < 2 * s.sequences * most; ++i) pages.push_back(i);
    std::shuffle(pages.begin(), pages.end(), random);
    h.table = Array(pages, {s.sequences, most});
  }
  const auto with = [](Shape shape, int64_t last) {
    shape.push_back(last);
    return shape;
  };
  const DType cache = f8 ? DType::f8_e4m3 : s.type;
  h.q = Array(with(q, s.d), s.type), h.k = Array(with(keys, s.d), cache),
  h.v = Array(with(keys, s.dv), cache);
  h.out = Array(with(q, s.dv), s.out), h.lse = Array(q, DType::f32);
  // At times all scores of a row are positive, and far apart, or grow with the sequence, so that maxima move again and again.
  const double mean = random() % 4 == 0 ? 1 : 0, growth = random() % 3 == 0 ? 0.01 : 0;
  h.q.draw(random, 0, h.q.count(), 1, 1, mean);
  for (int64_t n = 0; n < s.sequences; ++n)
    for (int64_t j = 0; j < lengths[static_cast<std::size_t>(n)]; ++j) {
      int64_t row = n * s.keys + j;
      if (s.layout == Layout::packed) row = cu_k[static_cast<std::size_t>(n)] + j;
      if (s.layout == Layout::paged)
        row = pages[static_cast<std::size_t>(n * most + j / s.page)] * s.page + j % s.page;
      // Some weights are far below the smallest normal number.
      const double scale = (random() % 50 == 0 ? 40 : 1) * (1 + growth * static_cast<double>(j));
      h.k.draw(random, row, row + 1, s.heads * s.d, scale, scale * mean);
      h.v.draw(random, row, row + 1, s.heads * s.dv);
    }
  if (sinks) h.sinks = Array({all}, DType::f32), h.sinks.draw(random);
  if (f8 && random() % 4 != 0)
    for (Array* factors : {&h.k_scale, &h.v_scale})
      *factors = Array({random() % 2 == 0 ? 1 : s.heads}, DType::f32),
      factors->draw(random, 0, factors->count(), 1, 0.2, 1);
  return h;
}

}  // namespace

namespace {

// The kernels' bits are their replays'.
void same_as_replay(Held& h) {
  const rlk::Status ran = h.run();
  REQUIRE_MESSAGE(ran, std::string(ran.message()));
  const rlk::Status replayed = h.replay();
  REQUIRE_MESSAGE(replayed, std::string(replayed.message()));
  check(cudaDeviceSynchronize());
  CHECK(h.same());
}
void same_as_replay(Held& h, DType type, std::mt19937& random) {
  if (random() % 2 == 0) h.out = Array(h.out.shape, type);
  same_as_replay(h);
}

Attention drawn_options(std::mt19937& random) {
  const bool causal = random() % 4 != 0;
  return {.causal = causal,
          .window = causal ? one_of<int64_t>(random, {0, 0, 1, 128, 129, 1024}) : 0,
          .softcap = one_of(random, {0., 0., 0., 2.}),
          .split = one_of<int64_t>(random, {512, 1024, 2048, 4096, 0})};
}

}  // namespace

TEST_CASE("attention on Hopper has the bits of its replay, for any shape, layout and option") {
  if (!hopper()) return;
  for (unsigned seed = 1; seed <= 150; ++seed) {
    std::mt19937 random(seed);
    const Sizes s{one_of(random, {Layout::dense, Layout::packed, Layout::paged}),
                  1 + static_cast<int64_t>(random() % 4),
                  one_of<int64_t>(random, {1, 1, 2, 5, 17, 64, 130}),
                  one_of<int64_t>(random, {1, 100, 127, 128, 129, 600, 1025, 2300}),
                  1 + static_cast<int64_t>(random() % 2),
                  one_of<int64_t>(random, {1, 2, 4, 7, 8, 16}),
                  one_of<int64_t>(random, {16, 48, 64, 96, 128, 128}),
                  one_of<int64_t>(random, {16, 64, 80, 128}),
                  one_of<int64_t>(random, {16, 17, 64, 128, 256}),
                  one_of(random, {DType::bf16, DType::f16}),
                  DType::f32};
    INFO("seed " << seed);
    Held h = make(s, drawn_options(random), random() % 2 == 0, random);
    same_as_replay(h, s.type, random);
  }
}

TEST_CASE(
    "attention on Hopper has the bits of its replay for wide and latent heads, whether v is k's or its own") {
  if (!hopper()) return;
  struct Widths {
    int64_t d, dv;
  };
  for (unsigned seed = 1; seed <= 120; ++seed) {
    std::mt19937 random(seed);
    const auto [d, dv] = one_of<Widths>(
        random,
        {{256, 256}, {256, 256}, {192, 128}, {144, 112}, {64, 208}, {208, 16}, {576, 512}, {576, 512}});
    const Sizes s{one_of(random, {Layout::dense, Layout::packed, Layout::paged}),
                  1 + static_cast<int64_t>(random() % 3),
                  one_of<int64_t>(random, {1, 1, 2, 5, 17, 40}),
                  one_of<int64_t>(random, {1, 100, 127, 128, 129, 600, 1025}),
                  1 + static_cast<int64_t>(random() % 2),
                  one_of<int64_t>(random, {1, 2, 7, 8, 16}),
                  d,
                  dv,
                  one_of<int64_t>(random, {16, 17, 64, 128, 256}),
                  one_of(random, {DType::bf16, DType::f16}),
                  DType::f32};
    INFO("seed " << seed);
    Held h = make(s, drawn_options(random), random() % 2 == 0, random);
    if (d >= dv && random() % 2 == 0) h.values_of_keys = dv;
    same_as_replay(h, s.type, random);
  }
}

TEST_CASE(
    "attention on Hopper over an fp8 cache has the bits of its replay, for any shape, layout and option") {
  if (!hopper()) return;
  struct Widths {
    int64_t d, dv;
  };
  for (unsigned seed = 1; seed <= 200; ++seed) {
    std::mt19937 random(seed);
    const auto [d, dv] =
        seed % 3 != 0 ? one_of<Widths>(random, {{16, 16}, {64, 64}, {128, 128}, {128, 80}, {48, 128}})
                      : one_of<Widths>(random, {{256, 256}, {192, 128}, {144, 112}, {64, 208}, {576, 512}});
    const Sizes s{one_of(random, {Layout::dense, Layout::packed, Layout::paged}),
                  1 + static_cast<int64_t>(random() % 4),
                  one_of<int64_t>(random, {1, 1, 1, 2, 5, 17, 64, 130}),
                  one_of<int64_t>(random, {1, 100, 127, 128, 129, 600, 1025, 2300}),
                  1 + static_cast<int64_t>(random() % 2),
                  one_of<int64_t>(random, {1, 2, 4, 7, 8, 16}),
                  d,
                  dv,
                  one_of<int64_t>(random, {16, 17, 64, 128, 256}),
                  one_of(random, {DType::bf16, DType::f16}),
                  DType::f32};
    INFO("seed " << seed);
    Held h = make(s, drawn_options(random), random() % 2 == 0, random, true);
    if (d >= dv && random() % 2 == 0) h.values_of_keys = dv;
    h.same_factors = !h.k_scale.shape.empty() && random() % 2 == 0;
    same_as_replay(h, s.type, random);
  }
}

TEST_CASE("attention on Hopper of many rows over an fp8 cache joins splits in a block to the replay's bits") {
  if (!hopper()) return;
  for (const int64_t d : {64, 128, 192, 256}) {
    std::mt19937 random(static_cast<unsigned>(d));
    const int64_t dv = d == 192 ? 128 : d;
    Held h = make({Layout::dense, 8, 130, 600, 2, 16, d, dv, 16, DType::bf16, DType::bf16}, {.split = 512},
                  true, random, true);
    same_as_replay(h);
  }
}

TEST_CASE(
    "attention on Hopper of few rows over an fp8 cache joins splits in registers to the replay's bits") {
  if (!hopper()) return;
  for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged})
    for (const int64_t group : {2, 16}) {
      std::mt19937 random(7);
      Held h = make({layout, 66, 1, 600, 16, group, 128, 128, 16, DType::bf16, DType::bf16}, {.split = 512},
                    layout != Layout::dense, random, true);
      same_as_replay(h);
    }
}

TEST_CASE("attention on Hopper of many rows joins splits in a block to the replay's bits, at every width") {
  if (!hopper()) return;
  for (const int64_t d : {64, 128, 192, 256}) {
    std::mt19937 random(static_cast<unsigned>(d));
    const int64_t dv = d == 192 ? 128 : d;
    for (const double cap : {0., 2.}) {
      // Blocks enough that none takes a single split.
      Held h = make({Layout::dense, 8, 130, 600, 2, 16, d, dv, 16, DType::bf16, DType::bf16},
                    {.softcap = cap, .split = 512}, cap == 0, random);
      same_as_replay(h);
    }
  }
}

// Items enough that a block has several, of few rows and three splits each, the first of them seen from inside.
TEST_CASE("attention on Hopper of many short packed sequences joins splits in a block to the replay's bits") {
  if (!hopper()) return;
  for (const int64_t d : {64, 128, 192, 256})
    for (const int64_t window : {0, 700}) {
      CAPTURE(d);
      CAPTURE(window);
      std::mt19937 random(static_cast<unsigned>(d + window));
      const int64_t dv = d == 192 ? 128 : d;
      Held h = make({Layout::packed, 130, 3, 1100, 2, 4, d, dv, 16, DType::bf16, DType::bf16},
                    {.window = window, .softcap = window == 0 ? 0. : 2., .split = 512}, window == 0, random);
      same_as_replay(h);
    }
}

// More sequences than a warp looks at together, many of them without rows or keys.
TEST_CASE("attention on Hopper of hundreds of packed sequences has the replay's bits") {
  if (!hopper()) return;
  for (const int64_t d : {64, 128, 256})
    for (const int64_t keys : {40, 150}) {
      CAPTURE(d);
      CAPTURE(keys);
      std::mt19937 random(static_cast<unsigned>(d + keys));
      Held h =
          make({Layout::packed, 600, keys == 40 ? 30 : 3, keys, 2, 4, d, d, 16, DType::bf16, DType::bf16}, {},
               keys == 40, random);
      same_as_replay(h);
    }
}

// Few rows with many splits, which are shared among blocks: more shares than there are blocks.
TEST_CASE("attention on Hopper of chunks behind sequences of any length has the replay's bits") {
  if (!hopper()) return;
  for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged})
    for (const int64_t d : {64, 128, 256}) {
      CAPTURE(static_cast<int>(layout));
      CAPTURE(d);
      std::mt19937 random(static_cast<unsigned>(d));
      Held h = make({layout, 5, 60, 4000, 2, 8, d, d, 64, DType::bf16, DType::bf16}, {.split = 512}, d == 64,
                    random);
      h.prefix_of = {};
      same_as_replay(h);
    }
}

TEST_CASE("attention on Hopper of few rows of equal sequences, a block each, has the replay's bits") {
  if (!hopper()) return;
  for (const int64_t sequences : {15, 32}) {  // times eight heads: one block an SM, and two
    std::mt19937 random(static_cast<unsigned>(sequences));
    Held h = make({Layout::dense, sequences, 1, 1100, 8, 2, 32, 16, 16, DType::bf16, DType::bf16},
                  {.split = 512}, false, random);
    h.kv_len = {};
    h.k.draw(random), h.v.draw(random);
    same_as_replay(h);
  }
}

TEST_CASE("attention on Hopper of few rows joins splits in registers to the replay's bits") {
  if (!hopper()) return;
  for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged}) {
    std::mt19937 random(7);
    // Sequences and heads enough that none shares its splits among blocks.
    Held h = make({layout, 66, 1, 600, 16, 2, 32, 16, 16, DType::bf16, DType::bf16}, {.split = 512},
                  layout != Layout::dense, random);
    same_as_replay(h);
  }
}

TEST_CASE("attention on Hopper of few rows and many keys brings rows whole, to the replay's bits") {
  if (!hopper()) return;
  for (const Layout layout : {Layout::dense, Layout::packed, Layout::paged})
    for (const int64_t page : {8, 16, 24, 64})
      for (const int64_t group : {4, 16}) {
        if (layout != Layout::paged && page != 8) continue;
        std::mt19937 random(static_cast<unsigned>(page + group));
        const DType type = group == 4 ? DType::bf16 : DType::f16;
        // More splits of all sequences and heads than clusters take.
        Held h = make({layout, 8, 1, 2111, 2, group, 128, 128, page, type, type}, {.split = 512},
                      layout != Layout::dense, random);
        same_as_replay(h);
      }
}

TEST_CASE("attention on Hopper of few rows on average: one sequence may have nearly all of them") {
  if (!hopper()) return;
  for (const int64_t group : {4, 16}) {
    std::mt19937 random(8);
    Held h = make({Layout::paged, 40, 1, 700, 2, group, 64, 128, 16, DType::bf16, DType::f32},
                  {.window = 200, .split = 512}, true, random);
    std::vector<int32_t> bounds(41, 37);
    bounds[0] = 0, bounds[39] = 38, bounds[40] = 40;
    h.cu_q = Array(bounds, {41});
    for (Array* rows : {&h.q, &h.out, &h.lse}) rows->shape.erase(rows->shape.begin() + 1);
    same_as_replay(h);
  }
}

namespace {

void other_lengths(int64_t queries, int64_t d, int64_t dv) {
  std::mt19937 random(5);
  Held h = make({Layout::paged, 3, queries, 2600, 2, 4, d, dv, 64, DType::bf16, DType::bf16}, {.split = 512},
                true, random);
  if (d > 256) h.values_of_keys = dv;
  h.k.draw(random), h.v.draw(random);
  REQUIRE(h.run());  // copies are made, attributes are set
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(h.run(stream));
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&ready, graph, 0));
  for (const std::vector<int32_t>& lengths : {std::vector{2600, 1, 0}, {128, 513, 2599}, {511, 512, 1025}}) {
    h.kv_len.bytes = Array(lengths, {3}).bytes;
    std::reverse(reinterpret_cast<int32_t*>(h.table.bytes.data()),
                 reinterpret_cast<int32_t*>(h.table.bytes.data()) + h.table.count());
    h.kv_len.send(), h.table.send();
    check(cudaGraphLaunch(ready, stream));
    check(cudaStreamSynchronize(stream));
    REQUIRE(h.replay());
    CHECK(h.same());
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace

TEST_CASE("attention on Hopper: a graph captured once serves other lengths and pages") {
  if (!hopper()) return;
  SUBCASE("128 channels") { other_lengths(1, 128, 128); }
  SUBCASE("256 channels") { other_lengths(1, 256, 256); }
  SUBCASE("latent heads") { other_lengths(1, 576, 512); }
  SUBCASE("chunks") { other_lengths(200, 128, 128); }
  SUBCASE("chunks of latent heads") { other_lengths(40, 576, 512); }
}

TEST_CASE("attention on Hopper refuses what its tiles are not cut for, with both values") {
  if (!hopper()) return;
  std::mt19937 random(6);
  // Nothing of q is read: 2048 queries of 128 heads, whose sums would be more than the workspace.
  Held h = make({Layout::dense, 1, 1, 20, 1, 1, 576, 512, 16, DType::bf16, DType::bf16}, {.split = 512},
                false, random);
  h.q.shape = {1, 2048, 128, 576}, h.out.shape = {1, 2048, 128, 512}, h.lse.shape = {1, 2048, 128};
  h.k.shape = {1, 600, 1, 576}, h.v.shape = {1, 600, 1, 512};
  const rlk::Status refused = h.run();
  CHECK(!refused);
  CHECK(std::string(refused.message())
            .find("D=576: sums of splits are 268435456 floats, the workspace holds 134217728") !=
        std::string::npos);
}
