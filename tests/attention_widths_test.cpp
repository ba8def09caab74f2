// labels: conformance
// Heads of every size that models have, latent ones among them, whose values are the first channels of their keys: a token has
// the same bits in one prefill, in chunks, decoded, from pages and packed with others, and so have its gradients.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "attention_owned.hpp"

namespace {

using attention_test::Owned;
using attention_test::same_rows;
using attention_test::Shape;
using rlk::Attention;
using rlk::AttentionBwd;
using rlk::DType;
using rlk::Tensor;

constexpr int64_t kHeads = 4, kKvHeads = 2;

struct Widths {
  int64_t d, dv;
  bool latent = false;  // v is a view of k
};
constexpr Widths kAll[] = {{64, 64}, {96, 96}, {256, 256}, {192, 128}, {576, 512}, {576, 512, true}};

std::string name_of(const Widths& w) {
  return std::to_string(w.d) + "/" + std::to_string(w.dv) + (w.latent ? ", a view" : "");
}

struct Keys {
  Widths widths;
  Owned k, v;

  // All NaN.
  Keys(const Widths& w, int64_t rows, DType t)
      : widths(w), k({rows, kKvHeads, w.d}, t, NAN), v({rows, kKvHeads, w.dv}, t, NAN) {}

  void take(int64_t to, const Keys& from, int64_t at) {
    k.copy_row(to, from.k, at), v.copy_row(to, from.v, at);
  }
  Tensor keys(const Shape& leading) const { return k.view(0, leading); }
  Tensor values(const Shape& leading) const {
    if (!widths.latent) return v.view(0, leading);
    Shape shape = leading, strides(leading.size() + 2, 1);
    shape.insert(shape.end(), {kKvHeads, widths.dv});
    strides[leading.size()] = widths.d;
    strides[leading.size() - 1] = kKvHeads * widths.d;
    if (leading.size() > 1) strides[0] = leading[1] * kKvHeads * widths.d;
    return Tensor(const_cast<std::byte*>(k.bytes.data()), std::span(std::as_const(shape)), k.type,
                  {kDLCPU, 0}, std::span(std::as_const(strides)));
  }
};

struct Results {
  Owned out, lse;
  Results(const Widths& w, int64_t rows, DType t)
      : out({rows, kHeads, w.dv}, t, NAN), lse({rows, kHeads}, DType::f32, NAN) {}
};

// Whether rows [0, count) of `part` are those from `at` on of `whole`.
bool same(const Results& part, int64_t count, const Results& whole, int64_t at) {
  return same_rows(part.out, 0, count, whole.out, at) && same_rows(part.lse, 0, count, whole.lse, at);
}

// A sequence, and what one prefill makes of it.
struct Sequence {
  int64_t tokens;
  Attention options;
  Owned q;
  Keys keys;
  Results whole;

  Sequence(const Widths& w, int64_t n, DType t, const Attention& o, unsigned seed)
      : tokens(n), options(o), q({n, kHeads, w.d}, t, NAN), keys(w, n, t), whole(w, n, t) {
    std::mt19937 random(seed);
    q = Owned(q.shape, t, random), keys.k = Owned(keys.k.shape, t, random),
    keys.v = Owned(keys.v.shape, t, random);
    whole = queries(0, n, keys, n);
    for (int64_t i = 0; i < n * kHeads; ++i) REQUIRE(std::isfinite(whole.lse.f32(i)));
  }

