// Calls of the rope family worth trying: every layout, pairing and way to name a row, partial and offset
// rotation, 16-byte and odd head sizes, and how near results must be.
//
// Where a case can be cut along its first axis (that is what axis 0 of the schema says), tables are fp32
// random values off the unit circle, so that a transpose is not mistaken for an inverse.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <utility>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr Fill kTable{Fill::uniform, -1.5, 1.5};

struct Config {
  const char* name;
  std::vector<int64_t> shape;  // of x
  int64_t heads_of_k = 0;      // 0: no k
  int64_t rows = 64, width = 0;
  std::vector<std::pair<std::string, std::variant<int64_t, double, std::string>>> attributes{};
  std::vector<CaseTensor> extra{};
  bool table_of_data = false;
  DType narrow = DType::f32;  // else a table's dtype beside fp32 data, the only one that this is a case of
};

CaseTensor positions(std::vector<int64_t> shape, int64_t below, int32_t batch_axis, DType type = DType::i64) {
  return {"positions", std::move(shape), type, {Fill::integers, 0, static_cast<double>(below)},
          {},          batch_axis};
}
CaseTensor between(const char* name, std::vector<int64_t> shape, double low, double below,
                   int32_t batch_axis = 0) {
  return {name, std::move(shape), DType::i64, {Fill::integers, low, below}, {}, batch_axis};
}
CaseTensor integers(const char* name, std::vector<double> list, DType type = DType::i32,
                    int32_t batch_axis = -1) {
  const auto n = static_cast<int64_t>(list.size());
  return {name, {n}, type, {Fill::values, 0, 0, std::move(list)}, {}, batch_axis};
}

// x has 4 axes: where the heads are.
int head_axis(const Config& c) {
  for (const auto& [name, value] : c.attributes)
    if (name == "layout") {
      const auto& layout = std::get<std::string>(value);
      return layout == "thd" ? 1 : layout == "bhsd" ? 1 : 2;
    }
  return 1;
}

// Along which axis of x rows are independent: tokens whose rows are counted from the first are not.
int32_t batch_axis(const Config& c) {
  for (const auto& [name, value] : c.attributes)
    if (name == "layout") {
      if (std::get<std::string>(value) == "sbhd") return 1;
      if (std::get<std::string>(value) == "thd" && c.extra.empty()) return -1;
    }
  return -3;
}

CaseTensor heads_of(const char* name, const std::vector<int64_t>& shape, DType type, const Config& c) {
  CaseTensor t{name, shape, type};
  t.batch_axis = batch_axis(c);
  return t;
}

// Whose tokens say which row of the table they want.
std::vector<Config> positioned() {
  return {
      {"starts",
       {3, 5, 2, 32},
       0,
       64,
       16,
       {{"layout", "bshd"}},
       {{"starts", {3}, DType::i32, {Fill::integers, 0, 50}, {}, 0}}},
      {"left padding",
       {3, 5, 2, 32},
       1,
       12,
       16,
       {{"layout", "bshd"}, {"negative", "unrotated"}},
       {{"starts", {3}, DType::i32, {Fill::integers, -4, 7}, {}, 0}}},
      {"left padding by positions",
       {3, 7, 2, 32},
       0,
       9,
       32,
       {{"layout", "bshd"}, {"pairing", "adjacent"}, {"table", "full"}, {"negative", "unrotated"}},
       {between("positions", {3, 7}, -6, 9)}},
      {"left padding of M-RoPE",
       {2, 6, 2, 24},
       1,
       9,
       12,
       {{"layout", "bshd"},
        {"mrope_t", int64_t{2}},
        {"mrope_h", int64_t{5}},
        {"mrope_w", int64_t{5}},
        {"negative", "unrotated"}},
       {between("positions", {3, 2, 6}, -6, 9, 1)}},
      {"packed by positions", {11, 3, 40}, 1, 32, 20, {{"layout", "thd"}}, {positions({11}, 32, 0)}},
      {"batched positions",
       {3, 7, 2, 32},
       1,
       40,
       16,
       {{"layout", "bshd"}},
       {positions({3, 7}, 40, 0, DType::i32)}},
      {"M-RoPE sections",
       {2, 6, 2, 24},
       0,
       30,
       12,
       {{"layout", "bshd"}, {"mrope_t", int64_t{2}}, {"mrope_h", int64_t{5}}, {"mrope_w", int64_t{5}}},
       {positions({3, 2, 6}, 30, 1)}},
      {"M-RoPE interleaved",
       {2, 6, 2, 24},
       1,
       30,
       12,
       {{"layout", "bshd"},
        {"mrope_t", int64_t{4}},
        {"mrope_h", int64_t{4}},
        {"mrope_w", int64_t{4}},
        {"mrope_interleaved", int64_t{1}}},
       {positions({3, 2, 6}, 30, 1)}},
  };
}

