// labels: conformance
// Sequences that share the keys of another one as their first: the bits of each with its keys in one piece, and gradients of
// the shared keys that go on from sequence to sequence.
#include <doctest/doctest.h>

#include <cmath>
#include <string>

#include "attention_owned.hpp"

namespace {

using attention_test::Owned;
using attention_test::same_rows;
using attention_test::says;
using rlk::Attention;
using rlk::AttentionBwd;
using rlk::DType;
using rlk::Tensor;

constexpr int64_t kHeads = 4, kKvHeads = 2, kWidth = 32, kValueWidth = 16;

struct Way {
  DType type;
  const char* backend = "";     // of the gradients; no name: the usual choice
  const char* arithmetic = "";  // of the forward
};
constexpr Way kWays[] = {{DType::f32},
                         {DType::bf16},
                         {DType::f16, "native.tiles"},
                         {DType::bf16, "native.replay_amx", "amx/k32/attn128/s1024"},
                         {DType::bf16, "native.replay_sm90_ex2", "sm90/t25k16/ex2/h8/attn128/s1024"}};

// Two prompts, of which the second has no queries here, their samples, and a sequence of no prompt between.
struct Sample {
  int64_t prefix, queries, own;  // own: keys
};
constexpr Sample kSamples[] = {{-1, 141, 141}, {0, 37, 37}, {-1, 0, 130}, {0, 1, 1},   {-1, 20, 33},
                               {2, 129, 129},  {0, 0, 3},   {2, 5, 0},    {0, 64, 100}};
constexpr int64_t kCount = std::size(kSamples);

struct Packed {
  std::vector<int64_t> cu_q{0}, cu_k{0}, prefix_of;
  Owned q, k, v, sinks, out, lse, d_out, d_q, d_k, d_v;
  Attention attributes;

  static int64_t all(int64_t Sample::* of) {
    int64_t sum = 0;
    for (const Sample& s : kSamples) sum += s.*of;
    return sum;
  }
  Packed(DType t, std::mt19937& random, const Attention& o)
      : q({all(&Sample::queries), kHeads, kWidth}, t, random),
        k({all(&Sample::own), kKvHeads, kWidth}, t, random),
        v({all(&Sample::own), kKvHeads, kValueWidth}, t, random),
        sinks({kHeads}, DType::f32, random),
        out({all(&Sample::queries), kHeads, kValueWidth}, t, NAN),
        lse({all(&Sample::queries), kHeads}, DType::f32, NAN),
        d_out({all(&Sample::queries), kHeads, kValueWidth}, t, random),
        d_q(q.shape, t, NAN),
        d_k(k.shape, t, NAN),
        d_v(v.shape, t, NAN),
        attributes(o) {
    for (const Sample& s : kSamples) {
      cu_q.push_back(cu_q.back() + s.queries), cu_k.push_back(cu_k.back() + s.own);
      prefix_of.push_back(s.prefix);
    }
  }
  static Tensor whole(const Owned& x) { return x.view(0, {x.shape[0]}); }
  static Tensor integers(const std::vector<int64_t>& x) {
    return Tensor(const_cast<int64_t*>(x.data()), {static_cast<int64_t>(x.size())}, DType::i64);
  }

