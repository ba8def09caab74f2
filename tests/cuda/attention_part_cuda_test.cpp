// labels: plugins gpu
// links: registry
// attention_part on Hopper: the bits of the CPU replay for drawn shapes, options and runs of keys, in memory that held NaN.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
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
using rlk::AttentionPart;
using rlk::DType;
using rlk::Tensor;

enum class Layout { dense, packed, paged };

// A rank's part of a call; tensors that are absent have no shape.
struct Held {
  Array q, k, v, cu_q, cu_k, kv_len, table, k_first, k_last, partials;
  AttentionPart options{};
  int64_t values_of_keys = 0;  // v is so many first channels of k

  template <class View>
  rlk::Status call(View view, const std::string& family) {
    const auto there = [&](Array& a) { return a.shape.empty() ? Tensor() : view(a); };
    const Tensor views[] = {
        there(q),
        there(k),
        values_of_keys != 0 ? first_channels(view(k), k.type, k.shape, values_of_keys) : there(v),
        there(cu_q),
        there(cu_k),
        there(kv_len),
        there(table),
        there(k_first),
        there(k_last),
        there(partials)};
    AttentionPart a = options;
    a.q = views[0], a.k = views[1], a.v = views[2];
    if (!cu_q.shape.empty()) a.cu_q = views[3];
    if (!cu_k.shape.empty()) a.cu_k = views[4];
    a.kv_len = views[5];
    if (!table.shape.empty()) a.block_table = views[6];
    a.k_first = views[7];
    if (!k_last.shape.empty()) a.k_last = views[8];
    a.partials = views[9];
    const std::string id =
        family + "_s" + (options.split == 0 ? std::string("none") : std::to_string(options.split));
    return rlk::attention_part(a, {.backend = id});
  }
  void same_as_replay() {
    std::fill(partials.bytes.begin(), partials.bytes.end(), std::byte{0xff});  // NaN
    partials.on_gpu(), partials.send();
    const rlk::Status ran = call([](Array& a) { return a.on_gpu(); }, "cuda.sm90_ex2");
    REQUIRE_MESSAGE(ran, std::string(ran.message()));
    const rlk::Status replayed = call([](Array& a) { return a.on_cpu(); }, "native.replay_sm90_ex2");
    REQUIRE_MESSAGE(replayed, std::string(replayed.message()));
    check(cudaDeviceSynchronize());
    CHECK(partials.same());
  }
};

// `room`: keys of a sequence that there is memory for.
struct Sizes {
  Layout layout;
  int64_t sequences, queries, room, heads, group, d, dv, page;
  DType type;
};

// The keys of a sequence that are here, [first, last) of its `length`.
struct Run {
  int64_t first, last, length;
};

// Whole splits, other ranks' before and behind, or the end of a sequence, or nothing.
Run drawn_run(std::mt19937& random, int64_t room, int64_t split) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<unsigned>(n)); };
  if (split == 0) {
    const int64_t length = below(4) == 0 ? room : below(room + 1);
    return {0, length, length};
  }
  const int64_t first = below(4) * split, whole = room / split;
  if (whole > 0 && below(2) == 0) {
    const int64_t last = first + (1 + below(whole)) * split;
    return {first, last, last + below(3) * 200};
  }
  const int64_t have = below(6) == 0 ? 0 : below(3) == 0 ? room : 1 + below(room);
  return {first, first + have, first + have};
}

Array numbers(const std::vector<int64_t>& values) {
  return Array(std::vector<int32_t>(values.begin(), values.end()));
}

