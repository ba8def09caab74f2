// Calls of logp worth trying: vocabularies around tiles and leaves, whole ones of production, peaked and flat rows, every
// option, rows that are masked, left out, infinite or NaN, and every cut into shards.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Config {
  const char* name = "plain";
  const Fill* logits = nullptr;  // null: normal
  double spread = 3;
  const Fill* target = nullptr;  // null: any token
  const Fill* d_logp = nullptr;
  int64_t padding = 0;  // columns beyond the vocabulary
  bool temperatures = false, keep = false, entropy = true;
  double temperature = 1, softcap = 0;
  const char* round = "fp32";
  int64_t first = 0, count = 8;
  bool brief = false;
};

int64_t here(int64_t vocab, const Config& o) {
  const int64_t leaf = 16 * ((vocab + 127) / 128);
  return std::min(vocab, (o.first + o.count) * leaf) - std::min(vocab, o.first * leaf);
}

Case base(int64_t n, int64_t vocab, DType t, const Config& o) {
  Case c;
  c.name = fmt::format("{} n={} v={} {}", o.name, n, vocab, name_of(t));
  const int64_t leaf = 16 * ((vocab + 127) / 128);
  c.attributes = {{"temperature", o.temperature},
                  {"softcap", o.softcap},
                  {"logits_round", std::string(o.round)},
                  {"vocab", o.padding || o.count != 8 ? vocab : 0},
                  {"vocab_start", std::min(vocab, o.first * leaf)},
                  {"leaf_first", o.first},
                  {"leaf_count", o.count}};
  const int64_t mine = here(vocab, o);
  const Fill logits = o.logits ? *o.logits : Fill{Fill::normal, 0, o.spread};
  const Fill target = o.target ? *o.target : Fill{Fill::integers, 0, static_cast<double>(vocab)};
  c.inputs = {{"logits", {n, mine + o.padding}, t, logits},
              {"target", {n}, n % 2 ? DType::i32 : DType::i64, target}};
  if (o.temperatures) c.inputs.push_back({"temperatures", {n}, DType::f32, {Fill::uniform, 0.5, 2}});
  if (o.keep)
    c.inputs.push_back({"keep", {n, (mine + 31) / 32 + 1}, DType::i32, {Fill::integers, -0x1p31, 0x1p31}});
  c.brief = o.brief;
  c.reduction = vocab;
  return c;
}

void forward(const CaseSink& sink, int64_t n, int64_t vocab, DType t, const Config& o) {
  Case c = base(n, vocab, t, o);
  c.results = {{"stats", DType::f32}, {"bad_count", DType::i32}};
  if (o.count == 8)
    c.results.insert(c.results.end(), {{"logp", DType::f32}, {"lse", DType::f32}, {"entropy", DType::f32}});
  sink(std::move(c));
}

void backward(const CaseSink& sink, int64_t n, int64_t vocab, DType t, const Config& o) {
  if (o.count != 8) return;
  Case c = base(n, vocab, t, o);
  c.inputs.push_back({"d_logp", {n}, DType::f32, o.d_logp ? *o.d_logp : Fill{}});
  if (o.entropy) c.inputs.push_back({"d_entropy", {n}, DType::f32, {}});
  c.results = {{"d_logits", t}};
  sink(std::move(c));
}

// Rows of eight entries: what is infinite, NaN, tied or far apart.
Fill special() {
  Fill f{Fill::values};
  // clang-format off
  f.list = {1,     2,     3,     4,     5,      6,     7,       8,      // every term counts
            -kInf, 2,     -kInf, 1,     -kInf,  -kInf, -kInf,   -kInf,  // absent ones
            -kInf, -kInf, -kInf, -kInf, -kInf,  -kInf, -kInf,   -kInf,
            0,     1,     kInf,  2,     3,      4,     5,       6,
            NAN,   -kInf, -kInf, -kInf, -kInf,  -kInf, -kInf,   -kInf,
            3,     3,     3,     3,     3,      3,     3,       3,      // ties
            9900,  -9900, 9984,  9984,  -9984,  9900,  0,       9984,
            6e4,   -6e4,  6e4,   -6e4,  0,      -0.0,  0x1p-14, -0x1p-24};
  // clang-format on
  return f;
}

// Targets at the ends of leaves, one beside another, some left out, some no tokens.
Fill some_left_out(int64_t vocab) {
  Fill f{Fill::values};
  f.list = {0, -100, static_cast<double>(vocab - 1), static_cast<double>(vocab), 1, -1, 2, -100};
  return f;
}

