#include "calls.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "registry/kda/geometry.hpp"

namespace differential {
namespace {

using rlk::registry::Op;

std::size_t position(const rlk_op_schema& s, std::string_view name) {
  for (uint32_t i = 0; i < s.num_arguments; ++i)
    if (name == s.arguments[i].name) return i;
  throw std::logic_error(fmt::format("{} has no argument {}", s.name, name));
}
std::size_t attribute_position(const rlk_op_schema& s, std::string_view name) {
  for (uint32_t i = 0; i < s.num_attributes; ++i)
    if (name == s.attributes[i].name) return i;
  throw std::logic_error(fmt::format("{} has no attribute {}", s.name, name));
}
bool has_attribute(const rlk_op_schema& s, std::string_view name) {
  return std::any_of(s.attributes, s.attributes + s.num_attributes,
                     [&](const rlk_attribute& a) { return name == a.name; });
}

DType float_type(Random& r) { return r.pick({DType::f32, DType::bf16, DType::f16}); }
DType index_type(Random& r) { return r.pick({DType::i32, DType::i64}); }
DType or_f32(Random& r, DType type) { return r.chance(50) ? type : DType::f32; }

// ---- lm_head

struct Product {
  Shape rows;
  int64_t k, v;
  DType type;
};

Product product(Random& r) {
  Product p;
  for (int64_t rank = r.below(4); rank > 0; --rank) p.rows.push_back(r.pick<int64_t>({1, 1, 2, 3, 5, 9}));
  if (p.rows.size() == 1 && r.chance(30)) p.rows[0] = r.pick<int64_t>({16, 17, 33, 64});
  if (!p.rows.empty() && r.chance(3)) p.rows[0] = 0;
  p.k = r.pick<int64_t>({0, 1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 100, 130, 300});
  if (r.chance(5)) p.k = r.between(1020, 1100);
  p.v = r.pick<int64_t>({0, 1, 2, 5, 15, 16, 17, 33, 64, 97, 130});
  p.type = float_type(r);
  return p;
}
Shape with_last(Shape rows, int64_t last) { return rows.push_back(last), rows; }

void lm_head(Call& c, Random& r) {
  const Product p = product(r);
  c.read("hidden", with_last(p.rows, p.k), p.type);
  c.read("weight", {p.v, p.k}, p.type);
  if (r.chance(40)) c.read("bias", {p.v}, p.type);
  c.write("out", or_f32(r, p.type));
  c.reduction = p.k;
}

void lm_head_bwd(Call& c, Random& r) {
  const Product p = product(r);
  c.read("d_out", with_last(p.rows, p.v), or_f32(r, p.type));
  c.read("hidden", with_last(p.rows, p.k), p.type);
  c.read("weight", {p.v, p.k}, p.type);
  for (const char* result : {"d_hidden", "d_weight", "d_bias"})
    if (r.chance(70)) c.write(result, or_f32(r, p.type));
  c.reduction = std::max<int64_t>(p.v, 1);
}

// ---- linear

// A whole sum, or leaves of one: how many, and the length that they have of `total`.
struct Part {
  int64_t leaves, length;
};
Part part_of(Call& c, Random& r, const std::string& prefix, const char* total_name, int64_t total) {
  const int64_t count = r.pick<int64_t>({8, 8, 4, 2, 1}), first = count * r.below(8 / count);
  c.set(prefix + "leaf_first", first), c.set(prefix + "leaf_count", count);
  if (count < 8 || r.chance(20)) c.set(total_name, total);
  const int64_t width = (total + 127) / 128 * 16;
  return {count, std::min(total, (first + count) * width) - std::min(total, first * width)};
}

void linear(Call& c, Random& r) {
  Product p = product(r);
  const bool gated = r.chance(25), interleaved = gated && r.chance(50);
  if (gated) p.v = interleaved ? 128 * r.below(3) : p.v / 2 * 2;
  const auto [leaves, k] = gated ? Part{8, p.k} : part_of(c, r, "", "k_total", p.k);
  if (gated) c.set("activation", 1), c.set("gate_up", interleaved ? 1 : 0), c.set("roundings", r.below(2));
  c.read("x", with_last(p.rows, k), p.type);
  c.read("weight", {p.v, k}, p.type);
  c.reduction = k;
  if (leaves < 8) return c.write("y", DType::f32);
  const DType y = or_f32(r, p.type);
  if (r.chance(40)) c.read("bias", {p.v}, y == DType::f32 ? or_f32(r, p.type) : p.type);
  if (!gated && r.chance(40))
    c.read("residual", with_last(p.rows, p.v), y == DType::f32 ? or_f32(r, p.type) : p.type);
  c.write("y", y);
}

void linear_bwd(Call& c, Random& r) {
  const Product p = product(r);
  auto [leaves, n] = part_of(c, r, "d_x_", "n_total", p.v);
  if (r.chance(25)) {
    const int64_t first = r.below(p.v + 1), second = r.below(p.v - first + 1), whole = p.v;
    const int64_t at = c.attributes[attribute_position(c.schema(), "d_x_leaf_first")].i;
    n = 0;
    for (const int64_t size : {first, second, whole - first - second}) {
      const int64_t width = (size + 127) / 128 * 16;
      n += std::min(size, (at + leaves) * width) - std::min(size, at * width);
    }
    c.set("n_total", whole);
    c.read("segments", {3}, DType::i64, {Values::list, 0, 0, {first, second, whole - first - second}});
  }
  c.read("d_y", with_last(p.rows, n), or_f32(r, p.type));
  c.read("x", with_last(p.rows, p.k), p.type);
  c.read("weight", {n, p.k}, p.type);
  if (r.chance(70)) c.write("d_x", leaves < 8 ? DType::f32 : or_f32(r, p.type));
  const bool before = r.chance(25);
  if (before) c.read("d_weight_before", {n, p.k}, DType::f32), c.read("d_bias_before", {n}, DType::f32);
  for (const char* result : {"d_weight", "d_bias", "d_residual"})
    if (r.chance(70)) c.write(result, before && result[2] != 'r' ? DType::f32 : or_f32(r, p.type));
  c.reduction = std::max<int64_t>(n, 1);
}

// How many of m rows are summed.
int64_t tp_sum_rows(Call& c, Random& r, int64_t m) {
  if (!r.chance(30)) return m;
  const int64_t first = r.below(m + 1), count = r.chance(50) ? -1 : r.below(m - first + 1);
  c.set("row_first", first), c.set("row_count", count);
  return count < 0 ? m - first : count;
}
void tp_sum(Call& c, Random& r) {
  const int64_t m = r.chance(3) ? 0 : r.between(1, 9), n = r.pick<int64_t>({0, 1, 2, 15, 16, 33, 100, 2060});
  const DType type = float_type(r);
  const int64_t t = r.pick<int64_t>({1, 2, 4, 8}), rows = tp_sum_rows(c, r, m);
  const bool apart = r.chance(40);
  c.read("partials", apart ? Shape{m, n} : Shape{t, m, n}, DType::f32);
  for (int64_t i = 1; apart && i < t; ++i) c.read(fmt::format("p{}", i), {m, n}, DType::f32);
  if (r.chance(40)) c.read("bias", {n}, type);
  if (r.chance(40)) c.read("residual", {rows, n}, type);
  c.write("y", type);
}

void tp_sum_bwd(Call& c, Random& r) {
  const int64_t m = r.chance(3) ? 0 : r.between(1, 9), n = r.pick<int64_t>({0, 1, 2, 15, 16, 33, 100, 2060});
  const DType type = float_type(r);
  const int64_t t = r.pick<int64_t>({1, 2, 4, 8}), rows = tp_sum_rows(c, r, m);
  const bool apart = r.chance(40);
  c.read("d_y", {rows, n}, type);
  c.read("partials", apart ? Shape{m, n} : Shape{t, m, n}, DType::f32);
  if (r.chance(70)) c.write("d_partials", DType::f32);
  for (int64_t i = 1; apart && i < t; ++i)
    if (r.chance(70)) c.write(fmt::format("d_p{}", i), DType::f32);
  if (r.chance(70)) c.write("d_bias", or_f32(r, type));
  if (r.chance(70)) c.write("d_residual", or_f32(r, type));
  c.reduction = std::max<int64_t>(rows, 1);
}

// ---- embedding

void embedding_like(Call& c, Random& r, bool backward) {
  Shape ids;
  for (int64_t rank = r.between(1, 3); rank > 0; --rank) ids.push_back(r.between(1, 6));
  if (r.chance(3)) ids[0] = 0;
  const int64_t v = r.pick<int64_t>({0, 1, 2, 9, 40}), h = r.pick<int64_t>({0, 1, 2, 16, 33, 100, 1030});
  const int64_t first = r.chance(30) ? r.below(1000) : 0;
  const DType type = float_type(r);
  c.read("ids", ids, index_type(r),
         {Values::integers, static_cast<double>(first - 2), static_cast<double>(first + v + 2)});
  c.read("weight", {v, h}, type);
  c.set("vocab_start", first);
  if (r.chance(30)) c.set("padding_idx", first + r.below(v + 1));
  if (r.chance(40)) c.set_real("scale", r.pick({2.0, 0.3, 45.25}));
  if (!backward) {
    if (r.chance(30)) c.set("vocab", first + r.below(v + 3));
    if (r.chance(40)) c.write("bad_count", DType::i32);
    return c.write("out", type);
  }
  c.reduction = 1;
  for (int64_t n : ids) c.reduction *= n;
  c.read("d_out", with_last(ids, h), or_f32(r, type));
  const bool before = r.chance(25);
  if (before) c.read("d_weight_before", {v, h}, DType::f32);
  c.write("d_weight", before ? DType::f32 : or_f32(r, type));
}

// ---- rope

enum Layout { bhsd, bshd, sbhd, thd };

struct Sizes {
  int64_t layout, rank, batch, tokens, heads;
};

Sizes sizes(Random& r) {
  Sizes z{r.below(4), 0, 1, r.pick<int64_t>({1, 2, 3, 5, 8, 17}), r.pick<int64_t>({1, 2, 3, 8, 24})};
  z.rank = z.layout == thd ? r.between(2, 3) : r.pick<int64_t>({2, 3, 4, 4, 4});
  if (z.rank == 4) z.batch = r.between(1, 3);
  if (z.rank == 2) z.heads = 1;
  if (r.chance(3)) z.tokens = 0;
  if (r.chance(2) && z.rank == 4) z.batch = 0;
  return z;
}

Shape shape_of(const Sizes& z, int64_t heads, int64_t dim) {
  if (z.rank == 2) return {z.tokens, dim};
  if (z.rank == 3) return z.layout == bhsd ? Shape{heads, z.tokens, dim} : Shape{z.tokens, heads, dim};
  if (z.layout == bhsd) return {z.batch, heads, z.tokens, dim};
  return z.layout == bshd ? Shape{z.batch, z.tokens, heads, dim} : Shape{z.tokens, z.batch, heads, dim};
}

constexpr double kTable = 1.5;  // off the unit circle, so that a transpose is not taken for an inverse

// Tables and what names their rows.
void tables_of(Call& c, Random& r, const Sizes& z, int64_t width, int64_t pairs, DType type) {
  int64_t cp = r.chance(15) && z.tokens % 2 == 0 ? r.between(2, 4) : 1;
  const int64_t reach = z.tokens * cp + 12, rows = std::max<int64_t>(1, reach + r.below(9));
  const bool padded = has_attribute(c.schema(), "negative") && r.chance(20);
  if (padded) c.set("negative", 1);
  const double low = padded ? -6 : 0;
  const auto below_rows = Values{Values::integers, low, static_cast<double>(rows)};
  const int64_t way = r.below(6);
  if (way == 0 || way == 1) {  // positions
    cp = 1;
    Shape at = r.chance(50)   ? Shape{z.tokens}
               : r.chance(50) ? Shape{z.batch, z.tokens}
                              : Shape{z.batch * z.tokens};
    if (way == 1 && has_attribute(c.schema(), "mrope_t") && pairs <= 256) {
      at.insert(at.begin(), 3);
      if (r.chance(50)) {
        c.read("axis_map", {pairs}, DType::i32, {Values::integers, 0, 3});
      } else {
        const int64_t t = r.below(pairs + 1), h = r.below(pairs - t + 1);
        c.set("mrope_t", t), c.set("mrope_h", h), c.set("mrope_w", pairs - t - h);
        c.set("mrope_interleaved", r.below(2));
      }
    }
    c.read("positions", at, index_type(r), below_rows);
  } else if (way == 2 && z.batch == 1) {  // packed
    std::vector<int64_t> bounds;
    const int64_t unit = cp > 1 ? 2 * cp : 1, most = z.tokens * cp / unit;
    for (int64_t n = r.between(1, 4); n > 0; --n) bounds.push_back(r.below(most + 1) * unit);
    std::sort(bounds.begin(), bounds.end());
    bounds[0] = r.chance(50) ? 0 : bounds[0];
    const auto n = static_cast<int64_t>(bounds.size());
    c.read("cu_seqlens", {n}, index_type(r), {Values::list, 0, 0, bounds});
    if (r.chance(50)) c.read("starts", {n - 1}, index_type(r), {Values::integers, low, 10});
  } else if (way == 3) {
    c.read("starts", {z.batch}, index_type(r), {Values::integers, low, 10});
  }
  if (cp > 1) c.set("cp_size", cp), c.set("cp_rank", r.below(cp));
  Shape table{rows, width};
  if (z.rank == 4 && r.chance(30)) table = {r.chance(50) ? 1 : z.batch, rows, width};
  const DType t = r.chance(70) ? DType::f32 : type == DType::f32 ? float_type(r) : type;
  c.read("cos", table, t, {Values::uniform, -kTable, kTable});
  c.read("sin", table, t, {Values::uniform, -kTable, kTable});
}

void rope_like(Call& c, Random& r, const char* x, const char* k, const char* out, const char* k_out) {
  const bool in_place = out == nullptr;
  const Sizes z = sizes(r);
  const DType type = float_type(r);
  const int64_t dim = r.pick<int64_t>({2, 4, 6, 8, 16, 20, 24, 32, 48, 64, 66, 128, 130});
  const int64_t offset = r.chance(60) ? 0 : r.below(dim - 1);
  const int64_t room = dim - offset,
                rotary = r.chance(60) && room % 2 == 0 ? room : 2 * r.between(1, room / 2);
  const bool full = r.chance(40);
  c.set("layout", z.layout);
  c.set("pairing", r.below(in_place ? 2 : 3));
  c.set("rotary_offset", offset);
  c.set("transpose", r.below(2));
  if (rotary != room || r.chance(60)) c.set("rotary_dim", rotary);
  if (r.chance(30)) c.set("table", full ? 2 : 1);
  c.read(x, shape_of(z, z.heads, dim), type);
  if (out) c.write(out, type);
  tables_of(c, r, z, full ? rotary : rotary / 2, rotary / 2, type);
  if (z.rank > 2 && r.chance(50)) {
    c.read(k, shape_of(z, r.pick<int64_t>({1, 2, 8}), dim), type);
    if (k_out) c.write(k_out, type);
  }
}

void rope_mla_q_like(Call& c, Random& r, const char* x, const char* out) {
  const Sizes z = sizes(r);
  const DType type = float_type(r);
  const int64_t rotary = 2 * r.between(1, 33), dim = rotary + r.pick<int64_t>({0, 1, 8, 64});
  const bool full = r.chance(60);
  c.set("layout", z.layout);
  c.set("remove_interleaving", r.below(2));
  c.set("inverse", r.below(2));
  if (!full || r.chance(50)) c.set("rotary_dim", rotary);
  c.read(x, shape_of(z, z.heads, dim), type);
  c.write(out, type);
  tables_of(c, r, z, full ? rotary : rotary / 2, rotary / 2, type);
}

void rope_mla_kv_like(Call& c, Random& r, bool backward) {
  Sizes z = sizes(r);
  const DType type = float_type(r);
  const int64_t k = r.pick<int64_t>({0, 1, 8, 32, 33}), v = r.pick<int64_t>({0, 4, 16, 33}),
                emb = 2 * r.between(1, 33);
  c.set("layout", z.layout);
  c.set("k_dim", k);
  c.set("remove_interleaving", r.below(2));
  if (backward) {
    c.read("d_key", shape_of(z, z.heads, k + emb), type);
    c.read("d_value", shape_of(z, z.heads, v), type);
    c.write("d_kv", type), c.write("d_k_pos_emb", type);
  } else {
    c.read("kv", shape_of(z, z.heads, k + v), type);
    c.read("k_pos_emb", shape_of(z, 1, emb), type);
    c.write("key", type), c.write("value", type);
  }
  tables_of(c, r, z, emb, emb / 2, type);
}

void rope_tables(Call& c, Random& r) {
  enum { none, linear, ntk, dynamic, yarn, llama3, longrope };
  const int64_t scaling = r.below(7), dim = 2 * r.between(2, 40), rows = r.between(1, 20);
  c.set("rotary_dim", dim);
  c.set("width", r.below(3));
  c.set("scaling", scaling);
  c.set_real("base", r.pick({10000.0, 500000.0, 1e6, 2.5}));
  c.set_real("factor", r.pick({1.0, 2.0, 8.0, 40.0}));
  c.set("original_max", r.pick<int64_t>({2048, 8192}));
  if (scaling == dynamic) c.set("seq_len", r.pick<int64_t>({0, 4096, 100000}));
  if (scaling == yarn) {
    c.set("truncate", r.below(2));
    if (r.chance(50)) c.set_real("mscale", 0.7);
    if (r.chance(50)) c.set_real("mscale_all_dim", 1.1);
  }
  if (r.chance(20)) c.set_real("attention_factor", 1.3);
  if (r.chance(50)) {
    c.read("positions", {rows}, index_type(r), {Values::integers, 0, 131072});
  } else {
    c.set("rows", rows), c.set("start", r.below(100000));
  }
  if (scaling == longrope)
    c.read("factors", {dim / 2}, r.pick({DType::f32, DType::f64}), {Values::uniform, 1, 12});
  const DType type = float_type(r);
  c.write("cos", type), c.write("sin", type);
}

// ---- kda

struct Kda {
  int64_t batch, tokens, heads, value_heads, k, v, gate;
  bool v_first, sigmoid;
  DType type;
};

Kda kda(Call& c, Random& r, int64_t tokens) {
  Kda z;
  z.batch = r.between(1, 2), z.tokens = tokens;
  z.heads = r.between(1, 2), z.value_heads = z.heads * r.between(1, 2);
  z.k = r.pick<int64_t>({1, 4, 8, 15, 16, 17, 32, 40}), z.v = r.pick<int64_t>({1, 3, 8, 16, 17, 32, 33});
  if (r.chance(4)) z.k = z.v = 128;
  z.gate = r.below(3), z.v_first = r.chance(50), z.sigmoid = r.chance(50);
  z.type = float_type(r);
  c.set("gate", z.gate);
  if (z.gate == 2) c.set_real("lower_bound", r.pick({-5.0, -1.0}));
  if (has_attribute(c.schema(), "scale")) {
    if (r.chance(50)) c.set_real("scale", 0.3);
    c.set("state_v_first", z.v_first);
    c.set("qk_l2norm", r.below(2));
    c.set("beta_sigmoid", z.sigmoid);
    c.set("allow_neg_eigval", r.below(2));
  }
  return z;
}

Values gate_values(const Kda& z) { return z.gate ? Values{} : Values{Values::uniform, -0.3, 0}; }

void gate_parameters(Call& c, Random& r, const Kda& z) {
  if (z.gate == 0) return;
  if (z.gate == 1 || r.chance(50)) c.read("a_log", {z.value_heads}, DType::f32, {Values::uniform, -1, 1});
  if (r.chance(50))
    c.read("dt_bias", r.chance(50) ? Shape{z.value_heads * z.k} : Shape{z.value_heads, z.k}, DType::f32);
}

// q, k, v, g, beta with these leading sizes.
void kda_inputs(Call& c, Random& r, const Kda& z, const Shape& lead) {
  const auto shape = [&](int64_t heads, int64_t width) {
    Shape s = lead;
    s.push_back(heads);
    if (width) s.push_back(width);
    return s;
  };
  const Values unit{Values::normal, 0, 1 / std::sqrt(static_cast<double>(z.k))};
  c.read("q", shape(z.heads, z.k), z.type, unit);
  c.read("k", shape(z.heads, z.k), z.type, unit);
  c.read("v", shape(z.value_heads, z.v), z.type);
  c.read("g", shape(z.value_heads, z.k), r.chance(50) ? DType::f32 : z.type, gate_values(z));
  c.read("beta", shape(z.value_heads, 0), r.chance(50) ? DType::f32 : z.type,
         z.sigmoid ? Values{} : Values{Values::uniform, 0, 1});
  gate_parameters(c, r, z);
}

Shape state_shape(const Kda& z, int64_t rows) {
  return {rows, z.value_heads, z.v_first ? z.v : z.k, z.v_first ? z.k : z.v};
}

// What forward and backward share; returns the number of sequences.
int64_t kda_sequences(Call& c, Random& r, Kda& z) {
  c.set("chunk_size", r.pick<int64_t>({64, 32}));
  int64_t sequences = z.batch;
  if (r.chance(30)) {
    z.batch = 1;
    std::vector<int64_t> bounds{0, z.tokens};
    for (int64_t n = r.below(4); n > 0; --n) bounds.push_back(r.below(z.tokens + 1));
    std::sort(bounds.begin(), bounds.end());
    sequences = static_cast<int64_t>(bounds.size()) - 1;
    c.read("cu_seqlens", {sequences + 1}, DType::i64, {Values::list, 0, 0, bounds});
  }
  kda_inputs(c, r, z, {z.batch, z.tokens});
  if (r.chance(50)) c.read("initial_state", state_shape(z, sequences), DType::f32, {Values::normal, 0, 0.5});
  return sequences;
}

int64_t token_count(Random& r) {
  return r.chance(3) ? 0 : r.chance(70) ? r.between(1, 40) : r.between(41, 140);
}

void kda_fwd(Call& c, Random& r) {
  Kda z = kda(c, r, token_count(r));
  kda_sequences(c, r, z);
  c.write("out", or_f32(r, z.type));
  if (r.chance(50)) c.write("final_state", DType::f32);
}

void kda_bwd(Call& c, Random& r) {
  Kda z = kda(c, r, token_count(r));
  const int64_t sequences = kda_sequences(c, r, z);
  c.read("d_out", {z.batch, z.tokens, z.value_heads, z.v}, r.chance(50) ? DType::f32 : z.type);
  if (r.chance(50)) c.read("d_final_state", state_shape(z, sequences), DType::f32, {Values::normal, 0, 0.3});
  for (const char* result : {"d_q", "d_k", "d_v"})
    if (r.chance(70)) c.write(result, or_f32(r, z.type));
  for (const char* from : {"g", "beta"})
    if (r.chance(70)) c.write(fmt::format("d_{}", from), or_f32(r, c.argument(from).dtype));
  if (r.chance(70)) c.write("d_initial_state", DType::f32);
  for (const char* from : {"a_log", "dt_bias"})
    if (c.argument(from).present && r.chance(70)) c.write(fmt::format("d_{}", from), DType::f32);
}

void kda_decode(Call& c, Random& r) {
  const Kda z = kda(c, r, 1);
  kda_inputs(c, r, z, {z.batch});
  c.read("state", state_shape(z, z.batch), DType::f32, {Values::normal, 0, 0.5});
  c.write("out", or_f32(r, z.type));
  c.write("state_out", DType::f32);
}

// Caches that no chunk left are read only where they are closed: in between an inverse must be one.
void kda_step(Call& c, Random& r) {
  const int64_t chunk = r.pick<int64_t>({64, 32});
  Kda z = kda(c, r, r.chance(50) ? r.between(0, 3) : r.between(4, chunk));
  c.set("chunk_size", chunk);
  int64_t sequences = z.batch;
  if (r.chance(30)) {
    z.batch = 1;
    std::vector<int64_t> bounds{0, r.between(0, z.tokens), z.tokens};
    sequences = 2;
    c.read("cu_seqlens", {3}, DType::i64, {Values::list, 0, 0, bounds});
  }
  kda_inputs(c, r, z, {z.batch, z.tokens});
  const bool kept = r.chance(80);
  std::vector<int64_t> rows;
  for (int64_t n = 0; n < sequences; ++n) rows.push_back(kept && r.chance(50) ? chunk : 0);
  c.read("rows", {sequences}, index_type(r), {Values::list, 0, 0, rows});
  c.read("state", state_shape(z, sequences), DType::f32, {Values::normal, 0, 0.5});
  if (kept)
    c.read("cache", {sequences, z.value_heads, rlk::kda::cache_layout(z.k, z.v, chunk).size}, DType::f32,
           {Values::uniform, 0, 1});
  c.write("out", or_f32(r, z.type));
}

void kda_gate_like(Call& c, Random& r, bool backward) {
  const Kda z = kda(c, r, 0);
  Shape shape{z.value_heads, z.k};
  for (int64_t rank = r.below(3); rank > 0; --rank) shape.insert(shape.begin(), r.between(1, 9));
  c.read("g", shape, z.type, gate_values(z));
  gate_parameters(c, r, z);
  if (!backward) return c.write("out", DType::f32);
  c.read("d_out", shape, float_type(r));
  if (r.chance(70)) c.write("d_g", or_f32(r, z.type));
  for (const char* from : {"a_log", "dt_bias"})
    if (c.argument(from).present && r.chance(70)) c.write(fmt::format("d_{}", from), DType::f32);
}

// ---- rms_norm

// Options and tensors that both directions share; returns the shape.
Shape norm_inputs(Call& c, Random& r, DType type, bool backward) {
  // In a narrow row a gradient is what little two large terms leave.
  Shape shape{backward ? r.pick<int64_t>({33, 64, 100, 1023, 1024, 1030})
                       : r.pick<int64_t>({1, 2, 7, 16, 33, 64, 100, 1023, 1024, 1030})};
  for (int64_t rank = r.below(4); rank > 0; --rank) shape.insert(shape.begin(), r.between(1, 5));
  if (shape.size() > 1 && r.chance(3)) shape[0] = 0;
  const bool residual = backward && r.chance(40), sum = backward && r.chance(30);
  c.read("x", shape, backward && !residual ? or_f32(r, type) : type);
  const DType wide = backward ? or_f32(r, type) : type;
  if (residual) c.read("residual", shape, wide);
  if (sum) c.read("sum", shape, wide);
  if (r.chance(80)) {
    c.read("weight", {shape.back()}, or_f32(r, type));
    c.set("weight_offset", r.below(2));
  }
  if (r.chance(40)) {
    c.read("gate", shape, type, {Values::normal, 0, 4});
    c.set("gate_act", r.below(2));
  } else {
    c.set("cast", r.below(2));
  }
  return shape;
}

void rms_norm(Call& c, Random& r) {
  const DType type = float_type(r);
  Shape shape = norm_inputs(c, r, type, false);
  c.write("y", type);
  if (r.chance(50)) {
    const DType wide = or_f32(r, type);
    c.read("residual", shape, wide);
    if (r.chance(70)) c.write("sum", wide);
  }
  if (r.chance(50)) c.write("rstd", DType::f32);
}

void rms_norm_bwd(Call& c, Random& r) {
  const DType type = float_type(r);
  const Shape shape = norm_inputs(c, r, type, true);
  c.read("d_y", shape, type);
  if (r.chance(40)) c.read("d_sum", shape, or_f32(r, type));
  if (r.chance(90)) c.write("d_x", or_f32(r, type));
  if (r.chance(40)) c.write("d_residual", or_f32(r, type));
  if (c.argument("weight").present && r.chance(80)) c.write("d_weight", or_f32(r, type));
  if (c.argument("gate").present && r.chance(80)) c.write("d_gate", or_f32(r, type));
}

// ---- qk_norm_rope

void qk_norm_rope(Call& c, Random& r) {
  const DType type = float_type(r), wide = or_f32(r, type), table = or_f32(r, type);
  const int64_t tokens = r.chance(3) ? 0 : r.between(1, 9), q_heads = r.between(r.chance(5) ? 0 : 1, 5),
                k_heads = r.between(1, 3), rows = r.between(1, 20);
  const int64_t dims = r.pick<int64_t>({2, 4, 16, 20, 33, 64, 66, 128, 136, 256}),
                rotary = r.chance(60) ? dims / 2 * 2 : 2 * r.between(1, dims / 2);
  c.read("q", {tokens, q_heads, dims}, type);
  c.read("k", {tokens, k_heads, dims}, type);
  c.read("cos", {rows, rotary / 2}, table, {Values::uniform, -1.5, 1.5});
  c.read("sin", {rows, rotary / 2}, table, {Values::uniform, -1.5, 1.5});
  c.read("positions", {tokens}, index_type(r), {Values::integers, 0, static_cast<double>(rows)});
  if (r.chance(70)) {
    c.read("q_weight", {dims}, wide), c.read("k_weight", {dims}, wide);
    c.set("weight_offset", r.below(2)), c.set("cast", r.below(2));
  }
  c.set("pairing", r.below(2));
  if (r.chance(40)) c.set("rotary_dim", rotary);
  c.write("q_out", type);
  if (r.chance(70)) c.write("k_out", type);
  if (r.chance(40)) return;
  const int64_t places = r.between(tokens, 20), first = r.below(places - tokens + 1);
  std::vector<int64_t> slots;  // no two alike
  for (int64_t t = 0; t < tokens; ++t)
    slots.push_back(r.chance(80) ? first + t : r.chance(50) ? -1 - t : places + t);
  c.read("slots", {tokens}, index_type(r), {Values::list, 0, 0, slots});
  const bool keys = r.chance(80), f8 = r.chance(30);
  const auto cache = [&](const char* name, const char* factors, int64_t width) {
    c.read(name, {places, k_heads, width}, f8 ? DType::f8_e4m3 : type);
    if (f8 && r.chance(70))
      c.read(factors, {r.chance(50) ? 1 : k_heads}, DType::f32, {Values::uniform, 0.01, 2});
  };
  if (keys) cache("k_cache", "k_scale", dims);
  if (keys && r.chance(30)) return;
  const int64_t v_dims = r.chance(60) ? dims : r.between(1, 256);
  c.read("v", {tokens, k_heads, v_dims}, type);
  cache("v_cache", "v_scale", v_dims);
}

// ---- swiglu

void swiglu_like(Call& c, Random& r, bool backward) {
  const DType type = float_type(r);
  Shape shape{r.pick<int64_t>({0, 1, 2, 7, 16, 33, 64, 100, 257})};
  for (int64_t rank = r.below(4); rank > 0; --rank) shape.insert(shape.begin(), r.between(1, 5));
  if (shape.size() > 1 && r.chance(3)) shape[0] = 0;
  // What the sigmoid takes is rounded, and in its tail that is many ulps: nothing against the peak of a row.
  c.set("act", shape.back() < 16 ? 0 : r.below(3));
  c.set("roundings", r.below(2));
  if (r.chance(20)) c.set_real("limit", 2), c.set_real("alpha", 1), c.set_real("up_offset", 0);
  const bool packed = r.chance(40);
  c.read("gate", packed ? with_last(Shape(shape.begin(), shape.end() - 1), 2 * shape.back()) : shape, type,
         {Values::normal, 0, 4});
  if (!packed) c.read("up", shape, type, {Values::normal, 0, 4});
  if (!backward) return c.write("out", type);
  c.read("d_out", shape, type);
  if (r.chance(80)) c.write("d_gate", type);
  if (!packed && r.chance(80)) c.write("d_up", type);
}

// ---- short_conv

void short_conv_like(Call& c, Random& r, bool backward) {
  const DType type = float_type(r), wide = or_f32(r, type);
  const int64_t d = r.pick<int64_t>({0, 1, 2, 7, 16, 33, 64, 100, 513}), taps = r.between(2, 4),
                tokens = token_count(r);
  int64_t batch = r.between(1, 3), sequences = batch;
  if (r.chance(40)) {
    batch = 1;
    std::vector<int64_t> bounds{0, tokens};
    for (int64_t n = r.below(6); n > 0; --n) bounds.push_back(r.below(tokens + 1));
    std::sort(bounds.begin(), bounds.end());
    sequences = static_cast<int64_t>(bounds.size()) - 1;
    c.read("cu_seqlens", {sequences + 1}, DType::i64, {Values::list, 0, 0, bounds});
  }
  const Shape shape{batch, tokens, d}, state{sequences, taps - 1, d};
  c.read("x", shape, type);
  c.read("weight", {d, taps}, wide);
  if (r.chance(50)) c.read("bias", {d}, or_f32(r, type));
  if (r.chance(50)) c.read("initial_state", state, type);
  if (!backward) {
    c.write("y", type);
    if (r.chance(60)) c.write("final_state", type);
    return;
  }
  c.read("d_y", shape, type);
  if (r.chance(50)) c.read("d_final_state", state, or_f32(r, type));
  if (r.chance(80)) c.write("d_x", or_f32(r, type));
  if (r.chance(70)) c.write("d_weight", or_f32(r, wide));
  if (c.argument("bias").present && r.chance(80)) c.write("d_bias", DType::f32);
  if (r.chance(50)) c.write("d_initial_state", or_f32(r, type));
}

// ---- losses

const Values kLogs{Values::normal, -1.5, 0.5};

void mask_of(Call& c, Random& r, const Shape& shape) {
  if (r.chance(60))
    c.read("mask", shape, r.pick({DType::boolean, DType::u8, DType::f32}), {Values::integers, 0, 2});
}

void ratio_kl_like(Call& c, Random& r, bool backward) {
  Shape shape{r.pick<int64_t>({0, 1, 7, 16, 33, 100, 1030})};
  if (r.chance(30)) shape.insert(shape.begin(), r.between(1, 5));
  c.read("logp", shape, DType::f32, kLogs);
  c.read("old_logp", shape, DType::f32, kLogs);
  mask_of(c, r, shape);
  c.set("estimator", r.below(4));
  const bool ref = r.chance(70);
  if (ref) c.read("ref_logp", shape, DType::f32, kLogs);
  if (!backward) {
    c.write("ratio", DType::f32);
    if (ref && r.chance(80)) c.write("kl", DType::f32);
    return;
  }
  if (r.chance(80)) c.read("d_ratio", shape, DType::f32);
  if (ref && r.chance(80)) c.read("d_kl", shape, DType::f32);
  c.write("d_logp", DType::f32);
}

// Where `parts` parts of n elements begin.
std::vector<int64_t> bounds(Random& r, int64_t parts, int64_t n) {
  std::vector<int64_t> all{0, n};
  for (; parts > 1; --parts) all.push_back(r.below(n + 1));
  std::sort(all.begin(), all.end());
  return all;
}

void group_advantage(Call& c, Random& r) {
  const int64_t n = r.pick<int64_t>({1, 2, 8, 33, 100});
  const std::vector<int64_t> offsets = bounds(r, r.between(1, 9), n);
  c.read("rewards", {n}, DType::f32, r.chance(50) ? Values{Values::integers, 0, 2} : Values{});
  c.read("group_offsets", {static_cast<int64_t>(offsets.size())}, index_type(r),
         {Values::list, 0, 0, offsets});
  for (const char* choice : {"center", "scale"}) c.set(choice, r.below(3));
  for (const char* choice : {"eps_use", "singleton"}) c.set(choice, r.below(2));
  if (r.chance(30)) c.set_real("eps", 0.25);
  c.write("advantages", DType::f32);
}

// ---- sample

void sample_like(Call& c, Random& r, bool verify) {
  const int64_t n = r.chance(3) ? 0 : r.pick<int64_t>({1, 2, 3, 7, 20}),
                v = r.pick<int64_t>({0, 1, 2, 16, 50, 129, 300, 1100});
  c.read("logits", {n, v}, float_type(r), {Values::normal, 0, 3});
  const auto numbers = [&](const char* name, double from, double to) {
    if (r.chance(50)) c.read(name, {n}, DType::f32, {Values::uniform, from, to});
  };
  numbers("temperature", 0, 2);
  numbers("top_p", 0, 1.2);
  numbers("min_p", -0.1, 0.3);
  if (r.chance(50)) c.read("top_k", {n}, index_type(r), {Values::integers, -2, static_cast<double>(v + 3)});
  c.read("seed", {n}, index_type(r), {Values::integers, -1e9, 1e9});
  for (const char* name : {"stream", "position"})
    if (r.chance(50)) c.read(name, {n}, index_type(r), {Values::integers, 0, 100000});
  c.set("filter_order", r.below(2)), c.set("logits_round", r.below(3)), c.set("raw_temperature", r.below(2));
  if (r.chance(20)) c.set_real("softcap", 5);
  if (r.chance(20)) c.set("vocab", r.below(v + 1));
  c.reduction = v;
  if (verify) {
    c.read("token", {n}, index_type(r), {Values::integers, -2, static_cast<double>(v + 2)});
    for (const char* name : {"logp", "logp_raw"})
      if (r.chance(30)) c.read(name, {n}, DType::f32);
    return c.write("status", DType::i32);
  }
  c.write("token", index_type(r));
  for (const char* name : {"logp", "logp_raw"})
    if (r.chance(60)) c.write(name, DType::f32);
  for (const char* name : {"count", "keep", "bad_count"})
    if (r.chance(60)) c.write(name, DType::i32);
}

// A step, its digit, and numbers that may be a state's.
int64_t sample_step(Call& c, Random& r, int64_t n, bool part) {
  const int64_t step = r.below(4);
  c.set("step", step);
  if (step == 1 || step == 2) c.set("digit", r.below(3));
  if (step > 0 && (part || step < 3 || r.chance(50)))
    c.read("state", {n, 24}, DType::i64, {Values::integers, 0, 4});
  return step;
}

void sample_part(Call& c, Random& r) {
  const int64_t n = r.pick<int64_t>({0, 1, 3, 5}), v = r.pick<int64_t>({1, 7, 130, 600});
  const int64_t count = r.pick<int64_t>({1, 2, 4, 8}), first = count * r.below(8 / count);
  const int64_t leaf = 16 * ((v + 127) / 128), start = std::min(v, first * leaf),
                here = std::min(v, (first + count) * leaf) - start;
  c.read("logits", {n, here + r.below(3)}, float_type(r), {Values::normal, 0, 3});
  c.set("vocab", v), c.set("vocab_start", start), c.set("leaf_first", first), c.set("leaf_count", count);
  c.reduction = v;
  for (const char* name : {"temperature", "top_p", "min_p"})
    if (r.chance(50)) c.read(name, {n}, DType::f32, {Values::uniform, 0.1, 1});
  if (r.chance(50)) c.read("top_k", {n}, index_type(r), {Values::integers, 0, 9});
  c.read("seed", {n}, index_type(r), {Values::integers, -1e9, 1e9});
  c.set("filter_order", r.below(2)), c.set("raw_temperature", r.below(2));
  const int64_t step = sample_step(c, r, n, true);
  c.write("partials", DType::i64);
  if (step == 3 && r.chance(60)) c.write("keep", DType::i32);
}

void sample_merge(Call& c, Random& r) {
  constexpr int64_t kWidths[] = {1, 2048, 2048, 8};
  const int64_t n = r.pick<int64_t>({0, 1, 3, 5}), parts = r.pick<int64_t>({1, 2, 4, 8});
  const int64_t step = sample_step(c, r, n, false);
  // The bits of 0.5 to 1: ids, scores and sums alike.
  const Values numbers = step == 0 || step == 3 ? Values{Values::integers, 0x3f000000, 0x3f800000}
                                                : Values{Values::integers, 0, 3};
  c.read("partials", {parts, n, kWidths[step]}, DType::i64, numbers);
  if (r.chance(50)) c.read("temperature", {n}, DType::f32, {Values::uniform, 0.1, 1});
  if (r.chance(70)) c.read("top_k", {n}, index_type(r), {Values::integers, 0, 3000});
  if (r.chance(70)) c.read("top_p", {n}, DType::f32, {Values::uniform, 0, 1.2});
  c.set("raw_temperature", r.below(2));
  if (step < 3) return c.write("next", DType::i64);
  c.write("token", index_type(r));
  for (const char* name : {"logp", "logp_raw"})
    if (r.chance(60)) c.write(name, DType::f32);
  for (const char* name : {"count", "bad_count"})
    if (r.chance(60)) c.write(name, DType::i32);
}

// [T] with cu_seqlens, or [B, S].
void policy_loss(Call& c, Random& r) {
  const bool packed = r.chance(60);
  const int64_t sequences = r.between(1, 6), tokens = r.pick<int64_t>({1, 7, 33, 130, 600});
  const Shape shape = packed ? Shape{tokens} : Shape{sequences, r.pick<int64_t>({1, 7, 20, 65})};
  c.reduction = shape.back();
  if (packed) {
    const std::vector<int64_t> cu = bounds(r, sequences, tokens);
    c.read("cu_seqlens", {sequences + 1}, index_type(r), {Values::list, 0, 0, cu});
  }
  for (const char* logs : {"logp", "old_logp"}) c.read(logs, shape, DType::f32, kLogs);
  const bool each = r.chance(50);
  c.set("advantages_per", each ? 1 : 0);
  c.read("advantages", each ? Shape{sequences} : shape, DType::f32, {Values::uniform, 0.2, 2});
  mask_of(c, r, shape);
  c.set("form", r.below(4)), c.set("level", r.below(2)), c.set("agg", r.below(3));
  if (r.chance(60)) {
    c.read("rollout_logp", shape, DType::f32, kLogs);
    c.set("is_mode", r.below(4)), c.set("is_level", r.below(3)), c.set_real("is_low", 0.4);
  }
  if (r.chance(60)) {
    c.read("ref_logp", shape, DType::f32, kLogs);
    c.set("kl", r.below(5)), c.set_real("kl_coef", r.pick({0.0, 0.02}));
  }
  if (r.chance(50))
    c.read("entropy", shape, DType::f32, {Values::uniform, 0, 3}), c.set_real("entropy_coef", 0.01);
  if (r.chance(40)) c.read("denominator", {1}, r.pick({DType::f32, DType::i64}), {Values::integers, 1, 99});
  if (r.chance(30)) c.set_real("dual_clip", 3);
  c.write("loss", DType::f32), c.write("totals", DType::f32);
  for (const char* result : {"metrics", "factor", "entropy_factor"})
    if (r.chance(70)) c.write(result, DType::f32);
}

void policy_loss_bwd(Call& c, Random& r) {
  const Shape shape{r.pick<int64_t>({0, 1, 40, 700})};
  c.read("d_loss", {1}, DType::f32);
  c.read("factor", shape, DType::f32), c.read("entropy_factor", shape, DType::f32);
  for (const char* result : {"d_logp", "d_entropy"})
    if (r.chance(80)) c.write(result, DType::f32);
}

void loss_reduce(Call& c, Random& r) {
  c.read("totals", {r.pick<int64_t>({0, 1, 2, 33, 300}), 5}, DType::f32, {Values::integers, 0, 5});
  c.set("agg", r.below(3)), c.set_real("kl_coef", 0.02), c.set_real("entropy_coef", r.pick({0.0, 0.01}));
  if (r.chance(50)) c.read("denominator", {1}, r.pick({DType::f32, DType::i32}), {Values::integers, 0, 99});
  c.write("loss", DType::f32);
  if (r.chance(70)) c.write("metrics", DType::f32);
}

// ---- attention

struct HeadWidths {
  int64_t d, dv;
};
// Narrow ones, and now and then those of models.
HeadWidths head_widths(Random& r) {
  if (r.chance(4)) return r.pick<HeadWidths>({{128, 128}, {256, 256}, {192, 128}, {576, 512}});
  return {16 * r.between(1, 3), 16 * r.between(1, 3)};
}

// Of packed sequences: which one's keys come before those of each, one before that has no prefix itself.
void prefixes(Call& c, Random& r, int64_t n) {
  std::vector<int64_t> of(static_cast<std::size_t>(n), -1);
  for (int64_t i = 1; i < n; ++i) {
    if (!r.chance(60)) continue;
    const int64_t before = r.chance(90) ? 0 : r.below(i);
    of[static_cast<std::size_t>(i)] = of[static_cast<std::size_t>(before)] < 0 ? before : 0;
  }
  c.read("prefix_of", {n}, index_type(r), {Values::list, 0, 0, of});
}

// Keys and values, now and then an fp8 cache with factors.
void cache(Call& c, Random& r, const Shape& k, const Shape& v, DType type) {
  const bool f8 = r.chance(20);
  const int64_t heads = k.end()[-2];
  c.read("k", k, f8 ? DType::f8_e4m3 : type), c.read("v", v, f8 ? DType::f8_e4m3 : type);
  for (const char* factors : {"k_scale", "v_scale"})
    if (f8 && r.chance(70))
      c.read(factors, {r.chance(50) ? 1 : heads}, DType::f32, {Values::uniform, 0.5, 2});
}

void attention(Call& c, Random& r) {
  const DType type = float_type(r);
  const auto [d, dv] = head_widths(r);
  const int64_t kv_heads = r.between(1, 2), heads = kv_heads * r.between(1, 3), n = r.between(1, 3),
                queries = r.below(7), keys = r.pick<int64_t>({1, 9, 40, 130});
  const bool packed = r.chance(30), paged = r.chance(40);
  const auto rows = [](Shape shape, int64_t h, int64_t w) { return shape.push_back(h), with_last(shape, w); };
  if (packed) {
    c.read("q", rows({queries}, heads, d), type);
    c.read("cu_q", {n + 1}, index_type(r), {Values::list, 0, 0, bounds(r, n, queries)});
  } else {
    c.read("q", rows({n, queries}, heads, d), type);
  }
  Shape held{n, keys};
  if (paged) {
    const int64_t page = r.pick<int64_t>({7, 16, 32}), most = (keys + page - 1) / page,
                  pages = r.between(1, 5);
    held = {pages, page};
    c.read("block_table", {n, most}, index_type(r), {Values::integers, 0, static_cast<double>(pages)});
  } else if (packed && r.chance(60)) {
    held = {keys};
    c.read("cu_k", {n + 1}, index_type(r), {Values::list, 0, 0, bounds(r, n, keys)});
  }
  cache(c, r, rows(held, kv_heads, d), rows(held, kv_heads, dv), type);
  if (held.size() == 1 && r.chance(40)) prefixes(c, r, n);
  if (paged || (held.size() == 2 && r.chance(40)))
    c.read("kv_len", {n}, index_type(r), {Values::integers, 0, static_cast<double>(keys + 1)});
  if (r.chance(30)) c.read("sinks", {heads}, DType::f32);
  c.set("causal", r.below(2));
  if (r.chance(30)) c.set("causal", 1), c.set("window", r.between(1, 50));
  if (r.chance(20)) c.set_real("softcap", 3);
  if (r.chance(30)) c.set("split", r.pick<int64_t>({0, 512, 2048, 4096}));
  c.write("out", or_f32(r, type));
  if (r.chance(70)) c.write("lse", DType::f32);
}

// Keys from the second split of a sequence on, or from its start.
void attention_part(Call& c, Random& r) {
  const DType type = float_type(r);
  const auto [d, dv] = head_widths(r);
  const int64_t kv_heads = r.between(1, 2), heads = kv_heads * r.between(1, 3), n = r.between(1, 3),
                queries = r.below(7), keys = r.pick<int64_t>({0, 1, 9, 130, 512}),
                split = r.pick<int64_t>({0, 512, 512, 1024});
  const bool packed = r.chance(40), paged = !packed && r.chance(50);
  const auto rows = [](Shape shape, int64_t h, int64_t w) { return shape.push_back(h), with_last(shape, w); };
  std::vector<int64_t> room(static_cast<std::size_t>(n), keys), first, length;
  Shape of_q{n, queries}, of_k{n, keys};
  if (packed) {
    of_q = {queries}, of_k = {keys};
    const std::vector<int64_t> cu = bounds(r, n, keys);
    for (std::size_t i = 0; i < room.size(); ++i) room[i] = cu[i + 1] - cu[i];
    c.read("cu_q", {n + 1}, index_type(r), {Values::list, 0, 0, bounds(r, n, queries)});
    c.read("cu_k", {n + 1}, index_type(r), {Values::list, 0, 0, cu});
  } else if (paged) {
    const int64_t page = r.pick<int64_t>({7, 16, 64}), pages = r.between(1, 9);
    of_k = {pages, page};
    c.read("block_table", {n, (keys + page - 1) / page}, index_type(r),
           {Values::integers, 0, static_cast<double>(pages)});
  }
  for (const int64_t most : room) {
    first.push_back(split * r.below(3));
    length.push_back(r.chance(20) ? r.below(first.back() + 1) : first.back() + r.below(most + 1));
  }
  c.read("q", rows(of_q, heads, d), type);
  cache(c, r, rows(of_k, kv_heads, d), rows(of_k, kv_heads, dv), type);
  c.read("kv_len", {n}, index_type(r), {Values::list, 0, 0, length});
  c.read("k_first", {n}, index_type(r), {Values::list, 0, 0, first});
  c.set("causal", r.below(2)), c.set("split", split);
  if (r.chance(30)) c.set("causal", 1), c.set("window", r.between(1, 50));
  if (r.chance(20)) c.set_real("softcap", 3);
  c.write("partials", DType::f32);
}

void attention_merge(Call& c, Random& r) {
  const int64_t heads = r.between(1, 3), dv = 16 * r.between(1, 3);
  Shape shape{r.between(1, 5), r.between(1, 3)};
  if (r.chance(50)) shape.push_back(r.below(4));
  for (const int64_t size : {heads, r.below(4), 2 + dv}) shape.push_back(size);
  c.read("partials", shape, DType::f32, {Values::uniform, 1, 9});
  if (r.chance(50)) c.read("sinks", {heads}, DType::f32);
  c.write("out", r.pick({DType::f32, DType::bf16, DType::f16}));
  if (r.chance(70)) c.write("lse", DType::f32);
}

void attention_bwd(Call& c, Random& r) {
  const DType type = float_type(r);
  const auto [d, dv] = head_widths(r);
  const int64_t kv_heads = r.between(1, 2), heads = kv_heads * r.between(1, 4), n = r.between(1, 3),
                queries = r.below(7), keys = r.pick<int64_t>({1, 9, 40, 130});
  const bool packed = r.chance(40);
  const auto rows = [](Shape shape, int64_t h, int64_t w) { return shape.push_back(h), with_last(shape, w); };
  Shape of_q{n, queries}, of_k{n, keys};
  if (packed) {
    of_q = {queries}, of_k = {keys};
    c.read("cu_q", {n + 1}, index_type(r), {Values::list, 0, 0, bounds(r, n, queries)});
    c.read("cu_k", {n + 1}, index_type(r), {Values::list, 0, 0, bounds(r, n, keys)});
    if (r.chance(40)) prefixes(c, r, n);
  } else if (r.chance(40)) {
    c.read("kv_len", {n}, index_type(r), {Values::integers, 0, static_cast<double>(keys + 1)});
  }
  c.read("q", rows(of_q, heads, d), type);
  c.read("k", rows(of_k, kv_heads, d), type);
  c.read("v", rows(of_k, kv_heads, dv), type);
  c.read("out", rows(of_q, heads, dv), or_f32(r, type));
  c.read("d_out", rows(of_q, heads, dv), or_f32(r, type));
  c.read("lse", with_last(of_q, heads), DType::f32, {Values::uniform, 2, 5});
  if (r.chance(30)) c.read("d_lse", with_last(of_q, heads), DType::f32);
  if (r.chance(30)) c.read("sinks", {heads}, DType::f32), c.write("d_sinks", DType::f32);
  c.set("causal", r.below(2));
  if (r.chance(30)) c.set("causal", 1), c.set("window", r.between(1, 50));
  if (r.chance(20)) c.set_real("softcap", 3);
  for (const char* result : {"d_q", "d_k", "d_v"})
    if (r.chance(80)) c.write(result, or_f32(r, type));
}

// ---- logp

// What logp and linear_logp share, of `rows` rows; returns the columns of the call's logits.
int64_t tokens(Call& c, Random& r, int64_t rows, bool part) {
  const int64_t vocab = r.pick<int64_t>({1, 2, 8, 17, 100, 129, 300, 1030}),
                leaf = 16 * ((vocab + 127) / 128);
  const int64_t count = part ? r.pick<int64_t>({1, 2, 4, 8, 8}) : 8, first = count * r.below(8 / count);
  const int64_t start = std::min(vocab, first * leaf), here = std::min(vocab, (first + count) * leaf) - start;
  const int64_t padding = r.chance(30) ? r.below(40) : 0;
  if (padding || count < 8 || r.chance(20)) c.set("vocab", vocab);
  c.set("vocab_start", start), c.set("leaf_first", first), c.set("leaf_count", count);
  c.read("target", {rows}, index_type(r), {Values::integers, -1, static_cast<double>(vocab + 1)});
  if (r.chance(30)) c.set("ignore_index", r.below(3) - 1);
  if (r.chance(30)) {
    c.read("temperatures", {rows}, DType::f32, {Values::uniform, 0.5, 2});
  } else if (r.chance(30)) {
    c.set_real("temperature", 1.3);
  }
  if (r.chance(30)) c.set_real("softcap", 20);
  if (r.chance(30))
    c.read("keep", {rows, (here + 31) / 32 + r.below(2)}, DType::i32, {Values::integers, -0x1p31, 0x1p31});
  return here + padding;
}
void token_results(Call& c, Random& r) {
  const bool whole = c.attributes[attribute_position(c.schema(), "leaf_count")].i == 8;
  for (const char* name : {"logp", "lse", "entropy"})
    if (whole && r.chance(70)) c.write(name, DType::f32);
  c.write("stats", DType::f32);
  if (r.chance(40)) c.write("bad_count", DType::i32);
}

void logp(Call& c, Random& r) {
  const int64_t rows = r.chance(3) ? 0 : r.between(1, 6);
  c.read("logits", {rows, tokens(c, r, rows, true)}, float_type(r), {Values::normal, 0, 4});
  c.set("logits_round", r.below(3));
  token_results(c, r);
}

void logp_bwd(Call& c, Random& r) {
  const int64_t rows = r.chance(3) ? 0 : r.between(1, 6);
  const DType type = float_type(r);
  c.read("logits", {rows, tokens(c, r, rows, false)}, type, {Values::normal, 0, 4});
  c.set("logits_round", r.below(3));
  if (r.chance(80)) c.read("d_logp", {rows}, DType::f32);
  if (r.chance(50)) c.read("d_entropy", {rows}, DType::f32);
  c.write("d_logits", or_f32(r, type));
}

void logp_merge(Call& c, Random& r) {
  const int64_t rows = r.between(1, 6);
  c.read("partials", {r.pick<int64_t>({1, 2, 4, 8}), rows, 4}, DType::f32, {Values::uniform, 1, 9});
  if (r.chance(50)) c.read("temperatures", {rows}, DType::f32, {Values::uniform, 0.5, 2});
  c.write("logp", DType::f32), c.write("lse", DType::f32), c.write("entropy", DType::f32),
      c.write("stats", DType::f32);
}

// Logits in fp32: those of 16 bits may be rounded to either side of where the truth is.
void linear_logp_like(Call& c, Random& r, bool backward) {
  const DType type = float_type(r);
  const int64_t rows = r.chance(3) ? 0 : r.between(1, 6), k = r.pick<int64_t>({1, 8, 17, 64}),
                columns = tokens(c, r, rows, !backward);
  c.read("hidden", {rows, k}, type);
  c.read("weight", {columns, k}, type, {Values::normal, 0, 1 / std::sqrt(static_cast<double>(k))});
  if (r.chance(30)) c.read("bias", {columns}, type);
  if (!backward) return token_results(c, r);
  if (r.chance(80)) c.read("d_logp", {rows}, DType::f32);
  if (r.chance(50)) c.read("d_entropy", {rows}, DType::f32);
  if (r.chance(80)) c.write("d_hidden", or_f32(r, type));
  const bool before = r.chance(25);
  if (before)
    c.read("d_weight_before", {columns, k}, DType::f32), c.read("d_bias_before", {columns}, DType::f32);
  if (r.chance(80)) c.write("d_weight", before ? DType::f32 : or_f32(r, type));
  if (r.chance(50)) c.write("d_bias", before ? DType::f32 : or_f32(r, type));
}

using Generator = std::function<void(Call&, Random&)>;
const std::map<std::string_view, Generator>& generators() {
  static const std::map<std::string_view, Generator> all = {
      {"lm_head", lm_head},
      {"lm_head_bwd", lm_head_bwd},
      {"linear", linear},
      {"linear_bwd", linear_bwd},
      {"tp_sum", tp_sum},
      {"tp_sum_bwd", tp_sum_bwd},
      {"embedding", [](Call& c, Random& r) { embedding_like(c, r, false); }},
      {"embedding_bwd", [](Call& c, Random& r) { embedding_like(c, r, true); }},
      {"rope", [](Call& c, Random& r) { rope_like(c, r, "x", "k", "out", "k_out"); }},
      {"rope_bwd", [](Call& c, Random& r) { rope_like(c, r, "d_out", "d_k_out", "d_x", "d_k"); }},
      {"rope_", [](Call& c, Random& r) { rope_like(c, r, "x", "k", nullptr, nullptr); }},
      {"rope_mla_q", [](Call& c, Random& r) { rope_mla_q_like(c, r, "x", "out"); }},
      {"rope_mla_q_bwd", [](Call& c, Random& r) { rope_mla_q_like(c, r, "d_out", "d_x"); }},
      {"rope_mla_kv", [](Call& c, Random& r) { rope_mla_kv_like(c, r, false); }},
      {"rope_mla_kv_bwd", [](Call& c, Random& r) { rope_mla_kv_like(c, r, true); }},
      {"rope_tables", rope_tables},
      {"qk_norm_rope", qk_norm_rope},
      {"rms_norm", rms_norm},
      {"rms_norm_bwd", rms_norm_bwd},
      {"short_conv", [](Call& c, Random& r) { short_conv_like(c, r, false); }},
      {"short_conv_bwd", [](Call& c, Random& r) { short_conv_like(c, r, true); }},
      {"swiglu", [](Call& c, Random& r) { swiglu_like(c, r, false); }},
      {"swiglu_bwd", [](Call& c, Random& r) { swiglu_like(c, r, true); }},
      {"logp", logp},
      {"logp_bwd", logp_bwd},
      {"logp_merge", logp_merge},
      {"linear_logp", [](Call& c, Random& r) { linear_logp_like(c, r, false); }},
      {"linear_logp_bwd", [](Call& c, Random& r) { linear_logp_like(c, r, true); }},
      {"ratio_kl", [](Call& c, Random& r) { ratio_kl_like(c, r, false); }},
      {"ratio_kl_bwd", [](Call& c, Random& r) { ratio_kl_like(c, r, true); }},
      {"group_advantage", group_advantage},
      {"sample", [](Call& c, Random& r) { sample_like(c, r, false); }},
      {"sample_verify", [](Call& c, Random& r) { sample_like(c, r, true); }},
      {"sample_part", sample_part},
      {"sample_merge", sample_merge},
      {"policy_loss", policy_loss},
      {"policy_loss_bwd", policy_loss_bwd},
      {"loss_reduce", loss_reduce},
      {"attention", attention},
      {"attention_bwd", attention_bwd},
      {"attention_part", attention_part},
      {"attention_merge", attention_merge},
      {"kda_fwd", kda_fwd},
      {"kda_bwd", kda_bwd},
      {"kda_decode", kda_decode},
      {"kda_step", kda_step},
      {"kda_gate", [](Call& c, Random& r) { kda_gate_like(c, r, false); }},
      {"kda_gate_bwd", [](Call& c, Random& r) { kda_gate_like(c, r, true); }}};
  return all;
}

// ---- what breaks a call

constexpr int64_t kMostElements = 1 << 16;

bool fits(const Shape& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) {
    if (d == 0) return true;
    if (__builtin_mul_overflow(n, d, &n)) n = INT64_MAX;
  }
  return n <= kMostElements;
}

void break_shape(Call& c, Argument& a, Random& r) {
  Shape shape = a.shape;
  const auto at =
      static_cast<std::size_t>(r.below(static_cast<int64_t>(std::max<std::size_t>(1, shape.size()))));
  switch (r.below(6)) {
    case 0:
      if (!shape.empty()) shape[at] += 1;
      break;
    case 1:
      if (!shape.empty() && shape[at] > 0) shape[at] -= 1;
      break;
    case 2:
      if (!shape.empty()) shape[at] = 0;
      break;
    case 3:
      shape.insert(shape.begin(), 1);
      break;
    case 4:
      if (!shape.empty()) shape.erase(shape.begin());
      break;
    default:  // a size that only a tensor without elements can have
      if (shape.size() > 1) shape[at] = std::abs(extreme(r) / 2), shape[(at + 1) % shape.size()] = 0;
  }
  if (shape.size() > RLK_MAX_RANK || !fits(shape)) return;
  c.broken += fmt::format("shape [{}] to [{}]; ", fmt::join(a.shape, ","), fmt::join(shape, ","));
  a.shape = shape;
}

void break_attribute(Call& c, Random& r) {
  const rlk_op_schema& s = c.schema();
  if (s.num_attributes == 0) return;
  const auto i = static_cast<std::size_t>(r.below(s.num_attributes));
  if (s.attributes[i].type == RLK_FLOAT) {
    c.attributes[i].f =
        r.pick({0.0, -0.0, -1.0, 1e-300, 1e300, double(INFINITY), -double(INFINITY), double(NAN)});
    c.broken += fmt::format("{}={}; ", s.attributes[i].name, c.attributes[i].f);
  } else {
    c.attributes[i].i = extreme(r);
    c.broken += fmt::format("{}={}; ", s.attributes[i].name, c.attributes[i].i);
  }
}

void break_argument(Call& c, Random& r) {
  const auto i = static_cast<std::size_t>(r.below(static_cast<int64_t>(c.arguments.size())));
  Argument& a = c.arguments[i];
  if (!a.present) return;
  c.broken += fmt::format("{}: ", c.schema().arguments[i].name);
  switch (r.below(4)) {
    case 0:
      a.present = false;
      c.broken += "absent; ";
      break;
    case 1:
      a.dtype = r.pick({DType::f16, DType::bf16, DType::f32, DType::i32, DType::i64});
      c.broken += fmt::format("{}; ", rlk::name_of(a.dtype));
      break;
    case 2:
      if (a.values.kind != Values::integers && a.values.kind != Values::list) return;
      a.values = {Values::list, 0, 0, {}};
      for (int n = 0; n < 4; ++n) a.values.numbers.push_back(extreme(r));
      c.broken += fmt::format("holds {}; ", fmt::join(a.values.numbers, ","));
      break;
    default:
      if (c.schema().arguments[i].role != RLK_WRITE) break_shape(c, a, r);
  }
}

}  // namespace

