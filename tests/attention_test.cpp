// labels: conformance
// attention gives a token the same bits however it is reached: in one prefill, in chunks, decoded, from pages, packed with
// others, or verified with guesses.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention_owned.hpp"

namespace {

using attention_test::Owned;
using attention_test::says;
using attention_test::Shape;
using rlk::Attention;
using rlk::DType;
using rlk::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kHeads = 4, kKvHeads = 2, kWidth = 32, kValueWidth = 16;

// A sequence of tokens, and what one prefill makes of it.
struct Sequence {
  int64_t tokens;
  Owned q, k, v, sinks, out, lse;
  Attention attributes;

  Sequence(int64_t n, DType t, std::mt19937& random, const Attention& options = {})
      : tokens(n),
        q({n, kHeads, kWidth}, t, random),
        k({n, kKvHeads, kWidth}, t, random),
        v({n, kKvHeads, kValueWidth}, t, random),
        sinks({kHeads}, DType::f32, random),
        out({n, kHeads, kValueWidth}, t, 7),
        lse({n, kHeads}, DType::f32, 7),
        attributes(options) {
    attributes.sinks = {};
    Attention a = call(0, n, n, k, v, out, lse);
    REQUIRE(rlk::attention(a));
  }
  // Queries [from, to) over `length` of the keys in `keys`, which may have room for more.
  Attention call(int64_t from, int64_t to, int64_t length, const Owned& keys, const Owned& values, Owned& o,
                 Owned& l) const {
    lengths[0] = static_cast<int32_t>(length);
    held = {q.view(from, {1, to - from}),
            keys.view(0, {1, keys.shape[0]}),
            values.view(0, {1, keys.shape[0]}),
            Tensor(lengths, {1}, DType::i32),
            Tensor(const_cast<std::byte*>(sinks.bytes.data()), {kHeads}, DType::f32),
            o.view(0, {1, to - from}),
            l.view(0, {1, to - from})};
    Attention a = attributes;
    a.q = held[0], a.k = held[1], a.v = held[2], a.kv_len = held[3], a.out = held[5], a.lse = held[6];
    if (attributes.softcap == 0) a.sinks = held[4];
    return a;
  }
  // Whether rows [from, to) of this prefill are the rows from `at` on of another result.
  bool same(int64_t from, int64_t to, const Owned& o, const Owned& l, int64_t at = 0) const {
    const auto rows = static_cast<std::size_t>(to - from), first = static_cast<std::size_t>(from),
               other = static_cast<std::size_t>(at);
    return std::memcmp(out.bytes.data() + first * out.row(), o.bytes.data() + other * out.row(),
                       rows * out.row()) == 0 &&
           std::memcmp(lse.bytes.data() + first * lse.row(), l.bytes.data() + other * lse.row(),
                       rows * lse.row()) == 0;
  }
  mutable int32_t lengths[1] = {};
  mutable std::vector<Tensor> held;
};

struct Named {
  const char* name;
  Attention options;
};
std::vector<Named> options() {
  return {{"plain", {}},
          {"window 129", {.window = 129}},
          {"window 1, splits of 512", {.window = 1, .split = 512}},
          {"cap, splits of 512", {.softcap = 2, .split = 512}},
          {"one split", {.split = 0}}};
}

// Tokens [from, to) computed alone, with NaN where keys of later tokens would be.
bool same_chunk(const Sequence& s, int64_t from, int64_t to) {
  Owned k({to + 3, kKvHeads, kWidth}, s.k.type, NAN), v({to + 3, kKvHeads, kValueWidth}, s.k.type, NAN);
  std::memcpy(k.bytes.data(), s.k.bytes.data(), static_cast<std::size_t>(to) * k.row());
  std::memcpy(v.bytes.data(), s.v.bytes.data(), static_cast<std::size_t>(to) * v.row());
  Owned out({to - from, kHeads, kValueWidth}, s.k.type, 3), lse({to - from, kHeads}, DType::f32, 3);
  REQUIRE(rlk::attention(s.call(from, to, to, k, v, out, lse)));
  return s.same(from, to, out, lse);
}

constexpr DType kTypes[] = {DType::f32, DType::bf16};

}  // namespace

TEST_CASE("attention in chunks is attention in one prefill") {
  std::mt19937 random(1);
  for (DType t : kTypes)
    for (const Named& o : options()) {
      const Sequence s(1100, t, random, o.options);
      for (int64_t chunk : {64, 127, 128, 129, 1000})
        for (int64_t from = 0; from < s.tokens; from += chunk) {
          CAPTURE(std::string(o.name));
          CAPTURE(chunk);
          CAPTURE(from);
          CHECK(same_chunk(s, from, std::min(s.tokens, from + chunk)));
        }
    }
}