std::vector<Config> plain() {
  return {
      {"plain q and k", {3, 4, 9, 64}, 2, 16, 32},
      {"24 heads", {2, 24, 3, 32}, 1, 8, 16},
      {"odd head size", {2, 3, 5, 20}, 0, 5, 6, {{"rotary_dim", int64_t{12}}, {"rotary_offset", int64_t{3}}}},
      {"partial", {2, 5, 6, 96}, 1, 6, 16, {{"rotary_dim", int64_t{32}}, {"rotary_offset", int64_t{16}}}},
      {"transposed", {2, 3, 4, 32}, 0, 4, 16, {{"transpose", int64_t{1}}}},
      {"bshd adjacent", {2, 6, 3, 48}, 1, 7, 24, {{"layout", "bshd"}, {"pairing", "adjacent"}}},
      {"bshd adjacent to half",
       {2, 6, 3, 48},
       1,
       7,
       24,
       {{"layout", "bshd"}, {"pairing", "adjacent_to_half"}}},
      {"full width, unequal halves", {2, 3, 6, 32}, 0, 6, 32, {{"table", "full"}}},
      {"full width adjacent",
       {2, 6, 3, 32},
       2,
       6,
       32,
       {{"layout", "bshd"}, {"pairing", "adjacent"}, {"table", "full"}}},
      {"tables of the data's dtype", {2, 3, 6, 64}, 1, 8, 32, {}, {}, true},
      {"bf16 tables", {2, 3, 6, 64}, 1, 8, 32, {}, {}, false, DType::bf16},
      {"fp16 tables", {2, 3, 6, 64}, 1, 8, 32, {}, {}, false, DType::f16},
      {"full width, adjacent, bf16 tables at offsets",
       {3, 5, 2, 40},
       0,
       64,
       32,
       {{"layout", "bshd"}, {"pairing", "adjacent"}, {"table", "full"}, {"rotary_dim", int64_t{32}}},
       {{"starts", {3}, DType::i32, {Fill::integers, 0, 50}, {}, 0}},
       false,
       DType::bf16},
      {"context parallel",
       {2, 6, 2, 32},
       0,
       24,
       16,
       {{"layout", "bshd"}, {"cp_rank", int64_t{1}}, {"cp_size", int64_t{4}}}},
      {"one token, many sequences", {9, 4, 1, 64}, 1, 1, 32},
      {"sbhd", {6, 2, 3, 32}, 1, 6, 16, {{"layout", "sbhd"}}},
      {"sbhd, full width", {6, 2, 3, 32}, 1, 6, 32, {{"layout", "sbhd"}, {"table", "full"}}},
      {"sbhd adjacent", {5, 3, 2, 32}, 1, 5, 16, {{"layout", "sbhd"}, {"pairing", "adjacent"}}},
      {"thd adjacent", {7, 3, 32}, 2, 7, 16, {{"layout", "thd"}, {"pairing", "adjacent"}}, {}},
      {"bhsd adjacent", {2, 3, 5, 32}, 3, 5, 16, {{"pairing", "adjacent"}}},
      {"transposed adjacent", {2, 3, 5, 32}, 1, 5, 16, {{"pairing", "adjacent"}, {"transpose", int64_t{1}}}},
      {"transposed full width", {2, 3, 5, 32}, 1, 5, 32, {{"table", "full"}, {"transpose", int64_t{1}}}},
      {"half by name", {2, 3, 5, 32}, 0, 5, 16, {{"table", "half"}}},
      {"partial adjacent",
       {2, 4, 3, 64},
       1,
       9,
       8,
       {{"layout", "bshd"}, {"pairing", "adjacent"}, {"rotary_dim", int64_t{16}}}},
      {"partial adjacent at an offset",
       {2, 4, 3, 64},
       1,
       9,
       8,
       {{"layout", "bshd"},
        {"pairing", "adjacent"},
        {"rotary_dim", int64_t{16}},
        {"rotary_offset", int64_t{48}}}},
      {"context parallel, last rank",
       {2, 6, 2, 32},
       1,
       24,
       16,
       {{"layout", "bshd"}, {"cp_rank", int64_t{3}}, {"cp_size", int64_t{4}}}},
      {"one head, one pair", {4, 1, 3, 2}, 1, 3, 1},
  };
}