// Fills in what says where keys lie; the rows of k and v that hold those of each sequence.
std::vector<std::vector<int64_t>> lay_out(Held& h, const Sizes& s, const std::vector<Run>& runs,
                                          std::mt19937& random) {
  const int64_t most = (s.room + s.page - 1) / s.page;
  std::vector<int64_t> cu_k{0}, firsts, lasts, lengths, pages;
  for (int64_t i = 0; i < 2 * s.sequences * most; ++i) pages.push_back(i);
  std::shuffle(pages.begin(), pages.end(), random);
  std::vector<std::vector<int64_t>> rows(runs.size());
  for (std::size_t n = 0; n < runs.size(); ++n) {
    const Run& run = runs[n];
    const auto number = static_cast<int64_t>(n);
    for (int64_t j = 0; j < run.last - run.first; ++j) {
      int64_t row = number * s.room + j;
      if (s.layout == Layout::packed) row = cu_k.back() + j;
      if (s.layout == Layout::paged)
        row = pages[static_cast<std::size_t>(number * most + j / s.page)] * s.page + j % s.page;
      rows[n].push_back(row);
    }
    cu_k.push_back(cu_k.back() + run.last - run.first);
    firsts.push_back(run.first), lasts.push_back(run.last), lengths.push_back(run.length);
  }
  h.kv_len = numbers(lengths), h.k_first = numbers(firsts);
  Shape keys{s.sequences, s.room, s.heads};
  if (s.layout == Layout::packed) {
    keys = {cu_k.back() + 2, s.heads};
    h.cu_k = numbers(cu_k);
  } else {
    h.k_last = numbers(lasts);
  }
  if (s.layout == Layout::paged) {
    keys = {2 * s.sequences * most, s.page, s.heads};
    pages.resize(static_cast<std::size_t>(s.sequences * most));
    h.table = numbers(pages), h.table.shape = {s.sequences, most};
  }
  const auto with = [](Shape shape, int64_t last) {
    shape.push_back(last);
    return shape;
  };
  h.k = Array(with(keys, s.d), s.type), h.v = Array(with(keys, s.dv), s.type);
  return rows;
}

// Keys and values of nobody are NaN; odd: so is a score now and then, or infinite.
Held make(const Sizes& s, const AttentionPart& options, const std::vector<Run>& runs, bool odd,
          std::mt19937& random) {
  Held h;
  h.options = options;
  const std::vector<std::vector<int64_t>> rows = lay_out(h, s, runs, random);
  for (const std::vector<int64_t>& of_sequence : rows)
    for (const int64_t row : of_sequence) {
      const double scale = random() % 50 == 0 ? 40 : 1;  // weights far below the smallest normal number
      h.k.draw(random, row, row + 1, s.heads * s.d, scale);
      h.v.draw(random, row, row + 1, s.heads * s.dv);
      if (odd && random() % 100 == 0) h.k.set(row * s.heads * s.d, random() % 2 == 0 ? NAN : HUGE_VAL);
    }
  std::vector<int64_t> cu_q{0};
  for (int64_t n = 0; n < s.sequences; ++n)
    cu_q.push_back(cu_q.back() + (n == 0 ? s.queries : static_cast<int64_t>(random()) % (s.queries + 1)));
  Shape q{s.sequences, s.queries, s.heads * s.group, s.d};
  if (s.layout == Layout::packed) {
    q = {cu_q.back() + 3, s.heads * s.group, s.d};
    h.cu_q = numbers(cu_q);
  }
  h.q = Array(q, s.type), h.q.draw(random);
  const int64_t room = s.layout == Layout::packed  ? h.k.shape[0]
                       : s.layout == Layout::paged ? h.table.shape[1] * s.page
                                                   : s.room;
  const int64_t splits = options.split == 0 ? 1 : (room + options.split - 1) / options.split;
  Shape partials = q;
  partials.back() = splits, partials.push_back(2 + s.dv);
  h.partials = Array(partials, DType::f32);
  return h;
}

struct Widths {
  int64_t d, dv;
};

AttentionPart drawn_options(std::mt19937& random) {
  const bool causal = random() % 4 != 0;
  return {.causal = causal,
          .window = causal ? one_of<int64_t>(random, {0, 0, 1, 128, 129, 700, 1024}) : 0,
          .softcap = one_of(random, {0., 0., 0., 2.}),
          .split = one_of<int64_t>(random, {512, 512, 512, 1024, 2048, 4096, 0})};
}

