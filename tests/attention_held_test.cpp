// labels: conformance
// attention as Hopper computes it: the reference that takes the maximum's place is held while no score exceeds it by more
// than 8. On rows whose scores rise from tile to tile by less, by more, by 8 exactly and by just more, the replay has the
// written rule's bits, and a token has the same bits however it is reached.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "attention_owned.hpp"
#include "rlk/resolve.hpp"
#include "src/harness/compare.hpp"
#include "src/harness/rule.hpp"

namespace {

using attention_test::Owned;
using rlk::Attention;
using rlk::AttentionPart;
using rlk::DType;
using rlk::Tensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kTile = 128, kHeads = 2, kTokens = 1040;
constexpr double kUnitScale = 0.693147182;  // times log2 e in fp32: 1, so that scores of few bits stay exact
constexpr DType kTypes[] = {DType::bf16, DType::f16};
constexpr const char* kBackend =
    "attention=native.replay_sm90_ex2_s512;attention_part=native.replay_sm90_ex2_s512";

// The largest score of every tile, beside which the others of the tile lie up to 6 lower. Channel c of q alone makes head
// c's scores: those of head 1 are half as far apart.
enum class Tops { slow, steep, at_eight, falling };
const char* name_of(Tops t) {
  constexpr const char* kNames[] = {"slow", "steep", "at 8", "falling"};
  return kNames[static_cast<int>(t)];
}
double top_of(Tops tops, int64_t tile) {
  constexpr double kSlow[] = {0.3125, 2.75, 4.1875, 7.5, 1.0625, 3.5625, 6.25, 8.9375, 9.0625};
  constexpr double kSteep[] = {-12.5, -3.75, 6.125, 15.4375, -20.5, -9.25, 1.8125, 12.6875, 14.1875};
  // Above the first of a split: 8 exactly, then 8 and a sixteenth.
  constexpr double kAtEight[] = {0.3125, 8.3125, 8.375, 12.4375, -2.1875, 5.8125, 5.8125, 5.875, 9.5625};
  constexpr double kFalling[] = {9.4375, 3.3125, 1.25, 0.0625, 5.5625, 13.5625, 4.5, 2.25, 1.0625};
  const auto i = static_cast<std::size_t>(tile);
  return tops == Tops::slow       ? kSlow[i]
         : tops == Tops::steep    ? kSteep[i]
         : tops == Tops::at_eight ? kAtEight[i]
                                  : kFalling[i];
}

struct Data {
  Owned q, k, v, sinks;

  Data(Tops tops, DType t, int64_t width, std::mt19937& random)
      : q({kTokens, kHeads, width}, t, 0.0),
        k({kTokens, 1, width}, t, 0.0),
        v({kTokens, 1, width}, t, random),
        sinks({kHeads}, DType::f32, random) {
    std::uniform_int_distribution<int> sixteenths(0, 96);
    for (int64_t j = 0; j < kTokens; ++j) {
      const double top = top_of(tops, j / kTile);
      for (int64_t h = 0; h < kHeads; ++h) {
        q.set((j * kHeads + h) * width + h, h == 0 ? 1 : 0.5);
        // Behind a tile's first keys, so that a row's maximum rises within a tile too.
        k.set(j * width + h, j % kTile == 9 + h ? top : top - 0.0625 * sixteenths(random));
      }
    }
  }
};

struct Result {
  Owned out, lse;
  Result(int64_t rows, DType t, int64_t width)
      : out({rows, kHeads, width}, t, 7.0), lse({rows, kHeads}, DType::f32, 7.0) {}
  bool same(const Result& whole, int64_t from) const {
    const auto at = static_cast<std::size_t>(from);
    return std::memcmp(out.bytes.data(), whole.out.bytes.data() + at * whole.out.row(), out.bytes.size()) ==
               0 &&
           std::memcmp(lse.bytes.data(), whole.lse.bytes.data() + at * whole.lse.row(), lse.bytes.size()) ==
               0;
  }
};

// Queries [from, to) of the data over the keys up to the last of them.
Result attend(const Data& d, const Attention& options, int64_t from, int64_t to) {
  Result r(to - from, d.q.type, d.v.shape[2]);
  const Tensor q = d.q.view(from, {1, to - from}), k = d.k.view(0, {1, to}), v = d.v.view(0, {1, to}),
               s = d.sinks.view(0, {kHeads}), out = r.out.view(0, {1, to - from}),
               lse = r.lse.view(0, {1, to - from});
  Attention a = options;
  a.q = q, a.k = k, a.v = v, a.sinks = s, a.out = out, a.lse = lse;
  rlk::check(rlk::attention(a));
  return r;
}

// The same by ranks that have `splits` splits of the keys each.
Result by_parts(const Data& d, const Attention& options, int64_t from, int64_t to, int64_t splits) {
  const int64_t rows = to - from, width = d.v.shape[2], room = splits * options.split,
                ranks = (to + room - 1) / room;
  Owned partials({ranks, 1, rows, kHeads, splits, 2 + width}, DType::f32, NAN);
  const Tensor q = d.q.view(from, {1, rows});
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t first[] = {rank * room}, last[] = {std::min(to, first[0] + room)}, length[] = {to};
    Owned k({room, 1, width}, d.k.type, NAN), v({room, 1, width}, d.k.type, NAN);
    for (int64_t j = first[0]; j < last[0]; ++j)
      k.copy_row(j - first[0], d.k, j), v.copy_row(j - first[0], d.v, j);
    const auto numbers = [](const int64_t* n) { return Tensor(const_cast<int64_t*>(n), {1}, DType::i64); };
    const Tensor keys = k.view(0, {1, room}), values = v.view(0, {1, room}), kv_len = numbers(length),
                 k_first = numbers(first), k_last = numbers(last), to_here = partials.view(rank, {});
    AttentionPart a{.q = q, .k = keys, .v = values, .kv_len = kv_len, .k_first = k_first, .k_last = k_last};
    a.partials = to_here, a.scale = options.scale, a.causal = options.causal, a.window = options.window;
    a.softcap = options.softcap, a.split = options.split;
    rlk::check(rlk::attention_part(a));
  }
  Result r(rows, d.q.type, width);
  const Tensor p = partials.view(0, {ranks}), s = d.sinks.view(0, {kHeads}), out = r.out.view(0, {1, rows}),
               lse = r.lse.view(0, {1, rows});
  rlk::check(rlk::attention_merge({.partials = p, .sinks = s, .out = out, .lse = lse}));
  return r;
}

