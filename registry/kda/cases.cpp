// Calls of the KDA ops worth trying: every tail length, width and grouping, packed sequences with an empty
// one, every gate, both layouts, and data that breaks careless inverses and careless exponentials.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "registry/kda/plain.hpp"
#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Shape {
  int64_t batch, tokens, heads, value_heads, k, v;
};
constexpr Shape kShapes[] = {{2, 1, 2, 2, 32, 32},     {1, 63, 1, 1, 60, 64},  {1, 64, 2, 2, 64, 60},
                             {2, 65, 1, 2, 64, 64},    {1, 100, 1, 4, 32, 48}, {1, 130, 2, 2, 100, 100},
                             {1, 130, 1, 1, 128, 128}, {1, 65, 1, 1, 256, 256}};

enum Gating { kGiven, kSlow, kMasked, kZero, kSoftplus, kBounded, kBoundedNoRate };
constexpr const char* kGatingNames[] = {"given",    "slow",    "masked",         "zero",
                                        "softplus", "bounded", "bounded-no-rate"};

struct Config {
  Gating gating = kGiven;
  bool v_first = false, norm = false, sigmoid = false, negative = false, states = true, collinear = false;
  int64_t chunk = 64;
  std::vector<double> bounds{};  // cu_seqlens
  bool brief = false;
  std::vector<double> strengths{};  // beta, over and over
  double scale = 0, loud = 1;       // the attribute; how large values are
  bool same_keys = false, safe = false;
  double lower_bound = -5;
};

// -1000 in every tenth place, mild decays elsewhere.
Fill masked_gates(int64_t n) {
  Fill fill{Fill::values};
  for (int64_t i = 0; i < n; ++i) fill.list.push_back(i % 10 == 3 ? -1000.0 : -0.05 * double(i % 7));
  return fill;
}

// Keys within a few percent of one direction, unit length.
Fill collinear_keys(int64_t rows, int64_t k) {
  Fill fill{Fill::values};
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < k; ++d)
      fill.list.push_back((1 + 0.05 * std::sin(double(i * 31 + d * 17))) / std::sqrt(double(k)));
  return fill;
}

Case make(const Shape& s, DType t, const Config& o) {
  Case c;
  const int64_t sequences = o.bounds.empty() ? s.batch : static_cast<int64_t>(o.bounds.size()) - 1;
  c.name = fmt::format(
      "b={} t={} h={} hv={} k={} v={} {} gate={}{}{}{}{}{}{}", s.batch, s.tokens, s.heads, s.value_heads, s.k,
      s.v, name_of(t), kGatingNames[o.gating], o.v_first ? " v-first" : "", o.norm ? " norm" : "",
      o.sigmoid ? (o.negative ? " sigmoid2" : " sigmoid") : "", o.collinear ? " collinear" : "",
      o.bounds.empty() ? "" : fmt::format(" packed {}", sequences), o.chunk == 64 ? "" : " chunk=32");
  if (!o.strengths.empty()) c.name += fmt::format(" beta={}", fmt::join(o.strengths, ","));
  if (o.scale != 0) c.name += fmt::format(" scale={}", o.scale);
  if (o.loud != 1) c.name += fmt::format(" values {}", o.loud);
  if (o.same_keys) c.name += " equal keys";
  if (o.safe) c.name += " safe";
  if (o.lower_bound != -5) c.name += fmt::format(" bound={}", o.lower_bound);
  const double unit = 1 / std::sqrt(double(s.k));
  const std::vector<int64_t> keys{s.batch, s.tokens, s.heads, s.k},
      gates{s.batch, s.tokens, s.value_heads, s.k};
  Fill k_fill{Fill::normal, 0, unit}, g_fill{Fill::log_decay, 0, 1};
  if (o.same_keys) k_fill = {Fill::same_rows, 0, unit};
  if (o.gating == kZero) g_fill = {Fill::constant, 0};
  if (o.collinear) k_fill = collinear_keys(s.batch * s.tokens * s.heads, s.k);
  if (o.gating == kSlow) g_fill = {Fill::log_decay, 0, 0.005};
  if (o.gating == kMasked) g_fill = masked_gates(s.batch * s.tokens * s.value_heads * s.k);
  const bool raw = o.gating >= kSoftplus;
  if (raw) g_fill = {};
  c.inputs = {{"q", keys, t, o.norm ? Fill{} : Fill{Fill::normal, 0, unit}},
              {"k", keys, t, o.norm ? Fill{} : k_fill},
              {"v", {s.batch, s.tokens, s.value_heads, s.v}, t, {Fill::normal, 0, o.loud}},
              {"g", gates, raw ? t : DType::f32, g_fill},
              {"beta",
               {s.batch, s.tokens, s.value_heads},
               DType::f32,
               o.sigmoid ? Fill{} : Fill{Fill::uniform, o.collinear ? 0.9 : 0, 1}}};
  const std::vector<int64_t> state{sequences, s.value_heads, o.v_first ? s.v : s.k, o.v_first ? s.k : s.v};
  if (o.states) c.inputs.push_back({"initial_state", state, DType::f32, {Fill::normal, 0, 0.5}});
  if (raw && o.gating != kBoundedNoRate)
    c.inputs.push_back({"a_log", {s.value_heads}, DType::f32, {Fill::uniform, 0, 1}});
  if (raw) c.inputs.push_back({"dt_bias", {s.value_heads, s.k}, DType::f32, {Fill::normal, 0, 0.5}});
  if (!o.bounds.empty())
    c.inputs.push_back({"cu_seqlens", {sequences + 1}, DType::i64, {Fill::values, 0, 1, o.bounds}});
  if (!o.strengths.empty()) c.inputs[4].fill = {Fill::values, 0, 0, o.strengths};
  c.brief = o.brief;
  c.attributes = {{"scale", o.scale},
                  {"safe_gate", int64_t{o.safe}},
                  {"lower_bound", o.lower_bound},
                  {"state_v_first", int64_t{o.v_first}},
                  {"qk_l2norm", int64_t{o.norm}},
                  {"beta_sigmoid", int64_t{o.sigmoid}},
                  {"allow_neg_eigval", int64_t{o.negative}},
                  {"chunk_size", o.chunk},
                  {"gate", std::string(raw ? o.gating == kSoftplus ? "softplus" : "bounded" : "none")}};
  c.large = s.tokens * s.value_heads * s.k * s.v > (o.brief ? 20'000'000 : 1'000'000);
  // Batches of many sequences are for those of little work.
  const bool heavy = s.tokens * s.value_heads * s.k * s.v > 300'000;
  c.most_rows = c.large ? 5 : heavy ? 9 : std::max<int64_t>(18, 1200 / s.tokens);
  return c;
}