const std::vector<Config>& configs() {
  static const std::vector<Config> all = [] {
    std::vector<Config> list = plain();
    for (Config& c : positioned()) list.push_back(std::move(c));
    return list;
  }();
  return all;
}

// Brief: what is served, and places of a table that a shortcut may confuse.
std::vector<Config> served() {
  const auto rows = [](std::vector<double> list) {
    const auto n = static_cast<int64_t>(list.size());
    return CaseTensor{"positions", {n}, DType::i64, {Fill::values, 0, 0, std::move(list)}, {}, -1};
  };
  return {
      {"40 heads", {1, 40, 2, 32}, 36, 4, 16},
      {"129 heads", {1, 2, 129, 16}, 33, 4, 8, {{"layout", "bshd"}}},
      {"D 128", {1, 4, 5, 128}, 2, 8, 64},
      {"D 128 adjacent", {1, 5, 4, 128}, 2, 8, 64, {{"layout", "bshd"}, {"pairing", "adjacent"}}},
      {"D 256", {1, 3, 5, 256}, 1, 8, 128},
      {"D 512", {1, 2, 3, 512}, 0, 8, 256},
      {"300 tokens", {1, 2, 300, 16}, 1, 300, 8},
      {"1025 tokens bshd", {1, 1025, 2, 16}, 1, 1025, 8, {{"layout", "bshd"}}},
      {"a long prefill", {1, 32, 2048, 128}, 8, 2048, 64},
      {"20 sequences", {20, 2, 3, 16}, 1, 3, 8},
      {"far rows",
       {7, 2, 8},
       1,
       70000,
       4,
       {{"layout", "thd"}},
       {rows({0, 1, 65535, 65536, 69999, 131, 32768})}},
      {"rows down and again", {6, 2, 16}, 1, 9, 8, {{"layout", "thd"}}, {rows({5, 4, 4, 3, 0, 5})}},
      {"more rows than tokens", {2, 3, 5, 32}, 1, 500, 16},
  };
}

// Rows of one kind each beside zeros, so that a pair's sum has one term: flushing, saturating and skipped
// zeros show.
Case special_values(DType t) {
  const double tiny = t == DType::f16    ? 0x1p-24
                      : t == DType::bf16 ? 0x1p-133
                                         : 0x1p-149,
               least = t == DType::f16 ? 0x1p-14 : 0x1p-126,
               most = t == DType::f16    ? 65504
                      : t == DType::bf16 ? 0x1.fep127
                                         : 0x1.fffffep127,
               inf = std::numeric_limits<double>::infinity();
  const double kinds[] = {tiny, -3 * tiny, least - tiny, least, -0.0, t == DType::f16 ? 0x1p14 : 0x1p100,
                          most, -most};
  Fill fill{Fill::values};
  for (double x : kinds)
    for (int i = 0; i < 32; ++i) fill.list.push_back(i < 16 ? x : 0);
  for (double x : {inf, -inf, std::nan("")})
    for (int i = 0; i < 32; ++i) fill.list.push_back(i == 3 ? x : i == 20 ? 0.0 : 1.0);
  const auto n = static_cast<int64_t>(fill.list.size()) / 32;
  Case c;
  c.name = fmt::format("special values {}", name_of(t));
  c.inputs = {{"x", {1, 1, n, 32}, t, fill, {}, -1},
              {"cos", {n, 16}, DType::f32, kTable},
              {"sin", {n, 16}, DType::f32, kTable}};
  c.results = {{"out", t}};
  c.brief = true;
  return c;
}

Case base_case(const Config& c, DType type) {
  Case out;
  out.name = fmt::format("{} [{}] {}", c.name, fmt::join(c.shape, ","), name_of(type));
  out.attributes = c.attributes;
  return out;
}

void add_tables(Case& out, const Config& c, DType type) {
  const DType t = c.table_of_data ? type : c.narrow;
  out.inputs.push_back({"cos", {c.rows, c.width}, t, kTable});
  out.inputs.push_back({"sin", {c.rows, c.width}, t, kTable});
}

