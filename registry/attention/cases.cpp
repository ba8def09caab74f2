// Calls of attention worth trying: lengths around tiles and splits, groups of heads, windows, pages, sinks, and data
// whose scores are Inf, NaN, or far apart; dense and paged batches, whose sequences are rows, and packed ones.
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
  bool causal = true, sinks = false, brief = false, sampled = false;
  int64_t window = 0, split = 1024, page = 0;
  double softcap = 0, scale = 0;
  Fill q{}, k{}, v{};
  std::vector<double> lengths{};          // kv_len
  std::vector<double> firsts{}, lasts{};  // k_first and k_last, of attention_part
  std::vector<double> prefixes{};         // prefix_of
  int64_t factors = -1;  // of an fp8 cache: how many there are; 0: none, -1: the cache is no fp8
};

void set_options(Case& c, const Config& o) {
  c.attributes = {{"causal", int64_t{o.causal}},
                  {"window", o.window},
                  {"split", o.split},
                  {"softcap", o.softcap},
                  {"scale", o.scale}};
  c.brief = o.brief;
  c.sampled = o.sampled;
  if (o.sinks) c.inputs.push_back({"sinks", {c.inputs[0].shape[c.inputs[0].shape.size() - 2]}, DType::f32});
}

// Factors that no number of few bits has, so that every product is rounded.
void use_fp8(Case& c, const Config& o) {
  if (o.factors < 0) return;
  for (std::size_t t : {1, 2}) c.inputs[t].dtype = DType::f8_e4m3;
  Fill keys{Fill::values}, values{Fill::values};
  for (int64_t h = 0; h < o.factors; ++h) {
    const auto x = static_cast<double>(h);
    keys.list.push_back(0.7317 + 0.1 * x), values.list.push_back(1.3071 - 0.2 * x);
  }
  if (o.factors == 0) return;
  c.inputs.push_back({"k_scale", {o.factors}, DType::f32, keys});
  c.inputs.push_back({"v_scale", {o.factors}, DType::f32, values});
}

// Every second page of a pool, last one first, so that half of the pool is nobody's and holds NaN.
void use_pages(Case& c, const Shape& s, int64_t page) {
  const int64_t most = (s.keys + page - 1) / page, used = s.batch * most;
  Fill table{Fill::values};
  for (int64_t i = 0; i < used; ++i) table.list.push_back(static_cast<double>(2 * (used - 1 - i)));
  for (std::size_t t : {1, 2}) {
    c.inputs[t].shape = {2 * used, page, s.kv_heads, c.inputs[t].shape.back()};
    const int64_t room = page * s.kv_heads * c.inputs[t].shape.back();
    Fill& fill = c.inputs[t].fill;
    if (fill.kind == Fill::normal && 2 * used * room < 200'000) {
      fill.kind = Fill::values;
      for (int64_t i = 0; i < 2 * used * room; ++i) {
        const int64_t x = i * 37 + i / 11;
        fill.list.push_back(i / room % 2 ? std::nan("") : std::sin(static_cast<double>(x)));
      }
    }
  }
  c.inputs.push_back({"block_table", {s.batch, most}, DType::i32, table});
  c.batch_axes = {{"k", -1}, {"v", -1}};
}

void as_part(Case& c, int64_t sequences, const Config& o) {
  c.inputs.push_back({"k_first", {sequences}, DType::i64, {Fill::values, 0, 0, o.firsts}});
  if (!o.lasts.empty())
    c.inputs.push_back({"k_last", {sequences}, DType::i32, {Fill::values, 0, 0, o.lasts}});
  c.results = {{"partials", DType::f32}};
}

void dense(const CaseSink& sink, const Shape& s, DType t, const Config& o) {
  Case c;
  c.name = fmt::format("{} b={} s={} l={} h={}/{} d={}/{} split={}{}{}{} {}", o.name, s.batch, s.queries,
                       s.keys, s.heads, s.kv_heads, s.d, s.dv, o.split, o.causal ? "" : " whole",
                       o.window ? fmt::format(" window={}", o.window) : "",
                       o.page ? fmt::format(" page={}", o.page) : "", name_of(t));
  c.inputs = {{"q", {s.batch, s.queries, s.heads, s.d}, t, o.q},
              {"k", {s.batch, s.keys, s.kv_heads, s.d}, t, o.k},
              {"v", {s.batch, s.keys, s.kv_heads, s.dv}, t, o.v}};
  set_options(c, o);
  std::vector<double> lengths = o.lengths;
  if (o.page) use_pages(c, s, o.page);
  if (o.page && lengths.empty()) lengths.assign(1, static_cast<double>(s.keys));
  if (!lengths.empty()) c.inputs.push_back({"kv_len", {s.batch}, DType::i32, {Fill::values, 0, 0, lengths}});
  use_fp8(c, o);
  c.results = {{"out", t}, {"lse", DType::f32}};
  if (!o.firsts.empty()) as_part(c, s.batch, o);
  c.reduction = s.keys;
  c.large = s.batch * s.queries * s.keys * s.heads * (s.d + s.dv) > 20'000'000;
  c.most_rows = std::max<int64_t>(5, 4'000'000 / (s.queries * s.keys * s.heads * (s.d + s.dv) / 4 + 1));
  sink(std::move(c));
}

