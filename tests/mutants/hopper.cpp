// Deliberate errors under the ids of Hopper's ex2, which CPUs replay. Those of attention and its gradients: the rules are written
// here once more, with a place for every error: a Way is right as it stands, and each mutant changes one of its functions.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "break.hpp"
#include "registry/attention/gradients.hpp"
#include "registry/attention/rows.hpp"
#include "registry/ex2_sm90.hpp"
#include "registry/exp32.hpp"
#include "registry/lm_head/chains.hpp"
#include "registry/logp/lse128.hpp"

namespace rlk::mutants {
namespace {

using registry::ex2_sm90, registry::exp2_32, registry::ln32, registry::tanh32;
using registry::attention::Sequence, registry::attention::Sequences, registry::attention::Visible;
namespace chains = registry::chains;

constexpr int64_t kTile = 128;
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147182f;
using Row = std::vector<float>;

float to_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }
float without_nothing(float m) { return m == -INFINITY ? 0 : m; }

struct Way {
  // Of a score, its factor, and the row's base.
  static float weight(float s, float c, float b) { return ex2_sm90(std::fma(s, c, -b)); }
  static float factor(float x) { return exp2_32(x); }  // of the sums so far
  static float share(float x) { return exp2_32(x); }   // of a split
  // Of how far a score is above the row's reference.
  static bool moves(float above) { return above > 8; }
  static float added(float l, float a, float tile) { return l * a + tile; }  // to a sum of weights
  // The sums of a tile's weights, and what a split has of them in the end.
  using Four = std::array<float, 4>;
  static Four classes(const std::array<float, kTile>& p) {
    return {of_class(p, 0), of_class(p, 1), of_class(p, 2), of_class(p, 3)};
  }
  static float of_class(const std::array<float, kTile>& p, unsigned r) {
    std::array<float, 32> v{};  // bits 0 and 3 to 6 of the index in a row
    for (unsigned i = 0; i < v.size(); ++i) v[i] = p[(i & 1) | r << 1 | i >> 1 << 3];
    for (unsigned bit : {1u, 0u, 4u, 2u, 3u})
      for (unsigned i = 0; i < v.size(); ++i)
        if ((i >> bit & 1) == 0) v[i] = v[i] + v[i + (1u << bit)];
    return v[0];
  }
  static float whole(const Four& l) { return (l[0] + l[1]) + (l[2] + l[3]); }
  static float begins(float) { return -INFINITY; }  // a split's reference, by that of the one before
  static float rounded(float p) { return to_bf16(p); }
  static float summed(float p) { return p; }
  static float lse(float m, float l) { return std::fma(m, kLn2, ln32(l)); }
  static bool scale_apart() { return false; }                            // a rounding of its own for scale
  static bool backwards() { return false; }                              // splits
  static bool skips(int64_t, int64_t) { return false; }                  // keys [first, last) of a tile
  static int64_t group_start(int64_t first) { return first / 16 * 16; }  // of the first key in a tile
  static int64_t kv_head(int64_t h, int64_t group, int64_t) { return h / group; }
  // Gradients.
  static float base(float lse) { return lse * kLog2e; }
  static float delta(const Row& d_out, const Row& out) {
    float sum = 0;
    for (std::size_t d = 0; d < out.size(); d += kTile) {
      std::array<float, kTile> products{};
      for (std::size_t i = d; i < std::min(out.size(), d + kTile); ++i) products[i - d] = d_out[i] * out[i];
      sum = sum + registry::lse128::tree_of_128(products);
    }
    return sum;
  }
  static int64_t place(int64_t i, const Sequence&) { return i; }  // of a query in the sums over queries
  static bool heads_in_order() { return false; }
};

Row single(const std::vector<double>& x) { return {x.begin(), x.end()}; }
float product(const Row& x, const Row& y, DType t) { return chains::sm90({x, y, t}, 0, x.size()); }

template <class Args>
struct Scores {
  explicit Scores(const Args& a, bool apart)
      : scale(static_cast<float>(registry::attention::scale_of(a.scale, a.q.dim(-1)))),
        cap(static_cast<float>(a.softcap)),
        apart_(apart && cap == 0),
        c(cap != 0 || apart_ ? kLog2e : scale * kLog2e) {}
  float operator()(float s) const {
    if (apart_) return s * scale;
    return cap != 0 ? cap * tanh32(s * scale / cap) : s;
  }
  float scale, cap;