Call::Call(const Op& o) : op(&o), arguments(o.schema->num_arguments), attributes(o.schema->num_attributes) {
  for (std::size_t i = 0; i < attributes.size(); ++i) {
    const rlk_attribute& a = schema().attributes[i];
    if (a.type == RLK_FLOAT)
      attributes[i].f = a.default_float;
    else
      attributes[i].i = a.default_int;
  }
}
Argument& Call::argument(std::string_view name) { return arguments[position(schema(), name)]; }
const Argument& Call::argument(std::string_view name) const { return arguments[position(schema(), name)]; }
void Call::read(std::string_view name, Shape shape, DType dtype, Values values) {
  argument(name) = {true, std::move(shape), dtype, std::move(values)};
}
void Call::write(std::string_view name, DType dtype) { argument(name) = {true, {}, dtype, {}}; }
int64_t Call::attribute(std::string_view name) const {
  return attributes[attribute_position(schema(), name)].i;
}
void Call::set(std::string_view name, int64_t value) {
  attributes[attribute_position(schema(), name)].i = value;
}
void Call::set_real(std::string_view name, double value) {
  attributes[attribute_position(schema(), name)].f = value;
}

std::string Call::text() const {
  std::string out = schema().name;
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].present)
      out += fmt::format(" {}=[{}]:{}", schema().arguments[i].name, fmt::join(arguments[i].shape, ","),
                         rlk::name_of(arguments[i].dtype));
  for (std::size_t i = 0; i < attributes.size(); ++i) {
    const rlk_attribute& a = schema().attributes[i];
    if (a.type == RLK_FLOAT && attributes[i].f != a.default_float)
      out += fmt::format(" {}={}", a.name, attributes[i].f);
    if (a.type != RLK_FLOAT && attributes[i].i != a.default_int)
      out += fmt::format(" {}={}", a.name, attributes[i].i);
  }
  return broken.empty() ? out : out + "   broken: " + broken;
}

bool known(const Op& op) { return generators().contains(op.schema->name); }

Call valid_call(const Op& op, Random& random) {
  Call c(op);
  generators().at(op.schema->name)(c, random);
  return c;
}

int64_t extreme(Random& r) {
  const int64_t base =
      r.pick<int64_t>({0, 1, 2, 3, 63, 64, int64_t{1} << 28, int64_t{1} << 31, int64_t{1} << 32,
                       int64_t{1} << 40, int64_t{1} << 62, INT64_MAX, INT64_MIN, -1, -2});
  int64_t near = base;
  return __builtin_add_overflow(base, r.between(-70, 70), &near) || r.chance(50) ? base : near;
}

void corrupt(Call& call, Random& random) {
  for (int64_t n = random.between(1, 2); n > 0 || call.broken.empty(); --n)
    random.chance(45) ? break_attribute(call, random) : break_argument(call, random);
}

}  // namespace differential
