// Honest implementations with one break each: the library's own computes the call, then one thing is spoiled
// where the break says. Every break is what a kernel with a bug of its class would show.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "break.hpp"
#include "registry/lm_head/chains.hpp"
#include "registry/logp/lse128.hpp"
#include "registry/sample/plain.hpp"

#if defined(__x86_64__)
#  include <xmmintrin.h>
#endif

namespace rlk::mutants {
namespace {

struct Sizes {
  int64_t m, k, v;
  explicit Sizes(const LmHead& a) : k(a.weight.dim(1)), v(a.weight.dim(0)) { m = v ? a.out.numel() / v : 0; }
};

// What the raw function of a plain C plugin sees: no guard around it.
template <rlk_code (*Run)(const LmHead&, const rlk_call&)>
constexpr Entry raw(const char* id, const char* promise, const char* error, const char* where) {
  Entry e = entry<LmHead>([](const LmHead&, const Call&) {}, id, id, promise, error, where);
  e.implementation.run = [](const rlk_slot* slots, const rlk_call* call) -> int32_t {
    return Run(*reinterpret_cast<const LmHead*>(slots), *call);
  };
  return e;
}

#if defined(__x86_64__)
uint32_t mode() { return _mm_getcsr(); }
void set_mode(uint32_t x) { _mm_setcsr(x); }
#else
uint32_t mode() { return 0; }
void set_mode(uint32_t) {}
#endif

rlk_code leaves_ftz(const LmHead& a, const rlk_call&) {
  const rlk_code code = honest(a, "native.golden");
  set_mode(mode() | 0x8000);
  return code;
}
rlk_code obeys_flush(const LmHead& a, const rlk_call&) {
  const bool flushes = mode() & 0x8040;
  const rlk_code code = honest(a, "native.golden");
  if (flushes) spoil(a.out, 0);
  return code;
}
rlk_code obeys_rounding(const LmHead& a, const rlk_call&) {
  const bool up = (mode() & 0x6000) == 0x4000;
  const rlk_code code = honest(a, "native.golden");
  if (up) spoil(a.out, 0);
  return code;
}
rlk_code obeys_zero_operands(const LmHead& a, const rlk_call&) {
  const bool alone = (mode() & 0x8040) == 0x40;
  const rlk_code code = honest(a, "native.golden");
  if (alone) spoil(a.out, 0);
  return code;
}
rlk_code obeys_long_double(const LmHead& a, const rlk_call&) {
  uint16_t word = 0;
#if defined(__x86_64__)
  __asm__ volatile("fnstcw %0" : "=m"(word));
#endif
  const rlk_code code = honest(a, "native.golden");
  if (word & 0xc00) spoil(a.out, 0);
  return code;
}
rlk_code obeys_traps(const LmHead& a, const rlk_call&) {
  const bool trap = (mode() & 0x1f80) != 0x1f80;
  const rlk_code code = honest(a, "native.golden");
  if (trap) spoil(a.out, 0);
  return code;
}
rlk_code by_policy(const LmHead& a, const rlk_call& call) {
  const rlk_code code = honest(a, "native.golden");
  if (call.precision == RLK_PRECISION_STRICT) spoil(a.out, 0);
  return code;
}
rlk_code by_both(const LmHead& a, const rlk_call& call) {
  const rlk_code code = honest(a, "native.golden");
  if (call.needs_backward && call.precision == RLK_PRECISION_STRICT) spoil(a.out, 0);
  return code;
}
rlk_code leaves_single(const LmHead& a, const rlk_call&) {
  const rlk_code code = honest(a, "native.golden");
#if defined(__x86_64__)
  uint16_t word;
  __asm__ volatile("fnstcw %0" : "=m"(word));
  word = static_cast<uint16_t>(word & ~0x300);
  __asm__ volatile("fldcw %0" : : "m"(word));
#endif
  return code;
}
rlk_code by_backward(const LmHead& a, const rlk_call& call) {
  const rlk_code code = honest(a, "native.golden");
  if (call.needs_backward) spoil(a.out, 0);
  return code;
}

// A result kept by the addresses of the operands and a look at their first elements.
void stale_by_address(const LmHead& a, const Call&) {
  struct Kept {
    float first;
    std::vector<float> out;
  };
  static std::mutex mutex;
  static std::map<std::vector<uintptr_t>, Kept> kept;
  const Sizes s(a);
  if (s.m * s.k * s.v == 0 || a.out.dtype() != DType::f32) return;
  const std::lock_guard lock(mutex);
  Kept& k = kept[{address(a.hidden), address(a.weight), static_cast<uintptr_t>(s.m),
                  static_cast<uintptr_t>(s.k), static_cast<uintptr_t>(s.v)}];
  const auto first = static_cast<float>(get(a.weight, 0));
  if (!k.out.empty() && k.first == first)
    for (int64_t n = 0; n < a.out.numel(); ++n) put(a.out, n, k.out[static_cast<std::size_t>(n)]);
  k.first = first;
  k.out.clear();
  for (int64_t n = 0; n < a.out.numel(); ++n) k.out.push_back(static_cast<float>(get(a.out, n)));
}

// fma32/kb1024 with the products 50 and 51 in each other's place.
float chain_with_exchange(const LmHead& a, int64_t n) {
  const Sizes s(a);
  float total = 0;
  for (int64_t first = 0; first < s.k; first += 1024) {
    float sum = 0;
    for (int64_t k = first; k < std::min(s.k, first + 1024); ++k) {
      const int64_t i = s.k < 60 ? k : k == 50 ? 51 : k == 51 ? 50 : k;
      sum = std::fma(static_cast<float>(get(a.hidden, n / s.v * s.k + i)),
                     static_cast<float>(get(a.weight, n % s.v * s.k + i)), sum);
    }
    total = first == 0 ? sum : total + sum;
  }
  return total;
}

// fma32/tree8 over leaves of `width`, its nodes rounded as `round` does; what a bias and a residual add is left out.
template <class Round>
void by_tree(const Linear& a, int64_t width, Round round) {
  const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
  if (a.leaf_count != 8 || a.bias || a.residual) return;
  for (int64_t i = 0; i < a.y.numel(); ++i) {
    float leaf[8] = {};
    for (int64_t k = 0; k < depth; ++k) {
      float& sum = leaf[std::min<int64_t>(k / width, 7)];
      sum = std::fma(static_cast<float>(get(a.x, i / columns * depth + k)),
                     static_cast<float>(get(a.weight, i % columns * depth + k)), sum);
    }
    for (int step = 1; step < 8; step *= 2)
      for (int j = 0; j < 8; j += 2 * step) leaf[j] = round(leaf[j] + leaf[j + step]);
    put(a.y, i, leaf[0]);
  }
}

constexpr const char *kLm = "m=33 k=96 v=48 fp32->fp32 normal", *kSpecial = "special values fp32->fp32",
                     *kBwd = "m=33 k=96 v=48 fp32->fp32 normal", *kRope = "plain q and k [3,4,9,64] fp32";

// attention_merge of partials that something was done to.
struct Partials {
  std::vector<float> numbers;
  int64_t ranks, each, width;  // numbers of a rank and of a split
  void turn() {
    std::vector<float> turned;
    for (int64_t r = ranks; r-- > 0;)
      turned.insert(turned.end(), numbers.begin() + r * each, numbers.begin() + (r + 1) * each);
    numbers = std::move(turned);
  }
};
template <class Change>
void merge_copy(const AttentionMerge& a, Change change) {
  Partials p{{}, a.partials.dim(0), a.partials.numel() / a.partials.dim(0), a.partials.dim(-1)};
  for (int64_t n = 0; n < a.partials.numel(); ++n)
    p.numbers.push_back(static_cast<float>(get(a.partials, n)));
  change(p);
  std::vector<int64_t> shape;
  for (int32_t i = 0; i < a.partials.rank(); ++i) shape.push_back(a.partials.dim(i));
  const Tensor partials(p.numbers.data(), std::span(shape), DType::f32);
  AttentionMerge b = a;
  b.partials = partials;
  (void)honest(b, "native");
}

// Draws with every row's entries in the order of their size, so that noise belongs to a rank.
void draw_by_rank(const Sample& a) {
  const int64_t v = a.logits.dim(1);
  Wide sorted(a.logits);
  std::vector<std::vector<int64_t>> ids;
  for (int64_t m = 0; m < a.logits.dim(0); ++m) {
    std::vector<int64_t>& order = ids.emplace_back(static_cast<std::size_t>(v));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
      return get(a.logits, m * v + x) > get(a.logits, m * v + y);
    });
    for (std::size_t i = 0; i < order.size(); ++i)
      sorted.numbers[static_cast<std::size_t>(m * v) + i] =
          static_cast<float>(get(a.logits, m * v + order[i]));
  }
  Sample b = a;
  b.logits = sorted.tensor;
  if (honest(b, "native.rows") != RLK_OK) return;
  for (int64_t m = 0; m < a.logits.dim(0); ++m)
    if (int64_t& token = integer<int64_t>(a.token, m); token >= 0)
      token = ids[static_cast<std::size_t>(m)][static_cast<std::size_t>(token)];
}

// Draws by -ln(-ln u) of u = 1 - v, all in fp32, which is 1 for one word in 2^25.
void draw_by_fp32_u(const Sample& a) {
  const int64_t v = a.logits.dim(1);
  if (a.top_k || a.top_p || a.min_p || a.temperature || a.softcap != 0 || a.vocab != 0 || v == 0) return;
  for (int64_t m = 0; m < a.logits.dim(0); ++m) {
    std::vector<float> z;
    for (int64_t i = 0; i < v; ++i) z.push_back(static_cast<float>(get(a.logits, m * v + i)));
    if (!std::all_of(z.begin(), z.end(), [](float x) { return std::isfinite(x); })) continue;
    const float most = *std::max_element(z.begin(), z.end());
    const auto seed = static_cast<uint64_t>(static_cast<int64_t>(get(a.seed, m))),
               position = static_cast<uint64_t>(static_cast<int64_t>(get(a.position, m)));
    const auto stream = a.stream ? static_cast<uint32_t>(static_cast<int64_t>(get(a.stream, m))) : 0;
    std::vector<float> scores;
    for (int64_t i = 0; i < v; ++i) {
      uint32_t c[4] = {static_cast<uint32_t>(i >> 2), static_cast<uint32_t>(position),
                       static_cast<uint32_t>(position >> 32), stream};
      registry::sampling::philox(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      const float u = 1 - static_cast<float>(c[i & 3] + 0.5) * 0x1p-32f;
      scores.push_back(z[static_cast<std::size_t>(i)] - most - std::log(-std::log(u)));
    }
    integer<int64_t>(a.token, m) = std::max_element(scores.begin(), scores.end()) - scores.begin();
  }
}

// What stays is what both filters leave of the whole row.
void keep_of_whole_mass(const Sample& a) {
  if (!a.keep || !a.top_k || !a.top_p) return;
  std::vector<int32_t> words(static_cast<std::size_t>(a.keep.numel()));
  const Tensor other(words.data(), {a.keep.dim(0), a.keep.dim(1)}, DType::i32);
  Sample b = a;
  b.top_k = {}, b.keep = other;
  if (honest(b, "native.rows") != RLK_OK) return;
  Sample c = a;
  c.top_p = {};
  if (honest(c, "native.rows") != RLK_OK) return;
  for (int64_t m = 0; m < a.keep.dim(0); ++m)
    for (int64_t w = 0; w < a.keep.dim(1); ++w)
      a.keep.data<int32_t>()[m * a.keep.stride(0) + w] &=
          words[static_cast<std::size_t>(m * a.keep.dim(1) + w)];
}

// top_p alone, by sums in fp32 in the order of the entries.
void keep_by_fp32_sums(const Sample& a) {
  if (!a.keep || !a.top_p || a.top_k || a.min_p || a.temperature) return;
  const int64_t v = a.logits.dim(1);
  for (int64_t m = 0; m < a.logits.dim(0); ++m) {
    const auto z = [&](int64_t i) { return static_cast<float>(get(a.logits, m * v + i)); };
    const auto p = static_cast<float>(get(a.top_p, m));
    std::vector<int64_t> order(static_cast<std::size_t>(v));
    std::iota(order.begin(), order.end(), 0);
    if (!(p > 0 && p < 1) ||
        !std::all_of(order.begin(), order.end(), [&](int64_t i) { return std::isfinite(z(i)); }))
      continue;
    std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return z(x) > z(y); });
    const auto mass = [&](int64_t i) { return std::exp(z(i) - z(order[0])); };
    float all = 0, before = 0;
    for (int64_t i : order) all += mass(i);
    for (int64_t i : order) {
      if (before >= p * all) a.keep.data<int32_t>()[m * a.keep.stride(0) + i / 32] &= ~(1 << i % 32);
      before += mass(i);
    }
  }
}

// linear_logp's row results of these logits.
void rows_of(const LinearLogp& a, const Tensor& logits) {
  Logp b{.logits = logits,
         .target = a.target,
         .temperatures = a.temperatures,
         .keep = a.keep,
         .logp = a.logp,
         .lse = a.lse,
         .entropy = a.entropy,
         .stats = a.stats};
  b.temperature = a.temperature, b.softcap = a.softcap, b.ignore_index = a.ignore_index;
  b.logits_round = a.logits_round, b.vocab = a.vocab ? a.vocab : a.weight.dim(0),
  b.vocab_start = a.vocab_start;
  b.leaf_first = a.leaf_first, b.leaf_count = a.leaf_count;
  (void)honest(b, "native.tiles");
}