  rlk::Status forward(const char* arithmetic) const {
    const Tensor tq = whole(q), tk = whole(k), tv = whole(v), to = whole(out), tl = whole(lse),
                 ts = whole(sinks), bq = integers(cu_q), bk = integers(cu_k), of = integers(prefix_of);
    Attention a = attributes;
    a.q = tq, a.k = tk, a.v = tv, a.cu_q = bq, a.cu_k = bk, a.prefix_of = of, a.sinks = ts;
    a.out = to, a.lse = tl;
    return rlk::attention(a, {.arithmetic = arithmetic});
  }
  rlk::Status backward(const char* backend) const {
    const Tensor tq = whole(q), tk = whole(k), tv = whole(v), to = whole(out), tl = whole(lse),
                 bq = integers(cu_q), bk = integers(cu_k), of = integers(prefix_of), go = whole(d_out),
                 gq = whole(d_q), gk = whole(d_k), gv = whole(d_v);
    AttentionBwd b{.q = tq, .k = tk, .v = tv, .cu_q = bq, .cu_k = bk, .prefix_of = of, .out = to, .lse = tl};
    b.d_out = go, b.d_q = gq, b.d_k = gk, b.d_v = gv;
    b.causal = attributes.causal, b.window = attributes.window;
    return rlk::attention_bwd(b, {.backend = backend});
  }
};

// One sequence, its keys in one piece.
struct Alone {
  int64_t queries, keys, shared;
  Owned q, k, v, out, lse, d_out, d_q, d_k, d_v;

  Alone(const Packed& from, int64_t n)
      : queries(kSamples[n].queries),
        keys(0),
        shared(kSamples[n].prefix < 0 ? 0 : kSamples[kSamples[n].prefix].own),
        q({queries, kHeads, kWidth}, from.q.type, NAN),
        k({shared + kSamples[n].own, kKvHeads, kWidth}, from.q.type, NAN),
        v({shared + kSamples[n].own, kKvHeads, kValueWidth}, from.q.type, NAN),
        out({queries, kHeads, kValueWidth}, from.q.type, NAN),
        lse({queries, kHeads}, DType::f32, NAN),
        d_out(out),
        d_q(q),
        d_k(k),
        d_v(v) {
    const auto at = static_cast<std::size_t>(n);
    for (int64_t i = 0; i < queries; ++i)
      q.copy_row(i, from.q, from.cu_q[at] + i), d_out.copy_row(i, from.d_out, from.cu_q[at] + i);
    const auto take = [&](int64_t of) {
      for (int64_t j = 0; j < kSamples[of].own; ++j, ++keys) {
        const int64_t row = from.cu_k[static_cast<std::size_t>(of)] + j;
        k.copy_row(keys, from.k, row), v.copy_row(keys, from.v, row);
      }
    };
    if (kSamples[n].prefix >= 0) take(kSamples[n].prefix);
    take(n);
  }
  static Tensor of(const Owned& x) { return x.view(0, {1, x.shape[0]}); }
  void run(const Packed& from, const Way& way) {
    const Tensor tq = of(q), tk = of(k), tv = of(v), to = of(out), tl = of(lse),
                 ts = from.sinks.view(0, {kHeads});
    Attention a = from.attributes;
    a.q = tq, a.k = tk, a.v = tv, a.sinks = ts, a.out = to, a.lse = tl;
    REQUIRE(rlk::attention(a, {.arithmetic = way.arithmetic}));
    const Tensor go = of(d_out), gq = of(d_q), gk = of(d_k), gv = of(d_v);
    AttentionBwd b{.q = tq, .k = tk, .v = tv, .out = to, .lse = tl};
    b.d_out = go, b.d_q = gq, b.d_k = gk, b.d_v = gv, b.causal = a.causal, b.window = a.window;
    REQUIRE(rlk::attention_bwd(b, {.backend = way.backend}));
  }
};

}  // namespace

