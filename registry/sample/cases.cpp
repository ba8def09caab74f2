// Calls of sample and sample_verify worth trying: every filter alone and together in both orders, ties, temperatures from 0
// up, rows without a finite entry, numbers that are no parameter, vocabularies around the leaves of the sum; and records of
// which some are wrong.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "registry/op.hpp"
#include "registry/sample/plain.hpp"
#include "registry/sample/shards.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr double kInf = std::numeric_limits<double>::infinity();

using List = std::vector<double>;  // from row to row, again from its start; empty: the argument is absent

struct Config {
  const char* name = "plain";
  List temperature{}, top_k{}, top_p{}, min_p{}, seed{};
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
  column("seed",
         !o.seed.empty() ? o.seed
         : o.brief       ? List{1, 0x1p40 + 7, -5, 0x1p52 + 1, 0}
                         : List{1, 7, -5, 123456789, 0},
         DType::i64);
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

// One large entry and many whose mass, added to it in fp32, would change nothing.
Fill faint_tail() {
  List x(301, -18);
  x[7] = 0;
  return listed(x);
}

// Rows in which an entry that is far behind has a word of 54, 98 and 44 of 2^32: -ln(-ln u) of u = 1 - v in fp32 is infinite.
Fill far_behind() {
  List x(24);
  x[1] = x[8 + 1] = x[16] = -24;
  return listed(x);
}
const List kRareWords{10710051, 3390783, 17818769};  // seeds

const Config kAll{.name = "all filters",
                  .temperature = {0.7, 1, 1.5, 0, 0.2},
                  .top_k = {50, 20, 0, 100, 7, 3},
                  .top_p = {0.9, 0.5, 0.99, 0.2},
                  .min_p = {0.01, 0.1, 0.001}};

void filters(const CaseSink& sink, DType t) {
  one(sink, 7, 100, t, {});
  one(sink, 3, 8, t, {.name = "rare words", .seed = kRareWords, .logits = far_behind()});
  one(sink, 6, 300, t, {.name = "temperatures", .temperature = {0.7, 1, 0, 2.5, 0.01, 100}});
  one(sink, 6, 300, t, {.name = "raw at one", .temperature = {0.7, 1, 0, 2.5}, .raw_at_one = true});
  one(sink, 6, 300, t, {.name = "top_k", .top_k = {1, 5, 0, 50, 1000, -1}});
  one(sink, 6, 300, t, {.name = "top_p", .top_p = {0.9, 0.5, 1, 0, 1e-30, 0.999999}});
  one(sink, 5, 301, t,
      {.name = "faint tail", .top_p = {0.999998, 0.999997, 0.9999965, 1, 0.5}, .logits = faint_tail()});
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
    r.token.push_back(m == 5 ? static_cast<double>(v) : static_cast<double>(token));
    r.logp.push_back(logp), r.logp_raw.push_back(raw);
  }
  return r;
}

// ---- parts of a vocabulary

// The steps of T parts over rows of drawn integers, eighths of which are logits: ties, absent entries, a row without a
// finite one, one with NaN. Hands every call of a step to `part` and `merge` before it goes on by the rule.
struct Steps {
  static constexpr int64_t n = 6;
  int64_t v, parts, leaf = 16 * ((v + 127) / 128);
  bool filters, min_p_first;
  std::vector<float> logits, temperature{0.7f, 1, 0, 2, 1, 1.5f}, top_p{0.9f, 1, 0.5f, 0.99f, 0.3f, 0.7f},
      min_p{0, 0.01f, 0, 0.05f, 0, 0.001f};
  std::vector<int32_t> top_k{20, 7, 0, 50, 3, 1000};
  std::vector<int64_t> seed{1, 7, -5, 123456789, 0, 3}, state, partials;

  Steps(int64_t v_, int64_t parts_, bool filters_, bool first)
      : v(v_), parts(parts_), filters(filters_), min_p_first(first) {
    uint32_t x = 99;
    for (int64_t i = 0; i < n * v; ++i) {
      x = x * 1664525u + 1013904223u;
      logits.push_back(x >> 28 == 5 ? -INFINITY : static_cast<float>(static_cast<int>(x >> 25) - 64) / 8);
      if (i / v == 4) logits.back() = -INFINITY;
    }
    if (v > 0) logits.back() = NAN;
  }
  int64_t start(int64_t t) const { return std::min(v, t * (8 / parts) * leaf); }
  int64_t end(int64_t t) const { return std::min(v, (t + 1) * (8 / parts) * leaf); }

