// The rope family as plainly as it can be said: fp64, one element at a time, positions and tables looked up
// afresh for every pair. It shares with the backends only the reading of shapes (registry/rope/geometry.hpp).
#include "registry/reference.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "registry/rope/geometry.hpp"

namespace rlk::registry {
namespace {

using namespace rotary;

int32_t report(const std::string& error, const rlk_host* host) {
  return error.empty() ? RLK_OK : host->fail(RLK_INVALID_ARGUMENT, error.c_str());
}

int64_t integer(const Integers& v, int64_t i) {
  return static_cast<int64_t>(load(v.wide ? DType::i64 : DType::i32, v.data, i));
}

DType dtype_of_float(Float f) {
  return f == Float::f32 ? DType::f32 : f == Float::bf16 ? DType::bf16 : DType::f16;
}

// Position of a token, by walking over the packed sequences.
int64_t position(const Geometry& g, int64_t b, int64_t t, int64_t pair) {
  const auto& r = g.rows;
  if (r.positions.data) {
    const int64_t axis = r.axes == 1 ? 0 : r.axis_bits[pair / 16] >> (pair % 16 * 2) & 3;
    return integer(r.positions, axis * r.position_axis + b * r.position_batch + t * r.position_token);
  }
  int64_t sequence = b, local = t, length = g.tokens;
  if (r.cu_seqlens.data) {
    bool found = false;
    for (int64_t s = 0; s < r.sequences && !found; ++s) {
      const int64_t begin = integer(r.cu_seqlens, s * r.cu_stride) / r.cp_size;
      const int64_t end = integer(r.cu_seqlens, (s + 1) * r.cu_stride) / r.cp_size;
      if (t >= begin && t < end) sequence = s, local = t - begin, length = end - begin, found = true;
    }
    if (!found) return 0;
  }
  if (r.cp_size > 1) {
    const int64_t chunk = length / 2;
    local =
        local < chunk ? r.cp_rank * chunk + local : (2 * r.cp_size - 1 - r.cp_rank) * chunk + (local - chunk);
  }
  return local + (r.starts.data ? integer(r.starts, sequence * r.start_stride) : 0);
}

struct Pair {
  double a, b;
};

// One pair of one token turned.
Pair turn(const Geometry& g, int64_t b, int64_t t, int64_t pair, Pair x) {
  const Table& table = g.table;
  const DType type = dtype_of_float(table.type);
  const int64_t row = position(g, b, t, pair);
  if (row < 0 && g.rows.negative_stay) return x;
  if (row < 0 || row >= g.rows.count) return {std::nan(""), std::nan("")};
  const int64_t at = pair * table.step;
  const int64_t c = b * table.cos_batch + row * table.cos_row + at,
                s = b * table.sin_batch + row * table.sin_row + at;
  const double c1 = load(type, table.cos, c), c2 = load(type, table.cos, c + table.second);
  const double s1 = load(type, table.sin, s), s2 = load(type, table.sin, s + table.second);
  if (g.transpose) return {x.a * c1 + x.b * s2, x.b * c2 - x.a * s1};
  return {x.a * c1 - x.b * s1, x.b * c2 + x.a * s2};
}

// Places of a pair's members within the rotary dims.
std::pair<int64_t, int64_t> members(bool adjacent, int64_t pair, int64_t rotary_dim) {
  return adjacent ? std::pair{2 * pair, 2 * pair + 1} : std::pair{pair, pair + rotary_dim / 2};
}

// Elements of a tensor by meaning, of any dtype.
struct Elements {
  DType type;
  void* data;
  detail::View view;
  Elements(const Attributes& o, const DLTensor* t)
      : type(dtype_of(t->dtype)), data(const_cast<void*>(detail::data_of(*t))) {
    (void)detail::see(o, "", *t, view);
  }
  int64_t at(int64_t b, int64_t t, int64_t h, int64_t d) const {
    return b * view.by_batch + t * view.by_token + h * view.by_head + d;
  }
  double get(int64_t b, int64_t t, int64_t h, int64_t d) const { return load(type, data, at(b, t, h, d)); }
  void set(int64_t b, int64_t t, int64_t h, int64_t d, double v) const {
    store(type, data, at(b, t, h, d), v);
  }
};

void rotate_tensor(const Geometry& g, const Elements& x, const Elements& y) {
  for (int64_t b = 0; b < g.batch; ++b)
    for (int64_t t = 0; t < g.tokens; ++t)
      for (int64_t h = 0; h < x.view.heads; ++h) {
        for (int64_t d = 0; d < g.head_dim; ++d)
          if (d < g.offset || d >= g.offset + g.rotary_dim) y.set(b, t, h, d, x.get(b, t, h, d));
        // All pairs are read before one is written: x and y may be the same memory.
        std::vector<Pair> turned;
        for (int64_t p = 0; p < g.rotary_dim / 2; ++p) {
          const auto [i, j] = members(g.in_adjacent, p, g.rotary_dim);
          turned.push_back(turn(g, b, t, p, {x.get(b, t, h, g.offset + i), x.get(b, t, h, g.offset + j)}));
        }
        for (int64_t p = 0; p < g.rotary_dim / 2; ++p) {
          const auto [i, j] = members(g.out_adjacent, p, g.rotary_dim);
          y.set(b, t, h, g.offset + i, turned[static_cast<std::size_t>(p)].a);
          y.set(b, t, h, g.offset + j, turned[static_cast<std::size_t>(p)].b);
        }
      }
}

// The call without its results, which may be fp64 here.
template <std::size_t N>
struct Reading {
  rlk_slot slots[N];
  Reading(const rlk_slot* s, std::initializer_list<int> results) {
    std::copy(s, s + N, slots);
    for (int r : results) slots[r].tensor = nullptr;
  }
};

int32_t rope_like(const rlk_slot* s, Form form, const rlk_host* host) {
  if (s[kK].tensor && !s[kKOut].tensor) return report("k is given, its result is missing", host);
  const Reading<kRopeArguments + static_cast<std::size_t>(kRopeAttributes)> r(s, {kOut, kKOut});
  Geometry g;
  if (const auto error = read_rope(r.slots, form, g); !error.empty()) return report(error, host);
  Attributes o;
  o.layout = static_cast<Layout>((s + kRopeArguments)[kLayout].i);
  rotate_tensor(g, {o, s[kX].tensor}, {o, s[kOut].tensor});
  if (s[kK].tensor) rotate_tensor(g, {o, s[kK].tensor}, {o, s[kKOut].tensor});
  return RLK_OK;
}

int32_t mla_q_like(const rlk_slot* s, bool backward, const rlk_host* host) {
  const Reading<kMlaQArguments + static_cast<std::size_t>(kMlaQAttributes)> r(s, {kMlaOut});
  Geometry g;
  if (const auto error = read_mla_q(r.slots, backward, g); !error.empty()) return report(error, host);
  Attributes o;
  o.layout = static_cast<Layout>((s + kMlaQArguments)[kMlaLayout].i);
  rotate_tensor(g, {o, s[kMlaX].tensor}, {o, s[kMlaOut].tensor});
  return RLK_OK;
}

int32_t mla_kv_like(const rlk_slot* s, bool backward, const rlk_host* host) {
  const Reading<kMlaKvArguments + static_cast<std::size_t>(kMlaKvAttributes)> r(s, {kKvOut0, kKvOut1});
  KvGeometry kvg;
  if (const auto error = read_mla_kv(r.slots, backward, kvg); !error.empty()) return report(error, host);
  const Geometry& g = kvg.turn;
  Attributes o;
  o.layout = static_cast<Layout>((s + kMlaKvArguments)[kKvLayout].i);
  const Elements in0(o, s[kKvIn0].tensor), in1(o, s[kKvIn1].tensor), out0(o, s[kKvOut0].tensor),
      out1(o, s[kKvOut1].tensor);
  const Elements &kv = backward ? out0 : in0, &emb = backward ? out1 : in1;
  const Elements &key = backward ? in0 : out0, &value = backward ? in1 : out1;
  for (int64_t b = 0; b < g.batch; ++b)
    for (int64_t t = 0; t < g.tokens; ++t) {
      for (int64_t h = 0; h < kvg.heads; ++h) {
        for (int64_t d = 0; d < kvg.k_dim; ++d)
          backward ? kv.set(b, t, h, d, key.get(b, t, h, d)) : key.set(b, t, h, d, kv.get(b, t, h, d));
        for (int64_t d = 0; d < kvg.v_dim; ++d)
          backward ? kv.set(b, t, h, kvg.k_dim + d, value.get(b, t, h, d))
                   : value.set(b, t, h, d, kv.get(b, t, h, kvg.k_dim + d));
      }
      for (int64_t p = 0; p < g.rotary_dim / 2; ++p) {
        const auto [i, j] = members(g.in_adjacent, p, g.rotary_dim);
        const auto [u, v] = members(g.out_adjacent, p, g.rotary_dim);
        if (backward) {
          Pair sum{0, 0};
          for (int64_t h = 0; h < kvg.heads; ++h) {
            sum.a += key.get(b, t, h, kvg.k_dim + i);
            sum.b += key.get(b, t, h, kvg.k_dim + j);
          }
          const Pair y = turn(g, b, t, p, sum);
          emb.set(b, t, 0, u, y.a), emb.set(b, t, 0, v, y.b);
        } else {
          const Pair y = turn(g, b, t, p, {emb.get(b, t, 0, i), emb.get(b, t, 0, j)});
          for (int64_t h = 0; h < kvg.heads; ++h)
            key.set(b, t, h, kvg.k_dim + u, y.a), key.set(b, t, h, kvg.k_dim + v, y.b);
        }
      }
    }
  return RLK_OK;
}

// Frequencies by the formulas of the published models, with the C library's functions.
std::vector<double> frequencies(const TableRule& r, double& attention) {
  const double d = static_cast<double>(r.rotary_dim), original = static_cast<double>(r.original_max),
               pi = std::acos(-1.0);
  double base = r.base;
  attention = 1;
  if (r.scaling == Scaling::ntk) base *= std::pow(r.factor, d / (d - 2));
  if (r.scaling == Scaling::dynamic) {
    const double length = std::max(static_cast<double>(r.seq_len), original);
    base *= std::pow(r.factor * length / original - (r.factor - 1), d / (d - 2));
  }
  double low = 0, high = 0;
  if (r.scaling == Scaling::yarn) {
    const auto turns = [&](double beta) {
      return d * std::log(original / (beta * 2 * pi)) / (2 * std::log(r.base));
    };
    low = r.truncate ? std::floor(turns(r.beta_fast)) : turns(r.beta_fast);
    high = r.truncate ? std::ceil(turns(r.beta_slow)) : turns(r.beta_slow);
    low = std::max(low, 0.0), high = std::min(high, d - 1);
    if (low == high) high += 0.001;
    const auto scale = [&](double a) { return r.factor <= 1 ? 1 : 0.1 * a * std::log(r.factor) + 1; };
    attention = r.mscale != 0 && r.mscale_all_dim != 0 ? scale(r.mscale) / scale(r.mscale_all_dim)
                                                       : scale(r.mscale != 0 ? r.mscale : 1);
  }
  if (r.scaling == Scaling::longrope && r.factor > 1)
    attention = std::sqrt(1 + std::log(r.factor) / std::log(original));
  if (r.attention_factor != 0) attention = r.attention_factor;
  std::vector<double> out;
  for (int64_t i = 0; i < r.rotary_dim / 2; ++i) {
    const double f = std::pow(base, -2.0 * static_cast<double>(i) / d);
    switch (r.scaling) {
      case Scaling::linear:
        out.push_back(f / r.factor);
        break;
      case Scaling::longrope:
        out.push_back(f / load(dtype_of(r.factors->dtype), detail::data_of(*r.factors),
                               i * detail::stride_of(*r.factors, 0)));
        break;
      case Scaling::yarn: {
        const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
        out.push_back(f / r.factor * ramp + f * (1 - ramp));
        break;
      }
      case Scaling::llama3: {
        const double wave = 2 * pi / f;
        const double k = (original / wave - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
        out.push_back(wave > original / r.low_freq_factor    ? f / r.factor
                      : wave < original / r.high_freq_factor ? f
                                                             : (1 - k) * f / r.factor + k * f);
        break;
      }
      default:
        out.push_back(f);
    }
  }
  return out;
}

}  // namespace

int32_t rope_reference(const rlk_slot* s, const rlk_host* host) {
  return rope_like(s, Form::out_of_place, host);
}
int32_t rope_bwd_reference(const rlk_slot* s, const rlk_host* host) {
  return rope_like(s, Form::backward, host);
}
int32_t rope__reference(const rlk_slot* s, const rlk_host* host) {
  Geometry g;
  if (const auto error = read_rope(s, Form::in_place, g); !error.empty()) return report(error, host);
  Attributes o;
  o.layout = static_cast<Layout>((s + kOut)[kLayout].i);
  rotate_tensor(g, {o, s[kX].tensor}, {o, s[kX].tensor});
  if (s[kK].tensor) rotate_tensor(g, {o, s[kK].tensor}, {o, s[kK].tensor});
  return RLK_OK;
}
int32_t rope_mla_q_reference(const rlk_slot* s, const rlk_host* host) { return mla_q_like(s, false, host); }
int32_t rope_mla_q_bwd_reference(const rlk_slot* s, const rlk_host* host) {
  return mla_q_like(s, true, host);
}
int32_t rope_mla_kv_reference(const rlk_slot* s, const rlk_host* host) { return mla_kv_like(s, false, host); }
int32_t rope_mla_kv_bwd_reference(const rlk_slot* s, const rlk_host* host) {
  return mla_kv_like(s, true, host);
}

int32_t rope_tables_reference(const rlk_slot* s, const rlk_host* host) {
  TableRule rule;
  int64_t rows = 0;
  bool full = false;
  if (const auto error = read_table_rule(s, rule, rows, full); !error.empty()) return report(error, host);
  double attention = 1;
  const auto f = frequencies(rule, attention);
  const rlk_slot* a = s + kTableArguments;
  const bool doubled = a[kTableWidth].i == 2;
  const auto half = static_cast<int64_t>(f.size());
  const Rows cos(In(s[kTableCos].tensor)), sin(In(s[kTableSin].tensor));
  for (int64_t row = 0; row < rows; ++row) {
    const DLTensor* p = s[kTablePositions].tensor;
    const double position = p ? load(dtype_of(p->dtype), detail::data_of(*p), row * detail::stride_of(*p, 0))
                              : static_cast<double>(a[kTableStart].i + row);
    for (int64_t column = 0; column < (full ? 2 * half : half); ++column) {
      const double angle = position * f[static_cast<std::size_t>(doubled ? column / 2 : column % half)];
      cos.set(row, column, std::cos(angle) * attention);
      sin.set(row, column, std::sin(angle) * attention);
    }
  }
  return RLK_OK;
}

}  // namespace rlk::registry
