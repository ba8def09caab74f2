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

// Token `at` of the first sequence as a decoder has it: a call over the open chunk's rows so far, from `state`, which is the one at the
// chunk's start. The call, whose last row is the token's.
inline Case open_chunk(const Case& all, std::int64_t start, std::int64_t at, const Buffer& state,
                       const Run& run) {
  Case c = cut(all, start, at + 1, 0);
  c.in["h0"] = state;
  c.bind();
  run(c);
  return c;
}

// Decoding token by token leaves the bits of a prefill, as long as the state moves at the end of a chunk and nowhere else, and the rows
// are the sequence's own.
inline void check_open_chunks(const Shape& shape, const Run& run) {
  Case all = random_case(shape, 16), other = random_case(shape, 17);
  run(all);
  Buffer state = all.in.at("h0");
  // What must show shows in fp32, since 16 bits hide the last bits of a sum, and where the past is not forgotten within a chunk.
  const bool shows = shape.type == Float::f32 && shape.gate == rlk::kda::Gate::none;
  for (std::int64_t at = 0; at < shape.tokens; ++at) {
    const std::int64_t row = at % shape.chunk, start = at - row;
    const bool bound = row < 2 || row > shape.chunk - 3 || row == 15 || row == 16;
    if (!bound && at + 1 < shape.tokens) continue;
    CAPTURE(at);
    const Case token = open_chunk(all, start, at, state, run);
    const auto expected = part(all, "o", at, at + 1, 0);
    CHECK(part(token, "o", row, row + 1, 0) == expected);
    if (shows && row == shape.chunk - 2 && at + 1 < shape.tokens) {
      // The state one row early: the next row from there is another arithmetic's.
      const Case early = open_chunk(all, at + 1, at + 1, token.out.at("ht"), run);
      CHECK(part(early, "o", 0, 1, 0) != part(all, "o", at + 1, at + 2, 0));
      // One cached row of another sequence.
      Case mixed = cut(all, start, at + 1, 0);
      for (const char* name : {"k", "v"}) {
        Buffer& b = mixed.in.at(name);
        const auto bytes = std::ptrdiff_t(b.bytes.size()) / (at + 1 - start);
        const auto& from = other.in.at(name).bytes;
        std::copy(from.begin() + start * bytes, from.begin() + (start + 1) * bytes, b.bytes.begin());
      }
      mixed.in["h0"] = state;
      mixed.bind();
      run(mixed);
      CHECK(part(mixed, "o", row, row + 1, 0) != expected);
    }
    if (row == shape.chunk - 1) state = token.out.at("ht");
  }
  if (!shows) return;
  // A prompt cut where no chunk begins: the same token, other bits.
  Case head = cut(all, 0, shape.chunk / 2, 0);
  run(head);
  const Case tail = open_chunk(all, shape.chunk / 2, shape.chunk - 1, head.out.at("ht"), run);
  CHECK(part(tail, "o", shape.chunk / 2 - 1, shape.chunk / 2, 0) !=
        part(all, "o", shape.chunk - 1, shape.chunk, 0));
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
