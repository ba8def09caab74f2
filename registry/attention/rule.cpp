// fma32/attn128/s<S>, amx/k32/attn128/s<S> and sm90/t25k16/ex2/h8/attn128/s<S> as the page has them, whole and in two
// steps, in plain loops, independent of every kernel. fma64 has no rule here: another exponential in fp64 may differ in
// its last bit.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "registry/attention/reference.hpp"
#include "registry/ex2_sm90.hpp"
#include "registry/exp32.hpp"
#include "registry/lm_head/chains.hpp"
#include "registry/op.hpp"
#include "rlk/float_guard.hpp"

namespace rlk::registry {
namespace {

using namespace attention;

constexpr int64_t kTile = 128;
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147182f;

using Row = std::vector<float>;
using Tile = std::array<float, kTile>;  // of each key of a tile: its score, then its weight

RLK_FUSED float dot(const std::vector<double>& x, const std::vector<double>& y) {
  float sum = 0;
  for (std::size_t d = 0; d < x.size(); ++d)
    sum = std::fma(static_cast<float>(x[d]), static_cast<float>(y[d]), sum);
  return sum;
}
RLK_FUSED void accumulate(float p, const std::vector<double>& v, Row& out) {
  for (std::size_t d = 0; d < v.size(); ++d) out[d] = std::fma(p, static_cast<float>(v[d]), out[d]);
}

// Bits of the index are folded in the order 6, 3, 0, 1, 2, 4, 5.
float tree(Tile v) {
  for (unsigned bit : {6u, 3u, 0u, 1u, 2u, 4u, 5u})
    for (unsigned j = 0; j < kTile; ++j)
      if ((j >> bit & 1) == 0) v[j] = v[j] + v[j + (1u << bit)];
  return v[0];
}
// Of the 32 weights whose index has the bits 1 and 2 of r: its other bits are folded in the order 3, 0, 6, 4, 5.
float tree_of_class(Tile v, unsigned r) {
  for (unsigned bit : {3u, 0u, 6u, 4u, 5u})
    for (unsigned j = 0; j < kTile; ++j)
      if ((j >> 1 & 3) == r && (j >> bit & 1) == 0) v[j] = v[j] + v[j + (1u << bit)];
  return v[2 * r];
}

// The sums so far: their maximum times c, or what is held in its place, the sum of weights, the weighted values.
struct Sums {
  float m = -INFINITY, l = 0;
  Row o;
  float classes[4] = {};  // where m is held, of a split that has not ended: l as four sums
};

float finite_or_zero(float m) { return m == -INFINITY ? 0 : m; }

void merge(Sums& all, float m, float l, const Row& o) {
  const float most = all.m > m ? all.m : m, base = finite_or_zero(most);
  const float a = exp2_32(all.m - base), b = exp2_32(m - base);
  all.l = std::fma(all.l, a, l * b);
  for (std::size_t d = 0; d < o.size(); ++d) all.o[d] = std::fma(all.o[d], a, o[d] * b);
  all.m = most;
}

void add(std::optional<Sums>& total, const Sums& part) {
  if (total)
    merge(*total, part.m, part.l, part.o);
  else
    total = part;
}

void finish(std::optional<Sums>& total, const In& sinks, int64_t head, std::size_t width, Row& out,
            float& lse) {
  const float sink =
      sinks ? static_cast<float>(load(DType::f32, sinks.data<char>(), head * sinks.stride(0))) : -INFINITY;
  out.assign(width, 0.0f);
  lse = sink;
  if (!total || total->l == 0) return;
  if (sinks) merge(*total, sink * kLog2e, 1, Row(width));
  for (std::size_t d = 0; d < width; ++d) out[d] = total->o[d] * (1 / total->l);
  lse = std::fma(total->m, kLn2, ln32(total->l));
}

// Whose chains an id has: fused multiply-adds, Intel's matrix unit, a Hopper tensor core.
enum class Chains { fma32, amx, sm90 };

struct Id {
  Chains chains;
  int64_t split;
};

// Args is Attention or AttentionPart.
template <class Args>
class Rule {
 public:
  Rule(const Args& a, const Id& id)
      : a_(a),
        all_(a),
        chains_(id.chains),
        split_(id.split),
        scale_(static_cast<float>(scale_of(a.scale, a.q.dim(-1)))),
        cap_(static_cast<float>(a.softcap)),
        c_(cap_ != 0 ? kLog2e : scale_ * kLog2e) {}

  const Sequences<Args>& sequences() const { return all_; }