template <class Emit>
void every_case(Emit emit) {
  for (DType t : kDTypes)
    for (const Shape& s : kShapes) {
      const Config o{.brief = s.k == 100 || s.k == 256};
      emit(make(s, t, o), s, t, o);
    }
  const Shape small{1, 70, 2, 2, 32, 32}, packed{1, 223, 2, 2, 32, 32};
  const Config variants[] = {
      {.gating = kSlow, .collinear = true},
      {.gating = kMasked},
      {.gating = kSoftplus},
      {.gating = kBounded},
      {.gating = kBoundedNoRate},
      {.v_first = true},
      {.norm = true},
      {.sigmoid = true, .negative = true},
      {.states = false},
      {.chunk = 32},
      {.gating = kBounded, .v_first = true, .norm = true, .sigmoid = true},
  };
  for (DType t : {DType::f32, DType::bf16})
    for (const Config& o : variants) emit(make(small, t, o), small, t, o);
  // Once each: what is served, and values that a shortcut may take for something else.
  const std::pair<Shape, Config> brief[] = {
      {{1, 300, 1, 1, 128, 128}, {}},
      {{1, 65, 2, 4, 128, 128}, {}},
      {{1, 1025, 1, 1, 16, 16}, {}},
      {{1, 300, 1, 8, 16, 16}, {}},
      {{1, 40, 12, 12, 16, 16}, {}},
      {{1, 40, 2, 18, 16, 16}, {.norm = true}},
      {{1, 4096, 2, 2, 64, 64}, {}},
      {{1, 33, 1, 2, 32, 32}, {}},
      {{1, 97, 2, 2, 32, 16}, {.chunk = 32}},
      {{20, 5, 1, 1, 16, 16}, {}},
      {{1, 70, 1, 2, 16, 16}, {.gating = kZero}},
      {{1, 70, 1, 2, 16, 16}, {.strengths = {0}}},
      {{1, 70, 1, 2, 16, 16}, {.strengths = {1}}},
      {{1, 70, 1, 2, 16, 16}, {.strengths = {1, 0, 0.5, 0, 1, 1e-6, 0.999}}},
      {{1, 70, 1, 2, 16, 16}, {.scale = 0.3}},
      {{1, 70, 1, 2, 16, 16}, {.loud = 300}},
      {{1, 70, 1, 2, 16, 16}, {.loud = 1e-3}},
      {{1, 70, 1, 2, 16, 16}, {.gating = kSlow, .same_keys = true}},
      {{1, 70, 1, 2, 16, 16}, {.gating = kSlow, .safe = true}},
      {{1, 70, 1, 2, 16, 16}, {.gating = kBounded, .lower_bound = -1.5}},
      {{1, 70, 2, 2, 16, 16}, {.sigmoid = true}},
      {{1, 150, 1, 1, 16, 16},
       {.bounds = {0, 7, 14, 21, 28, 35, 42, 49, 56, 63, 70, 77, 84, 91, 98, 105, 112, 119, 126, 133, 150}}},
      {{1, 130, 2, 2, 32, 32}, {.v_first = true, .bounds = {0, 0, 1, 65, 130, 130}}},
  };
  for (DType t : {DType::f32, DType::bf16})
    for (auto [s, o] : brief) {
      o.brief = true;
      emit(make(s, t, o), s, t, o);
    }
  const Config sequences{.bounds = {0, 15, 79, 79, 80, 144, 223}};
  for (DType t : {DType::f32, DType::bf16}) emit(make(packed, t, sequences), packed, t, sequences);
}

