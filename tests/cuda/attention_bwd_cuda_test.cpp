// labels: plugins gpu
// links: registry
// attention_bwd on Hopper: the bits of the CPU replay for drawn shapes and options, packed and dense, twice alike; inputs stay
// what they were, and a captured graph serves other lengths.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "array.hpp"
#include "rlk/rlk.hpp"

namespace {

using cuda_test::Array;
using cuda_test::check;
using cuda_test::hopper;
using cuda_test::one_of;
using cuda_test::Shape;
using rlk::AttentionBwd;
using rlk::DType;
using rlk::Tensor;

// The tensors of a call.
struct Held {
  Array q, k, v, cu_q, cu_k, kv_len, prefix_of, sinks, out, lse, d_out, d_lse, d_q, d_k, d_v, d_sinks;
  AttentionBwd options{};
  bool unit = false;  // P by the special function units' ex2

  template <class View>
  rlk::Status call(View view, const rlk::Options& how) {
    Array* const all[] = {&q,   &k,     &v,     &cu_q, &cu_k, &kv_len, &sinks,   &out,
                          &lse, &d_out, &d_lse, &d_q,  &d_k,  &d_v,    &d_sinks, &prefix_of};
    std::vector<Tensor> views;
    for (Array* a : all) views.push_back(a->shape.empty() ? Tensor() : view(*a));
    AttentionBwd b = options;
    b.q = views[0], b.k = views[1], b.v = views[2];
    if (!cu_q.shape.empty()) b.cu_q = views[3];
    if (!cu_k.shape.empty()) b.cu_k = views[4];
    if (!kv_len.shape.empty()) b.kv_len = views[5];
    if (!sinks.shape.empty()) b.sinks = views[6];
    b.out = views[7], b.lse = views[8], b.d_out = views[9];
    if (!d_lse.shape.empty()) b.d_lse = views[10];
    if (!d_q.shape.empty()) b.d_q = views[11];
    if (!d_k.shape.empty()) b.d_k = views[12];
    if (!d_v.shape.empty()) b.d_v = views[13];
    if (!d_sinks.shape.empty()) b.d_sinks = views[14];
    if (!prefix_of.shape.empty()) b.prefix_of = views[15];
    return rlk::attention_bwd(b, how);
  }
  rlk::Status replay() {
    return call([](Array& a) { return a.on_cpu(); },
                {.backend = unit ? "native.replay_sm90_ex2" : "native.replay_sm90"});
  }
  rlk::Status run(cudaStream_t stream = nullptr) {
    static const std::shared_ptr<void> workspace = [] {
      void* data = nullptr;
      check(cudaMalloc(&data, kWorkspace));
      return std::shared_ptr<void>(data, [](void* p) { cudaFree(p); });
    }();
    if (stream == nullptr) check(cudaMemset(workspace.get(), 0xff, kWorkspace));
    return call([](Array& a) { return a.on_gpu(); }, {.stream = stream,
                                                      .backend = unit ? "cuda.sm90_ex2" : "cuda.sm90",
                                                      .workspace = workspace.get(),
                                                      .workspace_bytes = kWorkspace});
  }
  bool kept() const {
    for (const Array* a : {&q, &k, &v, &cu_q, &cu_k, &kv_len, &prefix_of, &sinks, &out, &lse, &d_out, &d_lse})
      if (!a->same()) return false;
    return true;
  }