struct Named {
  const char* name;
  Attention options;
};
std::vector<Named> all_options() {
  return {{"plain", {.scale = kUnitScale, .split = 512}},
          {"window 200", {.scale = kUnitScale, .window = 200, .split = 512}},
          {"window 5", {.scale = kUnitScale, .window = 5, .split = 512}},
          {"cap", {.scale = kUnitScale, .softcap = 20, .split = 512}},
          {"other scale", {.scale = 0.6, .split = 512}}};
}
constexpr Tops kAllTops[] = {Tops::slow, Tops::steep, Tops::at_eight, Tops::falling};

// ---- the written rule

std::vector<double> list_of(const Owned& t) {
  std::vector<double> list;
  for (int64_t i = 0; i < t.count(); ++i) list.push_back(t.number(i));
  return list;
}

// The last `queries` queries of the data over all its keys, as a problem of the harness.
rlk::harness::Problem problem_of(const Data& d, const Attention& o, int64_t queries, bool part) {
  using rlk::registry::Fill;
  const int64_t width = d.q.shape[2];
  const auto values = [](std::vector<double> list) { return Fill{Fill::values, 0, 0, std::move(list)}; };
  Owned q({queries, kHeads, width}, d.q.type, 0.0);
  for (int64_t i = 0; i < queries; ++i) q.copy_row(i, d.q, kTokens - queries + i);
  rlk::registry::Case c;
  c.name = "held";
  c.inputs = {{"q", {1, queries, kHeads, width}, d.q.type, values(list_of(q))},
              {"k", {1, kTokens, 1, width}, d.k.type, values(list_of(d.k))},
              {"v", {1, kTokens, 1, width}, d.v.type, values(list_of(d.v))}};
  if (part) {
    c.inputs.push_back({"kv_len", {1}, DType::i64, values({kTokens})});
    c.inputs.push_back({"k_first", {1}, DType::i64, values({0})});
    c.results = {{"partials", DType::f32}};
  } else {
    c.inputs.push_back({"sinks", {kHeads}, DType::f32, values(list_of(d.sinks))});
    c.results = {{"out", d.q.type}, {"lse", DType::f32}};
  }
  c.attributes = {{"causal", int64_t{o.causal}},
                  {"window", o.window},
                  {"split", o.split},
                  {"softcap", o.softcap},
                  {"scale", o.scale}};
  return *rlk::harness::materialise(*rlk::registry::find(part ? "attention_part" : "attention"), c, 7);
}

