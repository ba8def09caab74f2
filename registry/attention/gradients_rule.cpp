// fma32/attn128, amx/k32/attn128, sm90/t25k16/attn128 and sm90/t25k16/ex2/attn128, the gradients, as the page has them, in plain
// loops, independent of every kernel. fma64 has no rule here: another exponential in fp64 may differ in its last bit.
#include <array>
#include <cmath>
#include <functional>

#include "registry/attention/gradients.hpp"
#include "registry/ex2_sm90.hpp"
#include "registry/exp32.hpp"
#include "registry/lm_head/chains.hpp"
#include "registry/op.hpp"
#include "rlk/float_guard.hpp"

namespace rlk::registry {
namespace {

using namespace attention;

constexpr std::size_t kTile = 128;
constexpr float kLog2e = 1.44269504f;

using Row = std::vector<float>;

RLK_FUSED float dot(const Row& x, const Row& y) {
  float sum = 0;
  for (std::size_t d = 0; d < x.size(); ++d) sum = std::fma(x[d], y[d], sum);
  return sum;
}
RLK_FUSED void accumulate(float p, const Row& v, Row& out) {
  for (std::size_t d = 0; d < v.size(); ++d) out[d] = std::fma(p, v[d], out[d]);
}

// Whose chains an id has: fused multiply-adds, Intel's matrix unit, a Hopper tensor core.
enum class Unit { none, amx, sm90 };

// A sum of x[i] y[i][d], ascending in i, for every d. Terms come with their place in the whole, so that a unit's groups are
// counted from its start, and what is absent is zeros.
class Chains {
 public:
  Chains(Unit unit, DType type, std::size_t width)
      : unit_(unit), type_(type), sum_(width), pending_(unit != Unit::none ? width : 0) {}
  void add(int64_t place, float x, const Row& y) {
    if (unit_ == Unit::none) return accumulate(x, y, sum_);
    const int64_t size = unit_ == Unit::amx ? 32 : 16;
    if (place / size != group_) end_group();
    group_ = place / size;
    const auto at = static_cast<std::size_t>(place % size);
    weights_[at] = x;
    for (std::size_t d = 0; d < y.size(); ++d) pending_[d][at] = y[d];
  }
  const Row& sum() {
    end_group();
    return sum_;
  }
  void end_group() {
    for (std::size_t d = 0; group_ >= 0 && d < pending_.size(); ++d) {
      const chains::Operands x{weights_, pending_[d], type_};
      sum_[d] = unit_ == Unit::amx ? chains::group_of_32(sum_[d], x, 0, 32)
                                   : chains::group_of_16(sum_[d], x, 0, 16);
      pending_[d] = {};
    }
    group_ = -1, weights_ = {};
  }

 private:
  Unit unit_;
  DType type_;
  Row sum_;
  int64_t group_ = -1;
  std::array<float, 32> weights_{};
  std::vector<std::array<float, 32>> pending_;
};

// Bits of the index are folded in the order 6, 3, 0, 1, 2, 4, 5.
float tree(std::array<float, kTile> v) {
  for (unsigned bit : {6u, 3u, 0u, 1u, 2u, 4u, 5u})
    for (unsigned j = 0; j < kTile; ++j)
      if ((j >> bit & 1) == 0) v[j] = v[j] + v[j + (1u << bit)];
  return v[0];
}

float delta_of(const Row& d_out, const Row& out) {
  float sum = 0;
  for (std::size_t d = 0; d < out.size(); d += kTile) {
    std::array<float, kTile> products{};
    for (std::size_t i = d; i < std::min(out.size(), d + kTile); ++i) products[i - d] = d_out[i] * out[i];
    sum = sum + tree(products);
  }
  return sum;
}

// Heads [first, first + count), each [width]: pairs of neighbours where the group is a power of two, else ascending.
Row join(const std::vector<Row>& heads, std::size_t first, std::size_t count) {
  if (count == 1) return heads[first];
  const bool pairs = (heads.size() & (heads.size() - 1)) == 0;
  const std::size_t left = pairs ? count / 2 : count - 1;
  Row sum = join(heads, first, left);
  const Row right = join(heads, first + left, count - left);
  for (std::size_t d = 0; d < sum.size(); ++d) sum[d] = sum[d] + right[d];
  return sum;
}

struct Id {
  Unit unit;
  bool unit_exp2;  // P as Hopper's special function unit has 2^x
};

class Rule {
 public:
  Rule(const AttentionBwd& a, const Id& id)
      : a_(a),
        all_(a),
        unit_(id.unit),
        unit_exp2_(id.unit_exp2),
        group_(a.q.dim(-2) / a.k.dim(-2)),
        scale_(static_cast<float>(scale_of(a.scale, a.q.dim(-1)))),
        cap_(static_cast<float>(a.softcap)),
        c_(cap_ != 0 ? kLog2e : scale_ * kLog2e),
        queries_(a.q.numel() / a.q.dim(-1)),
        keys_(a.k.numel() / a.k.dim(-1)) {}