void same_for(unsigned seed, std::initializer_list<Widths> widths, std::initializer_list<int64_t> rooms) {
  std::mt19937 random(seed);
  INFO("seed " << seed);
  const auto [d, dv] = one_of(random, widths);
  const Sizes s{one_of(random, {Layout::dense, Layout::packed, Layout::paged}),
                1 + static_cast<int64_t>(random() % 4),
                one_of<int64_t>(random, {1, 1, 2, 5, 17, 64, 130}),
                one_of<int64_t>(random, rooms),
                1 + static_cast<int64_t>(random() % 2),
                one_of<int64_t>(random, {1, 2, 4, 7, 16}),
                d,
                dv,
                one_of<int64_t>(random, {16, 17, 64, 128, 256}),
                one_of(random, {DType::bf16, DType::f16})};
  const AttentionPart options = drawn_options(random);
  std::vector<Run> runs;
  for (int64_t n = 0; n < s.sequences; ++n) runs.push_back(drawn_run(random, s.room, options.split));
  Held h = make(s, options, runs, false, random);
  if (d > 256 && random() % 2 == 0) h.values_of_keys = dv;
  h.same_as_replay();
}

}  // namespace

TEST_CASE("attention_part on Hopper has the bits of its replay, for any shape, option and run of keys") {
  if (!hopper()) return;
  for (unsigned seed = 1; seed <= 120; ++seed)
    same_for(seed, {{16, 16}, {64, 64}, {48, 80}, {96, 128}, {128, 128}, {128, 128}},
             {1, 100, 128, 512, 600, 1025, 2300});
}

TEST_CASE("attention_part on Hopper has the bits of its replay for wide and latent heads") {
  if (!hopper()) return;
  for (unsigned seed = 1; seed <= 80; ++seed)
    same_for(seed, {{192, 128}, {256, 256}, {144, 112}, {208, 16}, {576, 512}, {576, 512}},
             {1, 100, 128, 512, 600, 1025});
}

TEST_CASE("attention_part on Hopper marks what rows see no key of, wherever a rank's keys lie") {
  if (!hopper()) return;
  for (const Widths& w : {Widths{64, 64}, {128, 128}, {256, 256}, {576, 512}})
    for (const int64_t window : {0, 100, 600}) {
      CAPTURE(w.d);
      CAPTURE(window);
      std::mt19937 random(static_cast<unsigned>(w.d + window));
      // The last keys, some far before the first query, others beside the queries, and no keys at all.
      const std::vector<Run> runs{{1024, 2048, 2048}, {0, 1024, 1 << 20}, {512, 1100, 1100}, {512, 512, 300}};
      for (const int64_t queries : {3, 700}) {
        Held h = make({Layout::dense, 4, queries, 1024, 1, 4, w.d, w.dv, 16, DType::bf16},
                      {.window = window, .split = 512}, runs, false, random);
        if (queries == 700)
          h.kv_len = numbers({700, 1 << 20, 1100, 300}), h.k_last = numbers({700, 1024, 1100, 512});
        h.same_as_replay();
      }
    }
}

TEST_CASE("attention_part on Hopper keeps m where scores are NaN or infinite, and leaves one NaN") {
  if (!hopper()) return;
  for (const Widths& w : {Widths{64, 64}, {128, 128}, {192, 128}, {256, 256}, {576, 512}}) {
    CAPTURE(w.d);
    std::mt19937 random(static_cast<unsigned>(w.d));
    Held h = make({Layout::dense, 1, 1, 1024, 2, 2, w.d, w.dv, 16, DType::bf16}, {.split = 512},
                  {{512, 1536, 1536}}, true, random);
    h.same_as_replay();
  }
}

TEST_CASE("attention_part on Hopper refuses partials that do not start on 8 bytes, with both values") {
  if (!hopper()) return;
  std::mt19937 random(9);
  Held h = make({Layout::dense, 1, 1, 512, 1, 1, 64, 64, 16, DType::bf16}, {.split = 512}, {{0, 512, 512}},
                false, random);
  const auto aside = [&](Array& a) {
    const Tensor t = a.on_gpu();
    if (&a != &h.partials) return t;
    return Tensor(static_cast<char*>(t.dl().data) + 4, std::span<const int64_t>(a.shape), a.type,
                  {kDLCUDA, 0});
  };
  const rlk::Status refused = h.call(aside, "cuda.sm90_ex2");
  CHECK(!refused);
  CHECK(std::string(refused.message()).find("partials starts 4 bytes behind a multiple of 8") !=
        std::string::npos);
}
