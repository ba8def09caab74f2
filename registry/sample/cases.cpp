// Calls of sample and sample_verify worth trying: every filter alone and together in both orders, ties, temperatures from 0
// up, rows without a finite entry, numbers that are no parameter, vocabularies around the leaves of the sum; and records of
// which some are wrong.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "registry/op.hpp"
#include "registry/sample/plain.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr double kInf = std::numeric_limits<double>::infinity();

using List = std::vector<double>;  // from row to row, again from its start; empty: the argument is absent

struct Config {
  const char* name = "plain";
  List temperature{}, top_k{}, top_p{}, min_p{};
  Fill logits{Fill::normal, 0, 3};
  const char* round = "fp32";
  double softcap = 0;
  int64_t vocab = 0;
  bool min_p_first = false, raw_at_one = false, brief = false, large = false;
};

Fill listed(const List& values) { return {Fill::values, 0, 0, values}; }

Case base(int64_t n, int64_t v, DType t, const Config& o) {
  Case c;
  c.name = fmt::format("{} [{},{}] {}", o.name, n, v, name_of(t));
  c.attributes = {{"vocab", o.vocab},
                  {"logits_round", std::string(o.round)},
                  {"softcap", o.softcap},
                  {"filter_order", std::string(o.min_p_first ? "min_p_first" : "min_p_last")},
                  {"raw_temperature", int64_t{!o.raw_at_one}}};
  c.inputs = {{"logits", {n, v}, t, o.logits}};
  const auto column = [&](const char* name, const List& values, DType type) {
    if (!values.empty()) c.inputs.push_back({name, {n}, type, listed(values)});
  };
  column("temperature", o.temperature, DType::f32);
  column("top_k", o.top_k, DType::i32);
  column("top_p", o.top_p, DType::f32);
  column("min_p", o.min_p, DType::f32);
  column("seed", o.brief ? List{1, 0x1p40 + 7, -5, 0x1p52 + 1, 0} : List{1, 7, -5, 123456789, 0}, DType::i64);
  if (o.brief) column("stream", {0, 1, 77, -1}, DType::i32);
  column("position", o.brief ? List{0, 1, 0x1p33, 5, 6, 4096} : List{0, 1, 2, 3, 5, 6, 4096}, DType::i64);
  c.brief = o.brief;
  c.large = o.large;
  c.reduction = v;
  return c;
}

void one(const CaseSink& sink, int64_t n, int64_t v, DType t, const Config& o) {
  Case c = base(n, v, t, o);
  c.results = {{"token", o.brief ? DType::i32 : DType::i64},
               {"logp", DType::f32},
               {"logp_raw", DType::f32},
               {"count", DType::i32},
               {"keep", DType::i32},
               {"bad_count", DType::i32}};
  sink(std::move(c));
}

// Rows of eight: peaked, with absent entries, all absent, with NaN, with inf, with both zeros, one entry alone, all equal.
Fill special() {
  List x;
  const auto row = [&](const List& r) { x.insert(x.end(), r.begin(), r.end()); };
  row({30, 1, 2, 3, -4, 5, 6, 7});
  row({-kInf, 1, -kInf, 1, 0.5, -kInf, 0, -1});
  row(List(8, -kInf));
  row({1, 2, NAN, 3, 4, 5, 6, 7});
  row({1, 2, 3, kInf, 4, 5, 6, 7});
  row({-0.0, 0, -0.0, 0, -1, -2, 0, -0.0});
  row({-kInf, -kInf, -kInf, -3, -kInf, -kInf, -kInf, -kInf});
  row(List(8, -65504));
  return listed(x);
}

const Config kAll{.name = "all filters",
                  .temperature = {0.7, 1, 1.5, 0, 0.2},
                  .top_k = {50, 20, 0, 100, 7, 3},
                  .top_p = {0.9, 0.5, 0.99, 0.2},
                  .min_p = {0.01, 0.1, 0.001}};

void filters(const CaseSink& sink, DType t) {
  one(sink, 7, 100, t, {});
  one(sink, 6, 300, t, {.name = "temperatures", .temperature = {0.7, 1, 0, 2.5, 0.01, 100}});
  one(sink, 6, 300, t, {.name = "raw at one", .temperature = {0.7, 1, 0, 2.5}, .raw_at_one = true});
  one(sink, 6, 300, t, {.name = "top_k", .top_k = {1, 5, 0, 50, 1000, -1}});
  one(sink, 6, 300, t, {.name = "top_p", .top_p = {0.9, 0.5, 1, 0, 1e-30, 0.999999}});
  one(sink, 6, 300, t, {.name = "min_p", .min_p = {0.1, 0.5, 0, 1, 2, 1e-13, -1}});
  one(sink, 6, 600, t, kAll);
  Config o = kAll;
  o.name = "min_p first", o.min_p_first = true;
  one(sink, 6, 600, t, o);
  o = kAll;
  o.name = "ties", o.logits = {Fill::integers, -3, 3};
  one(sink, 7, 400, t, o);
}