TEST_CASE("attention of one token, or of some guesses, is attention in one prefill") {
  std::mt19937 random(2);
  for (DType t : kTypes)
    for (const Named& o : options()) {
      const Sequence s(1040, t, random, o.options);
      for (int64_t guesses : {1, 2, 3, 5, 7, 8})
        for (int64_t prefix : {0, 1, 2, 63, 126, 127, 128, 129, 511, 512, 1022, 1023, 1024, 1025}) {
          CAPTURE(std::string(o.name));
          CAPTURE(guesses);
          CAPTURE(prefix);
          CHECK(same_chunk(s, prefix, prefix + guesses));
        }
    }
}

TEST_CASE("attention in Hopper's arithmetic has the same bits in chunks, decoded and in one prefill") {
  std::mt19937 random(8);
  const rlk::BackendScope hopper("attention=native.replay_sm90_ex2_s512");
  for (const Attention& options : {Attention{.split = 512}, Attention{.window = 129, .split = 512}}) {
    const Sequence s(530, DType::bf16, random, options);
    for (int64_t from : {0, 1, 127, 128, 129, 511, 512, 513})
      for (int64_t tokens : {1, 5}) {
        CAPTURE(from);
        CAPTURE(tokens);
        CHECK(same_chunk(s, from, from + tokens));
      }
    CHECK(same_chunk(s, 100, 400));
  }
}

TEST_CASE("attention of few queries has the same bits on any number of threads, which share splits") {
  std::mt19937 random(8);
  for (DType t : kTypes)
    for (const Attention& o :
         {Attention{.split = 512}, Attention{.window = 1300, .split = 512}, Attention{}}) {
      const Sequence s(2100, t, random, o);
      for (int32_t threads : {1, 2, 5}) {
        CAPTURE(threads);
        Owned out({2, kHeads, kValueWidth}, t, 3), lse({2, kHeads}, DType::f32, 3);
        REQUIRE(rlk::attention(s.call(2098, 2100, 2100, s.k, s.v, out, lse), {.threads = threads}));
        CHECK(s.same(2098, 2100, out, lse));
      }
    }
}

TEST_CASE("attention over pages is attention over memory in one piece") {
  std::mt19937 random(3);
  for (DType t : kTypes)
    for (int64_t page : {16, 17, 64, 128, 256}) {
      CAPTURE(page);
      const Sequence s(1100, t, random, {.window = page == 64 ? 300 : 0});
      const int64_t used = (s.tokens + page - 1) / page, pages = 2 * used + 1;
      Owned k({pages * page, kKvHeads, kWidth}, t, NAN), v({pages * page, kKvHeads, kValueWidth}, t, NAN);
      std::vector<int32_t> table;
      for (int64_t i = 0; i < used; ++i) table.push_back(static_cast<int32_t>((i * 2 + used) % pages));
      for (int64_t j = 0; j < s.tokens; ++j) {
        const int64_t at = table[static_cast<std::size_t>(j / page)] * page + j % page;
        k.copy_row(at, s.k, j), v.copy_row(at, s.v, j);
      }
      for (int64_t from : {0, 500, 1023, 1099}) {
        const int64_t n = s.tokens - from;
        Owned out({n, kHeads, kValueWidth}, t, 3), lse({n, kHeads}, DType::f32, 3);
        Attention a = s.call(from, s.tokens, s.tokens, k, v, out, lse);
        const Tensor keys = k.view(0, {pages, page}), values = v.view(0, {pages, page}),
                     blocks(table.data(), {1, used}, DType::i32);
        a.k = keys, a.v = values, a.block_table = blocks;
        REQUIRE(rlk::attention(a));
        CHECK(s.same(from, s.tokens, out, lse));
      }
    }
}