// Every built-in implementation of the id, on every instruction set that is there, beside its rule. Returns how many were.
int compare(const rlk::harness::Problem& p, const std::string& arithmetic) {
  using namespace rlk::harness;
  const auto rule = by_rule(p, arithmetic);
  REQUIRE(rule);
  REQUIRE(rule->written);
  int compared = 0;
  for (const rlk::OpEntry& op : rlk::snapshot().ops)
    for (const rlk::ImplementationEntry& e : op.implementations) {
      if (std::string_view(op.schema->name) != p.schema().name) continue;
      if (e.backend->name != "native" || e.implementation->arithmetic != arithmetic) continue;
      const Outcome got =
          execute(p, {op.schema, e.implementation, e.backend, e.backend->devices().front(), nullptr});
      if (got.code != RLK_OK) continue;  // lacks an instruction set
      CAPTURE(std::string(e.implementation->id));
      for (std::size_t i = 0; i < got.results.size(); ++i) {
        if (got.results[i].dtype == DType::none) continue;
        const auto d = first_difference(rule->outcome.results[i], got.results[i]);
        if (d)
          CHECK_MESSAGE(false, p.schema().arguments[i].name << "[" << d->index << "]: " << d->expected << " "
                                                            << d->got);
      }
      ++compared;
    }
  return compared;
}

void compare_both(const Data& d, const Attention& o, int64_t queries) {
  const std::string split = o.split == 0 ? "none" : std::to_string(o.split);
  for (const bool part : {false, true}) {
    CAPTURE(part);
    CHECK(compare(problem_of(d, o, queries, part), "sm90/t25k16/ex2/h8/attn128/s" + split) > 0);
  }
}

}  // namespace

TEST_CASE(
    "attention's replay of Hopper has its rule's bits where maxima rise slowly, fast, and by 8 exactly") {
  std::mt19937 random(1);
  for (DType t : kTypes)
    for (Tops tops : kAllTops)
      for (int64_t width : {64, 128}) {
        const Data d(tops, t, width, random);
        for (Named& o : all_options()) {
          CAPTURE(std::string(rlk::name_of(t)));
          CAPTURE(std::string(name_of(tops)));
          CAPTURE(width);
          CAPTURE(std::string(o.name));
          compare_both(d, o.options, 3);
          if (width == 128) continue;
          for (int64_t split : {0, 1024}) {
            CAPTURE(split);
            o.options.split = split;
            compare_both(d, o.options, 2);
          }
        }
      }
}

TEST_CASE("attention's replay of Hopper has its rule's bits on drawn scores, near and far apart") {
  std::mt19937 random(2);
  for (DType t : kTypes)
    for (double apart : {1.0, 3.0, 20.0}) {
      CAPTURE(std::string(rlk::name_of(t)));
      CAPTURE(apart);
      Data d(Tops::slow, t, 64, random);
      std::normal_distribution<double> normal(0, apart);
      for (int64_t i = 0; i < d.q.count(); ++i) d.q.set(i, normal(random));
      for (int64_t i = 0; i < d.k.count(); ++i) d.k.set(i, normal(random) / apart);
      for (const int64_t window : {0, 300}) compare_both(d, {.window = window, .split = 512}, 4);
    }
}

TEST_CASE("attention's replay of Hopper has its rule's bits at scores of -inf, NaN and +inf") {
  std::mt19937 random(3);
  for (DType t : kTypes)
    for (const bool whole_split : {false, true})
      for (const float strange : {0.0f, kInfinity, static_cast<float>(NAN)}) {
        CAPTURE(std::string(rlk::name_of(t)));
        CAPTURE(whole_split);
        CAPTURE(strange);
        Data d(Tops::slow, t, 64, random);
        // Of every query all channels take part, so that -inf times q is no NaN. Of the second split all keys have scores
        // of -inf, or those of its first tile; two keys more are NaN or +inf.
        for (int64_t i = 0; i < d.q.count(); ++i) d.q.set(i, i % 64 == 0 ? 1 : 0.25);
        for (int64_t j = 512; j < (whole_split ? 1024 : 640); ++j) d.k.set(j * 64, -kInfinity);
        if (strange != 0) d.k.set(700 * 64 + 1, strange), d.k.set(300 * 64 + 1, strange);
        for (const int64_t window : {0, 500})
          compare_both(d, {.scale = kUnitScale, .window = window, .split = 512}, 3);
      }
}

namespace {

// body(data, options) with Hopper's replay, for rising maxima of every kind.
template <class Body>
void for_all_data(unsigned seed, Body body) {
  std::mt19937 random(seed);
  const rlk::BackendScope hopper(kBackend);
  for (DType t : kTypes)
    for (Tops tops : kAllTops)
      for (const Named& o : all_options()) {
        CAPTURE(std::string(rlk::name_of(t)));
        CAPTURE(std::string(name_of(tops)));
        CAPTURE(std::string(o.name));
        const Data d(tops, t, 64, random);
        body(d, o.options);
      }
}

}  // namespace