  // take(the split, its sums) for every split of which a row sees a key.
  template <class Take>
  void splits(const Sequence& s, int64_t i, int64_t head, bool with_values, Take take) const {
    const int64_t kv_head = head / (a_.q.dim(-2) / a_.k.dim(-2));
    const auto width = with_values ? static_cast<std::size_t>(a_.v.dim(-1)) : 0;
    const Visible seen = all_.visible(s, i);
    std::vector<double> q;
    all_.query(a_.q, s, i, head, q);
    Sums part{-INFINITY, 0, Row(width)};
    for (int64_t tile = seen.first / kTile; tile * kTile < seen.last; ++tile) {
      one_tile(s, q, kv_head, seen, tile, with_values, part);
      const bool ends = (tile + 1) * kTile >= seen.last || (split_ != 0 && (tile + 1) * kTile % split_ == 0);
      if (!ends) continue;
      if (held()) part.l = (part.classes[0] + part.classes[1]) + (part.classes[2] + part.classes[3]);
      take(split_ == 0 ? 0 : tile * kTile / split_, part);
      part = {-INFINITY, 0, Row(width)};
    }
  }

  void row(const Sequence& s, int64_t i, int64_t head, bool with_values, Row& out, float& lse) const {
    std::optional<Sums> total;
    splits(s, i, head, with_values, [&](int64_t, const Sums& part) { add(total, part); });
    const auto width = with_values ? static_cast<std::size_t>(a_.v.dim(-1)) : 0;
    finish(total, a_.sinks, head, width, out, lse);
  }

 private:
  // Whether m stays while no score exceeds it by more than 8.
  bool held() const { return chains_ == Chains::sm90; }

  void one_tile(const Sequence& s, const std::vector<double>& q, int64_t kv_head, const Visible& seen,
                int64_t tile, bool with_values, Sums& at) const {
    Tile x{};
    std::vector<double> key;
    const int64_t first = std::max(seen.first, tile * kTile), last = std::min(seen.last, (tile + 1) * kTile);
    for (int64_t j = first; j < last; ++j) {
      all_.key(s, j, kv_head, key);
      float score = chains_ == Chains::fma32 ? dot(q, key) : unit_dot(q, key);
      if (cap_ != 0) score = cap_ * tanh32(score * scale_ / cap_);
      x[static_cast<std::size_t>(j % kTile)] = score;
    }
    const auto begin = static_cast<std::size_t>(first % kTile),
               end = begin + static_cast<std::size_t>(last - first);
    const float a = held() ? weigh_held(x, begin, end, at) : weigh_running(x, begin, end, at);
    if (!with_values) return;
    for (float& o : at.o) o = o * a;
    for (float& p : x) p = static_cast<float>(round_to(a_.q.dtype(), p));
    if (chains_ != Chains::fma32)
      unit_values(s, x, kv_head, first, last, at.o);
    else
      for (int64_t j = first; j < last; ++j) {
        all_.value(s, j, kv_head, key);
        accumulate(x[static_cast<std::size_t>(j % kTile)], key, at.o);
      }
    for (float& o : at.o) o = o + 0.0f;
  }

  // Scores [begin, end) become weights, beside which `x` is +0; m and l move on. Returns what O is multiplied by.
  float weigh_running(Tile& x, std::size_t begin, std::size_t end, Sums& at) const {
    const float before = at.m;
    for (std::size_t j = begin; j < end; ++j)
      if (x[j] * c_ > at.m) at.m = x[j] * c_;
    const float base = finite_or_zero(at.m), a = exp2_32(before - base);
    for (std::size_t j = begin; j < end; ++j) x[j] = exp2_32(std::fma(x[j], c_, -base));
    at.l = std::fma(at.l, a, tree(x));
    return a;
  }
  // The same of Hopper: m stays while it can, and weights are those of the special function units.
  float weigh_held(Tile& x, std::size_t begin, std::size_t end, Sums& at) const {
    const float before = at.m;
    bool moves = before == -INFINITY;
    for (std::size_t j = begin; j < end; ++j)
      if (std::fma(x[j], c_, -before) > 8) moves = true;
    for (std::size_t j = begin; moves && j < end; ++j)
      if (x[j] * c_ > at.m) at.m = x[j] * c_;
    const float base = finite_or_zero(at.m), a = at.m == before ? 1 : exp2_32(before - base);
    for (std::size_t j = begin; j < end; ++j) x[j] = ex2_sm90(std::fma(x[j], c_, -base));
    for (unsigned r = 0; r < 4; ++r) at.classes[r] = at.classes[r] * a + tree_of_class(x, r);
    return a;
  }