struct Packed {
  Shape shape;
  std::vector<double> cu_q, cu_k;
};
const Packed kPacked{{4, 150, 290, 4, 2, 64, 48}, {0, 130, 130, 131, 150}, {0, 130, 135, 264, 290}},
    kLittle{{4, 14, 37, 2, 1, 16, 16}, {0, 7, 7, 8, 14}, {0, 9, 12, 21, 37}},
    kShared{{5, 31, 200, 4, 2, 32, 16}, {0, 9, 13, 20, 21, 31}, {0, 140, 145, 152, 153, 190}};

constexpr Shape kOne{2, 7, 20, 2, 1, 16, 16}, kOfPages{1, 5, 12, 2, 1, 16, 16};

// Sequences of different lengths in one batch, with an empty one and more keys than queries.
void packed(const CaseSink& sink, DType t, const Config& o, const Packed& of = kPacked) {
  const Shape& s = of.shape;
  Case c;
  c.name = fmt::format("{} packed h={}/{} d={}/{} split={}{}{} {}", o.name, s.heads, s.kv_heads, s.d, s.dv,
                       o.split, o.causal ? "" : " whole", o.window ? fmt::format(" window={}", o.window) : "",
                       name_of(t));
  c.inputs = {{"q", {s.queries, s.heads, s.d}, t},
              {"k", {s.keys, s.kv_heads, s.d}, t},
              {"v", {s.keys, s.kv_heads, s.dv}, t},
              {"cu_q", {s.batch + 1}, DType::i64, {Fill::values, 0, 0, of.cu_q}},
              {"cu_k", {s.batch + 1}, DType::i32, {Fill::values, 0, 0, of.cu_k}}};
  set_options(c, o);
  c.results = {{"out", t}, {"lse", DType::f32}};
  if (!o.firsts.empty()) {
    c.inputs.push_back({"kv_len", {s.batch}, DType::i64, {Fill::values, 0, 0, o.lengths}});
    as_part(c, s.batch, o);
  } else if (!o.lengths.empty()) {
    c.inputs.push_back({"kv_len", {s.batch}, DType::i64, {Fill::values, 0, 0, o.lengths}});
  }
  if (!o.prefixes.empty())
    c.inputs.push_back({"prefix_of", {s.batch}, DType::i32, {Fill::values, 0, 0, o.prefixes}});
  use_fp8(c, o);
  c.reduction = s.keys;
  for (const CaseTensor& input : c.inputs) c.batch_axes.push_back({input.argument, -1});
  for (const auto& [name, type] : c.results) c.batch_axes.push_back({name, -1});
  c.brief = true;
  sink(std::move(c));
}

// Scores of -inf, NaN and Inf in some rows, far apart in others.
Fill special() {
  constexpr double inf = std::numeric_limits<double>::infinity();
  Fill fill{Fill::values};
  for (int i = 0; i < 16 * 17; ++i) fill.list.push_back(std::cos(i * 3.7));
  fill.list[16 * 3] = inf, fill.list[16 * 6 + 1] = -inf, fill.list[16 * 9] = NAN;
  for (std::size_t d = 0; d < 16; ++d) fill.list[16 * 11 + d] = 0;
  return fill;
}

Config filled(const char* name, const Fill& q, const Fill& k) {
  Config o;
  o.name = name, o.brief = true, o.q = q, o.k = k;
  return o;
}
Config with_lengths(const char* name, int64_t page, const std::vector<double>& lengths) {
  Config o;
  o.name = name, o.sinks = page == 0, o.page = page, o.lengths = lengths;
  return o;
}