 private:
  bool apart_;

 public:
  float c;
};

// ---- attention

struct Sums {
  float m = -INFINITY, l = 0;
  Row o;
  Way::Four classes{};  // of a split
};

template <class W>
void join(Sums& all, const Sums& part) {
  const float most = all.m > part.m ? all.m : part.m, base = without_nothing(most);
  const float a = W::share(all.m - base), b = W::share(part.m - base);
  all.l = std::fma(all.l, a, part.l * b);
  for (std::size_t d = 0; d < all.o.size(); ++d) all.o[d] = std::fma(all.o[d], a, part.o[d] * b);
  all.m = most;
}

template <class W>
class Forward {
 public:
  explicit Forward(const Attention& a)
      : a_(a),
        all_(a),
        score_(a, W::scale_apart()),
        heads_(a.q.dim(-2)),
        kv_heads_(a.k.dim(-2)),
        width_(a.v.dim(-1)) {}

  void run() const {
    for (const Sequence& s : all_.all())
      for (int64_t i = 0; i < s.q_len; ++i)
        for (int64_t h = 0; h < heads_; ++h) row(s, i, h);
  }

 private:
  void row(const Sequence& s, int64_t i, int64_t head) const {
    std::vector<Sums> parts = splits(s, i, head);
    if (W::backwards()) std::reverse(parts.begin(), parts.end());
    const int64_t r = all_.row(s, i) * heads_ + head;
    const float sink = a_.sinks ? static_cast<float>(get(a_.sinks, head)) : -INFINITY;
    for (std::size_t n = 1; n < parts.size(); ++n) join<W>(parts[0], parts[n]);
    const bool none = parts.empty() || parts[0].l == 0;
    if (a_.sinks && !none) join<W>(parts[0], {sink * kLog2e, 1, Row(static_cast<std::size_t>(width_))});
    for (int64_t d = 0; d < width_; ++d)
      put(a_.out, r * width_ + d, none ? 0 : parts[0].o[static_cast<std::size_t>(d)] * (1 / parts[0].l));
    if (a_.lse) put(a_.lse, r, canonical(none ? sink : W::lse(parts[0].m, parts[0].l)));
  }

  std::vector<Sums> splits(const Sequence& s, int64_t i, int64_t head) const {
    const int64_t kv_head = W::kv_head(head, heads_ / kv_heads_, kv_heads_);
    const Visible seen = all_.visible(s, i);
    std::vector<double> q;
    all_.query(a_.q, s, i, head, q);
    std::vector<Sums> parts;
    float m = -INFINITY;
    bool open = false;
    for (int64_t tile = seen.first / kTile; tile * kTile < seen.last; ++tile) {
      if (!open) parts.push_back({W::begins(m), 0, Row(static_cast<std::size_t>(width_))});
      const int64_t first = std::max(seen.first, tile * kTile),
                    last = std::min(seen.last, (tile + 1) * kTile);
      if (!W::skips(first, last)) one_tile(s, single(q), kv_head, first, last, parts.back());
      parts.back().l = W::whole(parts.back().classes), m = parts.back().m;
      open = a_.split == 0 || (tile + 1) * kTile % a_.split != 0;
    }
    return parts;
  }