TEST_CASE("attention over a shared prefix, and its gradients, are those of each sequence in one piece") {
  std::mt19937 random(1);
  for (const Way& way : kWays)
    for (int64_t window : {0, 70}) {
      CAPTURE(way.backend);
      CAPTURE(window);
      const Packed all(way.type, random, Attention{.window = window});
      REQUIRE(all.forward(way.arithmetic));
      REQUIRE(all.backward(way.backend));
      for (int64_t n = 0; n < kCount; ++n) {
        CAPTURE(n);
        Alone one(all, n);
        if (one.queries == 0) continue;
        one.run(all, way);
        const auto at = static_cast<std::size_t>(n);
        CHECK(same_rows(one.out, 0, one.queries, all.out, all.cu_q[at]));
        CHECK(same_rows(one.lse, 0, one.queries, all.lse, all.cu_q[at]));
        CHECK(same_rows(one.d_q, 0, one.queries, all.d_q, all.cu_q[at]));
        // The keys of a prompt with samples have gradients of their queries, too.
        if (n == 0 || n == 2) continue;
        CHECK(same_rows(one.d_k, one.shared, kSamples[n].own, all.d_k, all.cu_k[at]));
        CHECK(same_rows(one.d_v, one.shared, kSamples[n].own, all.d_v, all.cu_k[at]));
      }
    }
}

// Where each query sees every key of a prompt, those of all its samples might be one sequence's.
TEST_CASE("gradients of a shared prefix are chains over the queries of its sequences one after another") {
  std::mt19937 random(2);
  const Packed all(DType::f32, random, Attention{.causal = false});
  REQUIRE(all.forward(""));
  REQUIRE(all.backward("native.tiles"));
  for (const int64_t prompt : {0, 2}) {
    CAPTURE(prompt);
    std::vector<int64_t> rows;
    for (int64_t n = 0; n < kCount; ++n)
      for (int64_t i = 0; (n == prompt || kSamples[n].prefix == prompt) && i < kSamples[n].queries; ++i)
        rows.push_back(all.cu_q[static_cast<std::size_t>(n)] + i);
    const auto count = static_cast<int64_t>(rows.size()), keys = kSamples[prompt].own,
               first = all.cu_k[static_cast<std::size_t>(prompt)];
    const auto gathered = [&](const Owned& from) {
      attention_test::Shape shape = from.shape;
      shape[0] = count;
      Owned to(shape, from.type, NAN);
      for (int64_t i = 0; i < count; ++i) to.copy_row(i, from, rows[static_cast<std::size_t>(i)]);
      return to;
    };
    const Owned q = gathered(all.q), out = gathered(all.out), lse = gathered(all.lse),
                d_out = gathered(all.d_out), d_k({keys, kKvHeads, kWidth}, DType::f32, NAN),
                d_v({keys, kKvHeads, kValueWidth}, DType::f32, NAN);
    const Tensor tq = q.view(0, {1, count}), tk = all.k.view(first, {1, keys}),
                 tv = all.v.view(first, {1, keys}), to = out.view(0, {1, count}),
                 tl = lse.view(0, {1, count}), go = d_out.view(0, {1, count}), gk = d_k.view(0, {1, keys}),
                 gv = d_v.view(0, {1, keys});
    AttentionBwd b{.q = tq, .k = tk, .v = tv, .out = to, .lse = tl};
    b.d_out = go, b.d_k = gk, b.d_v = gv, b.causal = false;
    REQUIRE(rlk::attention_bwd(b, {.backend = "native.tiles"}));
    CHECK(same_rows(d_k, 0, keys, all.d_k, first));
    CHECK(same_rows(d_v, 0, keys, all.d_v, first));
  }
}