// Beyond 4096 tokens, where an arithmetic may cut a sequence; what crosses the cut must matter on the other side.
std::vector<std::pair<Shape, Config>> beyond_segments() {
  const std::vector<double> faint{0.004, 0, 0.01, 0.002};
  return {{{1, 8256, 1, 1, 16, 16}, {.gating = kZero, .brief = true, .strengths = faint}},
          {{1, 4200, 1, 1, 16, 16},
           {.gating = kZero, .v_first = true, .bounds = {0, 4096, 4200}, .brief = true, .strengths = faint}},
          {{1, 4304, 1, 1, 16, 16},
           {.gating = kZero, .bounds = {0, 104, 4304}, .brief = true, .strengths = faint}}};
}

}  // namespace

void kda_fwd_cases(const CaseSink& sink) {
  for (int i = 0; i < 3; ++i) {
    const int64_t heads = sink.draw(1, 3), k = 4 * sink.draw(1, 20);
    const Shape s{sink.draw(1, 3),     sink.draw(1, 200), heads, heads * sink.draw(1, 4), k,
                  4 * sink.draw(1, 20)};
    Case c = make(s, DType::f32, {.brief = true});
    c.name += " drawn";
    c.results = {{"out", DType::f32}, {"final_state", DType::f32}};
    sink(std::move(c));
  }
  const auto emit = [&](Case c, DType t) {
    c.results = {{"out", t}, {"final_state", DType::f32}};
    sink(std::move(c));
  };
  every_case([&](Case c, const Shape&, DType t, const Config&) { emit(std::move(c), t); });
  for (const auto& [s, o] : beyond_segments()) emit(make(s, DType::f32, o), DType::f32);
}

void kda_bwd_cases(const CaseSink& sink) {
  const auto emit = [&](Case c, const Shape& s, DType t, const Config& o) {
    c.inputs.push_back({"d_out", {s.batch, s.tokens, s.value_heads, s.v}, t, {}});
    if (o.states) {
      const int64_t sequences = o.bounds.empty() ? s.batch : static_cast<int64_t>(o.bounds.size()) - 1;
      c.inputs.push_back({"d_final_state",
                          {sequences, s.value_heads, o.v_first ? s.v : s.k, o.v_first ? s.k : s.v},
                          DType::f32,
                          {Fill::normal, 0, 0.3}});
    }
    const DType raw = o.gating >= kSoftplus ? t : DType::f32;
    c.results = {{"d_q", t}, {"d_k", t}, {"d_v", t}, {"d_g", raw}, {"d_beta", DType::f32}};
    if (o.states) c.results.push_back({"d_initial_state", DType::f32});
    if (o.gating == kSoftplus || o.gating == kBounded) c.results.push_back({"d_a_log", DType::f32});
    if (o.gating >= kSoftplus) c.results.push_back({"d_dt_bias", DType::f32});
    sink(std::move(c));
  };
  every_case(emit);
  for (const auto& [s, o] : beyond_segments()) emit(make(s, DType::f32, o), s, DType::f32, o);
}

