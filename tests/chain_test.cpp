// labels: conformance
// The promise of all ops together: a small decoder made of them gives each token the same bits, of every intermediate, however
// the token is reached: packed, alone, in chunks, token by token, from a shared prefix, beside others, over 1 to 8 ranks; and
// what the sampler says of a token is what training computes again. Prints a table, one line a promise.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "registry/linear/geometry.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using Shape = std::vector<std::int64_t>;

const rlk::Options kNative{.backend = "native"};
constexpr std::int64_t kHidden = 64, kHeads = 4, kKeyHeads = 2, kWidth = 16, kInner = 96, kVocab = 300,
                       kLayers = 2, kLongest = 560, kQkv = (kHeads + 2 * kKeyHeads) * kWidth;

struct Array {
  std::vector<std::byte> bytes;
  Shape shape;
  DType type;
  Array(Shape s, DType t) : shape(std::move(s)), type(t) {
    std::int64_t n = rlk::size_of(t);
    for (std::int64_t d : shape) n *= d;
    bytes.assign(static_cast<std::size_t>(n), std::byte{0xff});  // NaN
  }
  Array(Shape s, DType t, std::mt19937& random, float deviation, float mean = 0) : Array(std::move(s), t) {
    std::normal_distribution<float> normal(mean, deviation);
    for (std::size_t i = 0; i < bytes.size(); i += static_cast<std::size_t>(rlk::size_of(t))) {
      const float x = normal(random);
      const std::uint16_t half = rlk::float_to_bf16(x);
      if (t == DType::f32)
        std::memcpy(bytes.data() + i, &x, 4);
      else
        std::memcpy(bytes.data() + i, &half, 2);
    }
  }
  template <class T>
  Array(Shape s, DType t, const std::vector<T>& values) : Array(std::move(s), t) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  std::int64_t row_bytes() const {
    return static_cast<std::int64_t>(bytes.size()) / std::max<std::int64_t>(1, shape[0]);
  }
  Tensor all() { return Tensor(bytes.data(), std::span(shape), type); }
  // Columns [first, first + n) of a matrix, as `inner` in place of the last dimension.
  Tensor columns(std::int64_t first, std::int64_t n, Shape inner = {}) {
    if (inner.empty()) inner = {n};
    Shape to{shape[0]}, strides(inner.size() + 1, 1);
    to.insert(to.end(), inner.begin(), inner.end());
    for (std::size_t i = inner.size() - 1; i > 0; --i) strides[i] = strides[i + 1] * inner[i];
    strides[0] = shape[1];
    return Tensor(bytes.data() + first * rlk::size_of(type), std::span(to), type, {kDLCPU, 0},
                  std::span(strides));
  }
  Tensor rows(std::int64_t first, std::int64_t n) {
    return Tensor(bytes.data() + first * row_bytes(), {n, shape[1]}, type);
  }
};

struct Layer {
  Array norm, qkv, q_norm, k_norm, out, norm_2, gate_up, down;
  Layer(DType t, std::mt19937& r)
      : norm({kHidden}, t, r, 0.1f, 1),
        qkv({kQkv, kHidden}, t, r, 0.2f),
        q_norm({kWidth}, t, r, 0.1f, 1),
        k_norm({kWidth}, t, r, 0.1f, 1),
        out({kHidden, kHeads * kWidth}, t, r, 0.2f),
        norm_2({kHidden}, t, r, 0.1f, 1),
        gate_up({2 * kInner, kHidden}, t, r, 0.2f),
        down({kHidden, kInner}, t, r, 0.2f) {}
};

// A token on its way through the model: where it is, and the cache that it reads.
struct Token {
  int sequence;
  std::int64_t position;
};
using Call = std::vector<Token>;  // of a sequence in a row, ascending

