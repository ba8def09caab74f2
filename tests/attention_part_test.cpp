// labels: conformance
// attention in two steps, over ranks that have a run of splits of every sequence each: the bits of attention on one device.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention_owned.hpp"
#include "rlk/resolve.hpp"

namespace {

using attention_test::Owned;
using attention_test::Shape;
using rlk::Attention;
using rlk::AttentionPart;
using rlk::DType;
using rlk::Tensor;

using Numbers = std::vector<int64_t>;

struct Heads {
  int64_t q = 4, kv = 2, d = 32, dv = 16;
};

// A packed batch: sequence n has queries[n] queries, the last ones of its lengths[n] tokens.
struct Batch {
  Numbers queries, lengths;
  Heads heads;
  DType type;
  Owned q, k, v, sinks;

  Batch(Numbers some, Numbers all, DType t, std::mt19937& random, const Heads& h = {})
      : queries(std::move(some)),
        lengths(std::move(all)),
        heads(h),
        type(t),
        q({sum(queries), h.q, h.d}, t, random),
        k({sum(lengths), h.kv, h.d}, t, random),
        v({sum(lengths), h.kv, h.dv}, t, random),
        sinks({h.q}, DType::f32, random) {}
  static int64_t sum(const Numbers& n) {
    int64_t all = 0;
    for (int64_t x : n) all += x;
    return all;
  }
  static Numbers bounds(const Numbers& n) {
    Numbers all{0};
    for (int64_t x : n) all.push_back(all.back() + x);
    return all;
  }
  int64_t count() const { return static_cast<int64_t>(lengths.size()); }
};

Tensor numbers(const Numbers& n) {
  return Tensor(const_cast<int64_t*>(n.data()), {static_cast<int64_t>(n.size())}, DType::i64);
}

struct Result {
  Owned out, lse;
  explicit Result(const Batch& b)
      : out({b.q.shape[0], b.heads.q, b.heads.dv}, b.type, 7),
        lse({b.q.shape[0], b.heads.q}, DType::f32, 7) {}
  bool operator==(const Result& other) const {
    return out.bytes == other.out.bytes && lse.bytes == other.lse.bytes;
  }
};

Result on_one_device(const Batch& b, const Attention& options, bool sinks) {
  Result r(b);
  const Numbers cu_q = Batch::bounds(b.queries), cu_k = Batch::bounds(b.lengths);
  const Tensor q = b.q.view(0, {b.q.shape[0]}), k = b.k.view(0, {b.k.shape[0]}),
               v = b.v.view(0, {b.v.shape[0]}), out = r.out.view(0, {b.q.shape[0]}),
               lse = r.lse.view(0, {b.q.shape[0]}), bounds_q = numbers(cu_q), bounds_k = numbers(cu_k),
               s = b.sinks.view(0, {b.heads.q});
  Attention a = options;
  a.q = q, a.k = k, a.v = v, a.cu_q = bounds_q, a.cu_k = bounds_k, a.out = out, a.lse = lse;
  if (sinks) a.sinks = s;
  rlk::check(rlk::attention(a));
  return r;
}

enum class Layout { packed, dense, paged };

// Rank r begins with split at[r] of a sequence, of every second one with the next; what is behind its keys is NaN.
struct Ranks {
  const Batch& b;
  const Numbers& at;
  const Attention& options;
  Layout layout;

  std::size_t count() const { return at.size(); }
  int64_t first(std::size_t rank, std::size_t n) const {
    return (at[rank] + (rank > 0 && n % 2 == 1 ? 1 : 0)) * options.split;
  }
  int64_t have(std::size_t rank, std::size_t n) const {
    const int64_t last = rank + 1 < count() ? first(rank + 1, n) : b.lengths[n];
    return std::max<int64_t>(0, std::min(last, b.lengths[n]) - first(rank, n));
  }

  Result merged(bool sinks) {
    int64_t most = 0, all = 0;  // keys of a sequence on a rank, and of all of them
    for (std::size_t r = 0; r < count(); ++r) {
      int64_t here = 0;
      for (std::size_t n = 0; n < b.lengths.size(); ++n)
        most = std::max(most, have(r, n)), here += have(r, n);
      all = std::max(all, here);
    }
    const int64_t room = layout == Layout::packed ? all : most, tokens = b.q.shape[0];
    const int64_t split = options.split == 0 ? room : options.split, splits = (room + split - 1) / split;
    Owned partials({static_cast<int64_t>(count()), tokens, b.heads.q, splits, 2 + b.heads.dv}, DType::f32,
                   NAN);
    for (std::size_t r = 0; r < count(); ++r) part(r, splits * split, partials);
    Result result(b);
    const Tensor p = partials.view(0, {partials.shape[0]}), out = result.out.view(0, {tokens}),
                 lse = result.lse.view(0, {tokens}), s = b.sinks.view(0, {b.heads.q});
    rlk::AttentionMerge m{.partials = p, .out = out, .lse = lse};
    if (sinks) m.sinks = s;
    rlk::check(rlk::attention_merge(m));
    return result;
  }

