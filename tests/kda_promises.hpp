// What every chunked form of KDA promises of its bits, as checks that take a way to run a case: on this
// machine's CPU, on fibers, on a GPU.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "kda_case.hpp"

namespace kda_test {

using Run = std::function<void(Case&)>;

inline const char* const kResults[] = {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"};

// The part of a result that belongs to tokens [from, to) of batch row b, or to sequence n of a state.
inline std::vector<std::uint8_t> part(const Case& c, const std::string& name, std::int64_t from,
                                      std::int64_t to, std::int64_t n) {
  const Buffer& b = c.out.at(name);
  const bool state = name == "ht" || name == "dh0";
  const std::int64_t rows = state ? c.p.sequences : c.p.batch * c.p.tokens;
  const auto row = std::int64_t(b.bytes.size()) / rows;
  const std::int64_t first = state ? n : from, last = state ? n + 1 : to;
  return {b.bytes.begin() + first * row, b.bytes.begin() + last * row};
}

// A case made of tokens [from, to) of row-flattened inputs and state n of c.
inline Case cut(const Case& c, std::int64_t from, std::int64_t to, std::int64_t n) {
  Case out;
  out.p = c.p;
  out.p.batch = out.p.sequences = 1;
  out.p.tokens = to - from;
  out.a_log = c.a_log;
  out.dt_bias = c.dt_bias;
  for (const auto& [name, b] : c.in) {
    const bool state = name == "h0" || name == "dht";
    const std::int64_t rows = state ? c.p.sequences : c.p.batch * c.p.tokens;
    const auto row = std::int64_t(b.bytes.size()) / rows;
    Buffer piece;
    piece.type = b.type;
    piece.bytes.assign(b.bytes.begin() + (state ? n : from) * row,
                       b.bytes.begin() + (state ? n + 1 : to) * row);
    out.in[name] = piece;
  }
  out.bind();
  return out;
}

// Every input of tokens [from, to) becomes `value`.
inline void poison(Case& c, std::int64_t from, std::int64_t to, float value = NAN) {
  for (auto& [name, b] : c.in) {
    if (name == "h0" || name == "dht") continue;
    const auto row = std::int64_t(b.size()) / (c.p.batch * c.p.tokens);
    for (std::int64_t i = from * row; i < to * row; ++i) rlk::kda::store(b.bytes.data(), b.type, i, value);
  }
}

// Outputs are the same whatever the tokens from `from` on hold, NaN and infinities included, and without
// them.
inline void check_later_tokens(const Shape& shape, const Run& run) {
  Case all = random_case(shape, 14);
  run(all);
  for (std::int64_t from : {1, 5, 16, 40, 63, 64, 65, 129}) {
    CAPTURE(from);
    if (from >= shape.tokens) continue;
    for (float value : {NAN, INFINITY, -INFINITY}) {
      CAPTURE(value);
      Case spoiled = random_case(shape, 14);
      poison(spoiled, from, shape.tokens, value);
      run(spoiled);
      CHECK(part(spoiled, "o", 0, from, 0) == part(all, "o", 0, from, 0));
    }
    Case prefix = cut(all, 0, from, 0);
    run(prefix);
    CHECK(part(prefix, "o", 0, from, 0) == part(all, "o", 0, from, 0));
  }
}

// A prefill in two calls, cut where a chunk begins, is the prefill in one; so are the gradients.
inline void check_cut_prefill(const Shape& shape, const Run& run) {
  Case all = random_case(shape, 15);
  run(all);
  for (std::int64_t at = shape.chunk; at < shape.tokens; at += shape.chunk) {
    CAPTURE(at);
    Case head = cut(all, 0, at, 0), tail = cut(all, at, shape.tokens, 0);
    run(head);
    tail.in["h0"] = head.out.at("ht");
    tail.bind();
    run(tail);
    CHECK(part(head, "o", 0, at, 0) == part(all, "o", 0, at, 0));
    CHECK(part(tail, "o", 0, shape.tokens - at, 0) == part(all, "o", at, shape.tokens, 0));
    CHECK(tail.out.at("ht") == all.out.at("ht"));
    // The backward of the tail hands its d_initial_state to the head.
    head.in["dht"] = tail.out.at("dh0");
    head.bind();
    run(head);
    for (const char* name : {"dq", "dk", "dv", "dg", "dbeta"}) {
      CAPTURE(name);
      CHECK(part(head, name, 0, at, 0) == part(all, name, 0, at, 0));
      CHECK(part(tail, name, 0, shape.tokens - at, 0) == part(all, name, at, shape.tokens, 0));
    }
    CHECK(head.out.at("dh0") == all.out.at("dh0"));
  }
}

// A packed sequence is the sequence alone, also when the first one of the batch is NaN.
inline void check_neighbours(const Shape& shape, const Run& run) {
  const std::vector<std::int64_t>& bounds = shape.bounds;
  for (bool poisoned : {false, true}) {
    Case all = random_case(shape, 12);
    if (poisoned) poison(all, bounds[0], bounds[1]);
    run(all);
    for (std::size_t n = 1; n + 1 < bounds.size(); ++n) {
      if (bounds[n] == bounds[n + 1]) continue;
      Case one = cut(all, bounds[n], bounds[n + 1], std::int64_t(n));
      run(one);
      for (const char* name : kResults) {
        CAPTURE(name);
        CHECK(part(one, name, 0, one.p.tokens, 0) ==
              part(all, name, bounds[n], bounds[n + 1], std::int64_t(n)));
      }
    }
  }
}

// A sequence in a batch is the sequence alone.
inline void check_batch(const Shape& shape, const Run& run) {
  Case all = random_case(shape, 11);
  run(all);
  for (std::int64_t n = 0; n < shape.batch; ++n) {
    CAPTURE(n);
    Case one = cut(all, n * shape.tokens, (n + 1) * shape.tokens, n);
    run(one);
    for (const char* name : kResults) {
      CAPTURE(name);
      CHECK(part(one, name, 0, shape.tokens, 0) ==
            part(all, name, n * shape.tokens, (n + 1) * shape.tokens, n));
    }
  }
}

}  // namespace kda_test
