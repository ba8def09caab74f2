// Calls of qk_norm_rope worth trying: heads of every size around the vectors of a row, both pairings, heads that turn in part,
// with and without norms, and caches, of fp8 too, whose slots lie in any order, nowhere and out of range.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Shape {
  int64_t tokens, q_heads, k_heads, dims;
  int64_t turned = 0;  // 0: all of them
};
struct Config {
  const char* name = "plain";
  bool norm = true, wide = false, table_of_data = false;  // wide: fp32 weights
  bool offset = false, early = false, adjacent = false;
  std::vector<double> slots{};
  int64_t v_dims = 0;  // beside slots; 0: k's
  bool keys_only = false;
  int64_t factors = -1;  // of fp8 caches: how many there are; 0: none, -1: the caches have q's dtype
  bool brief = false;
  Fill x{};
};

constexpr int64_t kRows = 40, kPlaces = 23;

// The first slots, and others behind them: no two tokens have one slot in a call that is made from this one either.
std::vector<double> distinct(const std::vector<double>& first) {
  constexpr int64_t kMostTokens = 1 << 17;
  std::vector<double> all = first;
  for (int64_t slot = 0; slot < kMostTokens; ++slot)
    if (std::find(first.begin(), first.end(), static_cast<double>(slot)) == first.end())
      all.push_back(static_cast<double>(slot));
  return all;
}

// Caches behind slots. Factors are no powers of two, so that products are rounded; keys' first takes some beyond 448.
void use_caches(Case& c, const Shape& s, DType t, const Config& o) {
  const DType cache = o.factors < 0 ? t : DType::f8_e4m3;
  const auto add = [&](const char* name, const char* factors, int64_t dims, double first) {
    c.inputs.push_back({name, {kPlaces, s.k_heads, dims}, cache});
    if (o.factors <= 0) return;
    Fill fill{Fill::values};
    for (int64_t h = 0; h < o.factors; ++h) fill.list.push_back(first + 0.0317 * static_cast<double>(h));
    c.inputs.push_back({factors, {o.factors}, DType::f32, fill});
  };
  add("k_cache", "k_scale", s.dims, 0.0047);
  if (o.keys_only) return;
  const int64_t v_dims = o.v_dims ? o.v_dims : s.dims;
  c.inputs.push_back({"v", {s.tokens, s.k_heads, v_dims}, t, o.x, {}, -1});
  add("v_cache", "v_scale", v_dims, 0.7317);
}

void forward(const CaseSink& sink, const Shape& s, DType t, const Config& o) {
  Case c;
  const int64_t turned = s.turned ? s.turned : s.dims;
  c.name = fmt::format("{} t={} q={} k={} d={}/{} {}", o.name, s.tokens, s.q_heads, s.k_heads, turned, s.dims,
                       name_of(t));
  c.attributes = {{"weight_offset", int64_t{o.offset}},
                  {"cast", std::string(o.early ? "early" : "end")},
                  {"pairing", std::string(o.adjacent ? "adjacent" : "half")}};
  c.reduction = s.dims;
  c.brief = o.brief;
  // Tokens that share a cache are rows of one state.
  const int32_t axis = o.slots.empty() ? -3 : -1;
  const DType table = o.table_of_data ? t : DType::f32, wide = o.wide ? DType::f32 : t;
  const Fill turns{Fill::uniform, -1.5, 1.5};
  c.inputs = {
      {"q", {s.tokens, s.q_heads, s.dims}, t, o.x, {}, axis},
      {"k", {s.tokens, s.k_heads, s.dims}, t, o.x, {}, axis},
      {"cos", {kRows, turned / 2}, table, turns},
      {"sin", {kRows, turned / 2}, table, turns},
      {"positions", {s.tokens}, o.wide ? DType::i64 : DType::i32, {Fill::integers, 0, kRows}, {}, axis}};
  if (o.norm) {
    c.inputs.push_back({"q_weight", {s.dims}, wide});
    c.inputs.push_back({"k_weight", {s.dims}, wide});
  }
  c.results = {{"q_out", t}, {"k_out", t}};
  if (!o.slots.empty()) {
    c.inputs.push_back({"slots",
                        {s.tokens},
                        o.wide ? DType::i32 : DType::i64,
                        {Fill::values, 0, 0, distinct(o.slots)},
                        {},
                        axis});
    use_caches(c, s, t, o);
    c.batch_axes = {{"q_out", -1}, {"k_out", -1}};
  }
  sink(std::move(c));
}