  void one_tile(const Sequence& s, const Row& q, int64_t kv_head, int64_t first, int64_t last,
                Sums& at) const {
    std::array<float, kTile> p{}, summed{};
    std::vector<double> key;
    float top = at.m;
    bool moves = at.m == -INFINITY;
    for (int64_t j = first; j < last; ++j) {
      all_.key(s, j, kv_head, key);
      const float x = p[static_cast<std::size_t>(j % kTile)] = score_(product(q, single(key), a_.q.dtype()));
      if (W::moves(std::fma(x, score_.c, -at.m))) moves = true;
      if (x * score_.c > top) top = x * score_.c;
    }
    const float m = moves ? top : at.m, base = without_nothing(m);
    for (auto j = static_cast<std::size_t>(first % kTile); j <= static_cast<std::size_t>((last - 1) % kTile);
         ++j) {
      p[j] = W::weight(p[j], score_.c, base);
      summed[j] = W::summed(p[j]);
      p[j] = W::rounded(p[j]);
    }
    const float a = W::factor(at.m - base);
    const Way::Four tile = W::classes(summed);
    for (std::size_t r = 0; r < tile.size(); ++r) at.classes[r] = W::added(at.classes[r], a, tile[r]);
    at.m = m;
    for (float& o : at.o) o = o * a;
    values(s, p, kv_head, first, last, at.o);
  }

  void values(const Sequence& s, const std::array<float, kTile>& p, int64_t kv_head, int64_t first,
              int64_t last, Row& o) const {
    std::vector<std::vector<double>> v(static_cast<std::size_t>(kTile + 16), std::vector<double>(o.size()));
    for (int64_t j = first; j < last; ++j) all_.value(s, j, kv_head, v[static_cast<std::size_t>(j % kTile)]);
    Row column(v.size()), weights(p.begin(), p.end());
    weights.resize(v.size());
    const auto start = static_cast<std::size_t>(W::group_start(first % kTile)),
               end = static_cast<std::size_t>((last - 1) % kTile) + 1;
    for (std::size_t d = 0; d < o.size(); ++d) {
      for (std::size_t j = 0; j < v.size(); ++j) column[j] = static_cast<float>(v[j][d]);
      for (std::size_t k = start; k < end; k += 16)
        o[d] = chains::group_of_16(o[d], {weights, column, a_.v.dtype()}, k, k + 16);
      o[d] = o[d] + 0.0f;
    }
  }

  const Attention& a_;
  const Sequences<Attention> all_;
  const Scores<Attention> score_;
  const int64_t heads_, kv_heads_, width_;
};

// Checked and computed by the replay of this id; then W's rows over it.
template <class W>
rlk_code by_rows(const Attention& a) {
  const std::string split = a.split == 0 ? "none" : std::to_string(a.split);
  if (const rlk_code code = honest(a, ("native.replay_sm90_ex2_s" + split).c_str())) return code;
  Forward<W>(a).run();
  return RLK_OK;
}

// ---- attention_bwd

template <class W>
class Backward {
 public:
  explicit Backward(const AttentionBwd& a)
      : a_(a),
        all_(a),
        score_(a, W::scale_apart()),
        group_(a.q.dim(-2) / a.k.dim(-2)),
        heads_(a.q.dim(-2)),
        kv_heads_(a.k.dim(-2)) {}

  void run() const {
    for (const Sequence& s : all_.all()) {
      for (int64_t i = 0; a_.d_q && i < s.q_len; ++i)
        for (int64_t h = 0; h < heads_; ++h) write(a_.d_q, all_.row(s, i) * heads_ + h, d_q(s, i, h));
      for (int64_t j = s.shared; (a_.d_k || a_.d_v) && j < s.kv_len; ++j)
        for (int64_t h = 0; h < kv_heads_; ++h) d_kv(s, j, h);
    }
  }

 private:
  struct Query {
    Row q, d_out;
    float base, delta;
  };
  struct Key {
    Row k, v;
  };
  struct Pair {
    float p = 0, ds = 0;
  };

  static void write(const Out& t, int64_t row, const Row& x) {
    for (std::size_t d = 0; t && d < x.size(); ++d)
      put(t, row * t.dim(-1) + static_cast<int64_t>(d), t.dtype() == DType::f32 ? canonical(x[d]) : x[d]);
  }