// Keys and values of every layer in shuffled pages, NaN where nothing was written.
struct Cache {
  std::int64_t page, most;
  std::vector<Array> keys, values;
  std::map<int, std::vector<std::int32_t>> tables;
  std::vector<std::int32_t> free;
  Cache(DType t, std::int64_t page_size, int sequences, unsigned seed)
      : page(page_size), most((kLongest + page_size - 1) / page_size) {
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(most) * sequences + 3; ++i) free.push_back(i);
    std::mt19937 random(seed);
    std::shuffle(free.begin(), free.end(), random);
    const Shape shape{static_cast<std::int64_t>(free.size()), page, kKeyHeads, kWidth};
    for (int l = 0; l < kLayers; ++l) keys.emplace_back(shape, t), values.emplace_back(shape, t);
  }
  std::int64_t slot(const Token& t) {
    std::vector<std::int32_t>& table = tables[t.sequence];
    while (static_cast<std::int64_t>(table.size()) * page <= t.position)
      table.push_back(free.back()), free.pop_back();
    return table[static_cast<std::size_t>(t.position / page)] * page + t.position % page;
  }
};

// All that was computed for a token, by sequence and position.
using Trace = std::map<std::pair<int, std::int64_t>, std::string>;

class Model {
 public:
  DType type;
  int ranks = 1;
  std::int64_t split = 512;

  Model(DType t, std::mt19937& r)
      : type(t),
        embedding({kVocab, kHidden}, t, r, 1),
        norm({kHidden}, t, r, 0.1f, 1),
        head({kVocab, kHidden}, t, r, 0.3f),
        cos({kLongest, kWidth / 2}, DType::f32),
        sin({kLongest, kWidth / 2}, DType::f32) {
    for (int l = 0; l < kLayers; ++l) layers.emplace_back(t, r);
    rlk::RopeTables tables{.cos = cos_.emplace_back(cos.all()), .sin = cos_.emplace_back(sin.all())};
    tables.rotary_dim = kWidth, tables.rows = kLongest;
    rlk::check(rlk::rope_tables(tables, kNative));
    std::uniform_int_distribution<std::int64_t> id(0, kVocab - 1);
    for (int s = 0; s < 5; ++s) {
      auto& sequence = tokens.emplace_back();
      for (std::int64_t i = 0; i < kLongest; ++i) sequence.push_back(id(r));
    }
    std::copy_n(tokens[0].begin(), 300, tokens[1].begin());  // a shared prefix
  }

  // Without a cache the call has every key that it needs.
  void run(const Call& call, Cache* cache, Trace& trace) {
    const auto m = static_cast<std::int64_t>(call.size());
    std::vector<std::int64_t> ids, positions;
    for (const Token& t : call)
      ids.push_back(tokens[static_cast<std::size_t>(t.sequence)][static_cast<std::size_t>(t.position)]),
          positions.push_back(t.position);
    Array id({m}, DType::i64, ids), at({m}, DType::i64, positions), h({m, kHidden}, type);
    const Tensor tid = id.all(), tw = embedding.all(), th = h.all();
    rlk::check(rlk::embedding({.ids = tid, .weight = tw, .out = th}, kNative));
    const auto seen = [&](Array& x) {
      for (std::int64_t i = 0; i < m; ++i)
        trace[{call[static_cast<std::size_t>(i)].sequence, call[static_cast<std::size_t>(i)].position}]
            .append(reinterpret_cast<const char*>(x.bytes.data()) + i * x.row_bytes(),
                    static_cast<std::size_t>(x.row_bytes()));
    };
    seen(h);
    for (int l = 0; l < kLayers; ++l) {
      Layer& w = layers[static_cast<std::size_t>(l)];
      Array x = normed(h, w.norm), qkv = across(x, w.qkv);
      turn(qkv, w, at);
      seen(qkv);
      Array o = attend(qkv, call, cache, l), after = joined(o, w.out, h);
      seen(o), seen(after);
      Array y = normed(after, w.norm_2), both = across(y, w.gate_up), z({m, kInner}, type);
      const Tensor tb = both.all(), tz = z.all();
      rlk::check(rlk::swiglu({.gate = tb, .out = tz}, kNative));
      h = joined(z, w.down, after);
      seen(both), seen(h);
    }
    Array last = normed(h, norm);
    seen(last);
    sampled(last, at, m, seen);
  }

