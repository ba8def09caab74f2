// Calls of the KDA ops worth trying: every tail length, width and grouping, packed sequences with an empty
// one, every gate, both layouts, and data that breaks careless inverses and careless exponentials.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

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

enum Gating { kGiven, kSlow, kMasked, kSoftplus, kBounded, kBoundedNoRate };
constexpr const char* kGatingNames[] = {"given", "slow", "masked", "softplus", "bounded", "bounded-no-rate"};

struct Options {
  Gating gating = kGiven;
  bool v_first = false, norm = false, sigmoid = false, negative = false, states = true, collinear = false;
  int64_t chunk = 64;
  std::vector<double> bounds{};  // cu_seqlens
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

Case make(const Shape& s, DType t, const Options& o) {
  Case c;
  const int64_t sequences = o.bounds.empty() ? s.batch : static_cast<int64_t>(o.bounds.size()) - 1;
  c.name = fmt::format(
      "b={} t={} h={} hv={} k={} v={} {} gate={}{}{}{}{}{}{}", s.batch, s.tokens, s.heads, s.value_heads, s.k,
      s.v, name_of(t), kGatingNames[o.gating], o.v_first ? " v-first" : "", o.norm ? " norm" : "",
      o.sigmoid ? (o.negative ? " sigmoid2" : " sigmoid") : "", o.collinear ? " collinear" : "",
      o.bounds.empty() ? "" : " packed", o.chunk == 64 ? "" : " chunk=32");
  const double unit = 1 / std::sqrt(double(s.k));
  const std::vector<int64_t> keys{s.batch, s.tokens, s.heads, s.k},
      gates{s.batch, s.tokens, s.value_heads, s.k};
  Fill k_fill{Fill::normal, 0, unit}, g_fill{Fill::log_decay, 0, 1};
  if (o.collinear) k_fill = collinear_keys(s.batch * s.tokens * s.heads, s.k);
  if (o.gating == kSlow) g_fill = {Fill::log_decay, 0, 0.005};
  if (o.gating == kMasked) g_fill = masked_gates(s.batch * s.tokens * s.value_heads * s.k);
  const bool raw = o.gating >= kSoftplus;
  if (raw) g_fill = {};
  c.inputs = {{"q", keys, t, o.norm ? Fill{} : Fill{Fill::normal, 0, unit}},
              {"k", keys, t, o.norm ? Fill{} : k_fill},
              {"v", {s.batch, s.tokens, s.value_heads, s.v}, t, {}},
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
  c.attributes = {{"state_v_first", int64_t{o.v_first}},
                  {"qk_l2norm", int64_t{o.norm}},
                  {"beta_sigmoid", int64_t{o.sigmoid}},
                  {"allow_neg_eigval", int64_t{o.negative}},
                  {"chunk_size", o.chunk},
                  {"gate", std::string(raw ? o.gating == kSoftplus ? "softplus" : "bounded" : "none")}};
  c.large = s.tokens * s.value_heads * s.k * s.v > 1'000'000;
  c.most_rows = c.large ? 5 : std::max<int64_t>(17, 4096 / s.tokens);
  return c;
}

template <class Emit>
void every_case(Emit emit) {
  for (DType t : kDTypes)
    for (const Shape& s : kShapes) emit(make(s, t, {}), s, t, Options{});
  const Shape small{1, 70, 2, 2, 32, 32}, packed{1, 223, 2, 2, 32, 32};
  const Options variants[] = {
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
    for (const Options& o : variants) emit(make(small, t, o), small, t, o);
  const Options sequences{.bounds = {0, 15, 79, 79, 80, 144, 223}};
  for (DType t : {DType::f32, DType::bf16}) emit(make(packed, t, sequences), packed, t, sequences);
}

}  // namespace

void kda_fwd_cases(const CaseSink& sink) {
  every_case([&](Case c, const Shape&, DType t, const Options&) {
    c.results = {{"out", t}, {"final_state", DType::f32}};
    sink(std::move(c));
  });
}

void kda_bwd_cases(const CaseSink& sink) {
  every_case([&](Case c, const Shape& s, DType t, const Options& o) {
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
  });
}

void kda_decode_cases(const CaseSink& sink) {
  struct Size {
    int64_t batch, heads, value_heads, k, v;
  };
  for (DType t : kDTypes)
    for (const Size& s :
         {Size{1, 1, 1, 128, 128}, Size{3, 2, 4, 64, 60}, Size{2, 2, 2, 100, 256}, Size{7, 1, 1, 16, 16}})
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
        c.most_rows = s.value_heads * s.k * s.v > 4096 ? 257 : 4096;
        sink(std::move(c));
      }
}

namespace {
Case gate_case(DType t, const char* gate, int64_t rows, int64_t heads, int64_t width) {
  Case c;
  c.name = fmt::format("rows={} hv={} k={} {} {}", rows, heads, width, gate, name_of(t));
  c.inputs = {{"g", {rows, heads, width}, t, {Fill::normal, 0, 3}},
              {"a_log", {heads}, DType::f32, {Fill::uniform, 0, 2}},
              {"dt_bias", {heads, width}, DType::f32, {}}};
  c.attributes = {{"gate", std::string(gate)}};
  return c;
}
}  // namespace

void kda_gate_cases(const CaseSink& sink) {
  for (DType t : kDTypes)
    for (const char* gate : {"softplus", "bounded"}) {
      Case c = gate_case(t, gate, 65, 3, 60);
      c.results = {{"out", DType::f32}};
      sink(std::move(c));
    }
}

void kda_gate_bwd_cases(const CaseSink& sink) {
  for (DType t : kDTypes)
    for (const char* gate : {"softplus", "bounded"}) {
      Case c = gate_case(t, gate, 65, 3, 60);
      c.inputs.push_back({"d_out", {65, 3, 60}, DType::f32, {}});
      c.results = {{"d_g", t}, {"d_a_log", DType::f32}, {"d_dt_bias", DType::f32}};
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
// A gate far in the tail is an exponential of a large fp32 argument, whose own rounding is many ulps of the
// result: against the row's peak it is nothing.
Bound kda_gate_bound(const BoundQuery&) { return {Bound::elementwise, 0x1p-20, 8}; }
Bound kda_gate_bwd_bound(const BoundQuery& q) { return rms(q, 0.008); }

}  // namespace rlk::registry