  Query query(const Sequence& s, int64_t i, int64_t head) const {
    Query x{};
    std::vector<double> row;
    all_.query(a_.q, s, i, head, row), x.q = single(row);
    all_.query(a_.d_out, s, i, head, row), x.d_out = single(row);
    all_.query(a_.out, s, i, head, row), x.delta = W::delta(x.d_out, single(row));
    using registry::attention::scalar;
    if (a_.d_lse) x.delta = x.delta - static_cast<float>(scalar(a_.d_lse, s, i, head));
    const auto lse = static_cast<float>(scalar(a_.lse, s, i, head));
    x.base = lse == -INFINITY ? 0 : W::base(lse);
    return x;
  }
  Key key(const Sequence& s, int64_t j, int64_t kv_head) const {
    Key x;
    std::vector<double> row;
    all_.key(s, j, kv_head, row), x.k = single(row);
    all_.value(s, j, kv_head, row), x.v = single(row);
    return x;
  }
  Pair pair(const Query& x, const Key& y) const {
    const float raw = product(x.q, y.k, a_.q.dtype()), s = score_(raw);
    const float p = W::weight(s, score_.c, x.base);
    const float ds = p * (product(x.d_out, y.v, a_.q.dtype()) - x.delta);
    if (score_.cap == 0) return {p, ds};
    const float t = tanh32(raw * score_.scale / score_.cap);
    return {p, ds * std::fma(-t, t, 1.0f)};
  }

  // Sums that go on by weights[i] rows[i], groups of 16 by the places of the first and all that follow.
  Row chain(const Row& weights, const std::vector<Row>& rows, int64_t place, Row sum) const {
    const auto before = static_cast<std::size_t>(place % 16);
    Row x(before), column;
    x.insert(x.end(), weights.begin(), weights.end());
    x.resize((x.size() + 15) / 16 * 16);
    for (std::size_t d = 0; d < sum.size(); ++d) {
      column.assign(x.size(), 0);
      for (std::size_t i = 0; i < rows.size(); ++i) column[before + i] = rows[i][d];
      for (std::size_t k = 0; k < x.size(); k += 16)
        sum[d] = chains::group_of_16(sum[d], {x, column, a_.v.dtype()}, k, k + 16);
    }
    return sum;
  }

  Row d_q(const Sequence& s, int64_t i, int64_t head) const {
    const Query x = query(s, i, head);
    const Visible seen = all_.visible(s, i);
    Row sum(x.q.size());
    for (int64_t tile = seen.first / kTile; tile * kTile < seen.last; ++tile) {
      const int64_t first = std::max(seen.first, tile * kTile),
                    last = std::min(seen.last, (tile + 1) * kTile);
      Row weights;
      std::vector<Row> rows;
      for (int64_t j = first; j < last; ++j) {
        const Key y = key(s, j, W::kv_head(head, group_, kv_heads_));
        weights.push_back(W::skips(first, last) ? 0 : to_bf16(pair(x, y).ds)), rows.push_back(y.k);
      }
      const Row part = chain(weights, rows, first % kTile - W::group_start(first % kTile), Row(sum.size()));
      for (std::size_t d = 0; d < sum.size(); ++d) sum[d] = sum[d] + part[d];
    }
    for (float& g : sum) g = g * score_.scale;
    return sum;
  }

  void d_kv(const Sequence& s, int64_t j, int64_t kv_head) const {
    const Key y = key(s, j, kv_head);
    std::vector<Row> d_k, d_v;
    for (int64_t h = 0; h < heads_; ++h) {
      if (W::kv_head(h, group_, kv_heads_) != kv_head) continue;
      d_k.emplace_back(y.k.size()), d_v.emplace_back(y.v.size());
      for (const Sequence& reader : all_.readers(s)) add_queries(reader, j, h, y, d_k.back(), d_v.back());
    }
    Row of_k = joined(d_k, 0, d_k.size());
    for (float& g : of_k) g = g * score_.scale;
    const int64_t row = registry::attention::key_row(a_, all_, s, j) * kv_heads_ + kv_head;
    write(a_.d_k, row, of_k), write(a_.d_v, row, joined(d_v, 0, d_v.size()));
  }

