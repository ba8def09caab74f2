// labels: conformance
// Gradients of a sequence have the same bits alone and packed with others, those of a query the same in chunks; and what lies
// behind a sequence is not read and gets +0.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "attention_owned.hpp"

namespace {

using attention_test::Owned;
using attention_test::same_rows;
using attention_test::says;
using attention_test::Shape;
using rlk::AttentionBwd;
using rlk::DType;
using rlk::Tensor;

constexpr int64_t kHeads = 4, kKvHeads = 2, kWidth = 32, kValueWidth = 16;

// Which data, and who computes: any arithmetic keeps these promises. No name: the usual choice.
struct Way {
  DType type;
  const char* backend = "";
};
constexpr Way kWays[] = {{DType::f32},
                         {DType::bf16},
                         {DType::bf16, "native.replay_amx"},
                         {DType::bf16, "native.replay_sm90"},
                         {DType::bf16, "native.replay_sm90_ex2"}};
rlk::Options options(const Way& way) { return {.backend = way.backend}; }

struct Gradients {
  Owned d_q, d_k, d_v, d_sinks;
  Gradients(int64_t queries, int64_t keys, DType t)
      : d_q({queries, kHeads, kWidth}, t, 7),
        d_k({keys, kKvHeads, kWidth}, t, 7),
        d_v({keys, kKvHeads, kValueWidth}, t, 7),
        d_sinks({kHeads}, DType::f32, 7) {}
};

// Tokens with all that the gradients take, and the forward's out and lse.
struct Tokens {
  int64_t count;
  Owned q, k, v, sinks, out, lse, d_out, d_lse;
  rlk::Attention attributes;
  const char* backend = "";  // of the gradients

  Tokens(int64_t n, DType t, std::mt19937& random, const rlk::Attention& o = {})
      : count(n),
        q({n, kHeads, kWidth}, t, random),
        k({n, kKvHeads, kWidth}, t, random),
        v({n, kKvHeads, kValueWidth}, t, random),
        sinks({kHeads}, DType::f32, random),
        out({n, kHeads, kValueWidth}, t, 7),
        lse({n, kHeads}, DType::f32, 7),
        d_out({n, kHeads, kValueWidth}, t, random),
        d_lse({n, kHeads}, DType::f32, random),
        attributes(o) {}