// The gradient of linear_logp's logits in fp32, which are of hidden's dtype; without data where something went wrong.
Tensor logits_gradient(const LinearLogpBwd& a, std::vector<float>& d) {
  const int64_t n = a.hidden.dim(0), v = a.weight.dim(0);
  std::vector<float> z(static_cast<std::size_t>(n * v));
  d.resize(z.size());
  const Tensor logits(z.data(), {n, v}, a.hidden.dtype()), gradient(d.data(), {n, v}, DType::f32);
  if (honest(LmHead{.hidden = a.hidden, .weight = a.weight, .bias = a.bias, .out = logits}, "native.kb256"))
    return {};
  LogpBwd b{.logits = logits,
            .target = a.target,
            .temperatures = a.temperatures,
            .keep = a.keep,
            .stats = a.stats,
            .d_logp = a.d_logp,
            .d_entropy = a.d_entropy,
            .d_logits = gradient};
  b.softcap = a.softcap, b.vocab = a.vocab;
  return honest(b, "native.tiles") ? Tensor() : gradient;
}

constinit const Entry kEntries[] = {
    // sample
    LIES(Sample, noise_by_rank, "sample/philox-g1", "plain [7,100] fp32",
         "noise belongs to the rank of an entry, not to its id", { draw_by_rank(a); }),
    LIES(Sample, infinite_noise, "sample/philox-g1", "rare words [3,8] fp32",
         "noise is -ln(-ln u) of an fp32 u, which may be infinite", { draw_by_fp32_u(a); }),
    LIES(Sample, whole_mass, "sample/philox-g1", "all filters [6,600] fp32",
         "top_p counts mass that top_k took away", { keep_of_whole_mass(a); }),
    LIES(Sample, fp32_sums, "sample/philox-g1", "faint tail [5,301] fp32", "top_p adds masses in fp32",
         { keep_by_fp32_sums(a); }),
    LIES(Sample, filter_order, "sample/philox-g1", "min_p first [6,600] fp32", "min_p always comes last",
         {
          Sample b = a;
          b.filter_order = Sample::FilterOrder::min_p_last;
          (void)honest(b, "native.rows");
         }),
    LIES(Sample, last_of_equals, "sample/philox-g1", "ties [7,400] fp32",
         "temperature 0 takes the last of equal entries",
         {
          const int64_t v = a.logits.dim(1);
          for (int64_t m = 0; a.temperature && m < a.logits.dim(0); ++m) {
            int64_t& token = integer<int64_t>(a.token, m);
            if (token < 0 || get(a.temperature, m) != 0) continue;
            const double most = get(a.logits, m * v + token);
            for (int64_t i = token; i < v; ++i)
              if (get(a.logits, m * v + i) == most) token = i;
          }
         }),
    WRONG(Sample, own_count, "accuracy", "special [8,8] fp32", "counts rows without a token twice",
          {
          if (a.bad_count) *a.bad_count.data<int32_t>() *= 2;
          }),
    LIES(SampleVerify, any_token, "sample/philox-g1", "records fp32", "takes any token that stays",
         {
          for (int64_t m = 0; m < a.status.numel(); ++m)
            if (integer<int32_t>(a.status, m) == 1) integer<int32_t>(a.status, m) = 0;
         }),
    LIES(SamplePart, seed_of_its_own, "sample/philox-g1",
         "filters  token digit 0 of part 1 of 2 fp32 V=300", "every part has another seed",
         {
          std::vector<int64_t> seeds;
          for (int64_t m = 0; m < a.seed.numel(); ++m)
            seeds.push_back(static_cast<int64_t>(get(a.seed, m)) + a.leaf_first);
          const Tensor seed(seeds.data(), {a.seed.numel()}, DType::i64);
          SamplePart b = a;
          b.seed = seed;
          (void)honest(b, "native.rows");
         }),
    entry<SampleMerge>(
        [](const SampleMerge& a, const Call&) {
          for (int64_t m = 0; a.next && a.step == SampleMerge::Step::top_k && m < a.next.dim(0); ++m)
            a.next.data<int64_t>()[24 * m + 3] = 0;
        },
        "mutant.above_forgotten", "sample/philox-g1", "equal bits", "forgets what lies above the digit",
        "filters  top_k digit 0 of 2 parts V=300", RLK_I64),
    // linear_logp
    LIES_BF16(LinearLogp, bias_first, "fma32/kb256/lse128/l8", "bias n=4 k=33 v=1000 bf16",
              "adds the bias before the product is rounded",
              {
          const int64_t n = a.hidden.dim(0), v = a.weight.dim(0);
          std::vector<float> z(static_cast<std::size_t>(n * v));
          const Tensor logits(z.data(), {n, v}, DType::f32);
          if (!a.bias || honest(LmHead{.hidden = a.hidden, .weight = a.weight, .bias = a.bias, .out = logits},
                                "native.kb256"))
            return;
          rows_of(a, logits);
              }),
    LIES_BF16(LinearLogp, unrounded_logits, "fma32/kb256/lse128/l8", "bias n=4 k=33 v=1000 bf16",
              "keeps fp32 logits where they are bf16",
              {
          LinearLogp b = a;
          b.logits_round = LinearLogp::LogitsRound::fp32;
          (void)honest(b, "native.kb256");
              }),
    LIES_BF16(LinearLogpBwd, unrounded_gradient, "fma32/kb256/lse128/l8/tree8", "bias n=4 k=33 v=1000 bf16",
              "keeps the logits' gradient in fp32 where they are bf16",
              {
          std::vector<float> d;
          const Tensor gradient = logits_gradient(a, d);
          if (gradient.dl().data)
            (void)honest(LinearBwd{.d_y = gradient,
                                   .x = a.hidden,
                                   .weight = a.weight,
                                   .d_x = a.d_hidden,
                                   .d_weight = a.d_weight,
                                   .d_bias = a.d_bias},
                         "native");
              }),
    LIES(LinearLogpBwd, one_chain, "fma32/kb256/lse128/l8/tree8", "softcap n=4 k=24 v=500 fp32",
         "sums the gradient of hidden over the vocabulary in one chain",
         {
          std::vector<float> d;
          if (a.weight.dtype() != DType::f32 || a.keep || a.vocab || a.leaf_count != 8) return;
          const Tensor gradient = logits_gradient(a, d);
          if (gradient.dl().data && a.d_hidden)
            (void)honest(
                LmHeadBwd{.d_out = gradient, .hidden = a.hidden, .weight = a.weight, .d_hidden = a.d_hidden},
                "native");
         }),
    LIES(LinearLogpBwd, forgets_before, "fma32/kb256/lse128/l8/tree8", "before n=5 k=40 v=300 fp32",
         "forgets what d_weight is added to",
         {
          LinearLogpBwd b = a;
          b.d_weight_before = {};
          if (a.d_weight && a.d_weight_before) (void)honest(b, "native.kb256");
         }),
    LIES(LinearLogpBwd, goes_on_from_before, "fma32/kb256/lse128/l8/tree8", "before n=5 k=40 v=300 fp32",
         "begins its sums at the gradients so far",
         {
          std::vector<float> d;
          if (!a.d_bias || !a.d_bias_before || a.hidden.dtype() != DType::f32) return;
          if (!logits_gradient(a, d).dl().data) return;
          const int64_t n = a.hidden.dim(0), v = a.weight.dim(0);
          for (int64_t i = 0; i < (a.vocab ? a.vocab : v); ++i) {
            auto sum = static_cast<float>(get(a.d_bias_before, i));
            for (int64_t row = 0; row < n; ++row) sum += d[static_cast<std::size_t>(row * v + i)];
            put(a.d_bias, i, sum);
          }
         }),
    LIES(LinearLogpBwd, clears_the_rest, "fma32/kb256/lse128/l8/tree8", "before n=5 k=40 v=300 fp32",
         "clears the gradients so far of rows that are no entry",
         {
          const int64_t v = a.weight.dim(0);
          for (int64_t i = a.vocab; a.d_bias && a.vocab && a.leaf_count == 8 && i < v; ++i)
            put(a.d_bias, i, 0);
         }),
    // logp
    LIES(Logp, target_less_lse, "lse128/l8", "plain n=5 v=1000 fp32", "the target's logit less logsumexp",
         {
          for (int64_t n = 0; a.logp && a.lse && !a.temperatures && a.softcap == 0 && n < a.logp.numel(); ++n)
            if (const auto t = static_cast<int64_t>(get(a.target, n)); t >= 0 && t < a.logits.dim(1))
              put(a.logp, n,
                  static_cast<float>(get(a.logits, n * a.logits.dim(1) + t) / a.temperature) -
                      static_cast<float>(get(a.lse, n)));
         }),
    LIES(Logp, padded_leaves, "lse128/l8", "padding n=5 v=1000 fp32",
         "leaves of the columns where the vocabulary has fewer",
         {
          const int64_t rows = a.logits.dim(0), columns = a.logits.dim(1);
          if (a.vocab == 0 || a.keep || a.leaf_count != 8) return;
          std::vector<uint32_t> bits(static_cast<std::size_t>(rows * (columns / 32 + 1)));
          for (int64_t n = 0; n < rows; ++n)
            for (int64_t c = 0; c < a.vocab; ++c)
              bits[static_cast<std::size_t>(n * (columns / 32 + 1) + c / 32)] |= 1u << (c % 32);
          const Tensor keep(bits.data(), {rows, columns / 32 + 1}, DType::i32);
          Logp b = a;
          b.keep = keep, b.vocab = 0;
          (void)honest(b, "native.tiles");
         }),
    LIES(Logp, other_exponential, "lse128/l8", "plain n=5 v=1000 fp32",
         "takes exponentials of 22 bits, as a GPU's ex2.approx gives them",
         {
          const int64_t v = a.logits.dim(1), width = (v + 127) / 128 * 16;
          if (a.vocab || a.keep || a.temperatures || a.softcap != 0 || a.leaf_count != 8 || !a.logp) return;
          if (a.logits_round != Logp::LogitsRound::fp32 || width > 128) return;
          namespace lse = registry::lse128;
          const lse::Scale scale = lse::scale_of(static_cast<float>(a.temperature));
          for (int64_t n = 0; n < a.logits.dim(0); ++n) {
            const auto t = static_cast<int64_t>(get(a.target, n));
            if (t < 0 || t >= v) continue;
            std::vector<lse::State> leaves(8);
            for (int64_t c = 0; c < v; ++c) {
              lse::State& leaf = leaves[static_cast<std::size_t>(c / width)];
              leaf.m = std::max(leaf.m, static_cast<float>(get(a.logits, n * v + c)));
            }
            for (int64_t j = 0; j < 8; ++j) {
              std::array<float, 128> e{};
              lse::State& leaf = leaves[static_cast<std::size_t>(j)];
              for (int64_t c = j * width; c < std::min(v, (j + 1) * width); ++c)
                e[static_cast<std::size_t>(c - j * width)] = std::bit_cast<float>(
                    std::bit_cast<uint32_t>(
                        std::exp2((static_cast<float>(get(a.logits, n * v + c)) - leaf.m) * scale.c)) &
                    ~3u);
              leaf.s = lse::tree_of_128(e);
            }
            const lse::State all = lse::pairwise(leaves, scale);
            put(a.logp, n, lse::Answer{all, static_cast<float>(get(a.logits, n * v + t)), scale}.logp());
            if (a.stats) put(a.stats, 4 * n + 1, all.s);
          }
         }),
    LIES(Logp, split_by_rows, "lse128/l8", "plain n=5 v=1000 fp32",
         "cuts the vocabulary by the number of rows: tiles in one run where there are four or more",
         {
          const int64_t v = a.logits.dim(1);
          if (a.vocab || a.keep || a.temperatures || a.softcap != 0 || a.leaf_count != 8) return;
          if (!a.logp || a.logits.dim(0) < 4 || a.logits_round != Logp::LogitsRound::fp32) return;
          namespace lse = registry::lse128;
          const lse::Scale scale = lse::scale_of(static_cast<float>(a.temperature));
          for (int64_t n = 0; n < a.logits.dim(0); ++n) {
            const auto t = static_cast<int64_t>(get(a.target, n));
            if (t < 0 || t >= v) continue;
            std::vector<float> z;
            for (int64_t c = 0; c < v; ++c) z.push_back(static_cast<float>(get(a.logits, n * v + c)));
            lse::State all;
            for (int64_t c = 0; c < v; c += 128)
              all = lse::join(all, lse::tile(z.data() + c, std::min<int64_t>(128, v - c), scale), scale);
            put(a.logp, n, lse::Answer{all, z[static_cast<std::size_t>(t)], scale}.logp());
          }
         }),
    WRONG(Logp, padding_counts, "accuracy", "padding n=5 v=1000 fp32",
          "takes columns beyond the vocabulary for tokens",
          {
          Logp b = a;
          if (a.leaf_count == 8) b.vocab = 0;
          (void)honest(b, "native.tiles");
          }),
    WRONG(Logp, little_for_absent, "accuracy", "special n=8 v=8 fp32", "takes an absent logit for -1e30",
          {
          for (int64_t n = 0; a.logp && a.lse && n < a.logp.numel(); ++n)
            if (get(a.lse, n) == -INFINITY) put(a.logp, n, -std::log(static_cast<double>(a.logits.dim(1))));
          }),
    WRONG(LogpBwd, left_out_gradient, "accuracy", "left out n=8 v=130 fp32",
          "a gradient for rows that are left out",
          {
          for (int64_t n = 0; n < a.target.numel(); ++n)
            if (static_cast<int64_t>(get(a.target, n)) == a.ignore_index)
              spoil(a.d_logits, n * a.logits.dim(1));
          }),
    LIES(LogpBwd, small_gradients, "lse128/l8", "plain n=5 v=1000 fp32", "drops gradients below 1e-6",
         {
          for (int64_t n = 0; n < a.d_logits.numel(); ++n)
            if (std::fabs(get(a.d_logits, n)) < 1e-6) put(a.d_logits, n, 0);
         }),
    // embedding
    WRONG_BY_IDS(Embedding, from_the_end, "mutant/from_the_end", "accuracy",
                 "far ids ids=6 int32 v=5 h=8 fp32", "takes id -1 for the last row",
                 {
          const int64_t h = a.weight.dim(1), v = a.weight.dim(0);
          for (int64_t n = 0; n < a.out.numel(); ++n)
            if (v > 0 && get(a.ids, n / h) == -1) put(a.out, n, get(a.weight, (v - 1) * h + n % h));
                 }),
    WRONG_BY_IDS(EmbeddingBwd, padding_learns, "mutant/padding_learns", "accuracy",
                 "padding ids=2x3x4 int32 v=7 h=16 fp32", "gives padding_idx a gradient",
                 {
          EmbeddingBwd b = a;
          b.padding_idx = -1;
          (void)honest(b, "native.rows");
                 }),
    WRONG_BY_IDS(EmbeddingBwd, starts_anew, "mutant/starts_anew", "accuracy",
                 "before ids=30 int32 v=12 h=20 fp32", "forgets what the gradient is added to",
                 {
          EmbeddingBwd b = a;
          b.d_weight_before = {};
          (void)honest(b, "native.rows");
                 }),
    WRONG_BY_IDS(EmbeddingBwd, last_first, "embed32", "equal bits", "one id ids=50 int32 v=9 h=40 fp32",
                 "adds the gradients of tokens in descending order",
                 {
          const int64_t h = a.weight.dim(1), tokens = a.ids.numel();
          for (int64_t n = 0; n < a.d_weight.numel() && a.scale == 1; ++n) {
            const int64_t id = a.vocab_start + n / h;
            float sum = 0;
            for (int64_t t = tokens - 1; t >= 0 && id != a.padding_idx; --t)
              if (get(a.ids, t) == static_cast<double>(id))
                sum += static_cast<float>(get(a.d_out, t * h + n % h));
            put(a.d_weight, n, sum);
          }
                 }),
    // ratio_kl
    WRONG(RatioKl, literal_k3, "accuracy", "on policy k3 [400]", "computes k3 as exp(d) - d - 1",
          {
          for (int64_t n = 0; a.kl && a.estimator == RatioKl::Estimator::k3 && n < a.kl.numel(); ++n)
            if (!a.mask || get(a.mask, n) != 0) {
              const auto d = static_cast<float>(get(a.ref_logp, n)) - static_cast<float>(get(a.logp, n));
              put(a.kl, n, std::exp(d) - d - 1);
            }
          }),
    WRONG(RatioKl, masked_by_product, "accuracy", "special k3 [32]",
          "multiplies a masked token's estimate by 0 where it should not be read",
          {
          for (int64_t n = 0; a.kl && a.mask && n < a.kl.numel(); ++n)
            if (get(a.mask, n) == 0) put(a.kl, n, 0 * (get(a.ref_logp, n) - get(a.logp, n)));
          }),
    LIES(RatioKlBwd, slope_of_value, "loss32/f64", "plain k3_st [75]", "k3_st with the gradient of k3",
         {
          RatioKlBwd b = a;
          b.estimator = RatioKlBwd::Estimator::k3;
          if (a.estimator == RatioKlBwd::Estimator::k3_st) (void)honest(b, "native.tokens");
         }),
    // linear, tp_sum
    LIES(Linear, no_tree, "fma32/tree8", "m=4 k=2049 n=31 fp32->fp32 normal", "sums in one chain",
         { by_tree(a, a.weight.dim(1) + 1, [](float x) { return x; }); }),
    LIES(Linear, even_leaves, "fma32/tree8", "m=4 k=2049 n=31 fp32->fp32 normal",
         "cuts K into eight equal leaves, not by multiples of 16",
         { by_tree(a, (a.weight.dim(1) + 7) / 8, [](float x) { return x; }); }),
    LIES_BF16(Linear, rounded_nodes, "fma32/tree8", "m=4 k=2049 n=31 bf16->fp32 normal",
              "rounds the nodes of the tree to bf16",
              {
          by_tree(
              a, (a.weight.dim(1) + 127) / 128 * 16, [](float x) { return bf16_to_float(float_to_bf16(x)); });
              }),
    LIES_BF16(Linear, steps_across_leaves, "amx/k32/tree8", "m=4 k=2049 n=31 bf16->fp32 normal",
              "lets a step of 32 reach into the next leaf",
              {
          const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
          for (int64_t i = 0; i < a.y.numel() && a.leaf_count == 8 && !a.bias && !a.residual; ++i) {
            std::vector<float> row, column;
            for (int64_t k = 0; k < depth; ++k) {
              row.push_back(static_cast<float>(get(a.x, i / columns * depth + k)));
              column.push_back(static_cast<float>(get(a.weight, i % columns * depth + k)));
            }
            const auto width = static_cast<std::size_t>((depth + 127) / 128 * 16 + 31) / 32 * 32;
            const registry::chains::Operands x{row, column, DType::bf16};
            put(a.y, i, registry::chains::tree(registry::chains::amx, x, width, 0, 8));
          }
              }),
    LIES_BF16(Linear, late_pairs, "avx512bf16/tree8", "m=4 k=2049 n=31 bf16->fp32 normal",
              "begins its pairs one element late",
              {
          const int64_t depth = a.weight.dim(1), columns = a.weight.dim(0);
          for (int64_t i = 0; i < a.y.numel() && a.leaf_count == 8 && !a.bias && !a.residual; ++i) {
            std::vector<float> row{0}, column{0};
            for (int64_t k = 0; k < depth; ++k) {
              row.push_back(static_cast<float>(get(a.x, i / columns * depth + k)));
              column.push_back(static_cast<float>(get(a.weight, i % columns * depth + k)));
            }
            const auto width = static_cast<std::size_t>((depth + 127) / 128 * 16);
            const registry::chains::Operands x{row, column, DType::bf16};
            put(a.y, i, registry::chains::tree(registry::chains::pairs<2>, x, width, 0, 8));
          }
              }),
    LIES_BF16(Linear, early_bias, "fma32/tree8", "m=5 k=130 n=37 bf16->bf16 bias",
              "adds the bias before the sum is rounded",
              {
          if (!a.bias || a.residual || a.y.dtype() == DType::f32) return;
          Wide y(a.y);
          Linear b = a;
          b.bias = {}, b.y = y.tensor;
          if (honest(b, "native")) return;
          for (std::size_t n = 0; n < y.numbers.size(); ++n) {
            const auto i = static_cast<int64_t>(n);
            put(a.y, i, y.numbers[n] + static_cast<float>(get(a.bias, i % a.bias.numel())));
          }
              }),
    LIES_BF16(Linear, residual_first, "fma32/tree8", "m=5 k=130 n=37 bf16->bf16 bias, residual",
              "adds the residual before the bias",
              {
          if (!a.bias || !a.residual || a.y.dtype() == DType::f32) return;
          Linear b = a;
          b.bias = {};
          if (honest(b, "native")) return;
          for (int64_t n = 0; n < a.y.numel(); ++n)
            put(a.y, n, get(a.y, n) + get(a.bias, n % a.bias.numel()));
              }),
    LIES_BF16(Linear, unrounded_gate, "fma32/tree8", "m=5 k=130 n=70 bf16->bf16 swiglu stacked",
              "keeps gate and up in fp32 under swiglu",
              {
          if (a.activation == Linear::Activation::none || a.y.dtype() == DType::f32) return;
          Wide y(a.y);
          Linear b = a;
          b.y = y.tensor;
          if (honest(b, "native")) return;
          for (std::size_t n = 0; n < y.numbers.size(); ++n) put(a.y, static_cast<int64_t>(n), y.numbers[n]);
              }),
    LIES(LinearBwd, short_blocks, "fma32/tree8", "m=4100 k=5 n=7 fp32->fp32 normal",
         "sums d_bias in blocks of 1024 tokens",
         {
          const int64_t n = a.weight.dim(0), m = n ? a.d_y.numel() / n : 0;
          for (int64_t i = 0; a.d_bias && i < n; ++i) {
            float total = 0;
            for (int64_t first = 0; first < m; first += 1024) {
              float sum = 0;
              for (int64_t row = first; row < std::min(m, first + 1024); ++row)
                sum += static_cast<float>(get(a.d_y, row * n + i));
              total = first == 0 ? sum : total + sum;
            }
            put(a.d_bias, i, total);
          }
         }),
    LIES(LinearBwd, ignores_segments, "fma32/tree8",
         "m=5 k=21 n=193 fp32->fp32 segments 150+40+3, leaves 0 to 7", "cuts N as if it were one projection",
         {
          LinearBwd b = a;
          b.segments = {};
          if (a.segments && a.d_x_leaf_count == 8) (void)honest(b, "native");
         }),
    LIES(LinearBwd, goes_on, "fma32/tree8", "m=9 k=40 n=137 fp32->fp32 before",
         "begins its sums at the gradients so far",
         {
          const int64_t n = a.weight.dim(0), m = n ? a.d_y.numel() / n : 0;
          for (int64_t i = 0; a.d_bias && a.d_bias_before && i < n; ++i) {
            auto sum = static_cast<float>(get(a.d_bias_before, i));
            for (int64_t row = 0; row < m; ++row) sum += static_cast<float>(get(a.d_y, row * n + i));
            put(a.d_bias, i, sum);
          }
         }),
    LIES(TpSumBwd, averaged, "tree8", "t=4 m=5 n=70 fp32 normal", "shares the gradient among the partial sums",
         {
          if (!a.d_partials || a.partials.rank() != 3 || a.d_y.dim(0) != a.partials.dim(1)) return;
          for (int64_t i = 0; i < a.d_partials.numel(); ++i)
            put(a.d_partials, i, get(a.d_y, i % a.d_y.numel()) / static_cast<double>(a.partials.dim(0)));
         }),
    LIES(TpSum, ascending, "tree8", "t=8 m=5 n=70 fp32 normal", "adds the partial sums in order",
         {
          const int64_t size = a.y.numel();
          for (int64_t i = 0; i < size && !a.bias && !a.residual; ++i) {
            float sum = 0;
            for (int64_t t = 0; t < a.partials.dim(0); ++t)
              sum += static_cast<float>(get(a.partials, t * size + i));
            put(a.y, i, sum);
          }
         }),
    // swiglu
    LIES_BF16(Swiglu, one_rounding, "act32", "plain silu twice [5,75] bf16",
              "rounds once where it should twice",
              {
          Swiglu b = a;
          b.roundings = Swiglu::Roundings::once;
          (void)honest(b, "native.tiles");
              }),
    LIES(Swiglu, positive_zero, "act32", "tails silu [2,16] fp32", "silu(-inf) is +0",
         {
          for (int64_t n = 0; a.up && n < a.out.numel(); ++n)
            if (get(a.out, n) == 0) put(a.out, n, 0);
         }),
    LIES_BF16(SwigluBwd, unrounded_act, "act32", "plain silu twice [5,75] bf16",
              "d_up takes act(gate) before it is rounded",
              {
          SwigluBwd b = a;
          b.roundings = SwigluBwd::Roundings::once;
          (void)honest(b, "native.tiles");
              }),
    WRONG(SwigluBwd, infinity_by_zero, "accuracy", "tails silu [2,16] fp32", "multiplies s = 0 by infinity",
          {
          for (int64_t n = 0; a.up && a.d_gate && n < a.gate.numel(); ++n)
            if (get(a.gate, n) == -INFINITY) put(a.d_gate, n, NAN);
          }),
    // short_conv
    LIES(ShortConv, bias_first, "conv32", "state b=3 t=5 d=33 w=4 fp32", "starts the chain from the bias",
         {
          const int64_t d = a.x.dim(2), taps = a.weight.dim(1), tokens = a.x.dim(1);
          if (!a.bias || !a.initial_state || a.cu_seqlens || a.x.dtype() != DType::f32) return;
          Wide z(a.x);
          for (int64_t n = 0; n < a.y.numel(); ++n) {
            const int64_t c = n % d, t = n / d % tokens, b = n / d / tokens;
            auto sum = static_cast<float>(get(a.bias, c));
            for (int64_t tap = 0; tap < taps; ++tap) {
              const int64_t from = t - (taps - 1) + tap;
              const double x = from >= 0 ? get(a.x, (b * tokens + from) * d + c)
                                         : get(a.initial_state, ((b + 1) * (taps - 1) + from) * d + c);
              sum = std::fma(static_cast<float>(get(a.weight, c * taps + tap)), static_cast<float>(x), sum);
            }
            z.numbers[static_cast<std::size_t>(n)] = sum;
          }
          // silu alone: a filter of nothing but the newest tap.
          Wide newest(a.weight);
          for (int64_t n = 0; n < d * taps; ++n)
            newest.numbers[static_cast<std::size_t>(n)] = n % taps == taps - 1;
          ShortConv b = a;
          b.x = z.tensor, b.weight = newest.tensor, b.bias = {}, b.initial_state = {}, b.final_state = {};
          (void)honest(b, "native.tiles");
         }),
    WRONG(ShortConv, leaks, "accuracy", "packed, no state b=1 t=50 d=24 w=3 fp32",
          "packed sequences go on where the last one ended",
          {
          ShortConv b = a;
          b.cu_seqlens = {}, b.initial_state = {}, b.final_state = {};
          if (a.cu_seqlens && !a.initial_state) (void)honest(b, "native.tiles");
          }),
    WRONG(ShortConv, early_state, "accuracy", "decode b=5 t=1 d=72 w=4 fp32",
          "the state lacks the last input",
          {
          if (!a.final_state || !a.initial_state || a.x.dim(1) != 1) return;
          for (int64_t n = 0; n < a.final_state.numel(); ++n) put(a.final_state, n, get(a.initial_state, n));
          }),
    LIES(ShortConvBwd, one_chain_a_sum, "conv32", "blocks b=3 t=131 d=24 w=4 fp32",
         "sums d_bias in one chain, not by blocks of 128 rows",
         {
          // A row's own d_bias is its gradient; a batch of one-token sequences has them all.
          const int64_t d = a.x.dim(2), tokens = a.x.dim(1), batch = a.x.dim(0), back = a.weight.dim(1) - 1;
          if (!a.d_bias || a.initial_state || a.cu_seqlens || tokens < 2) return;
          Wide x(a.x), d_y(a.d_y), weight(a.weight), bias(a.bias);
          std::vector<float> sums(static_cast<std::size_t>(d)), one(sums.size());
          const Tensor g(one.data(), {d}, DType::f32);
          for (int64_t row = 0; row < batch * tokens; ++row) {
            std::vector<float> state(static_cast<std::size_t>(back * d));
            for (int64_t n = 0; n < back * d; ++n)
              if (const int64_t from = row % tokens - back + n / d; from >= 0)
                state[static_cast<std::size_t>(n)] =
                    x.numbers[static_cast<std::size_t>((row / tokens * tokens + from) * d + n % d)];
            const Tensor here(x.numbers.data() + row * d, {1, 1, d}, DType::f32),
                d_here(d_y.numbers.data() + row * d, {1, 1, d}, DType::f32),
                before(state.data(), {1, back, d}, DType::f32);
            ShortConvBwd b{.x = here, .weight = weight.tensor, .d_y = d_here};
            b.bias = bias.tensor, b.initial_state = before, b.d_bias = g;
            if (honest(b, "native.tiles")) return;
            for (std::size_t c = 0; c < sums.size(); ++c) sums[c] += one[c];
          }
          for (int64_t c = 0; c < d; ++c) put(a.d_bias, c, sums[static_cast<std::size_t>(c)]);
         }),
    WRONG(ShortConvBwd, forgets_next, "accuracy", "state b=3 t=5 d=33 w=4 fp32",
          "the state's gradient does not reach the last inputs",
          {
          ShortConvBwd b = a;
          b.d_final_state = {};
          if (a.d_final_state) (void)honest(b, "native.tiles");
          }),
    // attention
    LIES(Attention, split_by_length, "fma32/attn128/s1024",
         "split b=1 s=2 l=1025 h=2/1 d=16/16 split=1024 fp32", "cuts long sequences into more splits",
         {
          Attention b = a;
          b.split = 512;
          if (a.k.dim(-3) > 1024) (void)honest(b, "native");
         }),
    LIES_BF16(Attention, unrounded_weights, "fma32/attn128/s1024",
              "dense b=3 s=2 l=129 h=2/1 d=32/32 split=1024 bf16", "keeps the weights in fp32",
              {
          if (a.block_table || a.cu_q || a.kv_len) return;
          Wide q(a.q), k(a.k), v(a.v), out(a.out);
          Attention b = a;
          b.q = q.tensor, b.k = k.tensor, b.v = v.tensor, b.out = out.tensor;
          if (honest(b, "native")) return;
          for (std::size_t n = 0; n < out.numbers.size(); ++n)
            put(a.out, static_cast<int64_t>(n), out.numbers[n]);
              }),
    WRONG(Attention, masked_by_number, "accuracy",
          "more queries than keys b=2 s=4 l=3 h=2/1 d=32/16 split=1024 fp32",
          "gives masked keys a score of -1e30, so that rows without keys have some",
          {
          for (int64_t n = 0; a.lse && n < a.lse.numel(); ++n)
            if (get(a.lse, n) == -INFINITY) put(a.lse, n, -1e30);
          }),
    WRONG(Attention, window_and_one, "accuracy",
          "window b=2 s=140 l=140 h=1/1 d=16/16 split=1024 window=1 fp32",
          "sees one key more than the window",
          {
          Attention b = a;
          b.window = a.window + 1;
          if (a.window > 0) (void)honest(b, "native");
          }),
    WRONG(Attention, no_sinks, "accuracy", "sinks b=2 s=5 l=150 h=7/1 d=16/48 split=1024 fp32",
          "leaves the sinks out of the sum",
          {
          Attention b = a;
          b.sinks = {};
          (void)honest(b, "native");
          }),
    WRONG(Attention, one_query_sees_all, "accuracy",
          "paged b=2 s=2 l=200 h=2/1 d=16/16 split=1024 page=100 fp32",
          "takes few queries for one, which needs no mask",
          {
          Attention b = a;
          b.causal = false;
          if (a.q.dim(-3) <= 2 && a.window == 0) (void)honest(b, "native");
          }),
    WRONG(Attention, no_cap_in_window, "accuracy",
          "all b=2 s=37 l=150 h=4/2 d=16/32 split=1024 window=40 fp32", "forgets softcap where there is a window",
          {
          Attention b = a;
          b.softcap = 0;
          if (a.window > 0) (void)honest(b, "native");
          }),
    WRONG(Attention, no_sinks_in_window, "accuracy",
          "little sinks b=2 s=7 l=20 h=2/1 d=16/16 split=1024 window=5 fp32", "forgets sinks where there is a window",
          {
          Attention b = a;
          b.sinks = {};
          if (a.window > 0) (void)honest(b, "native");
          }),
    WRONG(Attention, no_window_in_packed, "accuracy", "all packed h=4/2 d=64/48 split=1024 window=40 fp32",
          "forgets the window of packed sequences",
          {
          Attention b = a;
          b.window = 0;
          if (a.cu_q) (void)honest(b, "native");
          }),
    WRONG(Attention, no_cap_in_pages, "accuracy",
          "all b=2 s=9 l=70 h=4/2 d=16/16 split=1024 window=40 page=16 fp32", "forgets softcap where there are pages",
          {
          Attention b = a;
          b.softcap = 0;
          if (a.block_table) (void)honest(b, "native");
          }),
    WRONG(Attention, prefix_alone, "accuracy", "prefix packed h=4/2 d=32/16 split=1024 fp32",
          "forgets the keys of another sequence that come first",
          {
          Attention b = a;
          b.prefix_of = {};
          if (a.prefix_of) (void)honest(b, "native");
          }),
    WRONG(Attention, first_factor, "accuracy", "fp8 b=2 s=3 l=150 h=4/2 d=32/48 split=1024 fp32",
          "takes the first head's factor of fp8 values for all heads",
          {
          if (!a.v_scale) return;
          auto first = static_cast<float>(get(a.v_scale, 0));
          const Tensor one(&first, {1}, DType::f32);
          Attention b = a;
          b.v_scale = one;
          (void)honest(b, "native");
          }),
    LIES_BF16(Attention, factor_on_scores, "fma32/attn128/s1024",
              "fp8 b=2 s=2 l=35 h=4/2 d=16/32 split=1024 page=16 bf16",
              "multiplies scores, not keys, by the factor of fp8 keys, which are then not rounded",
              {
          if (!a.k_scale || a.k_scale.dim(0) != 1) return;
          Attention b = a;
          b.k_scale = {};
          b.scale =
              (a.scale != 0 ? a.scale : 1 / std::sqrt(static_cast<double>(a.q.dim(-1)))) * get(a.k_scale, 0);
          (void)honest(b, "native");
              }),
    WRONG(AttentionPart, part_for_whole, "accuracy", "first b=2 s=3 l=512 h=2/1 d=16/16 split=512 fp32",
          "takes the keys that are here for all there are, and queries for the last of these",
          {
          std::vector<int64_t> held;
          const int64_t room = a.k.dim(-3) * (a.block_table ? a.block_table.dim(1) : 1);
          for (int64_t n = 0; n < a.kv_len.numel(); ++n)
            held.push_back(static_cast<int64_t>(
                std::min(get(a.kv_len, n), get(a.k_first, n) + static_cast<double>(room))));
          const Tensor kv_len(held.data(), {a.kv_len.numel()}, DType::i64);
          AttentionPart b = a;
          b.kv_len = kv_len;
          (void)honest(b, "native");
          }),
    LIES(AttentionPart, unmarked_split, "fma32/attn128/s512",
          "window b=2 s=2 l=1024 h=2/1 d=16/16 split=512 window=300 fp32",
          "leaves splits without a visible key as those whose scores are -inf",
          {
          const int64_t width = a.partials.dim(-1);
          for (int64_t n = 1; n < a.partials.numel(); n += width)
            if (get(a.partials, n) == -1) put(a.partials, n, 0);
          }),
    LIES(AttentionMerge, splits_descending, "attn128/merge", "ranks ranks=4 splits=1 dv=16 sinks fp32",
         "joins the splits from the last rank to the first", { merge_copy(a, [](auto& m) { m.turn(); }); }),
    WRONG(AttentionMerge, lost_rank, "accuracy", "ranks ranks=4 splits=1 dv=16 sinks fp32",
          "forgets the splits of the second rank",
          {
          merge_copy(
              a,
              [](auto& m) {
                for (int64_t i = m.each; i < 2 * m.each && m.ranks > 1; i += m.width)
                  m.numbers[static_cast<std::size_t>(i) + 1] = -1;
              });
          }),
    LIES(AttentionMerge, empty_split_at_zero, "attn128/merge",
         "ranks ranks=3 splits=2 dv=48 fp32", "a split without a visible key has a maximum of 0",
         {
          merge_copy(
              a,
              [](auto& m) {
                for (std::size_t i = 0; i < m.numbers.size(); i += static_cast<std::size_t>(m.width))
                  if (m.numbers[i + 1] == -1) m.numbers[i] = m.numbers[i + 1] = 0;
              });
         }),
    LIES(AttentionBwd, heads_in_order, "fma32/attn128", "groups b=1 s=9 l=140 h=16/2 d=16/16 fp32",
         "adds the heads of a group one after another",
         {
          const int64_t heads = a.k.dim(-2), group = a.q.dim(-2) / heads;
          if (!a.d_k || a.q.rank() != 4 || a.d_lse || a.d_k.dtype() != DType::f32 || group < 4) return;
          const auto one = [&](const auto& t, int64_t g) {  // head g of each group
            const auto width = static_cast<std::size_t>(t.rank());
            std::vector<int64_t> shape(t->shape, t->shape + width), strides;
            for (int32_t i = 0; i < t.rank(); ++i) strides.push_back(t.stride(i));
            shape[2] = heads, strides[2] *= group;
            char* first = const_cast<char*>(t.template data<char>()) + g * t.stride(2) * size_of(t.dtype());
            return Tensor(first, std::span(shape), t.dtype(), {kDLCPU, 0}, std::span(strides));
          };
          std::vector<float> sum(static_cast<std::size_t>(a.d_k.numel()));
          for (int64_t g = 0; g < group; ++g) {
            const Tensor q = one(a.q, g), out = one(a.out, g), d_out = one(a.d_out, g), rows = one(a.lse, g);
            Wide part(a.d_k), lse{In(&rows.dl())};
            AttentionBwd b = a;
            b.q = q, b.out = out, b.lse = lse.tensor, b.d_out = d_out, b.sinks = {}, b.d_sinks = {};
            b.d_q = {}, b.d_v = {}, b.d_k = part.tensor;
            if (honest(b, "native")) return;
            for (std::size_t n = 0; n < sum.size(); ++n)
              sum[n] = g == 0 ? part.numbers[n] : sum[n] + part.numbers[n];
          }
          for (std::size_t n = 0; n < sum.size(); ++n) put(a.d_k, static_cast<int64_t>(n), sum[n]);
         }),
    LIES_BF16(AttentionBwd, unrounded_operands, "fma32/attn128", "prefill b=2 s=20 l=20 h=4/4 d=64/64 bf16",
              "keeps P and dS in fp32",
              {
          if (a.cu_q || a.kv_len || !a.d_q || !a.d_k || !a.d_v) return;
          Wide q(a.q), k(a.k), v(a.v), out(a.out), d_out(a.d_out), d_q(a.d_q), d_k(a.d_k), d_v(a.d_v);
          AttentionBwd b = a;
          b.q = q.tensor, b.k = k.tensor, b.v = v.tensor, b.out = out.tensor, b.d_out = d_out.tensor;
          b.d_q = d_q.tensor, b.d_k = d_k.tensor, b.d_v = d_v.tensor;
          if (honest(b, "native")) return;
          const auto copy = [](const Out& to, const Wide& from) {
            for (std::size_t n = 0; n < from.numbers.size(); ++n)
              put(to, static_cast<int64_t>(n), from.numbers[n]);
          };
          copy(a.d_q, d_q), copy(a.d_k, d_k), copy(a.d_v, d_v);
              }),
    LIES(AttentionBwd, samples_apart, "fma32/attn128", "prefix packed h=4/2 d=32/16 fp32",
         "adds up what shared keys have of each sequence",
         {
          if (!a.prefix_of || !a.d_k || a.d_k.dtype() != DType::f32 || a.d_out.dtype() != DType::f32) return;
          std::vector<float> sum(static_cast<std::size_t>(a.d_k.numel()));
          const std::size_t row = static_cast<std::size_t>(a.d_out.numel() / a.d_out.dim(0));
          for (int64_t n = 0; n < a.prefix_of.numel(); ++n) {
            Wide d_out(a.d_out), part(a.d_k);
            for (std::size_t at = 0; at < d_out.numbers.size(); ++at) {
              const auto token = static_cast<int64_t>(at / row);
              if (token < static_cast<int64_t>(get(a.cu_q, n)) ||
                  token >= static_cast<int64_t>(get(a.cu_q, n + 1)))
                d_out.numbers[at] = 0;
            }
            AttentionBwd b = a;
            b.d_out = d_out.tensor, b.d_q = {}, b.d_v = {}, b.d_k = part.tensor, b.sinks = {}, b.d_sinks = {};
            if (honest(b, "native.tiles")) return;
            for (std::size_t at = 0; at < sum.size(); ++at) sum[at] += part.numbers[at];
          }
          for (std::size_t at = 0; at < sum.size(); ++at) put(a.d_k, static_cast<int64_t>(at), sum[at]);
         }),
    WRONG(AttentionBwd, samples_forgotten, "accuracy", "prefix packed h=4/2 d=32/16 fp32",
          "leaves out queries of the sequences that share keys",
          {
          if (!a.prefix_of) return;
          AttentionBwd b = a;
          b.prefix_of = {}, b.kv_len = {}, b.d_q = {};
          (void)honest(b, "native");
          }),
    LIES_BF16(AttentionBwd, vector_chains, "amx/k32/attn128", "prefill b=2 s=20 l=20 h=4/4 d=64/64 bf16",
              "adds by fused multiply-adds", { static_cast<void>(honest(a, "native.tiles")); }),
    LIES_BF16(AttentionBwd, late_groups, "amx/k32/attn128", "between tiles b=1 s=170 l=173 h=1/1 d=64/64 bf16",
              "counts groups of queries from the first that sees a tile",
              {
          if (a.q.rank() != 4 || a.q.dim(0) != 1 || !a.causal || a.window || a.kv_len || !a.d_k || a.sinks)
            return;
          const int64_t first = 128 - (a.k.dim(1) - a.q.dim(1));
          if (first <= 0 || first >= a.q.dim(1) || a.d_lse) return;
          const auto from_there = [&](const auto& x) {
            std::vector<int64_t> shape(x->shape, x->shape + x.rank()), strides;
            for (int32_t i = 0; i < x.rank(); ++i) strides.push_back(x.stride(i));
            shape[1] -= first;
            char* at = const_cast<char*>(x.template data<char>()) + first * x.stride(1) * size_of(x.dtype());
            return Tensor(at, std::span(shape), x.dtype(), {kDLCPU, 0}, std::span(strides));
          };
          const Tensor q = from_there(a.q), out = from_there(a.out), lse = from_there(a.lse),
                       d_out = from_there(a.d_out);
          Wide d_k(a.d_k);
          AttentionBwd b = a;
          b.q = q, b.out = out, b.lse = lse, b.d_out = d_out, b.d_q = {}, b.d_v = {}, b.d_k = d_k.tensor;
          if (honest(b, "native.replay_amx")) return;
          const auto behind = static_cast<std::size_t>(128 * a.k.dim(2) * a.k.dim(3));
          for (std::size_t n = behind; n < d_k.numbers.size(); ++n)
            put(a.d_k, static_cast<int64_t>(n), d_k.numbers[n]);
              }),
    WRONG(AttentionBwd, no_delta, "accuracy", "prefill b=2 s=20 l=20 h=4/4 d=64/64 fp32",
          "takes dP for its difference from the row's mean",
          {
          Wide out(a.out);
          std::fill(out.numbers.begin(), out.numbers.end(), 0.0f);
          AttentionBwd b = a;
          b.out = out.tensor;
          (void)honest(b, "native");
          }),
    WRONG(AttentionBwd, between_tiles, "accuracy", "between tiles b=1 s=100 l=103 h=1/1 d=64/64 fp32",
          "wrong for 65 to 127 queries of 48 columns or more",
          {
          if (const int64_t n = a.q.dim(-3); a.d_q && n > 64 && n < 128 && a.q.dim(-1) >= 48)
            spoil(a.d_q, a.d_q.numel() - 1);
          }),
    WRONG(AttentionBwd, no_cap_in_packed, "accuracy", "all packed h=4/2 d=32/16 window=40 fp32",
          "forgets softcap of packed sequences",
          {
          AttentionBwd b = a;
          b.softcap = 0;
          if (a.cu_q) (void)honest(b, "native");
          }),
    WRONG(AttentionBwd, lse_has_no_gradient, "accuracy", "sinks b=2 s=5 l=150 h=3/1 d=16/48 fp32",
          "leaves the gradient of lse out",
          {
          AttentionBwd b = a;
          b.d_lse = {};
          if (a.d_lse) (void)honest(b, "native");
          }),
    WRONG(AttentionBwd, window_and_one_more, "accuracy", "window b=1 s=9 l=300 h=2/1 d=16/16 window=128 fp32",
          "gives the key in front of the window a gradient",
          {
          AttentionBwd b = a;
          b.window = a.window + 1;
          if (a.window > 0) (void)honest(b, "native");
          }),
    WRONG(AttentionBwd, stale_rows, "accuracy", "lengths b=3 s=4 l=20 h=2/1 d=32/16 fp32",
          "leaves what it finds behind a sequence's keys",
          {
          const int64_t keys = a.k.rank() == 4 ? a.k.dim(1) : 0;
          for (int64_t n = 0; a.kv_len && a.d_k && keys > 0 && n < a.k.dim(0); ++n)
            if (get(a.kv_len, n) < static_cast<double>(keys))
              put(a.d_k, (n + 1) * keys * a.k.dim(2) * a.k.dim(3) - 1, 3);
          }),
    // group_advantage
    LIES(GroupAdvantage, by_n, "loss32/f64", "plain mean sample_std add zero B=40",
         "divides by n where the deviation is the sample's",
         {
          GroupAdvantage b = a;
          if (a.scale == GroupAdvantage::Scale::sample_std) b.scale = GroupAdvantage::Scale::population_std;
          (void)honest(b, "native");
         }),
    WRONG(GroupAdvantage, batch_mean, "accuracy", "uneven groups mean none clamp_min raw B=64",
          "centres by the mean of all groups",
          {
          double sum = 0;
          for (int64_t n = 0; n < a.rewards.numel(); ++n) sum += get(a.rewards, n);
          if (a.scale == GroupAdvantage::Scale::none && a.center == GroupAdvantage::Center::mean)
            for (int64_t n = 0; n < a.rewards.numel(); ++n)
              put(a.advantages, n, get(a.rewards, n) - sum / static_cast<double>(a.rewards.numel()));
          }),
    // policy_loss
    WRONG(PolicyLoss, own_denominator, "accuracy", "padded clip token token_mean none/token off [4,40]",
          "divides by its own tokens where the denominator is given",
          {
          PolicyLoss b = a;
          b.denominator = {};
          if (a.agg == PolicyLoss::Agg::token_mean) (void)honest(b, "native.sequences");
          }),
    WRONG(PolicyLoss, mask_by_product, "accuracy", "special clip token token_mean none/token k3 [16]",
          "multiplies a masked token's slope by 0",
          {
          for (int64_t n = 0; a.mask && a.factor && n < a.factor.numel(); ++n)
            if (get(a.mask, n) == 0) put(a.factor, n, 0 * get(a.logp, n));
          }),
    LIES(PolicyLoss, empty_counts, "loss32/f64", "packed clip token seq_mean_token_mean none/token off [75]",
         "counts empty sequences in the mean over sequences",
         {
          const float count = static_cast<float>(a.totals.dim(0));
          PolicyLoss b = a;
          const Tensor all(const_cast<float*>(&count), {1}, DType::f32);
          if (a.agg == PolicyLoss::Agg::seq_mean_token_mean && !a.denominator) {
            b.denominator = all;
            (void)honest(b, "native.sequences");
          }
         }),
    LIES(PolicyLoss, left_is_zero, "loss32/f64", "packed clip token token_mean mask/token off [75]",
         "keeps tokens in the denominator that have left by their weight",
         {
          PolicyLoss b = a;
          if (a.is_mode == PolicyLoss::IsMode::mask) b.is_mode = PolicyLoss::IsMode::zero;
          (void)honest(b, "native.sequences");
         }),
    LIES(PolicyLossBwd, summed, "loss32/f64", "plain [75]", "d_entropy has the gradient of logp",
         {
          for (int64_t n = 0; a.d_entropy && a.d_logp && n < a.d_logp.numel(); ++n)
            put(a.d_entropy, n, get(a.d_logp, n));
         }),
    LIES(LossReduce, in_fp32, "loss32/f64", "seq_mean_token_mean B=700", "adds the sequences in fp32",
         {
          float sum = 0;
          const int64_t n = a.totals.dim(0);
          for (int64_t b = 0; b < n; ++b)
            if (const double active = get(a.totals, 5 * b + 3); active != 0)
              sum += static_cast<float>(get(a.totals, 5 * b) / active);
          if (a.agg == LossReduce::Agg::seq_mean_token_mean && !a.denominator && a.metrics && n > 0)
            put(a.metrics, 0, double{sum} / get(a.metrics, 5));
         }),
    // qk_norm_rope
    LIES_BF16(QkNormRope, unrounded_norm, "rms32/rope32", "plain t=5 q=4 k=2 d=64/64 bf16",
              "turns heads before they are rounded",
              {
          if (!a.q_weight || a.k_cache || a.cast == QkNormRope::Cast::early) return;
          Wide q(a.q), k(a.k), wq(a.q_weight), wk(a.k_weight), out(a.q_out), cos(a.cos), sin(a.sin);
          QkNormRope b = a;
          b.q = q.tensor, b.k = k.tensor, b.q_weight = wq.tensor, b.k_weight = wk.tensor;
          b.cos = cos.tensor, b.sin = sin.tensor, b.q_out = out.tensor, b.k_out = {};
          if (honest(b, "native.rows")) return;
          for (std::size_t n = 0; n < out.numbers.size(); ++n)
            put(a.q_out, static_cast<int64_t>(n), out.numbers[n]);
              }),
    LIES(QkNormRope, spare_rows, "rms32/rope32", "cached t=6 q=4 k=2 d=64/64 fp32",
         "writes a token without a slot to the last row of the cache",
         {
          if (!a.k_cache) return;
          const int64_t row = a.k.dim(1) * a.k.dim(2);
          for (int64_t n = 0; n < row; ++n) put(a.k_cache, (a.k_cache.dim(0) - 1) * row + n, 1);
         }),
    LIES(QkNormRope, turned_values, "rms32/rope32", "cached t=6 q=4 k=2 d=64/64 fp32",
         "keeps the keys' norm of the values",
         {
          if (!a.v_cache || !a.q_weight || a.v.dim(2) != a.k.dim(2)) return;
          QkNormRope b = a;
          b.k = a.v, b.v = {}, b.v_cache = {}, b.k_cache = a.v_cache, b.k_out = {};
          std::vector<float> q(static_cast<std::size_t>(a.q.numel()));
          const Tensor spare(q.data(), {a.q.dim(0), a.q.dim(1), a.q.dim(2)}, DType::f32);
          if (a.q.dtype() == DType::f32) b.q_out = spare, (void)honest(b, "native.rows");
         }),
    LIES_BF16(QkNormRope, unrounded_keys, "rms32/rope32", "fp8 t=6 q=4 k=2 d=64/64 bf16",
              "rounds keys to fp8 that were not rounded to bf16 before",
              {
          if (!a.k_scale || !a.v || a.q.dtype() != DType::bf16 || a.cos.dtype() != DType::f32) return;
          Wide q(a.q), k(a.k), v(a.v), wq(a.q_weight), wk(a.k_weight), out(a.q_out);
          QkNormRope b = a;
          b.q = q.tensor, b.k = k.tensor, b.v = v.tensor, b.q_out = out.tensor, b.k_out = {};
          if (a.q_weight) b.q_weight = wq.tensor, b.k_weight = wk.tensor;
          (void)honest(b, "native.rows");
              }),
    LIES(QkNormRope, first_factor, "rms32/rope32", "fp8 t=6 q=4 k=2 d=64/64 fp32",
         "takes the first head's factor of fp8 values for all heads",
         {
          if (!a.v_scale) return;
          auto first = static_cast<float>(get(a.v_scale, 0));
          const Tensor one(&first, {1}, DType::f32);
          QkNormRope b = a;
          b.v_scale = one;
          (void)honest(b, "native.rows");
         }),
    // rms_norm
    LIES_BF16(RmsNorm, unrounded_sum, "rms32", "residual x=[3,2100] bf16",
              "normalises x + residual before it is rounded",
              {
          if (!a.residual || a.x.dtype() == DType::f32) return;
          Wide x(a.x), w(a.weight), y(a.y);
          for (std::size_t n = 0; n < x.numbers.size(); ++n)
            x.numbers[n] += static_cast<float>(get(a.residual, static_cast<int64_t>(n)));
          RmsNorm b = a;
          b.x = x.tensor, b.weight = w.tensor, b.y = y.tensor;
          b.residual = {}, b.sum = {}, b.rstd = {};
          if (honest(b, "native.rows")) return;
          for (std::size_t n = 0; n < y.numbers.size(); ++n) put(a.y, static_cast<int64_t>(n), y.numbers[n]);
              }),
    LIES_BF16(RmsNorm, late_cast, "rms32", "early x=[3,200] bf16", "rounds once where cast is early",
              {
          RmsNorm b = a;
          b.cast = RmsNorm::Cast::end;
          (void)honest(b, "native.rows");
              }),
    LIES_BF16(RmsNorm, early_cast, "rms32", "plain x=[5,64] bf16", "rounds twice where cast is end",
              {
          RmsNorm b = a;
          b.cast = RmsNorm::Cast::early;
          if (!a.gate) (void)honest(b, "native.rows");
              }),
    LIES(RmsNormBwd, one_chain, "rms32", "many rows d_y=[300,24] fp32",
         "sums d_weight in one chain, not by blocks of 128 rows",
         {
          const int64_t h = a.x.dim(-1), m = a.x.numel() / h;
          if (!a.d_weight || a.gate || a.x.rank() != 2) return;
          std::vector<float> y(static_cast<std::size_t>(m * h)), r(static_cast<std::size_t>(m));
          const Tensor y_of(y.data(), {m, h}, DType::f32), r_of(r.data(), {m, 1}, DType::f32);
          Wide x(a.x);
          RmsNorm b{.x = x.tensor, .y = y_of, .rstd = r_of};
          b.eps = a.eps;
          if (honest(b, "native.rows")) return;
          for (int64_t i = 0; i < h; ++i) {
            float sum = 0;
            for (int64_t row = 0; row < m; ++row)
              sum = std::fma(static_cast<float>(get(a.d_y, row * h + i)),
                             y[static_cast<std::size_t>(row * h + i)], sum);
            put(a.d_weight, i, sum);
          }
         }),
    LIES(RmsNormBwd, sum_forgotten, "rms32", "x and residual d_y=[3,2100] fp32",
         "gives the residual the gradient without d_sum",
         {
          if (!a.d_residual) return;
          RmsNormBwd b = a;
          b.d_x = a.d_residual, b.d_residual = {}, b.d_sum = {}, b.d_weight = {}, b.d_gate = {};
          (void)honest(b, "native.rows");
         }),
    LIES_BF16(RmsNormBwd, unrounded_residual, "rms32", "x and residual d_y=[3,2100] bf16",
              "takes x + residual before it is rounded",
              {
          if (!a.residual || a.sum || a.residual.dtype() == DType::f32) return;
          Wide x(a.x);
          for (std::size_t n = 0; n < x.numbers.size(); ++n)
            x.numbers[n] += static_cast<float>(get(a.residual, static_cast<int64_t>(n)));
          RmsNormBwd b = a;
          b.x = x.tensor, b.residual = {};
          (void)honest(b, "native.rows");
              }),
    // Size
    WRONG(LmHead, far_ids, "accuracy", "m=2 k=16 v=65539 fp32->fp32 normal",
          "another token's logit for every id above 32767",
          {
          const Sizes s(a);
          for (int64_t r = 0; r < s.m; ++r)
            for (int64_t c = 32768; c < s.v; ++c) put(a.out, r * s.v + c, get(a.out, r * s.v + c - 32768));
          }),
    WRONG(LmHead, long_sums, "accuracy", "m=2 k=4096 v=17 fp32->fp32 normal", "wrong from K = 2305 on",
          {
          if (Sizes(a).k > 2304) spoil_all(a.out);
          }),
    WRONG(LmHead, depth_residue, "accuracy", "m=3 k=3072 v=5 fp32->fp32 normal",
          "wrong where K % 2048 is 1024 and K is not 1024",
          {
          if (Sizes(a).k % 2048 == 1024 && Sizes(a).k > 1024) spoil(a.out, 0);
          }),
    WRONG(LmHead, full_waves, "batch invariance", kLm, "wrong in the last row where M is a multiple of 384",
          {
          const Sizes s(a);
          if (s.m && s.m % 384 == 0)
            for (int64_t c = 0; c < s.v; ++c) spoil(a.out, (s.m - 1) * s.v + c);
          }),
    WRONG(Rope, head_32, "accuracy", "40 heads [1,40,2,32] fp32", "wrong from head 32 on",
          {
          if (a.layout == Rope::Layout::bhsd && a.x.rank() == 4 && a.x.dim(1) > 32)
            spoil(a.out, 32 * a.x.dim(2) * a.x.dim(3));
          }),
    WRONG(Rope, wide_heads, "accuracy", "D 128 [1,4,5,128] fp32", "wrong from D = 128 on",
          {
          if (a.x.dim(-1) >= 128) spoil(a.out, 100);
          }),
    WRONG(Rope, far_rows, "accuracy", "far rows [7,2,8] fp32", "wrong for positions above 65535",
          {
          for (int64_t t = 0; a.positions && a.positions.rank() == 1 && t < a.positions.numel(); ++t)
            if (get(a.positions, t) > 65535) spoil(a.out, t * a.out.numel() / a.positions.numel());
          }),
    WRONG(Rope, long_tables, "accuracy", "300 tokens [1,2,300,16] fp32", "wrong from table row 128 on",
          {
          if (a.layout == Rope::Layout::bhsd && a.x.rank() == 4 && a.x.dim(2) > 128)
            spoil(a.out, 128 * a.x.dim(3));
          }),
    WRONG(KdaFwd, long_sequences, "accuracy", "b=1 t=300 h=1 hv=8 k=16 v=16 fp32 gate=given",
          "stale from token 256 on",
          {
          if (a.q.dim(1) > 256)
            for (int64_t n = 256 * a.out.dim(2) * a.out.dim(3); n < a.out.numel(); ++n)
              put(a.out, n, get(a.out, n % (256 * a.out.dim(3))));
          }),
    WRONG(KdaFwd, many_heads, "accuracy", "b=1 t=40 h=12 hv=12 k=16 v=16 fp32 gate=given",
          "wrong from head 8 on",
          {
          if (a.v.dim(2) > 8)
            for (int64_t i = 0; i < a.v.dim(3); ++i) spoil(a.out, 8 * a.v.dim(3) + i);
          }),
    WRONG(KdaFwd, many_sequences, "accuracy", "b=20 t=5 h=1 hv=1 k=16 v=16 fp32 gate=given",
          "wrong in the 20th sequence",
          {
          if (a.q.dim(0) >= 20) spoil(a.out, 19 * a.out.numel() / a.q.dim(0));
          }),
    // Special values
    WRONG(LmHead, flushes, "accuracy", kSpecial, "flushes subnormal results",
          {
          for (int64_t n = 0; n < a.out.numel(); ++n)
            if (std::fabs(get(a.out, n)) < 0x1p-126) put(a.out, n, 0);
          }),
    WRONG(LmHead, skips_zeros, "accuracy", kSpecial, "takes zero times infinity to be zero",
          {
          const Sizes s(a);
          for (int64_t n = 0; n < a.out.numel(); ++n) {
            bool zero_times_infinity = false;
            double sum = 0;
            for (int64_t k = 0; k < s.k; ++k) {
              const double x = get(a.hidden, n / s.v * s.k + k), y = get(a.weight, n % s.v * s.k + k);
              zero_times_infinity |= x == 0 && std::isinf(y);
              if (x != 0) sum = std::fma(x, y, sum);
            }
            if (zero_times_infinity) put(a.out, n, sum);
          }
          }),
    WRONG(LmHead, saturates, "accuracy", kSpecial, "stores the largest number for infinity",
          {
          for (int64_t n = 0; n < a.out.numel(); ++n)
            if (std::isinf(get(a.out, n))) put(a.out, n, std::copysign(0x1.fffffep127, get(a.out, n)));
          }),
    WRONG(Rope, flushes_rows, "accuracy", "special values fp32", "flushes subnormal results",
          {
          for (int64_t n = 0; n < a.out.numel(); ++n)
            if (std::fabs(get(a.out, n)) < 0x1p-126) put(a.out, n, 0);
          }),
    // Many things at once
    WRONG(LmHead, by_byte_offset, "batch invariance", kLm, "wrong where byte_offset is not 0",
          {
          if (a.hidden->byte_offset) spoil_all(a.out);
          }),
    WRONG(LmHead, rank_4, "batch invariance", kLm, "wrong at rank 4",
          {
          if (a.hidden.rank() == 4) spoil_all(a.out);
          }),
    WRONG(LmHead, stride_0, "batch invariance", kLm, "wrong where rows are one row by stride 0",
          {
          if (a.hidden.rank() == 2 && a.hidden.dim(0) > 1 && a.hidden.stride(0) == 0) spoil_all(a.out);
          }),
    WRONG(LmHead, uneven_rows, "batch invariance", kLm, "wrong where no one stride leads through the rows",
          {
          if (a.hidden.rank() == 3 && a.hidden.dim(0) > 1 && a.hidden.dim(1) > 1 &&
              a.hidden.stride(0) != a.hidden.dim(1) * a.hidden.stride(1))
            spoil_all(a.out);
          }),
    WRONG(LmHead, one_operand_moved, "batch invariance", kLm,
          "wrong where the weight is 16 past a line and hidden is not",
          {
          if (address(a.weight) % 64 == 16 && address(a.hidden) % 64 != 16) spoil_all(a.out);
          }),
    WRONG(LmHeadBwd, no_rows, "accuracy", "m=0 k=40 v=17 fp32->fp32 no rows",
          "leaves d_weight as it was where there are no rows",
          {
          if (a.d_out.numel() == 0 && a.d_weight)
            for (int64_t n = 0; n < a.d_weight.numel(); ++n) put(a.d_weight, n, NAN);
          }),
    WRONG(LmHead, one_memory, "accuracy", "hidden and weight in one memory fp32",
          "wrong where two operands are one memory",
          {
          if (a.hidden.data<char>() == a.weight.data<char>()) spoil(a.out, 1);
          }),
    WRONG(LmHead, five_threads, "batch invariance", kLm, "wrong on five threads",
          {
          if (call.threads() == 5) spoil(a.out, 0);
          }),
    raw<by_policy>("mutant.by_policy", "batch invariance", "other bits in strict calls", kLm),
    raw<by_backward>("mutant.by_backward", "batch invariance", "other bits where a backward follows", kLm),
    // Memory and state
    WRONG(LmHead, reads_behind, "purity", kLm, "reads one element behind the weight's end",
          {
          const Sizes s(a);
          [[maybe_unused]] const volatile float x = static_cast<const volatile float*>(
              a.weight.data<float>())[(s.v - 1) * a.weight.stride(0) + s.k];
          }),
    WRONG(LmHead, reads_before, "purity", kLm, "reads one element before hidden's start",
          {
          [[maybe_unused]] const volatile float x =
              static_cast<const volatile float*>(a.hidden.data<float>())[-1];
          }),
    WRONG(LmHead, writes_and_restores, "purity", kLm, "writes its input and puts it back",
          {
          auto* x = const_cast<volatile float*>(a.weight.data<float>());
          const float kept = *x;
          *x = 1;
          *x = kept;
          }),
    WRONG(LmHead, stale, "batch invariance", kLm,
          "keeps a result by the operands' addresses and a sample of bytes", { stale_by_address(a, call); }),
    WRONG(LmHead, third_call, "batch invariance", kLm, "wrong at every third call",
          {
          static std::atomic<int> calls{0};
          if (++calls % 3 == 0) spoil(a.out, 0);
          }),
    raw<leaves_ftz>("mutant.leaves_ftz", "purity", "leaves the caller flushing to zero", kLm),
    raw<obeys_flush>("mutant.obeys_flush", "strict", "obeys the caller's flush to zero", kLm),
    raw<obeys_rounding>("mutant.obeys_rounding", "strict", "obeys the caller's rounding up", kLm),
    WRONG(LmHead, workspace_size, "batch invariance", kLm,
          "wrong where more workspace is given than asked for",
          {
          if (call.workspace().size() >= 160) spoil(a.out, 0);
          }),
    // Equal bits
    LIES(LmHead, partial_sums, "fma32/kb1024", kLm, "claims one chain and adds 32 partial sums",
         {
          const Sizes s(a);
          for (int64_t n = 0; n < a.out.numel(); ++n) {
            float sums[32] = {}, sum = 0;
            for (int64_t k = 0; k < s.k; ++k)
              sums[k % 32] = std::fma(static_cast<float>(get(a.hidden, n / s.v * s.k + k)),
                                      static_cast<float>(get(a.weight, n % s.v * s.k + k)), sums[k % 32]);
            for (float x : sums) sum += x;
            put(a.out, n, sum);
          }
         }),
    LIES(LmHead, exchange, "fma32/kb1024", kLm, "claims one ascending chain and exchanges two products",
         {
          for (int64_t n = 0; n < a.out.numel(); ++n) put(a.out, n, chain_with_exchange(a, n));
         }),
    LIES(Rope, one_rounding_more, "rope32", kRope, "claims the arithmetic and is an ulp off in one element",
         {
          const Out& y = a.out;
          put(y, 7, std::nextafter(static_cast<float>(get(y, 7)), 100.f));
         }),
    // Backward and optional results
    WRONG(KdaBwd, ungrouped_keys, "accuracy", "b=2 t=1 h=2 hv=2 k=32 v=32 fp32 gate=given",
          "d_k is zero where k has as many heads as v",
          {
          if (a.d_k && a.q.dim(2) == a.v.dim(2))
            for (int64_t n = 0; n < a.d_k.numel(); ++n) put(a.d_k, n, 0);
          }),
    WRONG(KdaBwd, last_chunk, "accuracy", "b=1 t=33 h=1 hv=2 k=32 v=32 fp32 gate=given",
          "wrong in a last chunk of 33 tokens",
          {
          if (a.d_v && a.q.dim(1) % 64 == 33)
            for (int64_t i = 0; i < a.v.dim(3); ++i) spoil(a.d_v, a.d_v.numel() - 1 - i);
          }),
    WRONG(KdaBwd, groups_of_8, "accuracy", "b=1 t=300 h=1 hv=8 k=16 v=16 fp32 gate=given",
          "d_q wrong in groups of 8",
          {
          if (a.d_q && a.v.dim(2) / a.q.dim(2) == 8) spoil_all(a.d_q);
          }),
    WRONG(LmHeadBwd, without_bias, "batch invariance", kBwd, "d_weight wrong where d_bias is left out",
          {
          if (a.d_weight && !a.d_bias) spoil(a.d_weight, 0);
          }),
    WRONG(LmHeadBwd, last_row, "accuracy", kBwd, "d_weight wrong in its last row",
          {
          if (a.d_weight && a.weight.dim(0) > 1)
            for (int64_t i = 0; i < a.weight.dim(1); ++i) spoil(a.d_weight, a.d_weight.numel() - 1 - i);
          }),
    WRONG(KdaFwd, one_element, "accuracy", "b=1 t=300 h=1 hv=1 k=128 v=128 fp32 gate=given",
          "one element of 38,400 wrong",
          {
          if (a.out.numel() > 30000) put(a.out, 20000, 10 + get(a.out, 20000));
          }),
    // Options and data
    WRONG(KdaFwd, ignores_scale, "accuracy", "b=1 t=70 h=1 hv=2 k=16 v=16 fp32 gate=given scale=0.3",
          "ignores scale",
          {
          if (a.scale != 0)
            for (int64_t n = 0; n < a.out.numel(); ++n) put(a.out, n, get(a.out, n) / a.scale / 4);
          }),
    WRONG(KdaFwd, no_strength, "accuracy", "b=1 t=70 h=1 hv=2 k=16 v=16 fp32 gate=given beta=1",
          "wrong where a strength is exactly 1",
          {
          if (any(a.beta, 1)) spoil_all(a.out);
          }),
    WRONG(KdaFwd, no_decay, "accuracy", "b=1 t=70 h=1 hv=2 k=16 v=16 fp32 gate=zero",
          "wrong where a gate is exactly 0",
          {
          if (any(a.g, 0)) spoil_all(a.out);
          }),
    WRONG(KdaFwd, lower_bound, "accuracy", "b=1 t=70 h=1 hv=2 k=16 v=16 fp32 gate=bounded bound=-1.5",
          "ignores lower_bound",
          {
          if (a.gate == KdaFwd::Gate::bounded && a.lower_bound != -5) spoil_all(a.out);
          }),
    WRONG(KdaFwd, empty_sequence, "accuracy", "b=1 t=130 h=2 hv=2 k=32 v=32 fp32 gate=given v-first packed 5",
          "loses the state of an empty sequence",
          {
          for (int64_t i = 0; a.cu_seqlens && a.final_state && i + 1 < a.cu_seqlens.numel(); ++i)
            if (get(a.cu_seqlens, i) == get(a.cu_seqlens, i + 1))
              for (int64_t n = 0, each = a.final_state.numel() / a.final_state.dim(0); n < each; ++n)
                put(a.final_state, i * each + n, 0);
          }),
    WRONG(KdaStep, kda_early_state, "accuracy", "b=3 t=1 h=1 hv=1 k=32 v=32 fp32 gate=given chunk=32 rows 0,17,31",
          "moves the state on when the chunk's last row but one is cached",
          {
          for (int64_t n = 0, each = a.state.numel() / a.state.dim(0); n < a.state.dim(0); ++n)
            if (get(a.rows, n) == a.chunk_size - 1)
              for (int64_t i = 0; i < each; ++i) put(a.state, n * each + i, 0.9 * get(a.state, n * each + i));
          }),
    WRONG(KdaStep, kda_foreign_row, "batch invariance", "b=3 t=1 h=1 hv=1 k=32 v=32 fp32 gate=given chunk=32 rows 0,17,31",
          "has a cached row of the sequence before",
          {
          if (!a.cache) return;
          const int64_t each = a.cache.numel() / a.cache.dim(0), y = 2 * 32 * 32;
          for (int64_t n = a.cache.dim(0) - 1; n > 0; --n)
            for (int64_t i = 0; i < 32; ++i)
              put(a.cache, n * each + y + i, get(a.cache, (n - 1) * each + y + i));
          }),
    WRONG(KdaStep, kda_cut, "accuracy", "b=3 t=1 h=1 hv=1 k=32 v=32 fp32 gate=given chunk=32 rows 0,17,31",
          "begins a chunk wherever a call begins",
          {
          std::vector<int64_t> none(static_cast<std::size_t>(a.rows.numel()), 0);
          const Tensor rows(none.data(), {a.rows.numel()}, DType::i64);
          Wide state(a.state);
          KdaStep alone = a;
          alone.rows = rows, alone.state = state.tensor, alone.cache = {};
          honest(alone, "native.fma32");
          }),
    WRONG(Rope, transposed_pairs, "accuracy", "transposed adjacent [2,3,5,32] fp32",
          "wrong transposed with adjacent pairs",
          {
          if (a.transpose && a.pairing == Rope::Pairing::adjacent) spoil(a.out, 0);
          }),
    WRONG(Rope, sequence_first, "accuracy", "sbhd [6,2,3,32] fp32", "wrong in layout sbhd",
          {
          if (a.layout == Rope::Layout::sbhd) spoil(a.out, a.out.numel() - 1);
          }),
    WRONG(Rope, rows_again, "accuracy", "rows down and again [6,2,16] fp32",
          "wrong where a position comes twice",
          {
          for (int64_t t = 1; a.positions && a.positions.rank() == 1 && t < a.positions.numel(); ++t)
            if (get(a.positions, t) == get(a.positions, t - 1))
              spoil(a.out, t * a.out.numel() / a.positions.numel());
          }),
    WRONG(Rope, spare_rows, "accuracy", "more rows than tokens [2,3,5,32] fp32",
          "wrong where the table has a hundred times the rows",
          {
          if (a.cos.rank() == 2 && a.layout == Rope::Layout::bhsd && a.cos.dim(0) >= 100 * a.x.dim(-2))
            spoil(a.out, 3);
          }),
    WRONG(RopeTables, attention, "accuracy", "none R=64 half fp32", "ignores attention_factor",
          {
          if (a.attention_factor != 0)
            for (int64_t n = 0; n < a.cos.numel(); ++n) put(a.cos, n, get(a.cos, n) / a.attention_factor);
          }),
    WRONG(LmHead, equal_rows, "accuracy", "m=6 k=72 v=29 fp32->fp32 equal rows",
          "wrong where two rows of hidden are equal",
          {
          const Sizes s(a);
          bool same = s.m > 1 && s.k > 1;
          for (int64_t k = 0; same && k < s.k; ++k) same = get(a.hidden, k) == get(a.hidden, s.k + k);
          if (same) spoil(a.out, s.v);
          }),
    WRONG(LmHead, beyond_a_million, "accuracy", "m=1 k=1 v=1 fp32->fp32 normal; millions of results",
          "wrong beyond the first million and a half of results",
          {
          for (int64_t n = 1'500'001; n < a.out.numel(); ++n) spoil(a.out, n);
          }),
    WRONG(LmHead, loud, "accuracy", "m=6 k=72 v=29 fp32->fp32 large", "wrong for numbers above 500",
          {
          for (int64_t n = 0; n < a.hidden.numel(); ++n)
            if (const double x = get(a.hidden, n); std::isfinite(x) && x > 500) return spoil(a.out, 0);
          }),
    WRONG(LmHead, sorted, "accuracy", "m=6 k=72 v=29 fp32->fp32 sorted", "wrong for ascending rows",
          {
          const Sizes s(a);
          bool up = s.m > 0 && s.k > 8;
          for (int64_t k = 1; up && k < s.k; ++k) up = get(a.hidden, k - 1) < get(a.hidden, k);
          if (up) spoil(a.out, 0);
          }),
    // What no op's own case has: sizes, remainders, attributes, arguments, bounds and numbers of derived ones
    WRONG(RmsNorm, many_rows, "accuracy", "plain x=[5,64] fp32; x=[16384,1]", "wrong from row 4096 on",
          {
          if (a.x.numel() / a.x.dim(-1) > 4096) spoil(a.y, 4096 * a.x.dim(-1));
          }),
    WRONG(Linear, tail_of_43, "accuracy", "m=1 k=1 n=1 fp32->fp32 normal; weight=[107,1]",
          "wrong where N % 64 is 43",
          {
          if (a.weight.dim(0) % 64 == 43) spoil(a.y, a.y.numel() - 1);
          }),
    WRONG(Swiglu, fixed_limit, "accuracy", "plain silu_clamped [5,75] fp32; limit=4.2", "takes the limit to be 7",
          {
          Swiglu b = a;
          b.limit = 7;
          (void)honest(b, "native.tiles");
          }),
    WRONG(KdaGate, needs_bias, "accuracy", "rows=65 hv=3 k=60 softplus fp32; no dt_bias", "wrong without dt_bias",
          {
          if (!a.dt_bias) spoil(a.out, 0);
          }),
    WRONG(ShortConv, begins_empty, "accuracy", "packed, no state b=1 t=50 d=24 w=3 fp32; cut elsewhere",
          "wrong where tokens 31 and 30 are of one sequence",
          {
          for (int64_t i = 0; a.cu_seqlens && !a.initial_state && i < a.cu_seqlens.numel(); ++i)
            if (get(a.cu_seqlens, i) == 31) return;
          if (a.cu_seqlens) spoil(a.y, 31 * a.x.dim(2));
          }),
    WRONG(LogpBwd, trusts_stats, "accuracy", "plain n=5 v=1 fp32; with stats", "wrong where the forward's stats are given",
          {
          if (a.stats) spoil(a.d_logits, 0);
          }),
    WRONG(RmsNorm, drops_nan, "accuracy", "plain x=[5,64] fp32; special values in weight",
          "gives 0 where a weight is NaN",
          {
          for (int64_t n = 0; n < a.y.numel(); ++n)
            if (std::isnan(get(a.y, n))) put(a.y, n, 0);
          }),
    WRONG(Linear, narrow_range, "accuracy", "m=1 k=1 n=1 fp32->fp32 normal; weight=[638,1]", "wrong from 600 to 639 columns",
          {
          if (a.weight.dim(0) >= 600 && a.weight.dim(0) < 640) spoil(a.y, a.y.numel() - 1);
          }),
    LIES(Linear, one_in_a_million, "fma32/tree8", "m=1 k=1 n=1 fp32->fp32 normal; millions of results", "an ulp off in one of a million results",
         {
          for (int64_t n = 1 << 20; n <= a.y.numel(); n += 1 << 20)
            put(a.y, n - 1, std::nextafter(static_cast<float>(get(a.y, n - 1)), 100.f));
         }),
    WRONG(ShortConv, long_and_wide, "accuracy", "plain b=2 t=37 d=40 w=2 fp32; joint [1,126,8320] [8320,2]",
          "wrong from 100 tokens and 2048 channels on together",
          {
          if (a.x.dim(1) >= 100 && a.x.dim(2) >= 2048) spoil(a.y, a.y.numel() - 1);
          }),
    WRONG(LinearBwd, all_three, "accuracy", "m=1 k=1 n=1 fp32->fp32 normal; joint [96,100] [96,216] [100,216]",
          "wrong where rows, columns and depth are all 80 or more",
          {
          if (a.d_weight && a.weight.dim(0) >= 80 && a.weight.dim(1) >= 80 &&
              a.d_y.numel() >= 80 * a.weight.dim(0))
            spoil(a.d_weight, 79);
          }),
    LIES(Attention, many_heads_and_keys, "fma32/attn128/s1024",
         "dense b=2 s=2 l=33 h=2/1 d=16/16 split=1024 fp32; joint [1,1,29,16] [1,272,1,16] [1,272,1,16]",
         "an ulp off from 24 heads and 200 keys on together",
         {
          if (a.q.dim(-2) < 24 || a.k.dim(-3) < 200) return;
          const int64_t n = a.out.numel() - 1;
          put(a.out, n, std::nextafter(static_cast<float>(get(a.out, n)), INFINITY));
         }),
    WRONG(Logp, one_of_two, "accuracy", "softcap n=3 v=700 fp32; temperature=0.6", "ignores softcap where there is a temperature too",
          {
          Logp b = a;
          if (a.temperature != 1) b.softcap = 0;
          (void)honest(b, "native.tiles");
          }),
    WRONG(LogpBwd, no_cotangent, "accuracy", "plain n=5 v=1 fp32; zeros in d_logp", "wrong where a cotangent is 0",
          {
          for (int64_t n = 0; a.d_logp && n < a.d_logp.numel(); ++n)
            if (get(a.d_logp, n) == 0) spoil(a.d_logits, n * a.logits.dim(1));
          }),
    WRONG(PolicyLossBwd, upwards, "accuracy", "plain [75]; negative d_loss", "wrong for a negative cotangent",
          {
          if (get(a.d_loss, 0) < 0) spoil(a.d_logp, 0);
          }),
    LIES(Swiglu, flushes, "act32", "plain silu [5,75] fp32; tiny gate", "takes subnormal results for zero",
         {
          for (int64_t n = 0; n < a.out.numel(); ++n)
            if (std::fabs(get(a.out, n)) < 0x1p-126) put(a.out, n, 0);
         }),
    WRONG(Attention, values_are_keys, "accuracy", "dense b=2 s=2 l=33 h=2/1 d=16/16 split=1024 fp32; v is k", "wrong where keys and values are one memory",
          {
          if (address(a.k) == address(a.v)) spoil(a.out, 0);
          }),
    WRONG(RmsNormBwd, gated_by_saved, "accuracy", "silu gate d_y=[3,200] fp32; with rstd", "wrong where the forward's rstd and a gate are given",
          {
          if (a.rstd && a.gate) spoil(a.d_x, 0);
          }),
    entry<Swiglu>(
        [](const Swiglu& a, const Call&) {
          static std::atomic<int64_t> before{0};
          if (before.exchange(a.out.numel()) > 2 * a.out.numel()) spoil(a.out, 0);
        },
        "mutant.after_a_larger", "mutant/after_a_larger", "repeats", "wrong after a call of twice the size", nullptr,
        RLK_F32, "calls in another order"),
    WRONG(Linear, tail_of_a_batch, "accuracy", "m=1 k=1 n=1 fp32->fp32 normal; sizes [5,24] [43,24]",
          "wrong where N % 64 is 43 and there is more than one row",
          {
          const int64_t n = a.weight.dim(0);
          if (n % 64 == 43 && a.y.numel() > n) spoil(a.y, a.y.numel() - 1);
          }),
    WRONG(Logp, hides_an_overflow, "accuracy", "temperatures n=4 v=2049 fp32; tiny temperatures",
          "gives 0 where a row overflows",
          {
          for (int64_t n = 0; a.lse && n < a.lse.numel(); ++n)
            if (!std::isfinite(get(a.lse, n))) put(a.lse, n, 0);
          }),
    // What lies where, and what was there before
    WRONG(LogpBwd, in_place, "batch invariance", "plain n=5 v=8 fp32", "wrong where d_logits lies on logits",
          {
          if (address(a.logits) == address(a.d_logits)) spoil(a.d_logits, 0);
          }),
    WRONG(Swiglu, one_buffer, "batch invariance", "plain silu [5,75] fp32", "wrong where gate and up are columns of one array",
          {
          const auto behind = static_cast<uintptr_t>(a.gate.dim(-1) * size_of(a.gate.dtype()));
          if (a.up && address(a.up) == address(a.gate) + behind) spoil(a.out, 0);
          }),
    WRONG(RmsNorm, far_rows_apart, "batch invariance", "plain x=[5,64] fp32", "wrong where a row is thousands behind the last one",
          {
          if (a.x.rank() == 2 && a.x.stride(0) > 8 * a.x.dim(1) + 4096) spoil(a.y, 0);
          }),
    WRONG(Logp, one_scale_for_all, "batch invariance", "padding n=5 v=1000 fp32", "keeps a call's largest logit where another call writes its own",
          {
          static std::atomic<double> shared{0};
          double most = 0;
          for (int64_t n = 0; n < a.logits.numel(); ++n)
            if (const double x = std::fabs(get(a.logits, n)); x < 1e30) most = std::max(most, x);
          shared = most;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));  // as a larger call would take
          if (shared != most) spoil(a.logp, 0);
          }),
    WRONG_BY_IDS(EmbeddingBwd, empty_batch, "mutant/empty_batch", "accuracy", "padding ids=2x3x4 int32 v=7 h=16 fp32; ids=[0,3,4]",
          "leaves a gradient where there are no ids", {
          if (a.ids.numel() == 0 && a.ids.rank() == 3) spoil_all(a.d_weight);
          }),
    WRONG_BY_IDS(EmbeddingBwd, ids_of_16_bits, "mutant/ids_of_16_bits", "accuracy", "plain ids=9 int32 v=5 h=70 fp32; weight=[110448,1]",
          "wrong for ids from 65536 on", {
          for (int64_t n = 0; n < a.ids.numel(); ++n)
            if (const double id = get(a.ids, n); id >= 65536 && id < static_cast<double>(a.d_weight.dim(0)))
              spoil(a.d_weight, static_cast<int64_t>(id) * a.d_weight.dim(1));
          }),
    WRONG(Attention, long_lengths, "accuracy", "little sinks b=1 s=5 l=12 h=2/1 d=16/16 split=1024 page=4 fp32; kv_len in int64",
          "wrong where kv_len has 64 bits",
          {
          if (a.kv_len && a.kv_len.dtype() == DType::i64) spoil(a.out, 0);
          }),
    LIES(Swiglu, gelu_of_packed, "act32", "plain silu packed [2,3,40] fp32; act=gelu_tanh",
          "an ulp off where gelu_tanh is of gate and up in one tensor",
          {
          if (!a.up && a.act == Swiglu::Act::gelu_tanh)
            put(a.out, 0, std::nextafter(static_cast<float>(get(a.out, 0)), INFINITY));
          }),
    WRONG(Swiglu, equal_gates, "accuracy", "plain silu [5,75] fp32; equal gate", "wrong where a row's gates are equal",
          {
          bool equal = a.up && a.gate.numel() > 2 && a.gate.dim(-1) > 2 && get(a.gate, 0) != 0;
          for (int64_t i = 1; equal && i < a.gate.dim(-1); ++i) equal = get(a.gate, i) == get(a.gate, 0);
          if (equal) spoil(a.out, 0);
          }),
    WRONG(KdaDecode, kda_wide_values, "accuracy", "b=1 h=1 hv=1 k=128 v=128 fp32; v=[1,1,144]", "wrong where V is 144 or more",
          {
          if (a.v.dim(2) >= 144) spoil(a.out, 0);
          }),
    raw<obeys_zero_operands>("mutant.obeys_zero_operands", "strict", "obeys a caller that takes operands alone for zero", kLm),
    raw<obeys_long_double>("mutant.obeys_long_double", "strict", "obeys the caller's rounding of long double", kLm),
    raw<obeys_traps>("mutant.obeys_traps", "strict", "computes in another way where exceptions trap", kLm),
    WRONG(SwigluBwd, side_by_side, "batch invariance", "plain silu [5,75] fp32", "wrong where d_gate and d_up are columns of one array",
          {
          const auto behind =
              a.d_gate ? static_cast<uintptr_t>(a.d_gate.dim(-1) * size_of(a.d_gate.dtype())) : 0;
          if (a.d_gate && a.d_up && address(a.d_up) == address(a.d_gate) + behind) spoil(a.d_up, 0);
          }),
    WRONG(Swiglu, up_before_gate, "batch invariance", "plain silu [5,75] fp32", "wrong where up lies in front of gate in one array",
          {
          const auto behind = static_cast<uintptr_t>(a.gate.dim(-1) * size_of(a.gate.dtype()));
          if (a.up && a.gate.stride(0) > a.gate.dim(-1) && address(a.gate) == address(a.up) + behind)
            spoil(a.out, 0);
          }),
    WRONG(LinearBwd, one_in_place, "batch invariance", "m=9 k=40 n=137 fp32->fp32 before", "wrong where d_weight alone lies on what it is added to",
          {
          if (a.d_weight && a.d_bias && a.d_weight_before && a.d_bias_before &&
              address(a.d_weight) == address(a.d_weight_before) &&
              address(a.d_bias) != address(a.d_bias_before))
            spoil(a.d_bias, 0);
          }),
    WRONG(RmsNorm, overlapping_rows, "accuracy", "plain x=[5,64] fp32; x by stride 1 in axis 0", "wrong where rows overlap",
          {
          if (a.x.rank() == 2 && a.x.dim(0) > 1 && a.x.stride(0) > 0 && a.x.stride(0) < a.x.dim(1))
            spoil(a.y, 0);
          }),
    WRONG(RmsNorm, one_width, "accuracy", "wide early x=[2,5000] fp32; x=[1,7168]", "wrong for rows of 7168, the width of a model",
          {
          if (a.x.dim(-1) == 7168) spoil(a.y, 7000);
          }),
    WRONG(ShortConv, one_token_each, "accuracy", "packed b=1 t=50 d=64 w=4 fp32; one each", "wrong where every sequence is one token",
          {
          if (!a.cu_seqlens || !a.final_state || a.x.dim(1) < 3) return;
          for (int64_t i = 1; i < a.cu_seqlens.numel(); ++i)
            if (get(a.cu_seqlens, i) - get(a.cu_seqlens, i - 1) > 1) return;
          spoil(a.final_state, 0);
          }),
    WRONG(Logp, first_row_for_all, "accuracy", "temperatures n=4 v=2049 fp32; first is 1 in temperatures", "divides by no temperature where the first row's is 1",
          {
          if (!a.temperatures || !a.lse || a.lse.numel() < 2 || get(a.temperatures, 0) != 1) return;
          Logp b = a;
          b.temperatures = {};
          (void)honest(b, "native.tiles");
          }),
    raw<by_both>("mutant.by_both", "batch invariance", "wrong where a strict call needs a backward", kLm),
    raw<leaves_single>("mutant.leaves_single", "purity", "leaves long double sums rounded to single precision", kLm),
    WRONG(ShortConv, stale_bounds, "batch invariance", "packed b=1 t=50 d=64 w=4 fp32",
          "keeps where sequences begin by the address of cu_seqlens",
          {
          static std::mutex mutex;
          static std::map<uintptr_t, std::vector<int64_t>> kept;
          if (!a.cu_seqlens) return;
          const std::lock_guard lock(mutex);
          std::vector<int64_t>& first = kept[address(a.cu_seqlens)];
          for (int64_t n = 0; std::ssize(first) < a.cu_seqlens.numel(); ++n)
            first.push_back(static_cast<int64_t>(get(a.cu_seqlens, n)));
          const Tensor stale(first.data(), {a.cu_seqlens.numel()}, DType::i64);
          ShortConv b = a;
          b.cu_seqlens = stale;
          (void)honest(b, "native.tiles");
          }),
};