TEST_CASE("attention of packed sequences is attention of each alone") {
  std::mt19937 random(4);
  for (DType t : kTypes) {
    std::vector<Sequence> all;
    std::vector<int64_t> bounds{0};
    for (int64_t n : {130, 1, 257, 16, 128}) {
      all.emplace_back(n, t, random);
      bounds.push_back(bounds.back() + n);
      if (n == 1) bounds.push_back(bounds.back());  // an empty one
    }
    const int64_t tokens = bounds.back();
    Owned q({tokens, kHeads, kWidth}, t, NAN), k({tokens + 2, kKvHeads, kWidth}, t, NAN),
        v({tokens + 2, kKvHeads, kValueWidth}, t, NAN), out({tokens, kHeads, kValueWidth}, t, 3),
        lse({tokens, kHeads}, DType::f32, 3);
    int64_t at = 0;
    for (Sequence& s : all) {
      s.sinks.bytes = all[0].sinks.bytes;
      REQUIRE(rlk::attention(s.call(0, s.tokens, s.tokens, s.k, s.v, s.out, s.lse)));
      for (int64_t i = 0; i < s.tokens; ++i, ++at)
        q.copy_row(at, s.q, i), k.copy_row(at, s.k, i), v.copy_row(at, s.v, i);
    }
    const Tensor cu(bounds.data(), {static_cast<int64_t>(bounds.size())}, DType::i64),
        sinks(all[0].sinks.bytes.data(), {kHeads}, DType::f32),
        queries = q.view(0, {tokens}), keys = k.view(0, {tokens + 2}), values = v.view(0, {tokens + 2}),
        o = out.view(0, {tokens}), l = lse.view(0, {tokens});
    REQUIRE(rlk::attention(
        {.q = queries, .k = keys, .v = values, .cu_q = cu, .cu_k = cu, .sinks = sinks, .out = o, .lse = l}));
    at = 0;
    for (const Sequence& s : all) {
      CHECK(s.same(0, s.tokens, out, lse, at));
      at += s.tokens;
    }
  }
}

TEST_CASE("attention without a visible key is zero, and its lse is the sink or -inf") {
  std::mt19937 random(5);
  Sequence s(3, DType::f32, random);
  Owned out({3, kHeads, kValueWidth}, DType::f32, 3), lse({3, kHeads}, DType::f32, 3);
  REQUIRE(rlk::attention(s.call(0, 3, 1, s.k, s.v, out, lse)));  // positions -2, -1 and 0
  for (int64_t h = 0; h < kHeads; ++h) {
    CHECK(lse.f32(h) == s.sinks.f32(h));
    CHECK(lse.f32(kHeads + h) == s.sinks.f32(h));
    CHECK(lse.f32(2 * kHeads + h) > s.sinks.f32(h));
    const float zero = 0;
    for (int64_t d = 0; d < 2 * kValueWidth; ++d) {  // of rows 0 and 1, the sign with them
      const float x = out.f32(h * 2 * kValueWidth + d);
      CHECK(std::memcmp(&x, &zero, sizeof x) == 0);
    }
  }
  Attention a = s.call(0, 3, 1, s.k, s.v, out, lse);
  a.sinks = {};
  REQUIRE(rlk::attention(a));
  CHECK(lse.f32(0) == -kInfinity);
}

TEST_CASE("attention scores of -inf are as good as masked, NaN and +inf make their row NaN and no other") {
  std::mt19937 random(6);
  for (DType t : kTypes) {
    Sequence s(140, t, random);
    for (int64_t d = 0; d < kWidth; ++d)
      for (int64_t h = 0; h < kHeads; ++h)
        s.q.set((100 * kHeads + h) * kWidth + d, d == 0), s.q.set((101 * kHeads + h) * kWidth + d, d == 0),
            s.q.set((120 * kHeads + h) * kWidth + d, d == 0);
    const auto set_key = [&](int64_t j, double x) {
      for (int64_t h = 0; h < kKvHeads; ++h) s.k.set((j * kKvHeads + h) * kWidth, x);
    };
    Owned out({140, kHeads, kValueWidth}, t, 3), lse({140, kHeads}, DType::f32, 3);
    for (int64_t j = 0; j <= 100; ++j) set_key(j, -kInfinity);
    set_key(101, 0.5);
    for (int64_t j = 102; j <= 120; ++j) set_key(j, kInfinity);
    Attention a = s.call(100, 102, 102, s.k, s.v, out, lse);
    a.sinks = {};
    REQUIRE(rlk::attention(a));
    CHECK(lse.f32(0) == -kInfinity);  // row 100: nothing but -inf
    const Owned alone({1, kHeads, kValueWidth}, t, 0.0);
    CHECK(std::memcmp(out.bytes.data(), alone.bytes.data(), alone.bytes.size()) == 0);
    // Row 101 has key 101 alone: its value.
    Owned value({1, kHeads, kValueWidth}, t, 0.0);
    const std::size_t head = value.bytes.size() / kHeads;
    for (int64_t h = 0; h < kHeads; ++h)
      std::memcpy(
          value.bytes.data() + static_cast<std::size_t>(h) * head,
          s.v.bytes.data() + 101 * s.v.row() + static_cast<std::size_t>(h / (kHeads / kKvHeads)) * head,
          head);
    CHECK(std::memcmp(out.bytes.data() + out.row(), value.bytes.data(), value.bytes.size()) == 0);
    a = s.call(119, 121, 121, s.k, s.v, out, lse);
    REQUIRE(rlk::attention(a));
    for (int64_t h = 0; h < kHeads; ++h) {
      uint32_t bits;
      std::memcpy(&bits, lse.bytes.data() + 4 * (kHeads + h), 4);
      CHECK(bits == 0x7fffffffu);
    }
  }
}