  const Sequences<AttentionBwd>& sequences() const { return all_; }

  Row d_q(const Sequence& s, int64_t i, int64_t head) {
    const Query& x = query(s, i, head);
    const Visible seen = all_.visible(s, i);
    Row sum(x.q.size());
    Chains tile = chains_of(x.q);
    for (int64_t j = seen.first; j < seen.last; ++j) {
      const Key& y = key(s, j, head / group_);
      tile.add(j, rounded(pair(x, y).ds), y.k);
      if ((j + 1) % static_cast<int64_t>(kTile) != 0 && j + 1 < seen.last) continue;
      for (std::size_t d = 0; d < sum.size(); ++d) sum[d] = sum[d] + tile.sum()[d];
      tile = chains_of(x.q);
    }
    for (float& g : sum) g = g * scale_;
    return sum;
  }

  struct OfKey {
    Row d_k, d_v;
  };
  OfKey d_kv(const Sequence& s, int64_t j, int64_t kv_head) {
    const Key& y = key(s, j, kv_head);
    const std::vector<Sequence> readers = all_.readers(s);
    const auto count = static_cast<std::size_t>(group_);
    std::vector<Row> d_k, d_v;
    for (std::size_t h = 0; h < count; ++h) {
      Chains of_k = chains_of(y.k), of_v = chains_of(y.v);
      for (const Sequence& reader : readers) {
        const Visible rows = seen_by(a_, reader, j);
        for (int64_t i = rows.first; i < rows.last; ++i) {
          const Query& x = query(reader, i, kv_head * group_ + static_cast<int64_t>(h));
          const Pair of = pair(x, y);
          of_k.add(i, rounded(of.ds), x.q), of_v.add(i, rounded(of.p), x.d_out);
        }
        of_k.end_group(), of_v.end_group();
      }
      d_k.push_back(of_k.sum()), d_v.push_back(of_v.sum());
      for (Row* sum : {&d_k[h], &d_v[h]})
        for (float& g : *sum) g = g + 0.0f;
    }
    OfKey sum{join(d_k, 0, count), join(d_v, 0, count)};
    for (float& g : sum.d_k) g = g * scale_;
    return sum;
  }

  float d_sink(int64_t head) {
    const auto sink = static_cast<float>(load(DType::f32, a_.sinks.data<char>(), head * a_.sinks.stride(0)));
    double sum = 0;
    for (const Sequence& s : all_.all())
      for (int64_t i = 0; i < s.q_len; ++i) {
        const Query& x = query(s, i, head);
        if (x.lse != -INFINITY) sum = sum + double{exp32(sink - x.lse)} * double{x.delta};
      }
    return static_cast<float>(0 - sum);
  }

 private:
  struct Query {
    Row q, d_out;
    float lse, delta;
  };
  struct Key {
    Row k, v;
  };
  struct Pair {
    float p, ds;
  };

  static Row single(const std::vector<double>& x) { return {x.begin(), x.end()}; }
  Chains chains_of(const Row& row) const { return {unit_, a_.v.dtype(), row.size()}; }
  float product(const Row& x, const Row& y) const {
    if (unit_ == Unit::none) return dot(x, y);
    const chains::Operands both{x, y, a_.q.dtype()};
    return unit_ == Unit::amx ? chains::amx(both, 0, x.size()) : chains::sm90(both, 0, x.size());
  }
  float rounded(float x) const { return static_cast<float>(round_to(a_.v.dtype(), x)); }

  const Query& query(const Sequence& s, int64_t i, int64_t head) {
    return queries_.get(all_.row(s, i) * a_.q.dim(-2) + head, [&] {
      Query x;
      std::vector<double> row;
      all_.query(a_.q, s, i, head, row), x.q = single(row);
      all_.query(a_.d_out, s, i, head, row), x.d_out = single(row);
      all_.query(a_.out, s, i, head, row);
      x.delta = delta_of(x.d_out, single(row));
      if (a_.d_lse) x.delta = x.delta - static_cast<float>(scalar(a_.d_lse, s, i, head));
      x.lse = static_cast<float>(scalar(a_.lse, s, i, head));
      return x;
    });
  }
  const Key& key(const Sequence& s, int64_t j, int64_t kv_head) {
    return keys_.get(key_row(a_, all_, s, j) * a_.k.dim(-2) + kv_head, [&] {
      Key x;
      std::vector<double> row;
      all_.key(s, j, kv_head, row), x.k = single(row);
      all_.value(s, j, kv_head, row), x.v = single(row);
      return x;
    });
  }