void kda_decode_cases(const CaseSink& sink) {
  struct Size {
    int64_t batch, heads, value_heads, k, v;
  };
  for (DType t : kDTypes)
    for (const Size& s :
         {Size{1, 1, 1, 128, 128}, Size{3, 2, 4, 64, 60}, Size{2, 2, 2, 100, 256}, Size{7, 1, 1, 16, 16},
          Size{2, 1, 8, 16, 16}, Size{1, 12, 12, 16, 16}, Size{40, 1, 2, 8, 12}})
      for (int64_t v_first : {0, 1}) {
        Case c;
        c.name = fmt::format("b={} h={} hv={} k={} v={} {}{}", s.batch, s.heads, s.value_heads, s.k, s.v,
                             name_of(t), v_first ? " v-first" : "");
        const double unit = 1 / std::sqrt(double(s.k));
        c.inputs = {{"q", {s.batch, s.heads, s.k}, t, {Fill::normal, 0, unit}},
                    {"k", {s.batch, s.heads, s.k}, t, {Fill::normal, 0, unit}},
                    {"v", {s.batch, s.value_heads, s.v}, t, {}},
                    {"g", {s.batch, s.value_heads, s.k}, DType::f32, {Fill::log_decay, 0, 1}},
                    {"beta", {s.batch, s.value_heads}, DType::f32, {Fill::uniform, 0, 1}},
                    {"state",
                     {s.batch, s.value_heads, v_first ? s.v : s.k, v_first ? s.k : s.v},
                     DType::f32,
                     {Fill::normal, 0, 0.5}}};
        c.results = {{"out", t}, {"state_out", DType::f32}};
        c.attributes = {{"state_v_first", v_first}};
        c.brief = s.value_heads >= 8 || s.batch >= 40;
        if (s.batch == 7)
          c.attributes.insert(c.attributes.end(),
                              {{"qk_l2norm", int64_t{1}}, {"beta_sigmoid", int64_t{1}}, {"scale", 0.4}});
        if (s.batch == 40) c.inputs[4].fill = {Fill::values, 0, 0, {1, 0, 0.5}};
        c.most_rows = s.value_heads * s.k * s.v > 4096 ? 257 : 4096;
        sink(std::move(c));
      }
}

namespace {

struct StepShape {
  int64_t batch, tokens, heads, value_heads, k, v;
  std::vector<double> rows;  // by sequence
};

// Caches that chunks of made-up tokens left.
Fill cached_rows(const StepShape& s, int64_t chunk) {
  Fill fill{Fill::values};
  const rlk::kda::CacheLayout at = rlk::kda::cache_layout(s.k, s.v, chunk);
  for (std::size_t n = 0; n < s.rows.size(); ++n)
    for (int64_t hv = 0; hv < s.value_heads; ++hv) {
      kda_step::Chunk<kda_step::Double> open{at};
      const auto number = [&](int64_t i, int64_t d) {
        return std::sin(double(i * 37 + d * 11 + hv * 5 + 3) + 0.7 * double(n));
      };
      for (int64_t i = 0; i < static_cast<int64_t>(s.rows[n]); ++i) {
        using Vector = kda_step::Values<double>;
        kda_step::Token<double> t{Vector(at.keys), Vector(at.keys), Vector(at.values), Vector(at.keys)};
        for (int64_t d = 0; d < s.k; ++d) {
          t.k[d] = number(i, d) / std::sqrt(double(s.k));
          t.decay[d] = std::exp(-0.2 * std::fabs(number(i, 2 * d)));
        }
        for (int64_t j = 0; j < s.v; ++j) t.v[j] = number(2 * i, j);
        t.beta = 0.5 + 0.4 * number(i, 1);
        open.row(i, t);
      }
      fill.list.insert(fill.list.end(), open.cache.list.begin(), open.cache.list.end());
    }
  return fill;
}

Case step_case(const StepShape& s, DType t, const Config& o) {
  Case c = make({s.batch, s.tokens, s.heads, s.value_heads, s.k, s.v}, t, o);
  c.name += fmt::format(" rows {}", fmt::join(s.rows, ","));
  for (CaseTensor& x : c.inputs)
    if (x.argument == "initial_state") x.argument = "state";
  const auto sequences = static_cast<int64_t>(s.rows.size());
  c.inputs.push_back({"rows", {sequences}, o.brief ? DType::i32 : DType::i64, {Fill::values, 0, 1, s.rows}});
  c.inputs.push_back({"cache",
                      {sequences, s.value_heads, rlk::kda::cache_layout(s.k, s.v, o.chunk).size},
                      DType::f32,
                      cached_rows(s, o.chunk)});
  c.results = {{"out", t}};
  c.most_rows = 18;
  return c;
}

}  // namespace