TEST_CASE("attention is as accurate as ever at scores up to 2^31, and finite") {
  // Of row i, key i % 3 has a score of nearly 2^31 (times log2 e), another one half of it, and all others are far below.
  constexpr int64_t kTokens = 200, kWide = 16;
  const float largest = 0x1p31f / 1.4427f;
  std::vector<float> q(kTokens * kWide), k(kTokens * kWide), v(kTokens * kWide), out(kTokens * kWide),
      lse(kTokens);
  for (int64_t i = 0; i < kTokens; ++i)
    for (int64_t d = 0; d < kWide; ++d) {
      const auto at = static_cast<std::size_t>(i * kWide + d);
      q[at] = d == i % 3 ? largest * (1 - static_cast<float>(i) / 1024) : d == (i + 1) % 3 ? largest / 2 : 0;
      k[at] = i < 3 ? d == i ? 4 : 0 : -1;  // scale is 1/4
      v[at] = static_cast<float>(i * 16 + d) / 16;
    }
  const Tensor tq(q.data(), {1, kTokens, 1, kWide}, DType::f32),
      tk(k.data(), {1, kTokens, 1, kWide}, DType::f32), tv(v.data(), {1, kTokens, 1, kWide}, DType::f32),
      to(out.data(), {1, kTokens, 1, kWide}, DType::f32), tl(lse.data(), {1, kTokens, 1}, DType::f32);
  Attention a;
  a.q = tq, a.k = tk, a.v = tv, a.out = to, a.lse = tl, a.causal = false;
  for (const char* implementation : {"native.tiles_s1024", "native.golden"}) {
    CAPTURE(std::string(implementation));
    REQUIRE(rlk::attention(a, {.backend = implementation}));
    for (int64_t i = 0; i < kTokens; ++i) {
      CAPTURE(i);
      CHECK(lse[static_cast<std::size_t>(i)] ==
            doctest::Approx(largest * (1 - static_cast<float>(i) / 1024)).epsilon(1e-6));
      for (int64_t d = 0; d < kWide; ++d)
        CHECK(out[static_cast<std::size_t>(i * kWide + d)] ==
              doctest::Approx(v[static_cast<std::size_t>(i % 3 * kWide + d)]).epsilon(1e-6));
    }
  }
}

TEST_CASE("attention refuses bounds, lengths and pages outside the tensors, with both values") {
  std::mt19937 random(7);
  const Sequence s(20, DType::f32, random);
  Owned out({20, kHeads, kValueWidth}, DType::f32, 3), lse({20, kHeads}, DType::f32, 3);
  says(rlk::attention(s.call(0, 20, 21, s.k, s.v, out, lse)), "kv_len[0] is 21, expected at most 20");
  Attention a = s.call(0, 20, 20, s.k, s.v, out, lse);
  const Tensor keys = s.k.view(0, {4, 5}), values = s.v.view(0, {4, 5});
  int32_t pages[] = {3, 0, 4, 1};
  const Tensor table(pages, {1, 4}, DType::i32);
  a.k = keys, a.v = values, a.block_table = table;
  says(rlk::attention(a), "block_table[0, 2] is 4, k has 4 pages");
  int32_t bounds[] = {0, 12, 9, 20};
  const Tensor cu(bounds, {4}, DType::i32), q = s.q.view(0, {20}), k = s.k.view(0, {20}),
                                            v = s.v.view(0, {20}), o = out.view(0, {20});
  says(rlk::attention({.q = q, .k = k, .v = v, .cu_q = cu, .cu_k = cu, .out = o}),
       "cu_q[2] is 9, expected at least 12");
  a = s.call(0, 20, 20, s.k, s.v, out, lse);
  a.split = 1000;
  says(rlk::attention(a), "split is 1000, it takes 512, 1024, 2048, 4096 or 0");
  a.split = 1024, a.causal = false, a.window = 3;
  says(rlk::attention(a), "window is 3, causal is 0");
}
