// Calls of attention_bwd worth trying: what the forward's cases try, with lse and out of their likely size; gradients are a
// function of these, consistent or not.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Shape {
  int64_t batch, queries, keys, heads, kv_heads, d, dv;
};

struct Config {
  const char* name = "dense";
  bool causal = true, sinks = false, lse = false, wide = false, brief = false, sampled = false, ruled = false;
  int64_t window = 0;
  double softcap = 0, scale = 0;
  Fill q{}, k{}, d_out{}, lse_fill{};
  std::vector<double> lengths{};   // kv_len
  std::vector<double> prefixes{};  // prefix_of
};

void set_options(Case& c, const Config& o, DType t, int64_t keys) {
  const std::vector<int64_t> q = c.inputs[0].shape;
  std::vector<int64_t> out = q, rows(q.begin(), q.end() - 1);
  out.back() = c.inputs[2].shape.back();
  const double likely = std::log(static_cast<double>(keys) + 1);
  const Fill lse = o.lse_fill.kind == Fill::normal ? Fill{Fill::uniform, likely, likely + 1} : o.lse_fill;
  c.inputs.push_back({"out", out, t, {Fill::normal, 0, 0.3}});
  c.inputs.push_back({"lse", rows, DType::f32, lse});
  c.inputs.push_back({"d_out", out, o.wide ? DType::f32 : t, o.d_out});
  if (o.lse) c.inputs.push_back({"d_lse", rows, DType::f32});
  if (o.sinks) c.inputs.push_back({"sinks", {q[q.size() - 2]}, DType::f32});
  c.attributes = {
      {"causal", int64_t{o.causal}}, {"window", o.window}, {"softcap", o.softcap}, {"scale", o.scale}};
  const DType result = o.wide ? DType::f32 : t;
  c.results = {{"d_q", result}, {"d_k", result}, {"d_v", result}};
  if (o.sinks) c.results.push_back({"d_sinks", DType::f32});
  c.brief = o.brief, c.sampled = o.sampled, c.ruled = o.ruled;
  c.reduction = keys;
}