  void add_queries(const Sequence& s, int64_t j, int64_t head, const Key& y, Row& d_k, Row& d_v) const {
    const Visible seen = registry::attention::seen_by(a_, s, j);
    Row p, ds;
    std::vector<Row> q, d_out;
    for (int64_t i = seen.first; i < seen.last; ++i) {
      const Query x = query(s, i, head);
      const Pair of = pair(x, y);
      p.push_back(W::rounded(of.p)), ds.push_back(to_bf16(of.ds)), q.push_back(x.q), d_out.push_back(x.d_out);
    }
    const int64_t place = W::place(seen.first, s);
    d_k = chain(ds, q, place, d_k), d_v = chain(p, d_out, place, d_v);
  }

  static Row joined(const std::vector<Row>& heads, std::size_t first, std::size_t count) {
    if (count == 1) return heads[first];
    const bool pairs = (heads.size() & (heads.size() - 1)) == 0 && !W::heads_in_order();
    const std::size_t left = pairs ? count / 2 : count - 1;
    Row sum = joined(heads, first, left);
    const Row right = joined(heads, first + left, count - left);
    for (std::size_t d = 0; d < sum.size(); ++d) sum[d] = sum[d] + right[d];
    return sum;
  }

  const AttentionBwd& a_;
  const Sequences<AttentionBwd> all_;
  const Scores<AttentionBwd> score_;
  const int64_t group_, heads_, kv_heads_;
};

template <class W>
rlk_code by_rows(const AttentionBwd& a) {
  if (const rlk_code code = honest(a, "native.replay_sm90_ex2")) return code;
  Backward<W>(a).run();
  return RLK_OK;
}

// ---- their table

constexpr const char *kSplit1024 = "sm90/t25k16/ex2/h8/attn128/s1024",
                     *kSplit512 = "sm90/t25k16/ex2/h8/attn128/s512", *kGradients = "sm90/t25k16/ex2/attn128",
                     *kLogp = "sm90/t25k16/ex2/lse2048/l8", *kLogpBwd = "sm90/t25k16/ex2/lse2048/l8/tree8",
                     *kSample = "sample/philox-g1/ex2/lse2048/l8";
constexpr const char *kLittle = "dense b=2 s=2 l=33 h=2/1 d=16/16 split=1024 bf16",
                     *kOneMore = "dense b=3 s=2 l=129 h=2/1 d=32/32 split=1024 bf16",
                     *kWindow = "window b=2 s=3 l=300 h=2/1 d=16/16 split=1024 window=128 bf16",
                     *kTwoSplits = "split b=1 s=2 l=642 h=1/1 d=16/16 split=512 bf16",
                     *kAllOptions = "all b=2 s=37 l=150 h=4/2 d=16/32 split=1024 window=40 bf16",
                     *kRising = "rising b=1 s=5 l=1000 h=2/1 d=16/16 split=1024 bf16",
                     *kRisingSplits = "rising b=1 s=5 l=1000 h=2/1 d=16/16 split=512 bf16",
                     *kFaint = "faint b=1 s=3 l=16 h=1/1 d=16/16 split=1024 bf16";
constexpr const char *kOneMoreBwd = "dense b=2 s=2 l=129 h=2/1 d=32/32 bf16",
                     *kSinksBwd = "sinks b=2 s=5 l=150 h=3/1 d=16/48 bf16",
                     *kTilesBwd = "between tiles b=1 s=170 l=173 h=1/1 d=64/64 bf16",
                     *kBareBwd = "bare packed h=4/2 d=32/16 whole bf16",
                     *kWideBwd = "width b=1 s=5 l=140 h=2/1 d=96/96 bf16",
                     *kGroupsBwd = "groups b=1 s=9 l=140 h=16/2 d=16/16 bf16",
                     *kPackedBwd = "dense packed h=4/2 d=32/16 bf16",
                     *kFaintBwd = "faint b=1 s=5 l=16 h=1/1 d=16/16 bf16";

struct OfLibrary : Way {
  static float weight(float s, float c, float b) { return exp2_32(std::fma(s, c, -b)); }
};
struct EveryTile : Way {
  static bool moves(float) { return true; }
};
struct AtEight : Way {
  static bool moves(float above) { return above >= 8; }
};
struct AboveSeven : Way {
  static bool moves(float above) { return above > 7; }
};
struct SumStays : Way {
  static float added(float l, float, float tile) { return l + tile; }
};
struct FusedSum : Way {
  static float added(float l, float a, float tile) { return std::fma(l, a, tile); }
};
struct ClassesInOrder : Way {
  static float whole(const Four& l) { return ((l[0] + l[1]) + l[2]) + l[3]; }
};
struct ClassesByOtherBits : Way {
  static Four classes(const std::array<float, kTile>& p) {
    Four sums{};
    for (unsigned r = 0; r < 4; ++r) {
      std::array<float, kTile> turned{};
      for (unsigned j = 0; j < kTile; ++j)  // bits 0 and 1 where 1 and 2 are asked for
        turned[(j & ~7u) | (j & 3) << 1 | (j >> 2 & 1)] = p[j];
      sums[r] = of_class(turned, r);
    }
    return sums;
  }
};
struct OneTree : Way {
  static Four classes(const std::array<float, kTile>& p) { return {registry::lse128::tree_of_128(p)}; }
};
struct BitsInOrder : Way {
  static Four classes(const std::array<float, kTile>& p) {
    Four sums{};
    for (unsigned r = 0; r < 4; ++r) {
      Row v;
      for (unsigned j = 0; j < kTile; ++j)
        if ((j >> 1 & 3) == r) v.push_back(p[j]);
      for (std::size_t half = v.size() / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) v[i] = v[2 * i] + v[2 * i + 1];
      sums[r] = v[0];
    }
    return sums;
  }
};
struct SplitBefore : Way {
  static float begins(float m) { return m; }
};
struct FactorByUnit : Way {
  static float factor(float x) { return ex2_sm90(x); }
};
struct SharesByUnit : Way {
  static float share(float x) { return ex2_sm90(x); }
};
struct ScaleApart : Way {
  static bool scale_apart() { return true; }
};
struct RoundedInput : Way {
  static float weight(float s, float c, float b) {
    const volatile float x = s * c;
    return ex2_sm90(x - b);
  }
};
struct LogarithmOfTwo : Way {
  static float lse(float m, float l) { return (m + std::log2(l)) * kLn2; }
};
struct Backwards : Way {
  static bool backwards() { return true; }
};
struct LoneKey : Way {
  static bool skips(int64_t first, int64_t last) {
    return first > 0 && first % kTile == 0 && last == first + 1;
  }
};
struct HeadsInTurn : Way {
  static int64_t kv_head(int64_t h, int64_t, int64_t kv_heads) { return h % kv_heads; }
};
struct NoFlush : Way {
  static float weight(float s, float c, float b) {
    const float x = std::fma(s, c, -b);
    return x < -125 ? ex2_sm90(x + 64) * 0x1p-64f : ex2_sm90(x);
  }
};
struct CutWeights : Way {
  static float rounded(float p) { return std::bit_cast<float>(std::bit_cast<uint32_t>(p) & 0xffff0000u); }
};
struct SumOfRounded : Way {
  static float summed(float p) { return to_bf16(p); }
};
struct GroupsOfWindow : Way {
  static int64_t group_start(int64_t first) { return first; }
};
struct DividedBase : Way {
  static float base(float lse) { return lse / kLn2; }
};
struct DeltaInOrder : Way {
  static float delta(const Row& d_out, const Row& out) {
    float sum = 0;
    for (std::size_t d = 0; d < out.size(); ++d) sum = std::fma(d_out[d], out[d], sum);
    return sum;
  }
};
struct HeadsInOrder : Way {
  static bool heads_in_order() { return true; }
};
struct GroupsOfBatch : Way {
  static int64_t place(int64_t i, const Sequence& s) { return s.q_begin + i; }
};

template <class Args, class W>
constexpr Entry changed(const char* id, const char* arithmetic, const char* where, const char* error) {
  return alone<Args>([](const Args& a, const Call&) { return by_rows<W>(a); }, id, arithmetic, "equal bits",
                     error, where, RLK_BF16);
}
template <class W>
constexpr Entry gradients(const char* id, const char* where, const char* error) {
  return changed<AttentionBwd, W>(id, kGradients, where, error);
}

constinit const Entry kEntries[] = {
    changed<Attention, OfLibrary>("mutant.ex2_of_library", kSplit1024, kOneMore,
                                  "takes weights by the library's exp2, not by the unit's"),
    changed<Attention, EveryTile>("mutant.held_nowhere", kSplit1024, kRising,
                                  "moves the reference at every tile that exceeds it"),
    changed<Attention, AtEight>("mutant.held_below_8", kSplit1024, kRising,
                                "moves the reference where a score is 8 above it"),
    changed<Attention, AboveSeven>("mutant.held_to_7", kSplit1024, kRising,
                                   "moves the reference where a score is more than 7 above it"),
    changed<Attention, SumStays>("mutant.held_sum", kSplit1024, kRising,
                                 "leaves the sums of weights as they are when the reference moves"),
    changed<Attention, FusedSum>("mutant.held_fused_sum", kSplit1024, kRising,
                                 "multiplies and adds sums of weights with one rounding"),
    changed<Attention, ClassesInOrder>("mutant.held_classes_in_order", kSplit1024, kOneMore,
                                       "adds the four sums of weights one after another"),
    changed<Attention, ClassesByOtherBits>("mutant.held_other_classes", kSplit1024, kOneMore,
                                           "takes the four sums by the bits 0 and 1 of a key"),
    changed<Attention, OneTree>("mutant.held_one_tree", kSplit1024, kOneMore,
                                "adds the weights of a tile in one tree"),
    changed<Attention, BitsInOrder>("mutant.held_bits_in_order", kSplit1024, kOneMore,
                                    "adds the weights of a sum with their neighbours first"),
    changed<Attention, SplitBefore>("mutant.held_over_splits", kSplit512, kRisingSplits,
                                    "begins a split with the reference of the one before"),
    changed<Attention, FactorByUnit>("mutant.ex2_everywhere", kSplit1024, kRising,
                                     "takes the factor of earlier tiles by the unit's ex2, too"),
    changed<Attention, SharesByUnit>("mutant.ex2_of_splits", kSplit512, kTwoSplits,
                                     "joins splits by the unit's ex2"),
    changed<Attention, ScaleApart>("mutant.ex2_scale_apart", kSplit1024, kOneMore,
                                   "multiplies scores by scale, then by log2 e"),
    changed<Attention, RoundedInput>("mutant.ex2_rounded_input", kSplit1024, kLittle,
                                     "rounds s c before the base is taken away"),
    changed<Attention, LogarithmOfTwo>("mutant.ex2_log2", kSplit1024, kOneMore,
                                       "takes lse by a logarithm of base 2"),
    changed<Attention, Backwards>("mutant.ex2_splits_backwards", kSplit512, kTwoSplits,
                                  "joins splits from the last to the first"),
    changed<Attention, LoneKey>("mutant.ex2_lone_key", kSplit1024, kOneMore,
                                "drops a tile's key where it is the only one"),
    changed<Attention, HeadsInTurn>("mutant.ex2_other_head", kSplit1024, kAllOptions,
                                    "takes key heads in turn, not by groups"),
    changed<Attention, NoFlush>("mutant.ex2_no_flush", kSplit1024, kFaint, "keeps weights below 2^-126"),
    changed<Attention, CutWeights>("mutant.ex2_cut_weights", kSplit1024, kOneMore, "cuts weights to bf16"),
    changed<Attention, SumOfRounded>("mutant.ex2_sum_of_rounded", kSplit1024, kOneMore,
                                     "adds weights after they are rounded to bf16"),
    changed<Attention, GroupsOfWindow>("mutant.ex2_groups_of_window", kSplit1024, kWindow,
                                       "counts groups of 16 keys from the first that is seen"),
    alone<LinearLogp>([](const LinearLogp& a, const Call&) { return honest(a, "native.replay_sm90"); },
                      "mutant.ex2_logp_of_library", kLogp, "equal bits",
                      "takes log-probabilities by the library's exp2, not by the unit's",
                      "plain n=5 k=40 v=130 bf16", RLK_BF16),
    alone<LinearLogpBwd>([](const LinearLogpBwd& a, const Call&) { return honest(a, "native.replay_sm90"); },
                         "mutant.ex2_logp_bwd_of_library", kLogpBwd, "equal bits",
                         "takes the logits' gradient by the library's exp2, not by the unit's",
                         "many tokens n=2 k=16 v=20000 fp16", RLK_F16),
    alone<Sample>([](const Sample& a, const Call&) { return honest(a, "native.rows"); },
                  "mutant.ex2_sample_of_library", kSample, "equal bits",
                  "takes log-probabilities by the library's exp2, not by the unit's", "plain [7,100] fp32",
                  RLK_F32),
    alone<SampleVerify>([](const SampleVerify& a, const Call&) { return honest(a, "native.rows"); },
                        "mutant.ex2_verify_of_library", kSample, "equal bits",
                        "takes records of another id's log-probabilities", "records fp32", RLK_F32),
    alone<SamplePart>([](const SamplePart& a, const Call&) { return honest(a, "native.rows"); },
                      "mutant.ex2_part_of_library", kSample, "equal bits",
                      "takes a part's sums by the library's exp2, not by the unit's",
                      "filters  token digit 0 of part 1 of 2 fp32 V=300", RLK_F32),
    alone<AttentionBwd>([](const AttentionBwd& a, const Call&) { return honest(a, "native.replay_sm90"); },
                        "mutant.ex2_bwd_of_library", kGradients, "equal bits",
                        "takes weights by the library's exp2, not by the unit's", kBareBwd, RLK_BF16),
    gradients<ScaleApart>("mutant.ex2_bwd_scale_apart", kWideBwd,
                          "multiplies scores by scale, then by log2 e"),
    gradients<RoundedInput>("mutant.ex2_bwd_rounded_input", kPackedBwd,
                            "rounds s c before the base is taken away"),
    gradients<DividedBase>("mutant.ex2_bwd_divided_base", kSinksBwd, "divides lse by ln 2 for the base"),
    gradients<DeltaInOrder>("mutant.ex2_bwd_delta_in_order", kTilesBwd, "adds d_out out in one chain"),
    gradients<LoneKey>("mutant.ex2_bwd_lone_key", kOneMoreBwd,
                       "d_q lacks a tile's key where it is the only one"),
    gradients<HeadsInTurn>("mutant.ex2_bwd_other_head", kGroupsBwd, "takes key heads in turn, not by groups"),
    gradients<HeadsInOrder>("mutant.ex2_bwd_heads_in_order", kGroupsBwd,
                            "adds the heads of a group one after another"),
    gradients<GroupsOfBatch>("mutant.ex2_bwd_groups_of_batch", kPackedBwd,
                             "counts groups of 16 queries from the first of the batch"),
    gradients<CutWeights>("mutant.ex2_bwd_cut_weights", kOneMoreBwd, "cuts weights to bf16"),
    gradients<NoFlush>("mutant.ex2_bwd_no_flush", kFaintBwd, "keeps weights below 2^-126"),
};

// The rules as they are written here: what is caught above is the change.
template <class Args>
constexpr Entry rows(const char* id, const char* arithmetic) {
  Entry e = alone<Args>([](const Args& a, const Call&) { return by_rows<Way>(a); }, id, arithmetic, "", "",
                        "", RLK_BF16);
  e.implementation.doc = "a control";
  return e;
}
constinit const Entry kControls[] = {rows<Attention>("mutant.control_rows", kSplit1024),
                                     rows<Attention>("mutant.control_rows_s512", kSplit512),
                                     rows<AttentionBwd>("mutant.control_rows", kGradients)};

}  // namespace

Broken hopper() { return {kEntries, kControls}; }

}  // namespace rlk::mutants