  void part(std::size_t rank, int64_t room, Owned& partials) const {
    constexpr int64_t kPage = 32;
    const int64_t n = b.count(), pages = (room + kPage - 1) / kPage;
    Shape leading{room};
    if (layout == Layout::dense) leading = {n, room};
    if (layout == Layout::paged) leading = {n * pages, kPage};
    const int64_t rows = leading.size() == 1 ? room : leading[0] * leading[1];
    Owned k({rows, b.heads.kv, b.heads.d}, b.type, NAN), v({rows, b.heads.kv, b.heads.dv}, b.type, NAN);
    Numbers cu_k{0}, firsts, lasts, table;
    int64_t from = 0;
    for (std::size_t s = 0; s < b.lengths.size(); ++s) {
      const auto number = static_cast<int64_t>(s);
      for (int64_t i = 0; i < pages; ++i) table.push_back((i * n + number) % (n * pages));
      for (int64_t j = 0; j < have(rank, s); ++j) {
        int64_t row = cu_k.back() + j;
        if (layout == Layout::dense) row = number * room + j;
        if (layout == Layout::paged)
          row = table[static_cast<std::size_t>(number * pages + j / kPage)] * kPage + j % kPage;
        k.copy_row(row, b.k, from + first(rank, s) + j), v.copy_row(row, b.v, from + first(rank, s) + j);
      }
      from += b.lengths[s];
      cu_k.push_back(cu_k.back() + have(rank, s)), firsts.push_back(first(rank, s));
      lasts.push_back(first(rank, s) + have(rank, s));
    }
    const Numbers cu_q = Batch::bounds(b.queries);
    const Tensor q = b.q.view(0, {b.q.shape[0]}), keys = k.view(0, leading), values = v.view(0, leading),
                 bounds_q = numbers(cu_q), bounds_k = numbers(cu_k), kv_len = numbers(b.lengths),
                 k_first = numbers(firsts), k_last = numbers(lasts),
                 blocks(table.data(), {n, pages}, DType::i64),
                 to = partials.view(static_cast<int64_t>(rank), {});
    AttentionPart a{.q = q, .k = keys, .v = values, .cu_q = bounds_q, .kv_len = kv_len, .k_first = k_first};
    if (layout == Layout::packed)
      a.cu_k = bounds_k;
    else
      a.k_last = k_last;
    if (layout == Layout::paged) a.block_table = blocks;
    a.partials = to, a.scale = options.scale, a.causal = options.causal, a.window = options.window;
    a.softcap = options.softcap, a.split = options.split;
    rlk::check(rlk::attention_part(a));
  }
};

struct Named {
  const char* name;
  Attention options;
  bool sinks;
};
std::vector<Named> options() {
  return {{"plain", {.split = 512}, false},
          {"sinks", {.split = 512}, true},
          {"window 700", {.window = 700, .split = 512}, true},
          {"window 1", {.window = 1, .split = 512}, false},
          {"cap", {.softcap = 2, .split = 512}, false},
          {"whole", {.causal = false, .split = 512}, true},
          {"splits of 1024", {}, false}};
}

void same(const Batch& b, const Named& o, const Numbers& at, Layout layout) {
  CAPTURE(std::string(o.name));
  CAPTURE(at.size());
  CAPTURE(static_cast<int>(layout));
  CHECK(Ranks{b, at, o.options, layout}.merged(o.sinks) == on_one_device(b, o.options, o.sinks));
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

}  // namespace

TEST_CASE("attention of ranks that have some splits each, merged, is attention: decode and prefill") {
  std::mt19937 random(1);
  for (DType t : kTypes) {
    const Heads heads{2, 1, 16, 16};
    const Batch prefill({200, 1, 90}, {1700, 30, 1100}, t, random, heads),
        decode({1, 1, 1}, {1700, 1025, 512}, t, random, heads),
        guesses({5, 3, 0}, {1537, 514, 9}, t, random, heads);
    for (const Named& o : options())
      for (const Batch* b : {&decode, &guesses, &prefill})
        for (const Numbers& at : {Numbers{0}, Numbers{0, 1}, Numbers{0, 1, 1, 2}}) {
          if (b == &prefill && (t == DType::f16 || at.size() != 4)) continue;
          same(*b, o, at, Layout::dense);
          if (b != &prefill) same(*b, o, at, at.size() == 2 ? Layout::paged : Layout::packed);
        }
  }
}

TEST_CASE("attention in one split is that of the one rank that has all keys") {
  std::mt19937 random(2);
  const Batch b({3, 2}, {600, 40}, DType::bf16, random);
  same(b, {"one split", {.split = 0}, true}, {0}, Layout::dense);
}

TEST_CASE("attention of ranks is attention in every arithmetic and for heads of every width") {
  std::mt19937 random(3);
  for (const char* backend :
       {"attention=native.replay_sm90_ex2_s512;attention_part=native.replay_sm90_ex2_s512", "native"}) {
    CAPTURE(std::string(backend));
    const Named plain{"plain", {.window = 600, .split = 512}, true};
    for (const Heads& h : {Heads{2, 1, 64, 64}, Heads{2, 1, 128, 128}, Heads{2, 1, 192, 128},
                           Heads{1, 1, 256, 256}, Heads{2, 1, 576, 512}}) {
      CAPTURE(h.d);
      const Batch b({2}, {1100}, DType::bf16, random, h);
      const rlk::BackendScope scope(backend);
      same(b, plain, {0, 1}, Layout::dense);
    }
  }
}

TEST_CASE(
    "attention of ranks has the same bits where scores are -inf, and where a sum of values underflows") {
  std::mt19937 random(4);
  Batch b({2}, {1600}, DType::f32, random, {1, 1, 16, 16});
  for (int64_t d = 0; d < 16; ++d) b.q.set(d, d == 0), b.q.set(16 + d, d == 1);
  for (int64_t j = 512; j < 1024; ++j) b.k.set(j * 16, -HUGE_VAL);  // all of a split, to query 0
  for (int64_t j = 0; j < 512; ++j) b.k.set(j * 16 + 1, -300);      // far below the others, to query 1
  for (int64_t j = 0; j < 512; ++j) b.v.set(j * 16 + 3, -1e-30);
  for (int64_t j = 1024; j < 1600; ++j) b.v.set(j * 16 + 3, 0), b.v.set((j - 512) * 16 + 3, 0);
  for (bool sinks : {false, true})
    same(b, {"-inf", {.scale = 1, .causal = false, .split = 512}, sinks}, {0, 1, 2}, Layout::dense);
}

TEST_CASE("attention_part refuses parts that are no splits, with both values") {
  std::mt19937 random(5);
  const Batch b({1}, {1500}, DType::f32, random);
  const Tensor q = b.q.view(0, {1, 1}), k = b.k.view(0, {1, 1500}), v = b.v.view(0, {1, 1500});
  const auto says = [&](int64_t length, int64_t first, int64_t split, const char* text, int64_t last = 0) {
    const Numbers lengths{length}, firsts{first}, lasts{last};
    const Tensor kv_len = numbers(lengths), k_first = numbers(firsts);
    const Owned partials({1, 1, b.heads.q, split == 0 ? 1 : 3, 2 + b.heads.dv}, DType::f32, 0.0);
    const Tensor result = partials.view(0, {1});
    const Tensor k_last = numbers(lasts);
    AttentionPart a{.q = q, .k = k, .v = v, .kv_len = kv_len, .k_first = k_first};
    a.partials = result, a.split = split;
    if (last != 0) a.k_last = k_last;
    const rlk::Status s = rlk::attention_part(a);
    CAPTURE(std::string(s.message()));
    CHECK(!s);
    CHECK(std::string(s.message()).find(text) != std::string::npos);
  };
  says(3000, 100, 512, "k_first[0] is 100, expected a multiple of 512");
  says(3000, -512, 512, "k_first[0] is -512, expected from 0 to");
  says(1000, 128, 0, "k_first[0] is 128, expected with one split 0");
  says(1501, 0, 0, "the keys of sequence 0 end at 1500, kv_len is 1501: with one split they are all here");
  says(-1, 0, 512, "kv_len[0] is -1, expected at least 0");
  says(3000, 512, 512,
       "the keys of sequence 0 end at 2012, kv_len is 3000: where others follow they end at a multiple of "
       "512");
  says(3000, 512, 512, "k_last[0] is 2560, expected at most 2012", 2560);
  says(3000, 512, 512, "the keys of sequence 0 end at 1025, kv_len is 3000", 1025);
}