void kda_step_cases(const CaseSink& sink) {
  for (DType t : kDTypes) {
    sink(step_case({3, 1, 1, 1, 32, 32, {0, 17, 31}}, t, {.chunk = 32}));
    sink(step_case({2, 3, 2, 4, 16, 16, {14, 32}}, t,
                   {.gating = kBounded, .norm = true, .sigmoid = true, .chunk = 32}));
    sink(step_case({2, 1, 1, 2, 16, 20, {40, 63}}, t, {.v_first = true}));
    sink(step_case({2, 1, 1, 2, 128, 128, {47, 64}}, t, {.gating = kBounded, .norm = true, .sigmoid = true}));
  }
  const std::pair<StepShape, Config> brief[] = {
      {{1, 64, 1, 1, 16, 16, {64}}, {}},
      {{1, 1, 1, 1, 128, 128, {50}}, {}},
      {{1, 1, 2, 2, 60, 12, {64}}, {.gating = kSoftplus, .negative = true}},
      {{1, 32, 1, 1, 16, 16, {0}}, {.gating = kMasked, .chunk = 32}},
      {{1, 9, 1, 2, 16, 16, {15, 16, 3, 32}}, {.chunk = 32, .bounds = {0, 2, 2, 8, 9}}},
      {{1, 2, 1, 1, 16, 16, {5}}, {.gating = kBoundedNoRate, .chunk = 32, .scale = 0.3}},
  };
  for (DType t : {DType::f32, DType::bf16})
    for (auto [s, o] : brief) {
      o.brief = true;
      sink(step_case(s, t, o));
    }
}

namespace {
constexpr struct {
  int64_t rows, heads, width;
  double loud;  // how large gates are
  bool brief;
} kGates[] = {{65, 3, 60, 3, false}, {300, 12, 8, 3, true}, {5, 1, 128, 40, true}, {5, 40, 4, 1e-3, true}};

Case gate_case(DType t, const char* gate, int64_t rows, int64_t heads, int64_t width, double loud = 3) {
  Case c;
  c.name = fmt::format("rows={} hv={} k={} {} {}", rows, heads, width, gate, name_of(t));
  c.inputs = {{"g", {rows, heads, width}, t, {Fill::normal, 0, loud}},
              {"a_log", {heads}, DType::f32, {Fill::uniform, 0, 2}},
              {"dt_bias", {heads, width}, DType::f32, {}}};
  c.attributes = {{"gate", std::string(gate)}};
  return c;
}
}  // namespace

void kda_gate_cases(const CaseSink& sink) {
  for (DType t : kDTypes)
    for (const char* gate : {"softplus", "bounded"})
      for (const auto& s : kGates) {
        Case c = gate_case(t, gate, s.rows, s.heads, s.width, s.loud);
        c.results = {{"out", DType::f32}};
        c.brief = s.brief;
        sink(std::move(c));
      }
}

void kda_gate_bwd_cases(const CaseSink& sink) {
  for (DType t : kDTypes)
    for (const char* gate : {"softplus", "bounded"})
      for (const auto& s : kGates) {
        Case c = gate_case(t, gate, s.rows, s.heads, s.width, s.loud);
        c.inputs.push_back({"d_out", {s.rows, s.heads, s.width}, DType::f32, {}});
        c.results = {{"d_g", t}, {"d_a_log", DType::f32}, {"d_dt_bias", DType::f32}};
        c.brief = s.brief;
        sink(std::move(c));
      }
}

namespace {
Bound rms(const BoundQuery& q, double sixteen_bit) {
  if (q.input == DType::f32) return {Bound::rms, q.arithmetic == "fma64" ? 1e-6 : 1e-4};
  return {Bound::rms, sixteen_bit};
}
}  // namespace

Bound kda_fwd_bound(const BoundQuery& q) { return rms(q, 0.005); }

Bound kda_bwd_bound(const BoundQuery& q) {
  if (q.result == "d_g" || q.result == "d_beta") return rms(q, 0.02);
  return rms(q, q.result == "d_a_log" ? 0.003 : 0.008);
}

Bound kda_decode_bound(const BoundQuery& q) { return rms(q, 0.005); }
Bound kda_step_bound(const BoundQuery& q) { return rms(q, 0.005); }
// A gate far in the tail is an exponential of a large fp32 argument, whose own rounding is many ulps of the
// result: against the row's peak it is nothing.
Bound kda_gate_bound(const BoundQuery&) { return {Bound::elementwise, 0x1p-20, 8}; }
Bound kda_gate_bwd_bound(const BoundQuery& q) { return rms(q, 0.008); }

}  // namespace rlk::registry