  std::vector<std::vector<std::int64_t>> tokens;

 private:
  Array embedding, norm, head, cos, sin;
  std::vector<Layer> layers;
  std::vector<Tensor> cos_ = reserved();
  static std::vector<Tensor> reserved() {
    std::vector<Tensor> two;
    two.reserve(2);
    return two;
  }

  Array normed(Array& x, Array& weight) {
    Array y(x.shape, type);
    const Tensor tx = x.all(), tw = weight.all(), ty = y.all();
    rlk::check(rlk::rms_norm({.x = tx, .weight = tw, .y = ty}, kNative));
    return y;
  }
  // Ranks have rows of the weight, and give columns.
  Array across(Array& x, Array& weight) {
    const std::int64_t n = weight.shape[0];
    Array y({x.shape[0], n}, type);
    const Tensor tx = x.all();
    for (int r = 0; r < ranks; ++r) {
      const std::int64_t first = n * r / ranks, count = n * (r + 1) / ranks - first;
      const Tensor tw = weight.rows(first, count), ty = y.columns(first, count);
      rlk::check(rlk::linear({.x = tx, .weight = tw, .y = ty}, kNative));
    }
    return y;
  }
  // Ranks have leaves of K, and tp_sum joins what they give.
  Array joined(Array& x, Array& weight, Array& residual) {
    const std::int64_t m = x.shape[0], n = weight.shape[0], k = weight.shape[1];
    Array y({m, n}, type), partials({ranks, m, n}, DType::f32);
    const Tensor tr = residual.all(), ty = y.all(), tp = partials.all();
    if (ranks == 1) {
      const Tensor tx = x.all(), tw = weight.all();
      rlk::check(rlk::linear({.x = tx, .weight = tw, .residual = tr, .y = ty}, kNative));
      return y;
    }
    for (int r = 0; r < ranks; ++r) {
      const std::int64_t each = 8 / ranks, first = rlk::leaves::length(k, 0, each * r),
                         count = rlk::leaves::length(k, each * r, each);
      const Tensor tx = x.columns(first, count), tw = weight.columns(first, count),
                   to(partials.bytes.data() + r * m * n * 4, {m, n}, DType::f32);
      rlk::Linear part{.x = tx, .weight = tw, .y = to};
      part.leaf_first = each * r, part.leaf_count = each, part.k_total = k;
      rlk::check(rlk::linear(part, kNative));
    }
    rlk::check(rlk::tp_sum({.partials = tp, .residual = tr, .y = ty}, kNative));
    return y;
  }
  // q and k are normed by head and turned, where they lie.
  void turn(Array& qkv, Layer& w, Array& at) {
    const Tensor tc = cos.all(), ts = sin.all(), ta = at.all();
    const auto part = [&](std::int64_t first, std::int64_t heads, Array& weight) {
      const Tensor x = qkv.columns(first, heads * kWidth, {heads, kWidth}), tw = weight.all();
      Array n({qkv.shape[0], heads, kWidth}, type);
      const Tensor tn = n.all();
      rlk::check(rlk::rms_norm({.x = x, .weight = tw, .y = tn}, kNative));
      rlk::Rope rope{.x = tn, .cos = tc, .sin = ts, .positions = ta, .out = x};
      rope.layout = rlk::Rope::Layout::bshd;
      rlk::check(rlk::rope(rope, kNative));
    };
    part(0, kHeads, w.q_norm), part(kHeads * kWidth, kKeyHeads, w.k_norm);
  }
  Array attend(Array& qkv, const Call& call, Cache* cache, int l) {
    const auto m = static_cast<std::int64_t>(call.size());
    Array o({m, kHeads * kWidth}, type);
    const Tensor q = qkv.columns(0, kHeads * kWidth, {kHeads, kWidth}),
                 k = qkv.columns(kHeads * kWidth, kKeyHeads * kWidth, {kKeyHeads, kWidth}),
                 v = qkv.columns((kHeads + kKeyHeads) * kWidth, kKeyHeads * kWidth, {kKeyHeads, kWidth}),
                 to = o.columns(0, kHeads * kWidth, {kHeads, kWidth});
    std::vector<std::int32_t> cu{0}, lengths, table;
    for (std::int64_t i = 0; i < m; ++i) {
      const Token& t = call[static_cast<std::size_t>(i)];
      if (cache) keep(*cache, qkv, i, cache->slot(t), l);
      if (i + 1 < m && call[static_cast<std::size_t>(i + 1)].sequence == t.sequence) continue;
      cu.push_back(static_cast<std::int32_t>(i + 1)),
          lengths.push_back(static_cast<std::int32_t>(t.position + 1));
      if (!cache) continue;
      std::vector<std::int32_t> pages = cache->tables[t.sequence];
      pages.resize(static_cast<std::size_t>(cache->most), -7);
      table.insert(table.end(), pages.begin(), pages.end());
    }
    const auto n = static_cast<std::int64_t>(lengths.size());
    Array bounds({n + 1}, DType::i32, cu), length({n}, DType::i32, lengths);
    const Tensor tb = bounds.all(), tl = length.all();
    rlk::Attention a{.q = q, .k = k, .v = v, .cu_q = tb, .cu_k = tb, .out = to};
    a.split = split;
    if (!cache) {
      rlk::check(rlk::attention(a, kNative));
      return o;
    }
    Array block({n, cache->most}, DType::i32, table);
    const Tensor tk = cache->keys[static_cast<std::size_t>(l)].all(),
                 tv = cache->values[static_cast<std::size_t>(l)].all(), tt = block.all();
    a.k = tk, a.v = tv, a.cu_k = {}, a.kv_len = tl, a.block_table = tt;
    rlk::check(rlk::attention(a, kNative));
    return o;
  }
  void keep(Cache& cache, Array& qkv, std::int64_t row, std::int64_t slot, int l) const {
    const std::int64_t bytes = kKeyHeads * kWidth * rlk::size_of(type);
    const std::byte* from = qkv.bytes.data() + row * qkv.row_bytes() + kHeads * kWidth * rlk::size_of(type);
    std::memcpy(cache.keys[static_cast<std::size_t>(l)].bytes.data() + slot * bytes, from,
                static_cast<std::size_t>(bytes));
    std::memcpy(cache.values[static_cast<std::size_t>(l)].bytes.data() + slot * bytes, from + bytes,
                static_cast<std::size_t>(bytes));
  }
  // A token drawn at each row; its logp as the sampler says, from the same logits, and without any.
  template <class Seen>
  void sampled(Array& x, Array& at, std::int64_t m, Seen& seen) {
    Array logits({m, kVocab}, DType::f32), token({m}, DType::i64), raw({m}, DType::f32),
        again({m}, DType::f32), fused({m}, DType::f32),
        seed({m}, DType::i64, std::vector<std::int64_t>(static_cast<std::size_t>(m), 5));
    const Tensor tx = x.all(), tw = head.all(), tl = logits.all(), tt = token.all(), tr = raw.all(),
                 ta = again.all(), tf = fused.all(), ts = seed.all(), tp = at.all();
    rlk::check(rlk::lm_head({.hidden = tx, .weight = tw, .out = tl}, kNative));
    rlk::check(rlk::sample({.logits = tl, .seed = ts, .position = tp, .token = tt, .logp_raw = tr}, kNative));
    rlk::check(rlk::logp({.logits = tl, .target = tt, .logp = ta}, kNative));
    rlk::check(rlk::linear_logp({.hidden = tx, .weight = tw, .target = tt, .logp = tf}, kNative));
    CHECK(again.bytes == fused.bytes);
    CHECK(raw.bytes == fused.bytes);
    seen(logits), seen(token), seen(fused);
  }
};