void edges(const CaseSink& sink, DType t) {
  Config o = kAll;
  o.brief = true;
  const auto try_with = [&](const char* name, int64_t n, int64_t v, Fill logits) {
    o.name = name, o.logits = std::move(logits);
    one(sink, n, v, t, o);
  };
  try_with("special", 8, 8, special());
  try_with("all equal", 4, 700, {Fill::constant, 1.5});
  try_with("flat", 3, 2100, {Fill::normal, 0, 0.01});
  try_with("loud", 3, 500, {Fill::powers_of_two, -3, 15});
  for (int64_t v : {1, 2, 31, 129, 1031}) try_with("width", 3, v, {Fill::normal, 0, 2});
  try_with("no columns", 3, 0, {});
  try_with("no rows", 0, 64, {});
  try_with("drawn", sink.draw(1, 6), sink.draw(2, 3000), {Fill::normal, 0, 4});
  o.vocab = 90;
  try_with("vocab", 5, 128, {Fill::normal, 1, 2});
  o.vocab = 0, o.softcap = 5, o.round = "bf16";
  try_with("softcap and rounding", 8, 8, special());
  try_with("softcap and rounding", 3, 300, {Fill::normal, 0, 9});
  one(sink, 8, 40, t,
      {.name = "no parameters",
       .temperature = {1, -1, NAN, kInf, 1e-45, 1, 1, 1e-38},
       .top_p = {NAN, 1, 1, 1, 1, -1, 5, 0.5},
       .min_p = {0, 0, 0, 0, 0, -3, NAN, 0},
       .brief = true});
  o = kAll;
  o.name = "vocabulary", o.brief = o.large = true;
  one(sink, 2, 151936, t, o);
}

// ---- records

struct Record {
  std::vector<double> logits, token, logp, logp_raw;
};

// What the rule gives for such rows, with every fourth row right and the others wrong in one thing each.
Record recorded(int64_t n, int64_t v, const List& temperature, const List& top_k) {
  Record r;
  std::vector<float> logits, temperatures;
  std::vector<int32_t> k;
  std::vector<int64_t> seeds, positions;
  uint32_t state = 12345;
  for (int64_t i = 0; i < n * v; ++i) {
    state = state * 1664525u + 1013904223u;
    logits.push_back(static_cast<float>(static_cast<int>(state >> 20) - 2048) /
                     256);  // exact in every dtype but bf16
    logits.back() = static_cast<float>(round_to(DType::bf16, logits.back()));
  }
  for (int64_t m = 0; m < n; ++m) {
    const auto at = static_cast<std::size_t>(m);
    temperatures.push_back(static_cast<float>(temperature[at % temperature.size()]));
    k.push_back(static_cast<int32_t>(top_k[at % top_k.size()]));
    seeds.push_back(m % 3);
    positions.push_back(m);
  }
  const Tensor z(logits.data(), {n, v}, DType::f32), t(temperatures.data(), {n}, DType::f32),
      top(k.data(), {n}, DType::i32), seed(seeds.data(), {n}, DType::i64),
      position(positions.data(), {n}, DType::i64);
  const rlk::Sample a{.logits = z, .temperature = t, .top_k = top, .seed = seed, .position = position};
  r.logits.assign(logits.begin(), logits.end());
  for (int64_t m = 0; m < n; ++m) {
    const sampling::PlainRow row(a, m);
    int64_t token = row.token;
    double logp = row.logp(), raw = row.logp_raw();
    if (m % 5 == 1)  // another that stays, where there is one
      for (std::size_t i = 0; i < row.kept.size(); ++i)
        if (row.kept[i] && static_cast<int64_t>(i) != row.token) token = static_cast<int64_t>(i);
    if (m % 5 == 2) logp += 0x1p-20;
    if (m % 5 == 3)  // one that does not stay
      token = std::find(row.kept.begin(), row.kept.end(), false) - row.kept.begin();
    if (m % 5 == 4) raw = m % 10 == 4 ? NAN : raw * 2;
    r.token.push_back(m == 0 ? static_cast<double>(v) : static_cast<double>(token));
    r.logp.push_back(logp), r.logp_raw.push_back(raw);
  }
  return r;
}

}  // namespace

void sample_cases(const CaseSink& sink) {
  for (DType t : kDTypes) {
    filters(sink, t);
    edges(sink, t);
  }
}

void sample_verify_cases(const CaseSink& sink) {
  const List temperature{1, 0.5, 0, 2}, top_k{4, 0, 10};
  const Record r = recorded(30, 50, temperature, top_k);
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (bool with_logp : {true, false}) {
      Case c;
      c.name = fmt::format("records{} {}", with_logp ? "" : " of tokens alone", name_of(t));
      c.inputs = {{"logits", {30, 50}, t, listed(r.logits)},
                  {"temperature", {30}, DType::f32, listed(temperature)},
                  {"top_k", {30}, DType::i32, listed(top_k)},
                  {"seed", {30}, DType::i64, listed({0, 1, 2})},
                  {"position", {30}, DType::i64, {Fill::linspace, 0, 29}},
                  {"token", {30}, with_logp ? DType::i64 : DType::i32, listed(r.token)}};
      if (with_logp) {
        c.inputs.push_back({"logp", {30}, DType::f32, listed(r.logp)});
        c.inputs.push_back({"logp_raw", {30}, DType::f32, listed(r.logp_raw)});
      }
      c.results = {{"status", DType::i32}};
      sink(std::move(c));
      Case none = base(8, 8, t, {.name = "special", .logits = special(), .brief = true});
      none.inputs.push_back({"token", {8}, DType::i64, listed({-1, 3, -1, 2, -1, 99, 3, 0})});
      none.results = {{"status", DType::i32}};
      if (with_logp) sink(std::move(none));
    }
}

// Integers and tokens are compared as they are. A logarithm of a sum of a vocabulary keeps 3e-6, and two ulps are the token's
// distance from the largest entry.
Bound sample_bound(const BoundQuery&) { return {.metric = Bound::elementwise, .ulps = 2, .absolute = 3e-6}; }
Bound sample_verify_bound(const BoundQuery&) { return {Bound::bits}; }

}  // namespace rlk::registry