// Scores so far apart that weights go down to 2^-149, each with a channel of values for itself: what is left of the least shows.
void faint(const CaseSink& sink, DType t) {
  Config o{
      .name = "faint", .brief = true, .q = {Fill::constant, 1}, .k = {Fill::values}, .v = {Fill::values}};
  for (int j = 0; j < 16; ++j)
    for (int d = 0; d < 16; ++d) o.k.list.push_back(-1.71875 * j), o.v.list.push_back(d == j ? 1024 : 0);
  dense(sink, {1, 3, 16, 1, 1, 16, 16}, t, o);
}

// Scores whose maxima rise from tile to tile: by less than 8 beside a split's first one, by more, by 8 exactly and by just
// more, for c is 1 and scores are sums of few bits. Where one tile moves the reference alone, what came before is most of
// a row's sums. One key in a tile is far below all others and has a channel for itself.
Config rising(DType t) {
  constexpr double kTops[] = {0.3125, 3.5625, 7.6875, 8.3125, 8.375, 16.25, 16.5, 9.25};
  constexpr double kFactors[] = {1, 0.5, 0.75, 1, 1.25, 0.875, 1, 0.625, 1.125, 1};  // of each query and head
  const double lowest = t == DType::f16 ? -15.5 : -119.5, alone = t == DType::f16 ? 1024 : 0x1p100;
  Config o{.name = "rising", .brief = true, .scale = 0.693147182};
  o.q.kind = o.k.kind = o.v.kind = Fill::values;
  for (int row = 0; row < 10; ++row)
    for (int d = 0; d < 16; ++d) o.q.list.push_back(d == row % 3 ? kFactors[row] : 0);
  for (int j = 0; j < 1000; ++j)
    for (int d = 0; d < 16; ++d) {
      const int tile = j / 128, at = j % 128;
      const double below = (j * 29 + d * 13) % 97 / 16.0;
      double x = at == 37 + d             ? 0
                 : tile == 3 || tile == 5 ? below / 4
                 : tile == 4 || tile == 6 ? 8 + below
                                          : below;
      x = at == 77 ? lowest : kTops[tile] - x;
      o.k.list.push_back(d < 3 ? x : 0);
      o.v.list.push_back(d < 15 ? 1.25 + std::sin(j * 16.0 + d) : at == 77 ? alone : 0);
    }
  return o;
}

// Every option at once, and each layout with as little work as lets further options be tried on it.
void combined_cases(const CaseSink& sink, DType t) {
  Config all{.name = "all", .sinks = true, .brief = true, .window = 40, .softcap = 2, .scale = 0.7};
  dense(sink, {2, 37, 150, 4, 2, 16, 32}, t, all);
  packed(sink, t, all);
  all.page = 16, all.lengths = {70, 33};
  dense(sink, {2, 9, 70, 4, 2, 16, 16}, t, all);
  Config little{.name = "little", .brief = true};
  for (int64_t window : {0, 5}) {
    little.window = window;
    for (int64_t page : {0, 4}) {
      little.page = page;
      for (bool sinks : {false, true}) {
        little.name = sinks ? "little sinks" : "little", little.sinks = sinks;
        dense(sink, page ? kOfPages : kOne, t, little);
      }
    }
    little.page = 0;
    packed(sink, t, little, kLittle);
  }
}

// An fp8 cache: with a factor a head, with one for all and with none; in pages whose others hold NaN, packed, and with a NaN.
void fp8_cases(const CaseSink& sink, DType t) {
  Config o{.name = "fp8", .factors = 2};
  dense(sink, {2, 3, 150, 4, 2, 32, 48}, t, o);
  packed(sink, t, o);
  o.page = 16, o.factors = 1;
  dense(sink, {2, 2, 35, 4, 2, 16, 32}, t, o);
  o.page = 0, o.factors = 0, o.split = 512, o.brief = true;
  dense(sink, {1, 2, 700, 2, 1, 16, 16}, t, o);
  o = filled("fp8 special", {}, special()), o.factors = 1;
  dense(sink, {2, 17, 17, 1, 1, 16, 16}, t, o);
}