  // Of a matrix unit.
  float unit_dot(const std::vector<double>& q, const std::vector<double>& key) const {
    const Row a(q.begin(), q.end()), b(key.begin(), key.end());
    const chains::Operands x{a, b, a_.q.dtype()};
    return chains_ == Chains::amx ? chains::amx(x, 0, q.size()) : chains::sm90(x, 0, q.size());
  }
  // Groups of keys count from the tile's start; those without a key would change nothing.
  void unit_values(const Sequence& s, const Tile& weights, int64_t kv_head, int64_t first, int64_t last,
                   Row& o) const {
    std::vector<std::vector<double>> values(static_cast<std::size_t>(kTile), std::vector<double>(o.size()));
    for (int64_t j = first; j < last; ++j)
      all_.value(s, j, kv_head, values[static_cast<std::size_t>(j % kTile)]);
    Row column(static_cast<std::size_t>(kTile));
    const chains::Operands x{weights, column, a_.q.dtype()};
    const bool amx = chains_ == Chains::amx;
    const std::size_t group = amx ? 32 : 16, end = static_cast<std::size_t>((last - 1) % kTile) + 1;
    for (std::size_t d = 0; d < o.size(); ++d) {
      for (std::size_t j = 0; j < values.size(); ++j) column[j] = static_cast<float>(values[j][d]);
      for (std::size_t k = static_cast<std::size_t>(first % kTile) / group * group; k < end; k += group)
        o[d] = (amx ? chains::group_of_32 : chains::group_of_16)(o[d], x, k, k + group);
    }
  }

  const Args& a_;
  const Sequences<Args> all_;
  const Chains chains_;
  const int64_t split_;
  const float scale_, cap_, c_;
};

// Nothing when it is none of ours.
std::optional<Id> id_of(std::string_view id) {
  struct Family {
    std::string_view first;
    Chains chains;
  };
  constexpr Family kFamilies[] = {{"fma32/attn128/s", Chains::fma32},
                                  {"amx/k32/attn128/s", Chains::amx},
                                  {"sm90/t25k16/ex2/h8/attn128/s", Chains::sm90}};
  const auto* family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                    [&](const auto& f) { return id.starts_with(f.first); });
  if (family == std::end(kFamilies)) return {};
  id.remove_prefix(family->first.size());
  if (id == "none") return Id{family->chains, 0};
  int64_t split = 0;
  const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), split);
  if (error != std::errc() || end != id.data() + id.size()) return {};
  return Id{family->chains, split};
}

void put(const DLTensor& t, int64_t element, float x) {
  const DType type = dtype_of(t.dtype);
  store(type, t.data, element, type == DType::f32 ? canonical(x) : x);
}

enum : uint32_t { kOut = Attention::Slot::out, kLse = Attention::Slot::lse };

// body(row of q flattened over heads, its elements of out and of lse) for every row that is looked at.
template <class Body>
void for_rows(const RuleQuery& q, int64_t rows, int64_t width, Body body) {
  std::vector<std::vector<int64_t>> out(static_cast<std::size_t>(rows));
  std::vector<bool> lse(static_cast<std::size_t>(rows), q.sample.empty());
  for (int64_t r = 0; q.sample.empty() && r < rows; ++r)
    for (int64_t d = 0; d < width; ++d) out[static_cast<std::size_t>(r)].push_back(r * width + d);
  for (const Sample& s : q.sample)
    for (int64_t e : s.elements)
      if (s.argument == kOut)
        out[static_cast<std::size_t>(e / width)].push_back(e);
      else if (s.argument == kLse)
        lse[static_cast<std::size_t>(e)] = true;
  for (int64_t r = 0; r < rows; ++r) {
    const auto& elements = out[static_cast<std::size_t>(r)];
    if (!elements.empty() || lse[static_cast<std::size_t>(r)]) body(r, elements);
  }
}

// take(sequence, query, head) where flattened row r of q lies in a sequence.
template <class Args, class Take>
void with_row(const Sequences<Args>& all, int64_t heads, int64_t r, Take take) {
  for (const Sequence& s : all.all()) {
    const int64_t i = r / heads - all.row(s, 0);
    if (i >= 0 && i < s.q_len) return take(s, i, r % heads);
  }
}