  void inputs(auto& a) {
    const auto column = [](auto& x, DType t) { return Tensor(x.data(), {n}, t); };
    temperatures_ = column(temperature, DType::f32), ks_ = column(top_k, DType::i32),
    ps_ = column(top_p, DType::f32);
    a.temperature = temperatures_;
    if (filters) a.top_k = ks_, a.top_p = ps_;
  }
  // body(a) for the call of part t at a step.
  void part(int64_t t, SamplePart::Step step, int64_t digit, const auto& body) {
    const Tensor z(logits.data() + start(t), {n, end(t) - start(t)}, DType::f32, {kDLCPU, 0}, {v, 1}),
        m(min_p.data(), {n}, DType::f32), s(seed.data(), {n}, DType::i64),
        st(state.data(), {n, 24}, DType::i64);
    SamplePart a{.logits = z, .seed = s};
    inputs(a);
    if (filters) a.min_p = m;
    if (step != SamplePart::Step::largest) a.state = st;
    if (min_p_first) a.filter_order = SamplePart::FilterOrder::min_p_first;
    a.vocab = v, a.vocab_start = start(t), a.leaf_first = t * (8 / parts), a.leaf_count = 8 / parts;
    a.step = step, a.digit = digit;
    body(a);
  }
  // The partials of all parts at a step, then the state after it.
  void go(SamplePart::Step step, int64_t digit) {
    constexpr int64_t widths[] = {1, 2048, 2048, 8};
    const int64_t width = widths[static_cast<int>(step)];
    partials.assign(static_cast<std::size_t>(parts * n * width), -1);
    for (int64_t t = 0; t < parts; ++t)
      part(t, step, digit, [&](SamplePart& a) {
        const Tensor out(partials.data() + t * n * width, {n, width}, DType::i64);
        a.partials = out;
        sampling::write_parts(a);
      });
    if (step == SamplePart::Step::token) return;
    std::vector<int64_t> next(static_cast<std::size_t>(n) * 24);
    const Tensor all(partials.data(), {parts, n, width}, DType::i64),
        before(state.data(), {n, 24}, DType::i64), after(next.data(), {n, 24}, DType::i64);
    SampleMerge m{.partials = all, .next = after};
    inputs(m);
    if (!state.empty()) m.state = before;
    m.step = static_cast<SampleMerge::Step>(step), m.digit = digit;
    sampling::write_merged(m);
    state = next;
  }
  // visit(step, digit) before each step, which has the state so far.
  void walk(const auto& visit) {
    using enum SamplePart::Step;
    const auto one = [&](SamplePart::Step step, int64_t digit) {
      visit(step, digit);
      go(step, digit);
    };
    one(largest, 0);
    for (int64_t d = 0; filters && d < 3; ++d) one(top_k, d);
    for (int64_t d = 0; filters && d < 3; ++d) one(top_p, d);
    one(token, 0);
  }

 private:
  Tensor temperatures_, ks_, ps_;
};

constexpr const char* kStepNames[] = {"largest", "top_k", "top_p", "token"};

Case step_case(const Steps& s, SamplePart::Step step, int64_t digit, const char* what) {
  Case c;
  c.name =
      fmt::format("{}{} {} digit {} of {} V={}", s.filters ? "filters " : "",
                  s.min_p_first ? "min_p first" : "", kStepNames[static_cast<int>(step)], digit, what, s.v);
  c.attributes = {{"step", std::string(kStepNames[static_cast<int>(step)])}, {"digit", digit}};
  c.brief = s.v != 300;
  return c;
}
template <class T>
Fill all_of(const std::vector<T>& x) {
  return listed({x.begin(), x.end()});
}
void columns(Case& c, const Steps& s, bool part) {
  const int64_t n = Steps::n;
  c.inputs.push_back({"temperature", {n}, DType::f32, all_of(s.temperature)});
  if (s.filters) {
    c.inputs.push_back({"top_k", {n}, DType::i32, all_of(s.top_k)});
    c.inputs.push_back({"top_p", {n}, DType::f32, all_of(s.top_p)});
    if (part) c.inputs.push_back({"min_p", {n}, DType::f32, all_of(s.min_p)});
  }
  if (part) c.inputs.push_back({"seed", {n}, DType::i64, all_of(s.seed)});
}