// Rows of a trace, all of which the whole has: how many, and how many of them differ.
struct Count {
  std::size_t rows = 0, differ = 0;
  void add(const Trace& part, const Trace& whole) {
    for (const auto& [at, bytes] : part) {
      ++rows;
      const auto found = whole.find(at);
      differ += found == whole.end() || found->second != bytes;
    }
  }
  void print(DType t, const char* left, const char* right) const {
    fmt::print("{:5} {:28} = {:62} {:6} rows, {} differ\n", rlk::name_of(t), left, right, rows, differ);
  }
};

Call range(int sequence, std::int64_t from, std::int64_t to) {
  Call call;
  for (std::int64_t p = from; p < to; ++p) call.push_back({sequence, p});
  return call;
}
Call both(Call a, const Call& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("a decoder gives a token the same bits however it is reached") {
  std::mt19937 random(3);
  for (const DType type : {DType::f32, DType::bf16}) {
    Model model(type, random);
    const auto equal = [&](const char* left, const char* right, const Count& c) {
      c.print(type, left, right);
      CHECK(c.rows > 0);
      CHECK(c.differ == 0);
    };
    const Call whole = range(0, 0, kLongest);
    Trace alone;
    model.run(whole, nullptr, alone);

    Count packed;
    Trace pack, others;
    model.run(both(both(range(2, 0, 37), whole), both(range(3, 0, 130), range(4, 0, 1))), nullptr, pack);
    model.run(range(2, 0, 37), nullptr, others), model.run(range(3, 0, 130), nullptr, others);
    others.insert(alone.begin(), alone.end()), model.run(range(4, 0, 1), nullptr, others);
    packed.add(pack, others);
    equal("training, packed", "each sequence alone", packed);

    Count chunks;
    for (const std::int64_t each : {7, 64, 127, 128, 129, 1000}) {
      Cache cache(type, 64, 1, 1);
      Trace t;
      for (std::int64_t p = 0; p < kLongest; p += each)
        model.run(range(0, p, std::min(kLongest, p + each)), &cache, t);
      chunks.add(t, alone);
    }
    equal("training", "prefill in chunks of 7, 64, 127, 128, 129, 1000", chunks);

    Count decoded;
    for (const std::int64_t prefix : {0, 1, 127, 128, 129, 511, 512, 513}) {
      Cache cache(type, 16, 1, 2);
      Trace t;
      if (prefix > 0) model.run(range(0, 0, prefix), &cache, t);
      for (std::int64_t p = prefix; p < (prefix == 0 ? kLongest : std::min(kLongest, prefix + 5)); ++p)
        model.run(range(0, p, p + 1), &cache, t);
      decoded.add(t, alone);
    }
    equal("prefill", "token by token from 0, 1, 127-129, 511-513", decoded);

    Count hits;
    Trace second;
    model.run(range(1, 0, kLongest), nullptr, second);
    for (const std::int64_t page : {16, 32, 64, 128})
      for (const std::int64_t hit : {page, 256 / page * page}) {  // whole pages are shared
        Cache cache(type, page, 2, static_cast<unsigned>(page));
        Trace t;
        model.run(whole, &cache, t);
        const auto first = cache.tables[0].begin();
        cache.tables[1].assign(first, first + hit / page);
        model.run(range(1, hit, 400), &cache, t);
        Trace own = alone;
        own.insert(second.begin(), second.end());
        hits.add(t, own);
      }
    equal("cold cache", "a prefix of another's pages of 16, 32, 64, 128, shuffled", hits);

    Count batch;
    Cache cache(type, 32, 5, 4);
    Trace t, want = alone;
    for (int s = 1; s < 5; ++s) model.run(range(s, 0, 60), nullptr, want);
    model.run(both(range(0, 0, 200), range(1, 0, 3)), &cache, t);
    for (std::int64_t p = 0; p < 40; ++p) {  // guesses of four tokens beside ones that join and leave
      Call call = range(0, 200 + 4 * p, 204 + 4 * p);
      if (p < 20) call = both(call, range(1, 3 + p, 4 + p));
      if (p >= 10) call = both(range(2, p - 10, p - 9), call);
      if (p == 15) call = both(call, range(3, 0, 60));
      model.run(call, &cache, t);
    }
    batch.add(t, want);
    equal("alone", "in batches that change, four tokens at a time", batch);

    Count sharded;
    for (const int ranks : {2, 4, 8}) {
      model.ranks = ranks;
      Trace r;
      model.run(range(0, 0, 150), nullptr, r);
      sharded.add(r, alone);
    }
    model.ranks = 1;
    equal("one rank", "2, 4 and 8, by partial sums and tp_sum", sharded);

    Count control;
    model.split = 0;
    Trace other;
    model.run(whole, nullptr, other);
    control.add(other, alone);
    control.print(type, "splits of 512 keys", "one split (control: rows from 512 on must differ)");
    CHECK(control.differ == kLongest - 512);
  }
}

// From hidden states to the policy loss and back to their gradients, by linear_logp or by what it is composed of.
namespace {

struct Loss {
  std::int64_t rows;
  Array logp, entropy, loss, totals, factor, entropy_factor, d_logp, d_entropy, d_hidden, d_weight;
  Loss(std::int64_t n, DType t)
      : rows(n),
        logp({n}, DType::f32),
        entropy({n}, DType::f32),
        loss({1}, DType::f32),
        totals({2, 5}, DType::f32),
        factor({n}, DType::f32),
        entropy_factor({n}, DType::f32),
        d_logp({n}, DType::f32),
        d_entropy({n}, DType::f32),
        d_hidden({n, kHidden}, t),
        d_weight({kVocab, kHidden}, t) {}
  bool operator==(const Loss& b) const {
    return logp.bytes == b.logp.bytes && entropy.bytes == b.entropy.bytes && loss.bytes == b.loss.bytes &&
           totals.bytes == b.totals.bytes && d_hidden.bytes == b.d_hidden.bytes &&
           d_weight.bytes == b.d_weight.bytes;
  }
};

// What a batch of answers holds.
struct Answers {
  Array hidden, weight, target, old_logp, advantages, bounds, denominator, d_loss;
  Answers(std::int64_t n, DType t, std::mt19937& r)
      : hidden({n, kHidden}, t, r, 1),
        weight({kVocab, kHidden}, t, r, 0.3f),
        target({n}, DType::i64),
        old_logp({n}, DType::f32, r, 1, -6),
        advantages({n}, DType::f32, r, 1),
        bounds({3}, DType::i32,
               std::vector<std::int32_t>{0, static_cast<std::int32_t>(n / 3), static_cast<std::int32_t>(n)}),
        denominator({1}, DType::f32, std::vector<float>{77}),
        d_loss({1}, DType::f32, std::vector<float>{0.75f}) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < n; ++i)
      ids.push_back(i % 11 == 4 ? -100 : static_cast<std::int64_t>(r() % kVocab));
    std::memcpy(target.bytes.data(), ids.data(), target.bytes.size());
  }
};