TEST_CASE("attention whose maxima rise has the same bits in one prefill, in chunks and decoded") {
  for_all_data(4, [](const Data& d, const Attention& options) {
    const Result whole = attend(d, options, 0, kTokens);
    for (const int64_t from : {0, 5, 9, 10, 127, 137, 138, 265, 400, 511, 512, 521, 522, 650, 1039}) {
      CAPTURE(from);
      for (const int64_t tokens : {1, 4})
        if (from + tokens <= kTokens) CHECK(attend(d, options, from, from + tokens).same(whole, from));
    }
    for (const int64_t from : {0, 300, 600}) CHECK(attend(d, options, from, from + 333).same(whole, from));
  });
}

TEST_CASE("attention of ranks is attention on one device where maxima rise") {
  for_all_data(5, [](const Data& d, const Attention& options) {
    for (const int64_t to : {int64_t{600}, kTokens})
      for (const int64_t splits : {1, 2})
        CHECK(by_parts(d, options, to - 40, to, splits).same(attend(d, options, to - 40, to), 0));
  });
}

namespace {

// What a part has for m behind three tiles, of which the first has scores of `first`, the others one of their own; `beside`
// lies in the second tile too.
float reference(double first, double second, double third, double beside = -1, double scale = kUnitScale) {
  std::mt19937 random(6);
  Data d(Tops::slow, DType::bf16, 64, random);
  for (int64_t j = 0; j < 512; ++j)
    d.k.set(j * 64, j < 128 ? first : j == 200 ? second : j == 201 ? beside : j == 300 ? third : -1);
  const int64_t zero[] = {0}, length[] = {512};
  Owned partials({1, kHeads, 1, 66}, DType::f32, NAN);
  const auto number = [](const int64_t* n) { return Tensor(const_cast<int64_t*>(n), {1}, DType::i64); };
  const Tensor q = d.q.view(0, {1, 1}), k = d.k.view(0, {1, 512}), v = d.v.view(0, {1, 512}),
               kv_len = number(length), k_first = number(zero), to = partials.view(0, {1, 1});
  AttentionPart a{.q = q, .k = k, .v = v, .kv_len = kv_len, .k_first = k_first};
  a.partials = to, a.scale = scale, a.split = 512;
  const rlk::Status s = rlk::attention_part(a, {.backend = "native.replay_sm90_ex2_s512"});
  REQUIRE_MESSAGE(s, std::string(s.message()));
  return partials.f32(0);
}

}  // namespace

TEST_CASE("attention's reference stays where a score is 8 above it, and moves where one is more") {
  CHECK(reference(0.3125, 0, 0) == 0.3125f);
  CHECK(reference(0.3125, 7.5, 8.25) == 0.3125f);
  CHECK(reference(0.3125, 8.3125, 8.3125) == 0.3125f);
  CHECK(reference(0.3125, 8.375, 8.3125) == 8.375f);
  CHECK(reference(0.3125, 4, 8.375) == 8.375f);
  CHECK(reference(0.3125, 8.375, 16.375) == 8.375f);
  CHECK(reference(0.3125, 8.375, 16.5) == 16.5f);
  CHECK(reference(0.3125, -kInfinity, 9) == 9);
  CHECK(reference(-kInfinity, -30, -22.5) == -1);
  // No number moves nothing, and is passed over where another score moves it.
  CHECK(reference(0.3125, NAN, 8.3125, 4) == 0.3125f);
  CHECK(reference(0.3125, NAN, 8.3125, 9) == 9);
}

TEST_CASE("attention's reference moves by the score times c less it, rounded once") {
  // Where that and the difference of the rounded product lie on two sides of 8.
  int stays = 0, moves = 0;
  for (int eighths = 40; eighths < 100; ++eighths) {
    const double apart = eighths / 8.0;
    const auto scale = static_cast<float>(8 / apart / 1.4426950408889634);
    const float c = scale * 1.44269504f;
    for (int i = 0; i < 240; ++i) {
      const double first = i / 8.0, second = first + apart;
      if (static_cast<float>(second) != rlk::bf16_to_float(rlk::double_to_bf16(second)) ||
          static_cast<float>(first) != rlk::bf16_to_float(rlk::double_to_bf16(first)))
        continue;
      const float m = static_cast<float>(first) * c;
      const volatile float product = static_cast<float>(second) * c;
      const bool once = std::fma(static_cast<float>(second), c, -m) > 8, twice = product - m > 8;
      if (once == twice || (once ? moves : stays) == 3) continue;
      CAPTURE(first);
      CAPTURE(second);
      CAPTURE(c);
      CHECK(reference(first, second, -1, -1, scale) == (once ? product : m));
      ++(once ? moves : stays);
    }
  }
  CHECK(stays == 3);
  CHECK(moves == 3);
}