void small_cases(const CaseSink& sink, DType t) {
  // One for each id comes first: that is what other processes compute too.
  for (int64_t split : {1024, 0, 512, 2048, 4096}) dense(sink, {2, 2, 33, 2, 1, 16, 16}, t, {.split = split});
  for (int64_t keys : {1, 127, 128, 129}) dense(sink, {3, 2, keys, 2, 1, 32, 32}, t, {.name = "dense"});
  dense(sink, {2, 20, 20, 4, 4, 64, 64}, t, {.name = "prefill"});
  dense(sink, {2, 5, 150, 7, 1, 16, 48}, t, {.name = "sinks", .sinks = true});
  dense(sink, {2, 3, 130, 2, 2, 16, 16}, t, {.name = "whole", .causal = false});
  dense(sink, {2, 3, 40, 2, 2, 16, 16}, t, {.name = "cap", .brief = true, .softcap = 2, .scale = 0.7});
  dense(sink, {2, 3, 300, 2, 1, 16, 16}, t, {.name = "window", .sinks = true, .brief = true, .window = 128});
  dense(sink, {2, 140, 140, 1, 1, 16, 16}, t, {.name = "window", .brief = true, .window = 1});
  dense(sink, {3, 4, 20, 2, 1, 32, 16}, t, with_lengths("lengths", 0, {20, 0, 2}));
  dense(sink, {2, 4, 3, 2, 1, 32, 16}, t, {.name = "more queries than keys", .brief = true});
  dense(sink, {2, 0, 3, 2, 1, 32, 16}, t, {.name = "no queries", .brief = true});
  dense(sink, {3, 2, 70, 8, 1, 16, 32}, t, with_lengths("paged", 16, {70, 5, 33}));
  dense(sink, {2, 2, 200, 2, 1, 16, 16}, t, {.name = "paged", .brief = true, .page = 100});
  dense(sink, {2, 17, 17, 1, 1, 16, 16}, t, filled("special", {}, special()));
  dense(sink, {2, 6, 40, 1, 1, 16, 16}, t, filled("far apart", {Fill::normal, 0, 8}, {Fill::normal, 0, 8}));
  faint(sink, t);
  for (int64_t split : {1024, 512}) {
    Config o = rising(t);
    o.split = split;
    dense(sink, {1, 5, 1000, 2, 1, 16, 16}, t, o);
    o.window = 300;
    dense(sink, {1, 5, 1000, 2, 1, 16, 16}, t, o);
  }
  packed(sink, t, {});
  packed(sink, t, {.name = "bare", .causal = false, .sinks = true, .split = 0});
  // Keys of the first sequence come before those of three others.
  Config shared{.name = "prefix"};
  shared.prefixes = {-1, 0, 0, -1, 0};
  packed(sink, t, shared, kShared);
  shared.causal = false, shared.split = 0;
  packed(sink, t, shared, kShared);
  shared.causal = true, shared.window = 20;
  packed(sink, t, shared, kShared);
  // The second sees a part of those keys, and none of its own.
  shared.window = 0, shared.lengths = {133, 120, 140, 1, 170};
  packed(sink, t, shared, kShared);
  fp8_cases(sink, t);
  combined_cases(sink, t);
  for (int64_t split : {0, 512, 2048, 4096})
    for (int64_t keys : {split == 0 ? 1100 : split - 1, split + 130})
      dense(sink, {1, 2, keys, 1, 1, 16, 16}, t, {.name = "split", .brief = true, .split = split});
  for (int64_t keys : {1023, 1024, 1025, 2049})
    dense(sink, {1, 2, keys, 2, 1, 16, 16}, t, {.name = "split", .brief = true});
  dense(sink, {1, 1, 33000, 1, 1, 16, 16}, t, {.name = "long", .brief = true});
  dense(sink, {1, 3, 1500, 1, 1, 16, 16}, t, {.name = "window", .brief = true, .window = 1024, .split = 512});
  dense(sink, {1, sink.draw(1, 9), sink.draw(1, 700), 4, 2, 48, 80}, t,
        {.name = "drawn", .brief = true, .split = 512});
}

}  // namespace

void attention_cases(const CaseSink& sink) {
  for (DType t : kDTypes) small_cases(sink, t);
  for (DType t : {DType::bf16, DType::f16}) {
    constexpr int64_t kWidths[][2] = {{96, 96}, {128, 128}, {256, 256}, {192, 128}, {576, 512}};
    for (const auto& [d, dv] : kWidths)
      dense(sink, {1, 3, 260, 2, 1, d, dv}, t, {.name = "width", .brief = true});
    for (const auto& [d, dv] : kWidths)
      dense(sink, {1, 3, 260, 2, 1, d, dv}, t, {.name = "fp8 width", .brief = true, .factors = 1});
  }
  Config production{.name = "production", .sampled = true, .page = 64};
  production.q.kind = production.k.kind = production.v.kind = Fill::quick;
  dense(sink, {2, 1, 3000, 32, 8, 128, 128}, DType::bf16, production);
  production.page = 0;
  dense(sink, {1, 60, 1100, 4, 1, 128, 128}, DType::bf16, production);
}