void dense(const CaseSink& sink, const Shape& s, DType t, const Config& o = {}) {
  Case c;
  c.name = fmt::format("{} b={} s={} l={} h={}/{} d={}/{}{}{} {}", o.name, s.batch, s.queries, s.keys,
                       s.heads, s.kv_heads, s.d, s.dv, o.causal ? "" : " whole",
                       o.window ? fmt::format(" window={}", o.window) : "", name_of(t));
  c.inputs = {{"q", {s.batch, s.queries, s.heads, s.d}, t, o.q},
              {"k", {s.batch, s.keys, s.kv_heads, s.d}, t, o.k},
              {"v", {s.batch, s.keys, s.kv_heads, s.dv}, t}};
  set_options(c, o, t, s.keys);
  if (!o.lengths.empty())
    c.inputs.push_back({"kv_len", {s.batch}, DType::i32, {Fill::values, 0, 0, o.lengths}});
  c.large = s.batch * s.queries * s.keys * s.heads * (s.d + s.dv) > 5'000'000;
  c.most_rows = std::max<int64_t>(5, 150'000 / (s.queries * s.keys * s.heads * (s.d + s.dv) / 4 + 1));
  sink(std::move(c));
}

struct Packed {
  Shape shape;
  std::vector<double> cu_q, cu_k;
};
const Packed kPacked{{4, 153, 294, 4, 2, 32, 16}, {0, 130, 130, 131, 150}, {0, 130, 135, 264, 290}},
    kLittle{{4, 16, 40, 2, 1, 16, 16}, {0, 7, 7, 8, 14}, {0, 9, 12, 21, 37}},
    kShared{{5, 60, 200, 4, 2, 32, 16}, {0, 20, 24, 41, 42, 55}, {0, 140, 144, 161, 162, 190}};

// Sequences of different lengths in one batch, an empty one, and rows of no sequence behind them.
void packed(const CaseSink& sink, DType t, const Config& o, const Packed& of = kPacked) {
  const Shape& s = of.shape;
  Case c;
  c.name =
      fmt::format("{} packed h={}/{} d={}/{}{}{} {}", o.name, s.heads, s.kv_heads, s.d, s.dv,
                  o.causal ? "" : " whole", o.window ? fmt::format(" window={}", o.window) : "", name_of(t));
  c.inputs = {{"q", {s.queries, s.heads, s.d}, t},
              {"k", {s.keys, s.kv_heads, s.d}, t},
              {"v", {s.keys, s.kv_heads, s.dv}, t}};
  set_options(c, o, t, s.keys);
  c.inputs.push_back({"cu_q", {s.batch + 1}, DType::i64, {Fill::values, 0, 0, of.cu_q}});
  c.inputs.push_back({"cu_k", {s.batch + 1}, DType::i32, {Fill::values, 0, 0, of.cu_k}});
  if (!o.lengths.empty())
    c.inputs.push_back({"kv_len", {s.batch}, DType::i64, {Fill::values, 0, 0, o.lengths}});
  if (!o.prefixes.empty())
    c.inputs.push_back({"prefix_of", {s.batch}, DType::i64, {Fill::values, 0, 0, o.prefixes}});
  for (const char* name : {"q", "k", "v", "out", "lse", "d_out", "d_lse", "d_q", "d_k", "d_v"})
    c.batch_axes.emplace_back(name, -1);
  c.brief = true;
  sink(std::move(c));
}

Fill listed(double usual, double first, double second) {
  Fill fill{Fill::values};
  for (int i = 0; i < 53; ++i) fill.list.push_back(usual + std::cos(i * i * 3.7));
  fill.list[17] = first, fill.list[40] = second;
  return fill;
}

// Scores so far apart that weights go down to 2^-149: of the least, d_v has nothing else. Where they
// become zero is an id's own affair.
void faint(const CaseSink& sink, DType t) {
  Config o{.name = "faint", .brief = true, .ruled = true, .q = {Fill::constant, 1}, .k = {Fill::values}};
  for (int key = 0; key < 16; ++key) o.k.list.insert(o.k.list.end(), 16, -1.71875 * key);
  o.d_out = {Fill::normal, 0, 1024}, o.lse_fill = {Fill::constant, 0.25};
  dense(sink, {1, 5, 16, 1, 1, 16, 16}, t, o);
}

// Every option at once, and each layout with as little work as lets further options be tried on it.
void combined_cases(const CaseSink& sink, DType t) {
  Config all{
      .name = "all", .sinks = true, .lse = true, .brief = true, .window = 40, .softcap = 3, .scale = 0.2};
  dense(sink, {1, 37, 150, 4, 2, 16, 32}, t, all);
  packed(sink, t, all);
  Config little{.name = "little", .brief = true};
  for (int64_t window : {0, 5}) {
    little.window = window;
    for (bool sinks : {false, true}) {
      little.name = sinks ? "little sinks" : "little", little.sinks = sinks;
      dense(sink, {2, 7, 20, 2, 1, 16, 16}, t, little);
      packed(sink, t, little, kLittle);
    }
  }
  // Rows of a tile and its half, at widths for which kernels have other tiles.
  for (int64_t queries : {40, 100, 170})
    dense(sink, {1, queries, queries + 3, 1, 1, 64, 64}, t, {.name = "between tiles", .brief = true});
}

void small_cases(const CaseSink& sink, DType t) {
  dense(sink, {2, 2, 33, 2, 1, 16, 16}, t);
  for (int64_t keys : {1, 127, 128, 129})
    dense(sink, {2, 2, keys, 2, 1, 32, 32}, t, {.name = "dense", .brief = keys != 129});
  dense(sink, {2, 20, 20, 4, 4, 64, 64}, t, {.name = "prefill"});
  dense(sink, {1, 129, 129, 1, 1, 16, 16}, t, {.name = "prefill", .brief = true});
  // The second tile's first query is in the middle of a group of 16.
  dense(sink, {1, 140, 144, 1, 1, 16, 16}, t, {.name = "chunk", .brief = true});
  dense(sink, {2, 5, 150, 3, 1, 16, 48}, t, {.name = "sinks", .sinks = true, .lse = true});
  dense(sink, {1, 9, 140, 16, 2, 16, 16}, t, {.name = "groups", .brief = true});
  dense(sink, {2, 3, 130, 2, 2, 16, 16}, t, {.name = "whole", .causal = false, .brief = true});
  dense(sink, {2, 3, 40, 2, 1, 16, 16}, t, {.name = "cap", .brief = true, .softcap = 2, .scale = 0.7});
  dense(sink, {1, 9, 300, 2, 1, 16, 16}, t, {.name = "window", .sinks = true, .brief = true, .window = 128});
  dense(sink, {1, 140, 140, 1, 1, 16, 16}, t, {.name = "window", .brief = true, .window = 1});
  Config lengths{.name = "lengths", .sinks = true};
  lengths.lengths = {20, 0, 2};
  dense(sink, {3, 4, 20, 2, 1, 32, 16}, t, lengths);
  dense(sink, {2, 4, 3, 2, 1, 32, 16}, t, {.name = "more queries than keys", .brief = true});
  dense(sink, {2, 0, 3, 2, 1, 32, 16}, t, {.name = "no queries", .sinks = true, .brief = true});
  dense(sink, {2, 3, 50, 2, 1, 16, 32}, t, {.name = "fp32 gradients", .wide = true, .brief = true});
  const double inf = std::numeric_limits<double>::infinity();
  Config none{.name = "rows of no key", .sinks = true, .brief = true}, special = none;
  none.lse_fill = listed(4, -inf, -inf);
  dense(sink, {2, 7, 60, 2, 1, 16, 16}, t, none);
  special.name = "special", special.causal = false, special.d_out = listed(0, inf, NAN);
  dense(sink, {2, 7, 60, 2, 2, 16, 16}, t, special);
  faint(sink, t);
  packed(sink, t, {});
  Config bare{.name = "bare", .causal = false, .sinks = true, .lse = true};
  bare.lengths = {129, 0, 100, 26};
  packed(sink, t, bare);
  // Keys of the first sequence come before those of three others, whose queries go on with its sums.
  Config shared{.name = "prefix", .sinks = true};
  shared.prefixes = {-1, 0, 0, -1, 0};
  packed(sink, t, shared, kShared);
  shared.window = 30;
  packed(sink, t, shared, kShared);
  shared.window = 0, shared.causal = false, shared.lengths = {133, 137, 120, 1, 140};
  packed(sink, t, shared, kShared);
  combined_cases(sink, t);
  dense(sink, {1, sink.draw(1, 40), sink.draw(1, 150), 4, 2, 48, 80}, t,
        {.name = "drawn", .brief = true, .window = sink.draw(0, 150)});
}

}  // namespace

void attention_bwd_cases(const CaseSink& sink) {
  for (DType t : kDTypes) small_cases(sink, t);
  for (DType t : {DType::bf16, DType::f16}) {
    constexpr int64_t kWidths[][2] = {{96, 96}, {128, 128}, {256, 256}, {192, 128}, {576, 512}};
    for (const auto& [d, dv] : kWidths)
      dense(sink, {1, 5, 140, 2, 1, d, dv}, t, {.name = "width", .brief = true});
  }
  dense(sink, {1, 16, 260, 8, 2, 128, 128}, DType::bf16, {.name = "production", .sampled = true});
  dense(sink, {1, 5, 1100, 8, 1, 64, 64}, DType::bf16,
        {.name = "production", .sinks = true, .sampled = true, .window = 1024});
}

// P and dS are rounded to v's dtype, which sums over keys and rows smooth.
Bound attention_bwd_bound(const BoundQuery& q) {
  if (q.result == "d_sinks") return {Bound::peak, 2e-5};
  const double value = q.input == DType::bf16 ? 2.5e-2 : q.input == DType::f16 ? 6e-3 : 2e-5;
  return {Bound::peak, value};
}

}  // namespace rlk::registry