Fill special() {
  constexpr double inf = std::numeric_limits<double>::infinity();
  return {Fill::values, 0, 0, {1, -2, 0.5, inf, 3, 1, 1,     1,      0,     -0.0,
                               0, 0,  1,   NAN, 1, 2, 1e-30, -1e-30, 2e-30, 0}};
}

}  // namespace

void qk_norm_rope_cases(const CaseSink& sink) {
  for (DType t : kDTypes) {
    forward(sink, {5, 4, 2, 64}, t, {});
    forward(sink, {3, 3, 1, 128}, t, {.name = "llama", .norm = false});
    forward(sink, {3, 2, 2, 256}, t, {.name = "early", .offset = true, .early = true});
    forward(sink, {4, 3, 2, 20}, t, {.name = "odd pairs", .wide = true});
    forward(sink, {4, 2, 1, 96, 32}, t, {.name = "in part", .norm = false, .adjacent = true});
    forward(sink, {4, 2, 1, 44, 12}, t, {.name = "normed, in part", .early = true});
    forward(sink, {4, 2, 1, 80}, t, {.name = "adjacent", .table_of_data = true, .adjacent = true});
    forward(sink, {6, 4, 2, 64}, t, {.name = "cached", .slots = {7, 22, 0, -1, 8, 23}});
    forward(sink, {5, 2, 2, 128}, t,
            {.name = "cached early", .early = true, .slots = {3, 2, 1, 0, 11}, .v_dims = 64, .brief = true});
    forward(sink, {4, 2, 1, 36}, t,
            {.name = "cached, wide", .wide = true, .slots = {-5, 9, 1e9, 10}, .v_dims = 200, .brief = true});
    forward(sink, {1, 16, 8, 128}, t, {.name = "decode", .slots = {21}, .brief = true});
    forward(sink, {3, 2, 1, 48}, t,
            {.name = "keys alone", .norm = false, .slots = {4, 17, 5}, .keys_only = true, .brief = true});
    forward(sink, {6, 4, 2, 64}, t, {.name = "fp8", .slots = {7, 22, 0, -1, 8, 23}, .factors = 2});
    forward(
        sink, {5, 3, 2, 128}, t,
        {.name = "fp8 early", .early = true, .slots = {3, 2, 1}, .v_dims = 72, .factors = 1, .brief = true});
    forward(
        sink, {4, 2, 1, 80, 36}, t,
        {.name = "fp8 adjacent", .norm = false, .adjacent = true, .slots = {9}, .factors = 0, .brief = true});
    forward(sink, {4, 2, 3, 256}, t,
            {.name = "fp8 wide",
             .wide = true,
             .slots = {-5, 9, 1e9, 10},
             .v_dims = 200,
             .factors = 3,
             .brief = true});
    forward(sink, {3, 2, 1, 48}, t,
            {.name = "fp8 keys alone", .slots = {4, 17, 5}, .keys_only = true, .factors = 1, .brief = true});
    forward(
        sink, {5, 2, 1, 20, 4}, t,
        {.name = "fp8 special", .norm = false, .slots = {4}, .factors = 0, .brief = true, .x = special()});
    forward(sink, {150, 5, 3, 32}, t, {.name = "many tokens", .brief = true});
    forward(sink, {0, 4, 2, 64}, t, {.name = "no tokens", .brief = true});
    forward(sink, {5, 0, 2, 64}, t, {.name = "no queries", .brief = true});
    forward(sink, {7, 1, 1, 2}, t, {.name = "one pair", .brief = true});
    forward(sink, {5, 2, 1, 4}, t, {.name = "special", .brief = true, .x = special()});
    forward(sink, {3, 2, 1, 64}, t, {.name = "loud channel", .brief = true, .x = {Fill::heavy_tailed}});
    forward(sink, {sink.draw(1, 9), sink.draw(1, 9), sink.draw(1, 4), 2 * sink.draw(1, 128)}, t,
            {.name = "drawn", .brief = true});
  }
}

// Where a norm's value lies close to the middle of two of q's dtype it is rounded to either of them, early and again at its end:
// some two ulps, of which a turn makes as many parts of the pair's size.
Bound qk_norm_rope_bound(const BoundQuery& q) {
  const double half = q.input == DType::bf16 ? 0x1p-5 : q.input == DType::f16 ? 0x1p-8 : 0x1p-19;
  return {Bound::elementwise, half, q.output == DType::f32 ? 4.0 : 1.0};
}

}  // namespace rlk::registry
