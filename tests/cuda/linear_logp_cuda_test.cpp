// labels: plugins gpu
// links: registry
// linear_logp on Hopper with logits that stay in registers: the bits of the kernels that have them in memory, for drawn shapes and
// options, parts of a vocabulary and rows of every kind; inputs stay what they were.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>

#include "array.hpp"
#include "rlk/rlk.hpp"

namespace {

using cuda_test::Array;
using cuda_test::check;
using cuda_test::hopper;
using rlk::DType;
using rlk::LinearLogp;
using rlk::LinearLogpBwd;
using std::int64_t;

constexpr std::size_t kWorkspace = std::size_t{1} << 30;
constexpr int64_t kPadding = 3;  // rows of the weight that are no entry

struct Sizes {
  int64_t rows, vocab, width, first, count;
  DType type;
  bool rounds, temperatures, bends;
  bool spoilt = true;  // with rows of NaN, and so every number of d_weight
};

struct Held {
  Sizes s;
  Array hidden, weight, target, temperatures, d_logp;
  Array logp, lse, entropy, stats, d_hidden, d_weight;

  int64_t start() const { return std::min(s.vocab, s.first * leaf()); }
  int64_t here() const { return std::min(s.vocab, (s.first + s.count) * leaf()) - start(); }
  int64_t leaf() const { return 16 * ((s.vocab + 127) / 128); }
  bool whole() const { return s.count == 8; }

  explicit Held(const Sizes& sizes, std::mt19937& random)
      : s(sizes),
        hidden({s.rows, s.width}, s.type),
        weight({here() + kPadding, s.width}, s.type),
        temperatures({s.rows}, DType::f32),
        d_logp({s.rows}, DType::f32),
        logp({s.rows}, DType::f32),
        lse({s.rows}, DType::f32),
        entropy({s.rows}, DType::f32),
        stats({s.rows, 4}, DType::f32),
        d_hidden({s.rows, s.width}, whole() ? s.type : DType::f32),
        d_weight({here() + kPadding, s.width}, s.type) {
    hidden.draw(random), d_logp.draw(random);
    weight.draw(random, 0, here() + kPadding, s.width, 2 / std::sqrt(static_cast<double>(s.width)));
    std::vector<std::int32_t> ids;
    for (int64_t i = 0; i < s.rows; ++i) {
      const auto id = static_cast<std::int32_t>(random() % static_cast<unsigned>(s.vocab));
      ids.push_back(i % 50 == 3 ? -100 : i % 70 == 9 ? static_cast<std::int32_t>(s.vocab) : id);
      temperatures.set(i, 0.5 + 0.01 * static_cast<double>(i % 100));
    }
    target = Array(ids);
    d_logp.set(7, -0.0);
    // Logits far apart, an infinite one and rows of NaN.
    hidden.draw(random, 5, 6, s.width, 60);
    if (s.spoilt) hidden.set(17 * s.width, INFINITY), hidden.set(29 * s.width + 1, NAN);
  }
  template <class Args>
  Args options() {
    Args a;
    a.hidden = hidden.on_gpu(), a.weight = weight.on_gpu(), a.target = target.on_gpu();
    if (s.temperatures) a.temperatures = temperatures.on_gpu();
    if (s.rounds) a.logits_round = s.type == DType::f16 ? Args::LogitsRound::fp16 : Args::LogitsRound::bf16;
    a.vocab = s.vocab, a.vocab_start = start(), a.leaf_first = s.first, a.leaf_count = s.count;
    return a;
  }
  // The bytes of all results.
  std::vector<std::vector<std::byte>> run(const char* backend, bool given) {
    std::vector<Array*> results{&d_hidden, &d_weight};
    auto f = options<LinearLogp>();
    if (s.bends || !whole()) f.stats = stats.on_gpu(), results.push_back(&stats);
    if (whole()) {
      f.logp = logp.on_gpu(), f.lse = lse.on_gpu();
      results.push_back(&logp), results.push_back(&lse);
      if (s.bends) f.entropy = entropy.on_gpu(), results.push_back(&entropy);
    }
    auto b = options<LinearLogpBwd>();
    b.d_logp = d_logp.on_gpu(), b.d_hidden = d_hidden.on_gpu(), b.d_weight = d_weight.on_gpu();
    if (given) b.stats = stats.on_gpu();
    for (Array* r : results) r->send();
    REQUIRE(rlk::linear_logp(f, how(backend)));
    REQUIRE(rlk::linear_logp_bwd(b, how(backend)));
    check(cudaDeviceSynchronize());
    std::vector<std::vector<std::byte>> bytes;
    for (const Array* r : results) bytes.push_back(r->brought());
    return bytes;
  }
  bool kept() const {
    for (const Array* a : {&hidden, &weight, &target, &d_logp})
      if (!a->same()) return false;
    return true;
  }
  static rlk::Options how(const char* backend) {
    static const std::shared_ptr<void> workspace = [] {
      void* data = nullptr;
      check(cudaMalloc(&data, kWorkspace));
      return std::shared_ptr<void>(data, [](void* p) { cudaFree(p); });
    }();
    check(cudaMemset(workspace.get(), 0xff, kWorkspace));
    return {.backend = backend, .workspace = workspace.get(), .workspace_bytes = kWorkspace};
  }
};

}  // namespace

TEST_CASE("logits that stay in registers are summed and bent to the bits of those in memory") {
  if (!hopper()) return;
  std::mt19937 random(41);
  const Sizes kSizes[] = {
      {256, 1000, 64, 0, 8, DType::bf16, false, false, true},
      {512, 2048, 200, 0, 8, DType::bf16, true, true, true},
      {777, 5003, 136, 0, 8, DType::f16, false, true, false},
      {300, 33104, 264, 0, 8, DType::f16, true, false, true},
      {2304, 20000, 512, 0, 8, DType::bf16, false, true, false},
      {520, 20000, 128, 2, 2, DType::bf16, false, true, true},
      {1030, 9999, 72, 4, 4, DType::bf16, true, false, true},
      {260, 900, 96, 7, 1, DType::bf16, false, true, true},
      {260, 100, 96, 7, 1, DType::bf16, false, false, true},  // an empty part
      {9000, 3000, 4096, 0, 8, DType::bf16, false, false,
       true},  // more rows than shares of d_hidden are held of
  };
  for (Sizes s : kSizes) {
    CAPTURE(s.rows);
    CAPTURE(s.vocab);
    for (s.spoilt = false;; s.spoilt = true) {
      Held h(s, random);
      for (const bool given : {false, true}) {
        const bool has_stats = s.bends || !h.whole(), needs_stats = !h.whole();
        if (given ? !has_stats : needs_stats) continue;
        const auto expected = h.run("cuda.sm90", given), got = h.run("cuda.sm90_fused", given);
        REQUIRE(expected.size() == got.size());
        for (std::size_t i = 0; i < got.size(); ++i) {
          CAPTURE(i);
          CHECK(got[i] == expected[i]);
        }
        CHECK(h.run("cuda.sm90_fused", given) == got);
      }
      CHECK(h.kept());
      if (s.spoilt) break;
    }
  }
}