void part_case(const CaseSink& sink, const Steps& s, int64_t t, DType type, SamplePart::Step step,
               int64_t digit) {
  Case c = step_case(s, step, digit, fmt::format("part {} of {} {}", t, s.parts, name_of(type)).c_str());
  c.attributes.push_back({"vocab", s.v});
  c.attributes.push_back({"vocab_start", s.start(t)});
  c.attributes.push_back({"leaf_first", t * (8 / s.parts)});
  c.attributes.push_back({"leaf_count", 8 / s.parts});
  c.attributes.push_back({"filter_order", std::string(s.min_p_first ? "min_p_first" : "min_p_last")});
  List rows;
  for (int64_t m = 0; m < Steps::n; ++m)
    rows.insert(rows.end(), s.logits.begin() + m * s.v + s.start(t), s.logits.begin() + m * s.v + s.end(t));
  c.inputs = {{"logits", {Steps::n, s.end(t) - s.start(t)}, type, listed(rows)}};
  columns(c, s, true);
  if (step != SamplePart::Step::largest)
    c.inputs.push_back({"state", {Steps::n, 24}, DType::i64, all_of(s.state)});
  c.results = {{"partials", DType::i64}};
  if (step == SamplePart::Step::token) c.results.push_back({"keep", DType::i32});
  sink(std::move(c));
}

struct Form {
  int64_t v, parts;
  bool filters = true, min_p_first = false;
};
constexpr Form kForms[] = {
    {300, 2}, {300, 4, true, true}, {300, 8}, {300, 1}, {300, 2, false}, {1000, 2}, {5, 8}, {0, 1}};

}  // namespace

void sample_part_cases(const CaseSink& sink) {
  for (const Form& f : kForms) {
    Steps s(f.v, f.parts, f.filters, f.min_p_first);
    s.walk([&](SamplePart::Step step, int64_t digit) {
      for (DType type : kDTypes)
        for (int64_t t : {int64_t{0}, f.parts - 1})
          if (t == 0 || f.parts > 1) part_case(sink, s, t, type, step, digit);
    });
  }
}

void sample_merge_cases(const CaseSink& sink) {
  for (const Form& f : kForms) {
    Steps s(f.v, f.parts, f.filters, f.min_p_first);
    std::vector<int64_t> state;
    s.walk([&](SamplePart::Step step, int64_t digit) {
      state = s.state;
      Steps after = s;
      after.go(step, digit);
      Case c = step_case(s, step, digit, fmt::format("{} parts", s.parts).c_str());
      c.inputs = {{"partials",
                   {s.parts, Steps::n, static_cast<int64_t>(after.partials.size()) / s.parts / Steps::n},
                   DType::i64,
                   all_of(after.partials)}};
      columns(c, s, false);
      if (step != SamplePart::Step::largest)
        c.inputs.push_back({"state", {Steps::n, 24}, DType::i64, all_of(state)});
      c.results = {{"next", DType::i64}};
      if (step == SamplePart::Step::token)
        c.results = {{"token", DType::i64},
                     {"logp", DType::f32},
                     {"logp_raw", DType::f32},
                     {"count", DType::i32},
                     {"bad_count", DType::i32}};
      sink(std::move(c));
    });
  }
}

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
namespace {

// The reference sums as sample/philox-g1 does. Of another id its rule says what bits there are.
Bound with_sums(const BoundQuery& q) {
  return {q.arithmetic.empty() || q.arithmetic == "sample/philox-g1" ? Bound::bits : Bound::none};
}

}  // namespace

Bound sample_verify_bound(const BoundQuery& q) { return with_sums(q); }
Bound sample_part_bound(const BoundQuery& q) {
  return q.result == "keep" ? Bound{Bound::bits} : with_sums(q);
}
Bound sample_merge_bound(const BoundQuery&) { return {Bound::bits}; }

}  // namespace rlk::registry