void rope_like(const CaseSink& sink, const char* x, const char* k, const char* out, const char* k_out,
               bool in_place) {
  std::vector<Config> all = configs();
  const std::size_t varied = all.size();
  for (Config& c : served()) all.push_back(std::move(c));
  for (int i = 0; i < 4; ++i) {
    const int64_t tokens = sink.draw(1, 40), width = sink.draw(1, 80);
    all.push_back({"drawn",
                   {sink.draw(1, 5), sink.draw(1, 33), tokens, 2 * width},
                   sink.draw(1, 12),
                   tokens + sink.draw(0, 90),
                   width});
  }
  for (DType type : kDTypes)
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Config& c = all[i];
      if (c.narrow != DType::f32 && type != DType::f32) continue;
      Case made = base_case(c, type);
      made.brief = i >= varied;
      made.large = c.rows == 2048;
      if (in_place && made.name.find("adjacent to half") != std::string::npos) continue;
      made.inputs.push_back(heads_of(x, c.shape, type, c));
      add_tables(made, c, type);
      if (!in_place) made.results.push_back({out, type});
      if (c.heads_of_k) {
        auto shape = c.shape;
        shape[static_cast<std::size_t>(head_axis(c))] = c.heads_of_k;
        made.inputs.push_back(heads_of(k, shape, type, c));
        if (!in_place) made.results.push_back({k_out, type});
      }
      for (const CaseTensor& t : c.extra) made.inputs.push_back(t);
      sink(std::move(made));
    }
}

void mla_q_like(const CaseSink& sink, const char* x, const char* out) {
  for (DType type : kDTypes)
    for (int64_t remove : {0, 1})
      for (int64_t inverse : {0, 1}) {
        Config c{"trailing", {2, 5, 3, 48}, 0, 5, 32};
        Case made = base_case(c, type);
        made.name += fmt::format(" remove_interleaving={} inverse={}", remove, inverse);
        made.attributes = {{"layout", "bshd"}, {"remove_interleaving", remove}, {"inverse", inverse}};
        made.inputs.push_back({x, c.shape, type});
        add_tables(made, c, type);
        made.results = {{out, type}};
        sink(std::move(made));
      }
}

void mla_kv_like(const CaseSink& sink, bool backward) {
  struct Size {
    int64_t heads, k, v, emb;
  };
  for (DType type : kDTypes)
    for (const Size& s : {Size{4, 32, 48, 16}, Size{3, 4, 6, 8}, Size{33, 16, 16, 64}})
      for (int64_t remove : {0, 1}) {
        Case made;
        made.name = fmt::format("heads={} k={} v={} R={} remove_interleaving={} {}", s.heads, s.k, s.v, s.emb,
                                remove, name_of(type));
        made.attributes = {{"layout", "bshd"}, {"k_dim", s.k}, {"remove_interleaving", remove}};
        if (backward) {
          made.inputs = {{"d_key", {2, 5, s.heads, s.k + s.emb}, type},
                         {"d_value", {2, 5, s.heads, s.v}, type}};
          made.results = {{"d_kv", type}, {"d_k_pos_emb", type}};
        } else {
          made.inputs = {{"kv", {2, 5, s.heads, s.k + s.v}, type}, {"k_pos_emb", {2, 5, 1, s.emb}, type}};
          made.results = {{"key", type}, {"value", type}};
        }
        made.inputs.push_back({"cos", {7, s.emb}, DType::f32, kTable});
        made.inputs.push_back({"sin", {7, s.emb}, DType::f32, kTable});
        sink(std::move(made));
      }
}

}  // namespace

void rope_cases(const CaseSink& sink) {
  rope_like(sink, "x", "k", "out", "k_out", false);
  for (DType type : kDTypes) {
    sink(special_values(type));
    Case made;
    made.name = fmt::format("one table for both, k is x {}", name_of(type));
    made.inputs = {{"x", {2, 3, 5, 32}, type},
                   {"k", {2, 3, 5, 32}, type},
                   {"cos", {5, 16}, DType::f32, kTable},
                   {"sin", {5, 16}, DType::f32, kTable}};
    made.results = {{"out", type}, {"k_out", type}};
    made.shared = {{"x", "k"}, {"cos", "sin"}};
    made.brief = true;
    sink(std::move(made));
  }
  // Packed sequences, an empty one among them: rows depend on their place, so there is no axis to cut.
  for (DType type : kDTypes) {
    Case made;
    made.name = fmt::format("cu_seqlens with an empty sequence {}", name_of(type));
    made.attributes = {{"layout", "thd"}};
    made.inputs = {{"x", {9, 2, 32}, type, {}, {}, -1},
                   {"cos", {24, 16}, DType::f32, kTable},
                   {"sin", {24, 16}, DType::f32, kTable},
                   integers("cu_seqlens", {0, 3, 3, 4, 9}),
                   integers("starts", {0, 7, 4, 11})};
    made.results = {{"out", type}};
    sink(std::move(made));
  }
}
void rope_bwd_cases(const CaseSink& sink) { rope_like(sink, "d_out", "d_k_out", "d_x", "d_k", false); }
void rope__cases(const CaseSink& sink) { rope_like(sink, "x", "k", "", "", true); }
void rope_mla_q_cases(const CaseSink& sink) { mla_q_like(sink, "x", "out"); }
void rope_mla_q_bwd_cases(const CaseSink& sink) { mla_q_like(sink, "d_out", "d_x"); }
void rope_mla_kv_cases(const CaseSink& sink) { mla_kv_like(sink, false); }
void rope_mla_kv_bwd_cases(const CaseSink& sink) { mla_kv_like(sink, true); }