rlk::Options by(const char* arithmetic) { return {.backend = "native", .arithmetic = arithmetic}; }

void policy(Answers& a, Loss& l) {
  const Tensor logp = l.logp.all(), old = a.old_logp.all(), advantages = a.advantages.all(),
               cu = a.bounds.all(), entropy = l.entropy.all(), denominator = a.denominator.all(),
               loss = l.loss.all(), totals = l.totals.all(), factor = l.factor.all(),
               bend = l.entropy_factor.all(), d = a.d_loss.all(), d_logp = l.d_logp.all(),
               d_entropy = l.d_entropy.all();
  rlk::PolicyLoss p{
      .logp = logp, .old_logp = old, .advantages = advantages, .cu_seqlens = cu, .entropy = entropy};
  p.denominator = denominator, p.loss = loss, p.totals = totals, p.factor = factor, p.entropy_factor = bend;
  p.entropy_coef = 0.01, p.agg = rlk::PolicyLoss::Agg::constant;
  rlk::check(rlk::policy_loss(p, kNative));
  rlk::check(rlk::policy_loss_bwd(
      {.d_loss = d, .factor = factor, .entropy_factor = bend, .d_logp = d_logp, .d_entropy = d_entropy},
      kNative));
}

void fused(Answers& a, Loss& l) {
  const rlk::Options options = by("fma32/kb1024/lse128/l8");
  const Tensor x = a.hidden.all(), w = a.weight.all(), t = a.target.all(), logp = l.logp.all(),
               entropy = l.entropy.all(), d_logp = l.d_logp.all(), d_entropy = l.d_entropy.all(),
               d_x = l.d_hidden.all(), d_w = l.d_weight.all();
  rlk::check(
      rlk::linear_logp({.hidden = x, .weight = w, .target = t, .logp = logp, .entropy = entropy}, options));
  policy(a, l);
  rlk::LinearLogpBwd b{.hidden = x, .weight = w, .target = t, .d_logp = d_logp, .d_entropy = d_entropy};
  b.d_hidden = d_x, b.d_weight = d_w;
  rlk::check(rlk::linear_logp_bwd(b, by("fma32/kb1024/lse128/l8/tree8")));
}

