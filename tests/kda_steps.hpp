// What kda_step promises of its bits, as checks that take a way to run a call: by an instruction set, on fibers.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "kda_promises.hpp"

namespace kda_test {

using rlk::kda::CacheLayout;
using rlk::kda::Step;
using RunStep = std::function<void(const Step&)>;

// Sequences that are decoded: what a sampler keeps of them.
struct Decoded {
  Shape shape;
  Case all, other;  // the tokens, and those of drafts that are refused
  CacheLayout layout;
  std::vector<float> cache;
  Buffer state;
  std::vector<std::int64_t> rows, at;  // rows in the cache, tokens accepted

  Decoded(const Shape& s, std::uint32_t seed)
      : shape(s),
        all(random_case(s, seed)),
        other(random_case(s, seed + 1000)),
        layout(rlk::kda::cache_layout(s.k, s.v, s.chunk)),
        cache(std::size_t(s.batch * s.value_heads * layout.size), NAN),
        state(all.in.at("h0")),
        rows(std::size_t(s.batch), 0),
        at(std::size_t(s.batch), 0) {}

  std::int64_t room(std::size_t b) const {
    return std::min(shape.chunk - rows[b] % shape.chunk, shape.tokens - at[b]);
  }

  // The next counts[b] tokens of every sequence, of which accepted[b] are its own.
  Case next(const std::vector<std::int64_t>& counts, const std::vector<std::int64_t>& accepted, bool packed) {
    Case c;
    c.p = all.p;
    c.p.batch = packed ? 1 : shape.batch;
    c.p.tokens = packed ? std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) : counts[0];
    c.a_log = all.a_log, c.dt_bias = all.dt_bias;
    if (packed) {
      c.cu_seqlens = {0};
      for (std::int64_t n : counts) c.cu_seqlens.push_back(c.cu_seqlens.back() + n);
    }
    for (const char* name : {"q", "k", "v", "g", "beta"}) {
      const Buffer& from = all.in.at(name);
      const auto row = std::int64_t(from.bytes.size()) / (shape.batch * shape.tokens);
      Buffer& to = c.in[name];
      to.type = from.type;
      for (std::size_t b = 0; b < counts.size(); ++b)
        for (std::int64_t t = 0; t < counts[b]; ++t) {
          const auto& bytes = (t < accepted[b] ? all : other).in.at(name).bytes;
          const std::int64_t token = std::int64_t(b) * shape.tokens + at[b] + t;
          to.bytes.insert(to.bytes.end(), bytes.begin() + token * row, bytes.begin() + (token + 1) * row);
        }
    }
    c.in["h0"] = state;
    c.bind();
    return c;
  }

  void run(Case& c, const RunStep& step) {
    Step p;
    static_cast<Problem&>(p) = c.p;
    p.initial = p.final = c.state(c.in.at("h0"));
    p.layout = layout;
    p.cache = {cache.data(), Float::f32, shape.value_heads * layout.size, layout.size};
    p.rows = rows.data();
    step(p);
    state = c.in.at("h0");
    for (std::int64_t& r : rows) r %= shape.chunk;
  }
};