template <class Make>
void all_cases(const CaseSink& sink, Make make) {
  const Fill out_of_130 = some_left_out(130), out_of_1000 = some_left_out(1000), specials = special();
  const Fill constant{Fill::constant, 2}, sorted{Fill::sorted, -20, 20}, one{Fill::one_hot},
      quick{Fill::quick, 0, 12};
  // 19.7 below the maximum all others together weigh as much as the rounding of it.
  Fill tail{Fill::values};
  tail.list = {-19.7, -19.7, -19.7, -19.7, 0.0, -19.7, -19.7};
  for (DType t : kDTypes) {
    for (int64_t v : {1, 8, 127, 129, 1000}) make(sink, 5, v, t, Config{});
    make(sink, 4, 2049, t, {.name = "temperatures", .temperatures = true});
    make(sink, 3, 700, t, {.name = "temperature", .temperature = 0.7});
    make(sink, 3, 700, t, {.name = "softcap", .spread = 20, .softcap = 15});
    make(sink, 5, 333, t, {.name = "keep", .keep = true});
    make(sink, 5, 1000, t, {.name = "padding", .padding = 100});
    make(sink, 8, 130, t, {.name = "left out", .target = &out_of_130});
    make(sink, 5, 1000, t,
         {.name = "everything",
          .spread = 9,
          .target = &out_of_1000,
          .padding = 7,
          .temperatures = true,
          .keep = true,
          .softcap = 30,
          .round = "bf16"});
    make(sink, 3, 300, t, {.name = "rounded to bf16", .round = "bf16"});
    make(sink, 3, 300, t, {.name = "rounded to fp16", .round = "fp16"});
    make(sink, 4, 1500, t, {.name = "no entropy", .entropy = false});
    make(sink, 0, 64, t, {.name = "no rows", .brief = true});
    make(sink, 8, 8, t, {.name = "special", .logits = &specials, .brief = true});
    make(sink, 3, 1100, t, {.name = "flat", .logits = &constant, .brief = true});
    make(sink, 3, 1100, t, {.name = "sorted", .logits = &sorted, .brief = true});
    make(sink, 3, 1100, t, {.name = "one entry", .logits = &one, .brief = true});
    make(sink, 4, 500, t, {.name = "loud", .spread = 150, .brief = true});
    make(sink, sink.draw(1, 9), sink.draw(2, 5000), t, {.name = "drawn", .brief = true});
  }
  for (int64_t v : {50257, 151936})
    make(sink, 2, v, v % 3 == 1 ? DType::f32 : DType::bf16,
         {.name = "whole vocabulary", .logits = &quick, .brief = true});
  make(sink, 2, 50257, DType::f32, {.name = "flat tail", .logits = &tail, .brief = true});
}

}  // namespace

void logp_cases(const CaseSink& sink) {
  const Fill out_of_1000 = some_left_out(1000);
  all_cases(sink, forward);
  const Fill quick{Fill::quick, 0, 12};
  for (int64_t v : {32000, 128256, 262144})
    forward(sink, 2, v, DType::bf16, {.name = "whole vocabulary", .logits = &quick, .brief = true});
  for (int64_t count : {1, 2, 4})
    for (int64_t first = 0; first < 8; first += count * (count == 1 ? 3 : 1)) {
      const std::string name = fmt::format("leaves {} to {}", first, first + count - 1);
      forward(sink, 4, 1000, DType::bf16,
              {.name = name.c_str(), .target = &out_of_1000, .keep = true, .first = first, .count = count});
    }
  forward(sink, 4, 20, DType::f32, {.name = "empty leaf", .first = 3, .count = 1, .brief = true});
}

void logp_bwd_cases(const CaseSink& sink) {
  all_cases(sink, backward);
  // What masks leave of a loss' gradient.
  Fill masked{Fill::values};
  masked.list = {1, -0.0, 0, -1};
  for (DType t : kDTypes)
    backward(sink, 4, 1104, t, {.name = "masked", .d_logp = &masked, .entropy = false, .brief = true});
}

void logp_merge_cases(const CaseSink& sink) {
  const auto merge = [&](const char* name, int64_t parts, Fill partials, bool temperatures, bool brief) {
    Case c;
    c.name = fmt::format("{} t={}", name, parts);
    c.inputs = {{"partials", {parts, 6, 4}, DType::f32, std::move(partials)}};
    if (temperatures) c.inputs.push_back({"temperatures", {6}, DType::f32, {Fill::uniform, 0.5, 2}});
    c.results = {{"logp", DType::f32}, {"lse", DType::f32}, {"entropy", DType::f32}, {"stats", DType::f32}};
    c.brief = brief;
    sink(std::move(c));
  };
  // A maximum, a sum from 1 on, what the entropy adds, and the target in one part of a row at most.
  Fill all{Fill::values};
  for (int p = 0; p < 8; ++p)
    for (int n = 0; n < 6; ++n)
      all.list.insert(all.list.end(), {1.5 * (p * 5 % 7) + n, 1 + 0.7 * p + 2 * n, -0.3 * p * n,
                                       p == 0 && n % 2 == 0 ? -2.0 : -kInf});
  Fill holes = all;
  for (std::size_t i = 0; i + 3 < holes.list.size(); i += 12)
    holes.list[i] = -kInf, holes.list[i + 1] = 0, holes.list[i + 2] = 0, holes.list[i + 3] = -kInf;
  Fill nothing{Fill::values, 0, 0, {-kInf, 0, 0, -kInf}}, ends = all;
  merge("every target", 1, {Fill::values, 0, 0, {3, 4, -0.3, -2, 5, 1.5, 0, 5}}, false, false);
  ends.list[0] = 3e38, ends.list[24] = -3e38, ends.list[4] = kInf, ends.list[9] = NAN, ends.list[12] = 200;
  for (int64_t parts : {1, 2, 4, 8}) {
    merge("plain", parts, all, parts == 4, false);
    merge("holes", parts, holes, false, false);
    merge("nothing", parts, nothing, false, true);
    merge("ends", parts, ends, false, true);
  }
}

// Absolute: 3e-6 is what a logarithm of a sum of a vocabulary keeps; two ulps are the target's distance from the maximum.
Bound logp_bound(const BoundQuery& q) {
  if (q.result == "stats") return {.metric = Bound::elementwise, .value = 2e-6, .ulps = 4, .absolute = 3e-6};
  return {.metric = Bound::elementwise, .ulps = 2, .absolute = 3e-6};
}
// A probability times the cotangents and their temperatures: 1e-6 of these, which are up to 3 in size in the cases.
Bound logp_bwd_bound(const BoundQuery&) {
  return {.metric = Bound::elementwise, .value = 0x1p-20, .ulps = 1, .absolute = 3e-6};
}
Bound logp_merge_bound(const BoundQuery& q) { return logp_bound(q); }

}  // namespace rlk::registry