void composed(Answers& a, Loss& l) {
  Array logits({l.rows, kVocab}, DType::f32), d_logits({l.rows, kVocab}, DType::f32);
  const Tensor x = a.hidden.all(), w = a.weight.all(), t = a.target.all(), z = logits.all(),
               d_z = d_logits.all(), logp = l.logp.all(), entropy = l.entropy.all(), d_logp = l.d_logp.all(),
               d_entropy = l.d_entropy.all(), d_x = l.d_hidden.all(), d_w = l.d_weight.all();
  rlk::check(rlk::lm_head({.hidden = x, .weight = w, .out = z}, by("fma32/kb1024")));
  rlk::check(rlk::logp({.logits = z, .target = t, .logp = logp, .entropy = entropy}, kNative));
  policy(a, l);
  rlk::check(rlk::logp_bwd(
      {.logits = z, .target = t, .d_logp = d_logp, .d_entropy = d_entropy, .d_logits = d_z}, kNative));
  rlk::check(
      rlk::linear_bwd({.d_y = d_z, .x = x, .weight = w, .d_x = d_x, .d_weight = d_w}, by("fma32/tree8")));
}

}  // namespace

TEST_CASE("the policy loss and its gradients are the same by linear_logp and by lm_head and logp") {
  std::mt19937 random(4);
  constexpr std::int64_t n = 90;
  for (const DType type : {DType::f32, DType::bf16}) {
    Answers a(n, type, random);
    Loss one(n, type), other(n, type);
    fused(a, one), composed(a, other);
    fmt::print("{:5} {:28} = {:62} {}\n", rlk::name_of(type), "linear_logp, policy_loss",
               "lm_head, logp, policy_loss; loss, totals, d_hidden, d_weight",
               one == other ? "equal" : "differ");
    CHECK(one == other);
    float loss = 0;
    std::memcpy(&loss, one.loss.bytes.data(), 4);
    CHECK(std::isfinite(loss));
    CHECK(std::any_of(one.d_hidden.bytes.begin(), one.d_hidden.bytes.end(),
                      [](std::byte b) { return b != std::byte{0} && b != std::byte{0xff}; }));
    // A row of d_hidden belongs to its token alone: the second sequence by itself, by the same global denominator.
    constexpr std::int64_t first = n / 3;
    const auto tail = [](Array& x) {
      Shape shape = x.shape;
      shape[0] -= first;
      Array y(shape, x.type);
      std::memcpy(y.bytes.data(), x.bytes.data() + first * x.row_bytes(), y.bytes.size());
      return y;
    };
    Answers b = a;
    for (Array Answers::* x : {&Answers::hidden, &Answers::target, &Answers::old_logp, &Answers::advantages})
      b.*x = tail(a.*x);
    b.bounds = Array({3}, DType::i32, std::vector<std::int32_t>{0, 0, n - first});
    Loss part(n - first, type);
    fused(b, part);
    const bool same =
        part.d_hidden.bytes == tail(one.d_hidden).bytes && part.logp.bytes == tail(one.logp).bytes;
    fmt::print("{:5} {:28} = {:62} {}\n", rlk::name_of(type), "gradients of rows",
               "a micro-batch of the batch's sequences", same ? "equal" : "differ");
    CHECK(same);
  }
}