void rope_tables_cases(const CaseSink& sink) {
  const auto add = [&](const char* scaling, int64_t dim, const char* width,
                       std::vector<std::pair<std::string, std::variant<int64_t, double, std::string>>> more,
                       std::vector<CaseTensor> inputs = {}) {
    for (DType type : kDTypes) {
      Case made;
      made.name = fmt::format("{} R={} {} {}", scaling, dim, width, name_of(type));
      made.attributes = std::move(more);
      more = made.attributes;
      made.attributes.push_back({"rotary_dim", dim});
      made.attributes.push_back({"scaling", scaling});
      made.attributes.push_back({"width", width});
      if (inputs.empty() || inputs[0].argument != "positions")
        made.inputs.push_back(integers("positions", {0, 1, 7, 255, 4095, 32767, 131071}, DType::i64, 0));
      for (const CaseTensor& t : inputs) made.inputs.push_back(t);
      made.results = {{"cos", type}, {"sin", type}};
      sink(std::move(made));
    }
  };
  add("none", 128, "half", {});
  add("none", 64, "full", {{"base", 500000.0}});
  add("none", 6, "full_adjacent", {});
  add("linear", 128, "half", {{"factor", 4.0}});
  add("ntk", 128, "half", {{"factor", 4.0}});
  add("dynamic", 128, "half", {{"factor", 2.0}, {"original_max", int64_t{2048}}, {"seq_len", int64_t{8192}}});
  add("yarn", 64, "half", {{"factor", 40.0}, {"original_max", int64_t{4096}}, {"mscale", 1.0}});
  add("yarn", 128, "full",
      {{"factor", 4.0}, {"original_max", int64_t{32768}}, {"base", 1e6}, {"truncate", int64_t{0}}});
  add("llama3", 128, "half", {{"factor", 8.0}, {"original_max", int64_t{8192}}, {"base", 500000.0}});
  add("none", 64, "half", {{"attention_factor", 0.7}, {"base", 100.0}});
  add("yarn", 64, "full_adjacent",
      {{"factor", 16.0},
       {"original_max", int64_t{2048}},
       {"beta_fast", 20.0},
       {"beta_slow", 2.0},
       {"mscale", 0.7},
       {"mscale_all_dim", 1.3}});
  add("llama3", 64, "full",
      {{"factor", 32.0},
       {"original_max", int64_t{4096}},
       {"low_freq_factor", 2.0},
       {"high_freq_factor", 9.0}});
  add("dynamic", 64, "full", {{"factor", 3.0}, {"original_max", int64_t{4096}}, {"seq_len", int64_t{100}}});
  add("linear", 256, "half", {{"factor", 0.5}}, {integers("positions", {131071, 5, 5, 4, 0}, DType::i32, 0)});
  add("longrope", 8, "half", {{"factor", 32.0}, {"original_max", int64_t{4096}}},
      {{"factors", {4}, DType::f64, {Fill::uniform, 1, 12}, {}, -1}});
}

// 1 ulp of the result's dtype plus 2^-20 of the pair; sums over heads are fp32.
Bound rope_bound(const BoundQuery&) { return {Bound::elementwise, 0x1p-20, 1}; }
Bound rope_bwd_bound(const BoundQuery& q) { return rope_bound(q); }
Bound rope__bound(const BoundQuery& q) { return rope_bound(q); }
Bound rope_mla_q_bound(const BoundQuery& q) { return rope_bound(q); }
Bound rope_mla_q_bwd_bound(const BoundQuery& q) { return rope_bound(q); }
Bound rope_mla_kv_bound(const BoundQuery& q) { return rope_bound(q); }
Bound rope_mla_kv_bwd_bound(const BoundQuery& q) { return rope_bound(q); }
Bound rope_tables_bound(const BoundQuery&) { return {Bound::elementwise, 0x1p-40, 1}; }

}  // namespace rlk::registry