// Tokens in pieces of any size, drafts among them that are refused, give what one call of kda_fwd gives. Sequences of a packed
// batch go on at their own pace. The cache's memory is NaN at first.
inline void check_steps(const Shape& shape, bool packed, const Run& prefill, const RunStep& step) {
  Decoded d(shape, 18);
  prefill(d.all);
  const std::int64_t pieces[] = {1, 1, 6, 1, 17, 4, 1, 30, 3};
  const auto unfinished = [&] {
    return std::any_of(d.at.begin(), d.at.end(), [&](std::int64_t t) { return t < shape.tokens; });
  };
  for (std::size_t turn = 0; unfinished(); ++turn) {
    CAPTURE(turn);
    std::vector<std::int64_t> counts, accepted;
    for (std::size_t b = 0; b < d.at.size(); ++b) {
      counts.push_back(std::min(pieces[(turn + (packed ? b : 0)) % 9], d.room(b)));
      accepted.push_back(counts[b] > 2 ? counts[b] - std::int64_t(turn % 3) : counts[b]);
    }
    Case c = d.next(counts, accepted, packed);
    d.run(c, step);
    std::int64_t from = 0;
    for (std::size_t b = 0; b < counts.size(); ++b) {
      const std::int64_t first = std::int64_t(b) * shape.tokens + d.at[b];
      CAPTURE(b);
      CAPTURE(d.at[b]);
      CHECK(part(c, "o", from, from + accepted[b], 0) == part(d.all, "o", first, first + accepted[b], 0));
      from += counts[b];
      d.rows[b] += accepted[b], d.at[b] += accepted[b];
    }
  }
  if (shape.tokens % shape.chunk != 0) return;
  // Without a token the call is the end of a chunk and nothing else.
  Case none =
      d.next(std::vector<std::int64_t>(d.at.size(), 0), std::vector<std::int64_t>(d.at.size(), 0), packed);
  d.run(none, step);
  CHECK(d.state == d.all.out.at("ht"));
}

// One token after the other, all sequences side by side: the call that samplers make, for which a backend may have code of its own.
inline void check_tokens(const Shape& shape, const Run& prefill, const RunStep& step) {
  Decoded d(shape, 18);
  prefill(d.all);
  const std::vector<std::int64_t> one(d.at.size(), 1);
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    CAPTURE(t);
    Case c = d.next(one, one, false);
    d.run(c, step);
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      const std::int64_t token = b * shape.tokens + t;
      CHECK(part(c, "o", b, b + 1, 0) == part(d.all, "o", token, token + 1, 0));
      d.rows[std::size_t(b)] += 1, d.at[std::size_t(b)] += 1;
    }
  }
}

// What must show: each is a decoder's error, and gives other bits than a prefill.
inline void check_step_errors(const Shape& shape, const Run& prefill, const RunStep& step) {
  const std::int64_t last = shape.chunk - 1;
  const auto whole = [&](std::uint32_t seed) {
    Decoded d(shape, seed);
    prefill(d.all);
    Case c = d.next({last}, {last}, false);
    d.run(c, step);
    d.rows[0] = d.at[0] = last;
    return d;
  };
  const auto differs = [&](Decoded& d, const char* error) {
    CAPTURE(error);
    Case c = d.next({1}, {1}, false);
    d.run(c, step);
    CHECK(part(c, "o", 0, 1, 0) != part(d.all, "o", d.at[0], d.at[0] + 1, 0));
  };
  Decoded early = whole(18);
  Case end = early.next({1}, {1}, false);
  early.run(end, step);
  CHECK(part(end, "o", 0, 1, 0) == part(early.all, "o", last, last + 1, 0));
  // The state of a chunk whose last row is another's.
  early.rows[0] = last, early.at[0] = last;
  Case wrong = early.next({1}, {0}, false);
  early.run(wrong, step);
  early.rows[0] = shape.chunk, early.at[0] = shape.chunk;
  differs(early, "a refused draft counted");
  Decoded mixed = whole(18), stranger = whole(19);
  for (std::int64_t at : {mixed.layout.y, mixed.layout.n})
    std::copy_n(stranger.cache.begin() + at, mixed.layout.values, mixed.cache.begin() + at);
  differs(mixed, "a cached row of another sequence");
  Decoded cut(shape, 18);
  prefill(cut.all);
  Case half = cut.next({shape.chunk / 2}, {shape.chunk / 2}, false);
  cut.run(half, step);
  Case head = kda_test::cut(cut.all, 0, shape.chunk / 2, 0);
  prefill(head);
  cut.state = head.out.at("ht"), cut.at[0] = shape.chunk / 2;
  differs(cut, "a cut that is not at a chunk");
}

}  // namespace kda_test