TEST_CASE("keys behind kv_len of a prompt or of a sample are not read, and have gradient +0") {
  std::mt19937 random(3);
  // A prompt of 5 keys in room for 8, a sample that sees 3 of them, one that has 2 own keys in room for 4.
  const std::vector<int64_t> cu_q{0, 5, 6, 8}, cu_k{0, 8, 10, 14}, of{-1, 0, 0}, length{5, 3, 7};
  Owned q({8, kHeads, kWidth}, DType::f32, random), k({14, kKvHeads, kWidth}, DType::f32, random),
      v({14, kKvHeads, kValueWidth}, DType::f32, random), out({8, kHeads, kValueWidth}, DType::f32, NAN),
      lse({8, kHeads}, DType::f32, NAN), d_out({8, kHeads, kValueWidth}, DType::f32, random),
      d_k(k.shape, DType::f32, NAN), d_v(v.shape, DType::f32, NAN);
  const auto nobody = [](int64_t row) { return (row >= 5 && row < 10) || row >= 12; };
  for (Owned* x : {&k, &v})
    for (int64_t i = 0; i < x->count(); ++i)
      if (nobody(i / (x->count() / 14))) x->set(i, NAN);
  const Tensor tq = Packed::whole(q), tk = Packed::whole(k), tv = Packed::whole(v), to = Packed::whole(out),
               tl = Packed::whole(lse), go = Packed::whole(d_out), gk = Packed::whole(d_k),
               gv = Packed::whole(d_v), bq = Packed::integers(cu_q), bk = Packed::integers(cu_k),
               kv_len = Packed::integers(length), prefix_of = Packed::integers(of);
  Attention a{.q = tq, .k = tk, .v = tv, .cu_q = bq, .cu_k = bk, .kv_len = kv_len, .prefix_of = prefix_of};
  a.out = to, a.lse = tl;
  REQUIRE(rlk::attention(a));
  AttentionBwd b{.q = tq, .k = tk, .v = tv, .cu_q = bq, .cu_k = bk, .kv_len = kv_len, .prefix_of = prefix_of};
  b.out = to, b.lse = tl, b.d_out = go, b.d_k = gk, b.d_v = gv;
  REQUIRE(rlk::attention_bwd(b));
  for (const Owned* x : {&out, &d_k, &d_v})
    for (int64_t i = 0; i < x->count(); ++i) REQUIRE(std::isfinite(x->f32(i)));
  for (const Owned* x : {&d_k, &d_v})
    for (int64_t i = 0; i < x->count(); ++i)
      if (nobody(i / (x->count() / 14)))
        REQUIRE(x->f32(i) == 0);
      else
        REQUIRE(x->f32(i) != 0);
}

TEST_CASE("attention refuses prefixes that are none, with both values") {
  std::mt19937 random(4);
  Packed all(DType::f32, random, {});
  const std::vector<int64_t> good = all.prefix_of;
  REQUIRE(all.forward(""));
  all.prefix_of[1] = 1;
  says(all.forward(""), "attention: prefix_of[1] is 1, expected less than 1");
  says(all.backward(""), "attention_bwd: prefix_of[1] is 1, expected less than 1");
  all.prefix_of[1] = -2;
  says(all.forward(""), "prefix_of[1] is -2, expected at least -1");
  all.prefix_of = good, all.prefix_of[3] = 1;
  says(all.forward(""), "prefix_of[3] is 1, which has a prefix itself: prefix_of[1] is 0");
  all.prefix_of = good, all.prefix_of.pop_back();
  says(all.forward(""), "prefix_of has size 8, expected 9");
  all.prefix_of = {0};
  const Alone one(all, 0);
  const Tensor q = Alone::of(one.q), k = Alone::of(one.k), v = Alone::of(one.v), out = Alone::of(one.out),
               of = Packed::integers(all.prefix_of);
  says(rlk::attention({.q = q, .k = k, .v = v, .prefix_of = of, .out = out}),
       "prefix_of is given, q has rank 4, not 3");
  const std::vector<int64_t> length{141, 179};
  all.prefix_of = {-1, 0};
  const std::vector<int64_t> two{0, 141, 178};
  const Tensor tq = Packed::whole(all.q), tk = Packed::whole(all.k), tv = Packed::whole(all.v),
               to = Packed::whole(all.out), cu = Packed::integers(two), kv_len = Packed::integers(length),
               both = Packed::integers(all.prefix_of);
  says(rlk::attention({.q = tq,
                       .k = tk,
                       .v = tv,
                       .cu_q = cu,
                       .cu_k = cu,
                       .kv_len = kv_len,
                       .prefix_of = both,
                       .out = to}),
       "kv_len[1] is 179, expected at most 178");
}