  // Of queries [from, to) over all keys before `to`: the forward, or the gradients.
  void run(int64_t from, int64_t to, Gradients* g, int64_t room) {
    const int64_t length[] = {to};
    const auto rows = [&](const Owned& t) { return t.view(from, {1, to - from}); };
    const Tensor queries = rows(q), keys = k.view(0, {1, room}), values = v.view(0, {1, room}), o = rows(out),
                 l = rows(lse), d_o = rows(d_out), d_l = rows(d_lse),
                 kv_len(const_cast<int64_t*>(length), {1}, DType::i64), s = sinks.view(0, {kHeads});
    rlk::Attention a = attributes;
    a.q = queries, a.k = keys, a.v = values, a.kv_len = kv_len, a.sinks = s;
    a.out = o, a.lse = l;
    if (g == nullptr) {
      REQUIRE(rlk::attention(a));
      return;
    }
    const Tensor d_q = g->d_q.view(0, {1, to - from}), d_k = g->d_k.view(0, {1, room}),
                 d_v = g->d_v.view(0, {1, room}), d_s = g->d_sinks.view(0, {kHeads});
    AttentionBwd b{.q = queries, .k = keys, .v = values, .kv_len = kv_len, .sinks = s, .out = o, .lse = l};
    b.d_out = d_o, b.d_lse = d_l, b.d_q = d_q, b.d_k = d_k, b.d_v = d_v, b.d_sinks = d_s;
    b.causal = attributes.causal, b.window = attributes.window, b.softcap = attributes.softcap;
    REQUIRE(rlk::attention_bwd(b, options({q.type, backend})));
  }
  Gradients all() {
    run(0, count, nullptr, count);
    Gradients g(count, count, q.type);
    run(0, count, &g, count);
    return g;
  }
};

bool zero_rows(const Owned& x, int64_t from) {
  return std::all_of(x.bytes.begin() + from * static_cast<int64_t>(x.row()), x.bytes.end(),
                     [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

TEST_CASE("attention_bwd of packed sequences is that of each alone, and rows of no sequence get +0") {
  std::mt19937 random(1);
  for (const Way& way : kWays) {
    const DType t = way.type;
    CAPTURE(way.backend);
    std::vector<Tokens> parts;
    std::vector<Gradients> expected;
    std::vector<int64_t> bounds{0};
    for (int64_t n : {130, 1, 257, 16, 128}) {
      parts.emplace_back(n, t, random, rlk::Attention{.window = 100});
      parts.back().sinks.bytes = parts.front().sinks.bytes, parts.back().backend = way.backend;
      expected.push_back(parts.back().all());
      bounds.push_back(bounds.back() + n);
      if (n == 1) bounds.push_back(bounds.back());  // an empty one
    }
    const int64_t tokens = bounds.back(), rows = tokens + 3;
    Tokens all(rows, t, random);
    for (Owned* x : {&all.q, &all.k, &all.v, &all.out, &all.lse, &all.d_out, &all.d_lse})
      for (int64_t i = 0; i < x->count(); ++i) x->set(i, NAN);
    int64_t at = 0;
    for (const Tokens& p : parts)
      for (int64_t i = 0; i < p.count; ++i, ++at) {
        all.q.copy_row(at, p.q, i), all.k.copy_row(at, p.k, i), all.v.copy_row(at, p.v, i);
        all.out.copy_row(at, p.out, i), all.lse.copy_row(at, p.lse, i);
        all.d_out.copy_row(at, p.d_out, i), all.d_lse.copy_row(at, p.d_lse, i);
      }
    Gradients g(rows, rows, t);
    const Tensor cu(bounds.data(), {static_cast<int64_t>(bounds.size())}, DType::i64),
        sinks = parts[0].sinks.view(0, {kHeads}), q = all.q.view(0, {rows}), k = all.k.view(0, {rows}),
        v = all.v.view(0, {rows}), out = all.out.view(0, {rows}), lse = all.lse.view(0, {rows}),
        d_out = all.d_out.view(0, {rows}), d_lse = all.d_lse.view(0, {rows}), d_q = g.d_q.view(0, {rows}),
        d_k = g.d_k.view(0, {rows}), d_v = g.d_v.view(0, {rows});
    AttentionBwd b{.q = q, .k = k, .v = v, .cu_q = cu, .cu_k = cu, .sinks = sinks, .out = out, .lse = lse};
    b.d_out = d_out, b.d_lse = d_lse, b.d_q = d_q, b.d_k = d_k, b.d_v = d_v, b.window = 100;
    REQUIRE(rlk::attention_bwd(b, options(way)));
    at = 0;
    for (std::size_t n = 0; n < parts.size(); at += parts[n++].count) {
      CAPTURE(n);
      CHECK(same_rows(g.d_q, at, parts[n].count, expected[n].d_q, 0));
      CHECK(same_rows(g.d_k, at, parts[n].count, expected[n].d_k, 0));
      CHECK(same_rows(g.d_v, at, parts[n].count, expected[n].d_v, 0));
    }
    for (const Owned* x : {&g.d_q, &g.d_k, &g.d_v}) CHECK(zero_rows(*x, tokens));
  }
}

TEST_CASE("d_q of attention_bwd in chunks is that of one call, with NaN where later keys would be") {
  std::mt19937 random(2);
  for (const Way& way : kWays)
    for (const rlk::Attention& o :
         {rlk::Attention{}, rlk::Attention{.window = 129}, rlk::Attention{.softcap = 2}}) {
      const DType t = way.type;
      Tokens s(390, t, random, o);
      s.backend = way.backend;
      const Gradients whole = s.all();
      for (int64_t chunk : {64, 127, 128, 129})
        for (int64_t from = 0; from < s.count; from += chunk) {
          const int64_t to = std::min(s.count, from + chunk), room = to + 2;
          CAPTURE(chunk);
          CAPTURE(from);
          Tokens part = s;
          for (Owned* x : {&part.k, &part.v}) {
            Owned longer({room, kKvHeads, x->shape[2]}, t, NAN);
            for (int64_t j = 0; j < to; ++j) longer.copy_row(j, *x, j);
            *x = longer;
          }
          Gradients g(to - from, room, t);
          part.run(from, to, &g, room);
          CHECK(same_rows(g.d_q, 0, to - from, whole.d_q, from));
          CHECK((zero_rows(g.d_k, to) && zero_rows(g.d_v, to)));
        }
    }
}

// By one thread a task is a sequence and head, by many a tile of its keys.
TEST_CASE("attention_bwd has the same bits whether scores are computed once or twice") {
  std::mt19937 random(8);
  for (const Way& way : {Way{DType::f32, "native.tiles"}, Way{DType::bf16, "native.tiles"},
                         Way{DType::bf16, "native.replay_amx"}})
    for (const rlk::Attention& o :
         {rlk::Attention{}, rlk::Attention{.window = 129}, rlk::Attention{.causal = false, .softcap = 2}}) {
      const DType t = way.type;
      Tokens s(390, t, random, o);
      s.run(0, s.count, nullptr, s.count);
      int64_t bounds[] = {0, 130, 130, 131, 388};
      const Tensor cu(bounds, {5}, DType::i64), sinks = s.sinks.view(0, {kHeads}), q = s.q.view(0, {390}),
                                                k = s.k.view(0, {390}), v = s.v.view(0, {390}),
                                                out = s.out.view(0, {390}), lse = s.lse.view(0, {390}),
                                                d_out = s.d_out.view(0, {390});
      const auto by = [&](int32_t threads) {
        Gradients g(390, 390, t);
        const Tensor d_q = g.d_q.view(0, {390}), d_k = g.d_k.view(0, {390}), d_v = g.d_v.view(0, {390}),
                     d_sinks = g.d_sinks.view(0, {kHeads});
        AttentionBwd b{
            .q = q, .k = k, .v = v, .cu_q = cu, .cu_k = cu, .sinks = sinks, .out = out, .lse = lse};
        b.d_out = d_out, b.d_q = d_q, b.d_k = d_k, b.d_v = d_v, b.d_sinks = d_sinks;
        b.causal = o.causal, b.window = o.window, b.softcap = o.softcap;
        REQUIRE(rlk::attention_bwd(b, {.backend = way.backend, .threads = threads}));
        return g;
      };
      const Gradients once = by(1), side_by_side = by(2), twice = by(64);
      for (const Owned Gradients::* which :
           {&Gradients::d_q, &Gradients::d_k, &Gradients::d_v, &Gradients::d_sinks}) {
        CHECK((once.*which).bytes == (twice.*which).bytes);
        CHECK((side_by_side.*which).bytes == (twice.*which).bytes);
      }
    }
}

TEST_CASE("a key and a value that no query sees have gradient +0, and so has a query that sees none") {
  std::mt19937 random(3);
  Tokens s(140, DType::f32, random, rlk::Attention{.window = 5});
  s.all();
  Gradients g(2, 140, DType::f32);
  s.run(138, 140, &g, 140);  // sees keys from 134 on
  Owned before({134, kKvHeads, kWidth}, DType::f32, 0.0);
  CHECK(same_rows(before, 0, 134, g.d_k, 0));
  CHECK(!same_rows(before, 0, 1, g.d_k, 134));
  // Three queries of one key: the first two see nothing.
  const int64_t length[] = {1};
  Tokens few(3, DType::f32, random);
  const Tensor q = few.q.view(0, {1, 3}), k = few.k.view(0, {1, 3}), v = few.v.view(0, {1, 3}),
               out = few.out.view(0, {1, 3}), lse = few.lse.view(0, {1, 3}),
               d_out = few.d_out.view(0, {1, 3}), kv_len(const_cast<int64_t*>(length), {1}, DType::i64);
  REQUIRE(rlk::attention({.q = q, .k = k, .v = v, .kv_len = kv_len, .out = out, .lse = lse}));
  Gradients of(3, 3, DType::f32);
  const Tensor d_q = of.d_q.view(0, {1, 3}), d_k = of.d_k.view(0, {1, 3});
  AttentionBwd b{.q = q, .k = k, .v = v, .kv_len = kv_len, .out = out, .lse = lse, .d_out = d_out};
  b.d_q = d_q, b.d_k = d_k;
  REQUIRE(rlk::attention_bwd(b));
  CHECK(zero_rows(of.d_k, 1));
  Owned none({2, kHeads, kWidth}, DType::f32, 0.0);
  CHECK(same_rows(none, 0, 2, of.d_q, 0));
}

// By two implementations: within the rounding of 16 bits of each other, and not the same.
void check_close(DType t, const Gradients& a, const Gradients& b) {
  bool differ = false;
  for (const Owned Gradients::* which : {&Gradients::d_q, &Gradients::d_k, &Gradients::d_v}) {
    const Owned &x = a.*which, &y = b.*which;
    double peak = 0, most = 0;
    for (int64_t i = 0; i < x.count(); ++i) {
      peak = std::max(peak, std::fabs(x.number(i)));
      most = std::max(most, std::fabs(x.number(i) - y.number(i)));
    }
    differ = differ || most > 0;
    CHECK(most < (t == DType::bf16 ? 8e-3 : 1e-3) * peak);
  }
  CHECK(differ);
  CHECK(a.d_sinks.bytes == b.d_sinks.bytes);
}

TEST_CASE(
    "attention_bwd by a tensor core is close to the fp32 one, by Hopper's own 2^x to that, and no two are "
    "the same") {
  std::mt19937 random(5);
  for (DType t : {DType::bf16, DType::f16})
    for (const rlk::Attention& o : {rlk::Attention{}, rlk::Attention{.causal = false, .softcap = 2}}) {
      Tokens s(300, t, random, o);
      const Gradients usual = s.all();
      s.backend = "native.replay_sm90";
      const Gradients own = s.all();
      s.backend = "native.replay_sm90_ex2";
      const Gradients units = s.all();
      check_close(t, usual, own), check_close(t, own, units);
    }
}

TEST_CASE("a tensor core's attention_bwd refuses a d_out that it would have to round") {
  std::mt19937 random(6);
  Tokens s(5, DType::bf16, random);
  Gradients g(5, 5, DType::bf16);
  const Owned wide({5, kHeads, kValueWidth}, DType::f32, 1.0);
  const Tensor q = s.q.view(0, {1, 5}), k = s.k.view(0, {1, 5}), v = s.v.view(0, {1, 5}),
               out = s.out.view(0, {1, 5}), lse = s.lse.view(0, {1, 5}), d_out = wide.view(0, {1, 5}),
               d_q = g.d_q.view(0, {1, 5});
  const AttentionBwd b{.q = q, .k = k, .v = v, .out = out, .lse = lse, .d_out = d_out, .d_q = d_q};
  for (const char* backend : {"native.replay_sm90", "native.replay_amx"}) {
    const rlk::Status status = rlk::attention_bwd(b, {.backend = backend});
    CAPTURE(std::string(status.message()));
    CHECK(std::string(status.message()).find("d_out is fp32") != std::string::npos);
  }
}

TEST_CASE("attention_bwd refuses pages and what does not fit, with both values") {
  std::mt19937 random(4);
  Tokens s(20, DType::f32, random);
  Gradients g(20, 20, DType::f32);
  int64_t bounds[] = {0, 12, 9, 20}, pages[] = {0};
  const Tensor q = s.q.view(0, {1, 20}), k = s.k.view(0, {1, 20}), v = s.v.view(0, {1, 20}),
               out = s.out.view(0, {1, 20}), lse = s.lse.view(0, {1, 20}), d_out = s.d_out.view(0, {1, 20}),
               d_q = g.d_q.view(0, {1, 20}), d_s = g.d_sinks.view(0, {kHeads}), flat = s.lse.view(0, {20}),
               cu(bounds, {4}, DType::i64), length(bounds + 1, {1}, DType::i64),
               table(pages, {1, 1}, DType::i64);
  const AttentionBwd good{.q = q, .k = k, .v = v, .out = out, .lse = lse, .d_out = d_out, .d_q = d_q};
  AttentionBwd b = good;
  b.block_table = table, b.kv_len = length;
  says(rlk::attention_bwd(b), "block_table is given");
  b = good, b.d_sinks = d_s;
  says(rlk::attention_bwd(b), "d_sinks is asked for, sinks is absent");
  b = good, b.lse = flat;
  says(rlk::attention_bwd(b), "lse has rank 2, expected 3");
  b = good, b.d_out = q;
  says(rlk::attention_bwd(b), "d_out has size 32 in dimension 3, expected 16");
  const Tensor rows = s.q.view(0, {20}), o = s.out.view(0, {20}), d_o = s.d_out.view(0, {20}),
               d_r = g.d_q.view(0, {20}), kk = s.k.view(0, {20}), vv = s.v.view(0, {20});
  says(rlk::attention_bwd({.q = rows,
                           .k = kk,
                           .v = vv,
                           .cu_q = cu,
                           .cu_k = cu,
                           .out = o,
                           .lse = flat,
                           .d_out = d_o,
                           .d_q = d_r}),
       "cu_q[2] is 9, expected at least 12");
}