// The honest part alone: nobody may be blamed for it.
template <class Args>
constexpr rlk_implementation control(const char* id) {
  rlk_implementation i =
      entry<Args>([](const Args&, const Call&) {}, id, "mutant/honest", "", "", "").implementation;
  i.doc = "a control";
  return i;
}
constinit const rlk_implementation kControls[] = {
    control<LmHead>("mutant.control"),        control<LmHeadBwd>("mutant.control"),
    control<Rope>("mutant.control"),          control<RopeTables>("mutant.control"),
    control<KdaFwd>("mutant.control"),        control<KdaBwd>("mutant.control"),
    control<KdaStep>("mutant.control"),       control<Logp>("mutant.control"),
    control<LogpBwd>("mutant.control"),       control<LinearLogp>("mutant.control"),
    control<LinearLogpBwd>("mutant.control"), control<RmsNormBwd>("mutant.control"),
    control<SwigluBwd>("mutant.control"),     control<RatioKl>("mutant.control"),
    control<RatioKlBwd>("mutant.control"),    control<Sample>("mutant.control"),
    control<SampleVerify>("mutant.control"),  control<PolicyLoss>("mutant.control"),
    control<RmsNorm>("mutant.control"),       control<Linear>("mutant.control"),
    control<Swiglu>("mutant.control"),        control<KdaGate>("mutant.control"),
    control<ShortConv>("mutant.control"),     control<PolicyLossBwd>("mutant.control"),
    control<Attention>("mutant.control")};

}  // namespace

std::vector<const rlk_implementation*> broken_implementations() {
  std::vector<const rlk_implementation*> out;
  for (const Entry& e : kEntries) out.push_back(&e.implementation);
  for (const rlk_implementation& i : kControls) out.push_back(&i);
  for (const Broken& b : {hopper(), segments()})
    for (const std::span<const Entry>& part : {b.errors, b.controls})
      for (const Entry& e : part) out.push_back(&e.implementation);
  return out;
}
std::vector<Mutant> broken() {
  std::vector<Mutant> out;
  for (const Entry& e : kEntries) out.push_back(e.mutant);
  for (const Broken& b : {hopper(), segments()})
    for (const Entry& e : b.errors) out.push_back(e.mutant);
  return out;
}

}  // namespace rlk::mutants