namespace {

// Keys from `firsts` on, of sequences of `lengths`.
Config part(const char* name, int64_t split, const std::vector<double>& lengths,
            const std::vector<double>& firsts) {
  Config o;
  o.name = name, o.split = split, o.lengths = lengths, o.firsts = firsts;
  return o;
}

void part_cases(const CaseSink& sink, DType t) {
  for (int64_t split : {1024, 512, 2048, 4096}) {
    const auto s = static_cast<double>(split);
    dense(sink, {2, 2, 33, 2, 1, 16, 16}, t, part("last", split, {s + 33, 2 * s + 20}, {s, 2 * s}));
  }
  dense(sink, {2, 2, 33, 2, 1, 16, 16}, t, part("all", 0, {33, 20}, {0, 0}));
  Config o = part("first", 512, {700, 1300}, {0, 512});
  dense(sink, {2, 3, 512, 2, 1, 16, 16}, t, o);
  o.name = "none here", o.lengths = {5, 513};
  o.firsts = {512, 512};
  dense(sink, {2, 3, 40, 2, 1, 16, 16}, t, o);
  o = part("two splits", 512, {1030, 900}, {0, 0}), o.brief = true;
  dense(sink, {2, 2, 1024, 4, 2, 32, 48}, t, o);
  o.name = "window", o.window = 300;
  dense(sink, {2, 2, 1024, 2, 1, 16, 16}, t, o);
  o.name = "cap", o.window = 0, o.softcap = 2, o.scale = 0.7;
  dense(sink, {2, 2, 1024, 2, 1, 16, 16}, t, o);
  o = part("whole", 512, {1030, 900}, {512, 512}), o.causal = false, o.brief = true;
  dense(sink, {2, 2, 512, 2, 1, 16, 16}, t, o);
  o = part("paged", 512, {1100, 530}, {512, 512}), o.page = 64;
  dense(sink, {2, 2, 600, 3, 1, 16, 32}, t, o);
  o = part("some", 512, {1100, 530}, {0, 0}), o.lasts = {512, 1024}, o.page = 48, o.brief = true;
  dense(sink, {2, 2, 1024, 3, 1, 16, 32}, t, o);
  o = part("fp8", 512, {1100, 530}, {512, 512}), o.factors = 1, o.page = 64;
  dense(sink, {2, 2, 600, 4, 2, 16, 32}, t, o);
  o = part("special", 512, {529, 520}, {512, 512}), o.brief = true, o.k = special();
  dense(sink, {2, 17, 17, 1, 1, 16, 16}, t, o);
  for (int64_t window : {0, 300}) {
    o = rising(t), o.split = 512, o.lengths = {1000}, o.firsts = {0}, o.window = window;
    dense(sink, {1, 5, 1000, 2, 1, 16, 16}, t, o);
  }
  o = part("no queries", 512, {529, 520}, {512, 512}), o.brief = true;
  dense(sink, {2, 0, 17, 1, 1, 16, 16}, t, o);
  o = part("all", 512, {1030, 900}, {0, 0}), o.brief = true, o.window = 300, o.softcap = 2, o.scale = 0.7;
  dense(sink, {2, 5, 1024, 4, 2, 16, 16}, t, o);
  o.page = 64;
  dense(sink, {2, 5, 1024, 4, 2, 16, 16}, t, o);
  for (int64_t window : {0, 5})
    for (int64_t page : {0, 4}) {
      o = page ? part("little", 512, {12}, {0}) : part("little", 512, {20, 13}, {0, 0});
      o.brief = true, o.window = window, o.page = page;
      dense(sink, page ? kOfPages : kOne, t, o);
      if (page != 0) continue;
      o.lengths = {9, 3, 9, 16}, o.firsts = {0, 0, 0, 0};
      packed(sink, t, o, kLittle);
    }
  packed(sink, t, part("later", 512, {642, 517, 600, 1050}, {512, 512, 512, 1024}));
  o = part("bare", 0, {130, 5, 129, 26}, {0, 0, 0, 0}), o.causal = false;
  packed(sink, t, o);
}

}  // namespace

void attention_part_cases(const CaseSink& sink) {
  for (DType t : kDTypes) part_cases(sink, t);
  for (DType t : {DType::bf16, DType::f16})
    for (const auto& [d, dv] : {std::pair{96, 96}, {128, 128}, {256, 256}, {192, 128}, {576, 512}}) {
      Config o = part("width", 1024, {1100}, {1024});
      o.brief = true;
      dense(sink, {1, 3, 76, 2, 1, d, dv}, t, o);
    }
}