  // Queries [from, to), of which `of` has the keys before `to`, dense or in pages.
  Results queries(int64_t from, int64_t to, const Keys& of, int64_t room, int64_t page = 0,
                  const std::vector<int32_t>& pages = {}) const {
    Results r(of.widths, to - from, q.type);
    const Shape leading = page == 0 ? Shape{1, room} : Shape{room / page, page};
    const Tensor k = of.keys(leading), v = of.values(leading), rows = q.view(from, {1, to - from}),
                 out = r.out.view(0, {1, to - from}), lse = r.lse.view(0, {1, to - from}),
                 length(&to, {1}, DType::i64),
                 table(const_cast<int32_t*>(pages.data()), {1, static_cast<int64_t>(pages.size())},
                       DType::i32);
    Attention a = options;
    a.q = rows, a.k = k, a.v = v, a.kv_len = length, a.out = out, a.lse = lse;
    if (page != 0) a.block_table = table;
    const rlk::Status status = rlk::attention(a);
    REQUIRE_MESSAGE(status, std::string(status.message()));
    return r;
  }
  // The same with NaN behind the last key.
  bool same_chunk(int64_t from, int64_t to) const {
    Keys some(keys.widths, to + 3, q.type);
    for (int64_t j = 0; j < to; ++j) some.take(j, keys, j);
    return same(queries(from, to, some, to + 3), to - from, whole, from);
  }
  // The same from shuffled pages, among which lie twice as many of nobody's, full of NaN.
  bool same_pages(int64_t from, int64_t page, std::mt19937& random) const {
    const int64_t used = (tokens + page - 1) / page, room = 3 * used * page;
    Keys pool(keys.widths, room, q.type);
    std::vector<int32_t> pages(static_cast<std::size_t>(3 * used));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    pages.resize(static_cast<std::size_t>(used));
    for (int64_t j = 0; j < tokens; ++j)
      pool.take(pages[static_cast<std::size_t>(j / page)] * page + j % page, keys, j);
    return same(queries(from, tokens, pool, room, page, pages), tokens - from, whole, from);
  }
};

void reached_any_way(const Sequence& s, std::initializer_list<int64_t> chunks,
                     std::initializer_list<int64_t> prefixes) {
  std::mt19937 random(7);
  for (int64_t chunk : chunks)
    for (int64_t from = 0; from < s.tokens; from += chunk) {
      CAPTURE(chunk);
      CAPTURE(from);
      CHECK(s.same_chunk(from, std::min(s.tokens, from + chunk)));
    }
  for (int64_t guesses : {1, 3, 8})
    for (int64_t prefix : prefixes) {
      CAPTURE(guesses);
      CAPTURE(prefix);
      CHECK(s.same_chunk(prefix, prefix + guesses));
    }
  for (int64_t page : {16, 50, 64, 128})
    for (int64_t from : {s.tokens - 1, s.tokens - 70}) {
      CAPTURE(page);
      CAPTURE(from);
      CHECK(s.same_pages(from, page, random));
    }
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

}  // namespace

TEST_CASE(
    "attention of heads of any size has the same bits in one prefill, in chunks, decoded and from pages") {
  for (const Widths& w : kAll)
    for (DType t : kTypes) {
      CAPTURE(name_of(w));
      CAPTURE(std::string(rlk::name_of(t)));
      const Attention options =
          t == DType::f16 ? Attention{.window = 129, .softcap = 3, .split = 512} : Attention{.split = 512};
      reached_any_way(Sequence(w, 530, t, options, 1), {127, 400}, {0, 1, 127, 128, 129, 511, 512, 513});
    }
}

TEST_CASE(
    "attention of heads of any size in Hopper's arithmetic has the same bits however a token is reached") {
  const rlk::BackendScope hopper("attention=native.replay_sm90_ex2_s512");
  for (const Widths& w : kAll) {
    CAPTURE(name_of(w));
    reached_any_way(Sequence(w, 140, DType::bf16, {.split = 512}, 2), {129}, {0, 127, 129});
  }
}

TEST_CASE("attention whose values are a view of its keys is attention of a copy of them") {
  for (const char* backend : {"native", "attention=native.replay_sm90_ex2_s1024"}) {
    const rlk::BackendScope scope(backend);
    Sequence view({576, 512, true}, 140, DType::bf16, {}, 3);
    Keys copied({576, 512}, view.tokens, DType::bf16);
    copied.k = view.keys.k;
    for (int64_t row = 0; row < view.tokens * kKvHeads; ++row)
      std::memcpy(copied.v.bytes.data() + row * 1024, view.keys.k.bytes.data() + row * 1152, 1024);
    CHECK(same(view.queries(0, view.tokens, copied, view.tokens), view.tokens, view.whole, 0));
  }
}

namespace {

struct Gradients {
  Owned d_q, d_k, d_v;
  Gradients(const Widths& w, int64_t rows, DType t)
      : d_q({rows, kHeads, w.d}, t, NAN),
        d_k({rows, kKvHeads, w.d}, t, NAN),
        d_v({rows, kKvHeads, w.dv}, t, NAN) {}
};

// Gradients of packed sequences, of which `forward` has the results.
Gradients gradients(const Owned& q, const Keys& keys, const Results& forward, const Owned& d_out,
                    const std::vector<int64_t>& bounds) {
  const int64_t rows = q.shape[0];
  Gradients g(keys.widths, rows, q.type);
  const Tensor cu(const_cast<int64_t*>(bounds.data()), {static_cast<int64_t>(bounds.size())}, DType::i64),
      qs = q.view(0, {rows}), k = keys.keys({rows}), v = keys.values({rows}),
      out = forward.out.view(0, {rows}), lse = forward.lse.view(0, {rows}), d_o = d_out.view(0, {rows}),
      d_q = g.d_q.view(0, {rows}), d_k = g.d_k.view(0, {rows}), d_v = g.d_v.view(0, {rows});
  AttentionBwd b{.q = qs, .k = k, .v = v, .cu_q = cu, .cu_k = cu, .out = out, .lse = lse, .d_out = d_o};
  b.d_q = d_q, b.d_k = d_k, b.d_v = d_v;
  const rlk::Status status = rlk::attention_bwd(b);
  REQUIRE_MESSAGE(status, std::string(status.message()));
  return g;
}

}  // namespace

TEST_CASE("attention and its gradients of heads of any size are those of each sequence alone") {
  for (const Widths& w : kAll)
    for (DType t : {DType::f32, DType::bf16}) {
      CAPTURE(name_of(w));
      std::mt19937 random(4);
      std::vector<int64_t> bounds{0, 130, 130, 131, 260};
      const int64_t rows = bounds.back() + 2;
      Owned q({rows, kHeads, w.d}, t, NAN), d_out({rows, kHeads, w.dv}, t, NAN);
      Keys keys(w, rows, t);
      Results all(w, rows, t);
      std::vector<Sequence> alone;
      std::vector<Gradients> expected;
      for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
        const int64_t from = bounds[n], count = bounds[n + 1] - from;
        if (count == 0) continue;
        const Sequence s(w, count, t, {}, static_cast<unsigned>(n) + 10);
        const Owned cotangent({count, kHeads, w.dv}, t, random);
        const Gradients g = gradients(s.q, s.keys, s.whole, cotangent, {0, count});
        for (int64_t i = 0; i < count; ++i)
          q.copy_row(from + i, s.q, i), keys.take(from + i, s.keys, i),
              d_out.copy_row(from + i, cotangent, i);
        alone.push_back(s), expected.push_back(g);
      }
      const Tensor cu(bounds.data(), {static_cast<int64_t>(bounds.size())}, DType::i64),
          qs = q.view(0, {rows}), k = keys.keys({rows}), v = keys.values({rows}),
          out = all.out.view(0, {rows}), lse = all.lse.view(0, {rows});
      const rlk::Status status =
          rlk::attention({.q = qs, .k = k, .v = v, .cu_q = cu, .cu_k = cu, .out = out, .lse = lse});
      REQUIRE_MESSAGE(status, std::string(status.message()));
      const Gradients g = gradients(q, keys, all, d_out, bounds);
      int64_t at = 0;
      for (std::size_t n = 0; n < alone.size(); at += alone[n++].tokens) {
        CAPTURE(n);
        const int64_t count = alone[n].tokens;
        CHECK(same_rows(all.out, at, count, alone[n].whole.out, 0));
        CHECK(same_rows(all.lse, at, count, alone[n].whole.lse, 0));
        CHECK(same_rows(g.d_q, at, count, expected[n].d_q, 0));
        CHECK(same_rows(g.d_k, at, count, expected[n].d_k, 0));
        CHECK(same_rows(g.d_v, at, count, expected[n].d_v, 0));
      }
    }
}