// Whether an id's rule is of such a call.
template <class Args>
bool rules(const std::optional<Id>& id, const Args& a) {
  if (!id || id->split != a.split) return false;
  if (id->chains == Chains::amx) return a.q.dtype() == DType::bf16;
  return id->chains == Chains::fma32 || a.q.dtype() == DType::bf16 || a.q.dtype() == DType::f16;
}

}  // namespace

bool attention_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const Attention*>(q.slots);
  const DLTensor *out = q.slots[kOut].tensor, *lse = q.slots[kLse].tensor;
  const int64_t heads = a.q.dim(-2), width = a.v.dim(-1), rows = a.q.numel() / a.q.dim(-1);
  // The truth of a large call, in fp64.
  if (q.arithmetic == "fma64" && dtype_of(out->dtype) == DType::f64) {
    const Sequences all(a);
    for_rows(q, rows, width, [&](int64_t r, const std::vector<int64_t>& elements) {
      with_row(all, heads, r, [&](const Sequence& s, int64_t i, int64_t head) {
        const TrueRow row = true_row(a, all, s, i, head);
        for (int64_t e : elements)
          store(DType::f64, out->data, e, row.out[static_cast<std::size_t>(e % width)]);
        if (lse) store(DType::f64, lse->data, r, row.lse);
      });
    });
    return true;
  }
  const auto id = id_of(q.arithmetic);
  if (!rules(id, a)) return false;
  const Rule rule(a, *id);
  if (!rule.sequences().valid()) return false;
  Row values;
  for_rows(q, rows, width, [&](int64_t r, const std::vector<int64_t>& elements) {
    with_row(rule.sequences(), heads, r, [&](const Sequence& s, int64_t i, int64_t head) {
      float sum = 0;
      rule.row(s, i, head, !elements.empty(), values, sum);
      for (int64_t e : elements) put(*out, e, values[static_cast<std::size_t>(e % width)]);
      if (lse) put(*lse, r, sum);
    });
  });
  return true;
}

bool attention_part_rule(const RuleQuery& q) {
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const AttentionPart*>(q.slots);
  const auto id = id_of(q.arithmetic);
  if (!rules(id, a)) return false;
  const Rule rule(a, *id);
  if (!rule.sequences().valid()) return false;
  const DLTensor& partials = *a.partials.get();
  const int64_t heads = a.q.dim(-2), count = a.partials.dim(-2), width = a.partials.dim(-1);
  for (int64_t r = 0; r < a.q.numel() / a.q.dim(-1); ++r)
    with_row(rule.sequences(), heads, r, [&](const Sequence& s, int64_t i, int64_t head) {
      for (int64_t e = r * count * width; e < (r + 1) * count * width; ++e)
        put(partials, e, e % width == 0 ? -INFINITY : e % width == 1 ? -1.0f : 0.0f);
      rule.splits(s, i, head, true, [&](int64_t split, const Sums& part) {
        const int64_t first = id->split == 0 ? 0 : s.first / id->split;
        const int64_t at = (r * count + split - first) * width;
        put(partials, at, part.m), put(partials, at + 1, part.l);
        for (std::size_t d = 0; d < part.o.size(); ++d)
          put(partials, at + 2 + static_cast<int64_t>(d), part.o[d]);
      });
    });
  return true;
}

bool attention_merge_rule(const RuleQuery& q) {
  if (q.arithmetic != "attn128/merge") return false;
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const AttentionMerge*>(q.slots);
  const Rows partials(a.partials);
  const int64_t ranks = a.partials.dim(0), heads = a.partials.dim(-3), count = a.partials.dim(-2);
  const int64_t width = a.partials.dim(-1) - 2, rows = a.out.numel() / width;
  for (int64_t r = 0; r < rows; ++r) {
    std::optional<Sums> total;
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t split = 0; split < count; ++split) {
        const auto number = [&](int64_t i) {
          return static_cast<float>(partials.get((rank * rows + r) * count + split, i));
        };
        if (number(1) == -1) continue;
        Sums part{number(0), number(1), Row(static_cast<std::size_t>(width))};
        for (int64_t d = 0; d < width; ++d) part.o[static_cast<std::size_t>(d)] = number(2 + d);
        add(total, part);
      }
    Row out;
    float lse = 0;
    finish(total, a.sinks, r % heads, static_cast<std::size_t>(width), out, lse);
    for (int64_t d = 0; d < width; ++d) put(*a.out.get(), r * width + d, out[static_cast<std::size_t>(d)]);
    if (a.lse) put(*a.lse.get(), r, lse);
  }
  return true;
}

}  // namespace rlk::registry