void attention_merge_cases(const CaseSink& sink) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  const auto merge = [&](const char* name, std::vector<int64_t> shape, const Fill& partials, bool sinks,
                         DType t) {
    Case c;
    c.name = fmt::format("{} ranks={} splits={} dv={}{} {}", name, shape[0], shape[shape.size() - 2],
                         shape.back() - 2, sinks ? " sinks" : "", name_of(t));
    const int64_t heads = shape[shape.size() - 3];
    c.inputs = {{"partials", std::move(shape), DType::f32, partials}};
    if (sinks) c.inputs.push_back({"sinks", {heads}, DType::f32});
    c.results = {{"out", t}, {"lse", DType::f32}};
    sink(std::move(c));
  };
  // Seven splits: sums, one of them without a visible key and one whose scores are all -inf.
  const auto splits = [&](int64_t width, double apart) {
    Fill fill{Fill::values};
    for (int s = 0; s < 7; ++s) {
      const double l = s == 2 ? -1 : s == 5 ? 0 : 1 + 0.7 * s;
      fill.list.insert(fill.list.end(), {l > 0 ? apart * (s * 5 % 7 - 3) : -inf, l});
      for (int64_t d = 0; d < width; ++d)
        fill.list.push_back(l > 0 ? l * std::sin(static_cast<double>(s * 37 + d)) : 0.0);
    }
    return fill;
  };
  Fill plain = splits(16, 1), ends = splits(16, 3), nothing = splits(16, 3);
  ends.list[0] = 3e38, ends.list[18] = -3e38, ends.list[3 * 18] = inf, ends.list[4 * 18 + 1] = NAN;
  for (std::size_t i = 0; i < nothing.list.size(); i += 18) nothing.list[i] = -inf, nothing.list[i + 1] = -1;
  plain.list.resize(2 * 18);  // those with keys
  for (DType t : {DType::f32, DType::bf16, DType::f16}) {
    merge("one rank", {1, 6, 2, 1, 18}, plain, false, t);
    merge("ranks", {4, 6, 2, 1, 18}, splits(16, 1), true, t);
    merge("ranks", {3, 2, 3, 2, 2, 50}, splits(48, 1.3), false, t);
    merge("far apart", {2, 3, 5, 2, 3, 18}, splits(16, 60), true, t);
    merge("nothing", {2, 4, 2, 2, 18}, nothing, true, t);
    merge("nothing", {2, 4, 2, 2, 18}, nothing, false, t);
    merge("no splits", {2, 4, 2, 0, 18}, nothing, true, t);
    merge("ends", {2, 7, 2, 1, 18}, ends, false, t);
    merge("wide", {8, 3, 2, 1, 514}, splits(512, 1), false, t);
  }
}

// P is rounded to v's dtype, which an average over keys smooths; fp32 scores lose a few
// ulps of their terms' magnitude.
Bound attention_bound(const BoundQuery& q) {
  if (q.result == "lse") return {.metric = Bound::elementwise, .ulps = 8, .absolute = 1e-6};
  Bound b{Bound::peak, q.input == DType::bf16 ? 8e-3 : q.input == DType::f16 ? 2e-3 : 2e-5};
  b.flushes = q.arithmetic.starts_with("amx/");
  return b;
}

// Of a part: lse's bound on the maximum, out's on all else, of the peak of a split.
Bound attention_part_bound(const BoundQuery& q) {
  // What is held for the maximum is no number to be near to, and l and O go by it: they are judged by their bits, and by
  // the accuracy of attention, which joins the same.
  if (q.arithmetic.find("/h8/") != std::string_view::npos) return {.metric = Bound::none};
  const double value = q.input == DType::bf16 ? 8e-3 : q.input == DType::f16 ? 2e-3 : 2e-5;
  return {.metric = Bound::elementwise,
          .value = value,
          .ulps = 8,
          .flushes = q.arithmetic.starts_with("amx/"),
          .absolute = 1e-6};
}
Bound attention_merge_bound(const BoundQuery& q) {
  if (q.result == "lse") return {.metric = Bound::elementwise, .ulps = 8, .absolute = 1e-6};
  return {Bound::peak, q.output == DType::bf16 ? 8e-3 : q.output == DType::f16 ? 2e-3 : 2e-5};
}

}  // namespace rlk::registry