  Pair pair(const Query& x, const Key& y) const {
    float score = product(x.q, y.k), slope = 1;
    if (cap_ != 0) {
      const float t = tanh32(score * scale_ / cap_);
      score = t * cap_, slope = std::fma(-t, t, 1.0f);
    }
    const float base = x.lse == -INFINITY ? 0 : x.lse * kLog2e;
    const float exponent = std::fma(score, c_, -base);
    const float p = unit_exp2_ ? ex2_sm90(exponent) : exp2_32(exponent);
    const float ds = p * (product(x.d_out, y.v) - x.delta);
    return {p, cap_ != 0 ? ds * slope : ds};
  }

  const AttentionBwd& a_;
  const Sequences<AttentionBwd> all_;
  const Unit unit_;
  const bool unit_exp2_;
  const int64_t group_;
  const float scale_, cap_, c_;
  Kept<Query> queries_;
  Kept<Key> keys_;
};

enum { kDQ = 13, kDK = 14, kDV = 15, kDSinks = 16 };

// The elements of one result that are looked at, by row.
class Wanted {
 public:
  Wanted(const RuleQuery& q, std::size_t argument) {
    const Out t(q.slots[argument].tensor);
    if (!t) return;
    tensor_ = q.slots[argument].tensor, width_ = t.dim(-1);
    rows_.resize(static_cast<std::size_t>(width_ ? t.numel() / width_ : 0));
    for (std::size_t r = 0; q.sample.empty() && r < rows_.size(); ++r)
      for (int64_t d = 0; d < width_; ++d) rows_[r].push_back(d);
    for (const Sample& s : q.sample)
      for (int64_t e : s.argument == argument ? s.elements : std::vector<int64_t>{})
        rows_[static_cast<std::size_t>(e / width_)].push_back(e % width_);
    // Rows of no sequence are +0.
    for (int64_t e = 0; q.sample.empty() && e < t.numel(); ++e) set(e, 0);
  }
  bool any(int64_t row) const { return tensor_ != nullptr && !rows_[static_cast<std::size_t>(row)].empty(); }
  template <class Number>
  void put(int64_t row, const std::vector<Number>& x) const {
    if (!any(row)) return;
    for (int64_t d : rows_[static_cast<std::size_t>(row)])
      set(row * width_ + d, double{x[static_cast<std::size_t>(d)]});
  }

 private:
  void set(int64_t element, double x) const {
    const DType type = dtype_of(tensor_->dtype);
    store(type, tensor_->data, element, type == DType::f32 ? double{canonical(static_cast<float>(x))} : x);
  }
  const DLTensor* tensor_ = nullptr;
  int64_t width_ = 0;
  std::vector<std::vector<int64_t>> rows_;
};

// What `of` (the rule, or the truth in fp64) says of all that is looked at.
template <class Of>
void write(const RuleQuery& q, const AttentionBwd& a, Of& of) {
  const Wanted d_q(q, kDQ), d_k(q, kDK), d_v(q, kDV), d_sinks(q, kDSinks);
  const int64_t heads = a.q.dim(-2), kv_heads = a.k.dim(-2);
  for (const Sequence& s : of.sequences().all()) {
    for (int64_t i = 0; i < s.q_len; ++i)
      for (int64_t h = 0; h < heads; ++h)
        if (const int64_t row = of.sequences().row(s, i) * heads + h; d_q.any(row))
          d_q.put(row, of.d_q(s, i, h));
    for (int64_t j = s.shared; j < s.kv_len; ++j)
      for (int64_t h = 0; h < kv_heads; ++h) {
        const int64_t row = key_row(a, of.sequences(), s, j) * kv_heads + h;
        if (!d_k.any(row) && !d_v.any(row)) continue;
        const auto sum = of.d_kv(s, j, h);
        d_k.put(row, sum.d_k), d_v.put(row, sum.d_v);
      }
  }
  if (!d_sinks.any(0)) return;
  std::vector<double> all;
  all.reserve(static_cast<std::size_t>(heads));
  for (int64_t h = 0; h < heads; ++h) all.push_back(double{of.d_sink(h)});
  d_sinks.put(0, all);
}

}  // namespace

bool attention_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const AttentionBwd*>(q.slots);
  // The truth of a large call, in fp64.
  if (q.arithmetic == "fma64") {
    for (const Out* t : {&a.d_q, &a.d_k, &a.d_v, &a.d_sinks})
      if (*t && t->dtype() != DType::f64) return false;
    TrueGradients truth(a);
    write(q, a, truth);
    return true;
  }
  const bool unit_exp2 = q.arithmetic == "sm90/t25k16/ex2/attn128",
             amx = q.arithmetic == "amx/k32/attn128" && a.q.dtype() == DType::bf16,
             sm90 = unit_exp2 || q.arithmetic == "sm90/t25k16/attn128";
  if (!sm90 && !amx && q.arithmetic != "fma32/attn128") return false;
  Rule rule(a, {sm90 ? Unit::sm90 : amx ? Unit::amx : Unit::none, unit_exp2});
  if (!rule.sequences().valid()) return false;
  write(q, a, rule);
  return true;
}

}  // namespace rlk::registry