  static constexpr std::size_t kWorkspace = std::size_t{64} << 20;
};

struct Sizes {
  bool packed;
  int64_t sequences, queries, keys, heads, group, d, dv;
  DType type, result;
};

// Rows of nobody are NaN.
Held make(const Sizes& s, const AttentionBwd& options, bool sinks, std::mt19937& random) {
  Held h;
  h.options = options;
  const int64_t all = s.heads * s.group;
  std::vector<int32_t> lengths, cu_q{0}, cu_k{0};
  for (int64_t n = 0; n < s.sequences; ++n) {
    const auto up_to = [&](int64_t most) {
      return static_cast<int32_t>(n == 0 ? most : random() % static_cast<unsigned>(most + 1));
    };
    cu_q.push_back(cu_q.back() + up_to(s.queries)), cu_k.push_back(cu_k.back() + up_to(s.keys));
    const int32_t room =
        s.packed ? cu_k.back() - cu_k[static_cast<std::size_t>(n)] : static_cast<int32_t>(s.keys);
    lengths.push_back(n % 2 == 0 ? room : static_cast<int32_t>(random() % static_cast<unsigned>(room + 1)));
  }
  Shape of_q{s.sequences, s.queries, all}, of_k{s.sequences, s.keys, s.heads};
  if (s.packed) {
    of_q = {cu_q.back() + 3, all}, of_k = {cu_k.back() + 2, s.heads};
    h.cu_q = Array(cu_q), h.cu_k = Array(cu_k);
  }
  std::vector<int32_t> all_keys = lengths;
  if (s.packed && random() % 2 == 0) {
    const std::vector<int32_t> prefixes = cuda_test::prefixes(s.sequences, random);
    h.prefix_of = Array(prefixes);
    for (std::size_t n = 0; n < prefixes.size(); ++n) {
      if (prefixes[n] < 0) continue;
      const int32_t shared = lengths[static_cast<std::size_t>(prefixes[n])];
      all_keys[n] += shared;
      // Some see a part of the other's keys, and none of their own.
      if (random() % 5 == 0) all_keys[n] = static_cast<int32_t>(random() % static_cast<unsigned>(shared + 1));
    }
  }
  h.kv_len = Array(all_keys);
  const auto with = [](Shape shape, int64_t last) {
    shape.push_back(last);
    return shape;
  };
  h.q = Array(with(of_q, s.d), s.type), h.k = Array(with(of_k, s.d), s.type);
  h.v = Array(with(of_k, s.dv), s.type);
  h.out = Array(with(of_q, s.dv), s.type), h.d_out = Array(with(of_q, s.dv), s.type);
  h.lse = Array(of_q, DType::f32), h.d_lse = Array(of_q, DType::f32);
  h.d_q = Array(with(of_q, s.d), s.result), h.d_k = Array(with(of_k, s.d), s.result);
  h.d_v = Array(with(of_k, s.dv), s.result);
  if (sinks) {
    h.sinks = Array({all}, DType::f32), h.d_sinks = Array({all}, DType::f32);
    h.sinks.draw(random, 0, all, 1);
  }
  if (random() % 2 == 0) h.d_lse = {};
  for (int64_t n = 0; n < s.sequences; ++n) {
    const auto at = static_cast<std::size_t>(n);
    const int64_t q0 = s.packed ? cu_q[at] : n * s.queries, q1 = s.packed ? cu_q[at + 1] : q0 + s.queries;
    const int64_t k0 = s.packed ? cu_k[at] : n * s.keys, k1 = k0 + lengths[at];
    // Some weights are far below the smallest normal number, some rows of no key.
    const float mean = std::log(static_cast<float>(s.keys) + 1);
    h.q.draw(random, q0, q1, all * s.d), h.d_out.draw(random, q0, q1, all * s.dv);
    h.out.draw(random, q0, q1, all * s.dv, 0.3), h.lse.draw(random, q0, q1, all, 2, mean);
    if (!h.d_lse.shape.empty()) h.d_lse.draw(random, q0, q1, all);
    for (int64_t j = k0; j < k1; ++j) {
      h.k.draw(random, j, j + 1, s.heads * s.d, random() % 50 == 0 ? 40 : 1);
      h.v.draw(random, j, j + 1, s.heads * s.dv);
    }
    for (int64_t i = q0 * all; i < q1 * all; ++i)
      if (random() % 40 == 0) h.lse.set(i, random() % 2 == 0 ? -INFINITY : 150.f);
  }
  return h;
}

// The kernels' bits are their replays'.
void same_as_replay(Held& h) {
  for (const bool unit : {false, true}) {
    CAPTURE(unit);
    h.unit = unit;
    const rlk::Status ran = h.run();
    REQUIRE_MESSAGE(ran, std::string(ran.message()));
    const rlk::Status replayed = h.replay();
    REQUIRE_MESSAGE(replayed, std::string(replayed.message()));
    check(cudaDeviceSynchronize());
    CHECK(h.d_q.same());
    CHECK(h.d_k.same());
    CHECK(h.d_v.same());
    CHECK(h.d_sinks.same());
    CHECK(h.kept());
  }
}

using Widths = std::vector<std::array<int64_t, 2>>;

void one_draw(unsigned seed, const Widths& widths) {
  std::mt19937 random(seed);
  const auto [d, dv] = widths[random() % widths.size()];
  const bool causal = random() % 4 != 0;
  const int64_t length = one_of<int64_t>(random, {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 300});
  const Sizes s{random() % 2 == 0,
                1 + static_cast<int64_t>(random() % 3),
                random() % 3 == 0 ? 1 + static_cast<int64_t>(random() % 140) : length,
                length,
                1 + static_cast<int64_t>(random() % 2),
                one_of<int64_t>(random, {1, 1, 2, 3, 4, 8}),
                d,
                dv,
                one_of(random, {DType::bf16, DType::f16}),
                DType::f32};
  AttentionBwd options{};
  options.causal = causal, options.window = causal ? one_of<int64_t>(random, {0, 0, 1, 17, 128, 129}) : 0;
  options.softcap = one_of(random, {0., 0., 0., 2.});
  Held h = make(s, options, random() % 2 == 0, random);
  if (random() % 2 == 0)
    for (Array* a : {&h.d_q, &h.d_k, &h.d_v}) *a = Array(a->shape, s.type);
  if (random() % 6 == 0) h.d_q = {};
  if (random() % 6 == 0) h.d_k = {};
  if (random() % 6 == 0) h.d_v = {};
  if (h.d_q.shape.empty() && h.d_k.shape.empty() && h.d_v.shape.empty()) return;
  INFO("seed " << seed);
  INFO((s.packed ? "packed " : "dense ")
       << s.sequences << " sequences, " << s.queries << " queries, " << s.keys << " keys, heads " << s.heads
       << " x " << s.group << ", D " << s.d << ", Dv " << s.dv << ", window " << options.window << ", cap "
       << options.softcap);
  same_as_replay(h);
}

void other_lengths(bool unit) {
  std::mt19937 random(5);
  Held h = make({false, 3, 150, 150, 1, 4, 128, 128, DType::bf16, DType::bf16}, {}, true, random);
  h.unit = unit;
  h.k.draw(random, 0, 3 * 150, 128), h.v.draw(random, 0, 3 * 150, 128);
  REQUIRE(h.run());  // copies are made, attributes are set
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  check(cudaDeviceSynchronize());
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  CHECK(h.run(stream));
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&ready, graph, 0));
  for (const std::vector<int32_t>& lengths : {std::vector{150, 1, 0}, {128, 129, 127}, {3, 150, 64}}) {
    h.kv_len.bytes = Array(lengths).bytes;
    h.kv_len.send();
    check(cudaGraphLaunch(ready, stream));
    check(cudaStreamSynchronize(stream));
    REQUIRE(h.replay());
    CHECK(h.d_q.same());
    CHECK(h.d_k.same());
    CHECK(h.d_v.same());
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace

const Widths kNarrow{{16, 16}, {48, 64}, {64, 64}, {96, 80}, {128, 16}, {128, 128}, {16, 128}, {64, 128}},
    kWide{{256, 256}, {192, 128}, {144, 112}, {192, 192}, {64, 208}, {208, 16}, {256, 128}};

TEST_CASE("attention_bwd on Hopper has the bits of its replay, for any shape, layout and option") {
  if (!hopper()) return;
  for (unsigned seed = 21; seed <= 200; ++seed) one_draw(seed, kNarrow);
}
TEST_CASE("attention_bwd on Hopper has the bits of its replay for heads above 128 channels") {
  if (!hopper()) return;
  for (unsigned seed = 321; seed <= 440; ++seed) one_draw(seed, kWide);
}

// Few enough for compute-sanitizer.
TEST_CASE("attention_bwd on Hopper has the bits of its replay, a few draws") {
  if (!hopper()) return;
  for (unsigned seed = 1; seed <= 20; ++seed) one_draw(seed, kNarrow);
  for (unsigned seed = 301; seed <= 310; ++seed) one_draw(seed, kWide);
}

TEST_CASE("attention_bwd on Hopper has the bits of its replay where blocks take many items, of many heads") {
  if (!hopper()) return;
  std::mt19937 random(7);
  // A block joins all heads that share its keys, or of eight the first and the last four.
  const std::vector<std::array<int64_t, 3>> drawn = {{70, 1, 64},  {70, 2, 64},  {70, 3, 64},  {70, 4, 64},
                                                     {30, 2, 128}, {30, 3, 128}, {30, 8, 128}, {30, 2, 256},
                                                     {30, 3, 192}, {30, 8, 192}};
  for (const bool packed : {false, true})
    for (const auto& [sequences, group, width] : drawn) {
      CAPTURE(packed);
      CAPTURE(group);
      CAPTURE(width);
      const int64_t values = width == 192 ? 128 : width;
      Held h =
          make({packed, sequences, 20, packed ? 300 : 140, 2, group, width, values, DType::bf16, DType::bf16},
               {}, false, random);
      CAPTURE(h.prefix_of.shape.size());
      same_as_replay(h);
    }
}

TEST_CASE("attention_bwd on Hopper: a graph captured once serves other lengths") {
  if (!hopper()) return;
  SUBCASE("the library's exp2") { other_lengths(false); }
  SUBCASE("the units' ex2") { other_lengths(true); }
}

TEST_CASE("attention_bwd on Hopper refuses what its tiles are not cut for, with both values") {
  if (!hopper()) return;
  std::mt19937 random(6);
  Held h = make({false, 1, 2, 20, 1, 1, 576, 512, DType::bf16, DType::bf16}, {}, false, random);
  rlk::Status refused = h.run();
  CHECK(!refused);
  CHECK(std::string(refused.message()).find("D=576, Dv=512") != std::string::npos);
  h = make({false, 1, 2, 20, 1, 1, 64, 64, DType::bf16, DType::bf16}, {}, false, random);
  h.d_out = Array(h.d_out.shape, DType::f32);
  refused = h.run();
  CHECK(std::string(refused.message()).find("d_out is fp32") != std::string::npos);
}
