// A row of sample/philox-g1 as plainly as it can be said: entries are sorted, filters walk the order, every score is looked
// at, sums are trees of loops. Independent of every kernel; what the reference and the rule share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "registry/exp32.hpp"
#include "registry/logp/lse128.hpp"
#include "registry/reference.hpp"

namespace rlk::registry::sampling {

// Philox4x32-10: the four words of a counter under a key.
inline void philox(uint32_t c[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53} * c[0], b = uint64_t{0xcd9e8d57} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1, static_cast<uint32_t>(a)};
    std::copy_n(next, 4, c);
    key0 += 0x9e3779b9, key1 += 0xbb67ae85;
  }
}

// The noise of one word: -ln(-log1p(-v)).
inline float gumbel(uint32_t word) {
  const auto v = std::min(static_cast<float>(word + 0.5) * 0x1p-32f, 0x1.fffffep-1f);
  return -ln32(-log1p32(-v));
}

inline int64_t integer_at(const In& v, int64_t row) {
  if (!v) return 0;
  const int64_t i = row * v.stride(0);
  return v.dtype() == DType::i32 ? v.data<int32_t>()[i] : v.data<int64_t>()[i];
}
inline float number_at(const In& v, int64_t row, float absent) {
  return v ? v.data<float>()[row * v.stride(0)] : absent;
}

// How sums for log-probabilities are made: lse128::reduce, or that of another of logp's rules.
using Reduce = lse128::State (*)(const std::vector<float>& z, int64_t vocab, int64_t first, int64_t count,
                                 lse128::Scale k);

struct PlainRow {
  std::vector<float> z;
  std::vector<bool> kept;
  float temperature = 1, tau = 1, raw_tau = 1, most = -INFINITY;
  int64_t token = -1, count = 0;
  bool finite = false;

  // Of the token: among what stays, or among all entries.
  float logp() const { return log_probability(tau, true); }
  float logp_raw() const { return log_probability(raw_tau, false); }

  template <class Args>
  PlainRow(const Args& a, int64_t row, Reduce by = lse128::reduce) : reduce(by) {
    temperature = number_at(a.temperature, row, 1);
    const float p = number_at(a.top_p, row, 1), least = number_at(a.min_p, row, 0);
    read(a, row);
    kept.assign(z.size(), false);
    if (!finite || !(temperature >= 0 && temperature < INFINITY) || std::isnan(p) || std::isnan(least))
      return;
    tau = 1 / temperature;
    const bool greedy = !(tau * 1.44269504f < INFINITY);
    if (greedy) tau = 1;
    raw_tau = a.raw_temperature ? tau : 1;
    filter(a, row, p, least);
    choose(a, row, greedy);
  }

 private:
  Reduce reduce;

  template <class Args>
  void read(const Args& a, int64_t row) {
    const Rows logits(a.logits);
    const auto cap = static_cast<float>(a.softcap);
    const DType round = a.logits_round == Args::LogitsRound::bf16   ? DType::bf16
                        : a.logits_round == Args::LogitsRound::fp16 ? DType::f16
                                                                    : DType::f32;
    finite = true;
    for (int64_t i = 0; i < (a.vocab ? a.vocab : a.logits.dim(1)); ++i) {
      auto x = static_cast<float>(round_to(round, logits.get(row, i)));
      if (cap > 0 && std::isfinite(x)) x = cap * tanh32(x / cap);
      z.push_back(x + 0.0f);
      if (std::isnan(x) || x == INFINITY) finite = false;
      most = std::max(most, z.back());
    }
    if (most == -INFINITY) finite = false;
  }

  // As logp's page has it.
  float log_probability(float tau_of, bool of_kept) const {
    if (token < 0) return NAN;
    std::vector<float> there = z;
    for (std::size_t i = 0; of_kept && i < z.size(); ++i)
      if (!kept[i]) there[i] = -INFINITY;
    const auto n = static_cast<int64_t>(z.size());
    const lse128::Scale scale{tau_of, tau_of * 1.44269504f};
    const lse128::State all = reduce(there, n, 0, 8, scale);
    return lse128::Answer{all, z[static_cast<std::size_t>(token)], scale}.logp();
  }

  int64_t mass(int64_t i) const {
    return static_cast<int64_t>(std::floor(
        std::ldexp(double{exp2_32((z[static_cast<std::size_t>(i)] - most) * (tau * 1.44269504f))}, 40)));
  }

  // A filter leaves a part of `order`, in order.
  using Order = std::vector<int64_t>;
  void min_p(Order& order, float share) const {
    const auto least = static_cast<int64_t>(std::floor(std::ldexp(std::min(1.0, double{share}), 40)));
    if (least > 0) std::erase_if(order, [&](int64_t i) { return mass(i) < least; });
  }
  void top_p(Order& order, float p) const {
    if (p >= 1) return;
    uint64_t all = 0, before = 0, target = 1;
    for (int64_t i : order) all += static_cast<uint64_t>(mass(i));
    if (p > 0) {
      // p all, with as many digits as it has: 24 and 63 fit 128 bits.
      int exponent = 0;
      const auto digits = static_cast<uint64_t>(std::ldexp(std::frexp(p, &exponent), 24));
      const int shift = 24 - exponent;
      __extension__ using Wide = unsigned __int128;
      const Wide product = static_cast<Wide>(digits) * all;
      target = shift >= 127 ? 1 : static_cast<uint64_t>((product + ((Wide{1} << shift) - 1)) >> shift);
    }
    std::size_t n = 0;
    for (; n < order.size() && before < target; ++n) before += static_cast<uint64_t>(mass(order[n]));
    order.resize(n);
  }

  template <class Args>
  void filter(const Args& a, int64_t row, float p, float share) {
    Order order;
    for (std::size_t i = 0; i < z.size(); ++i)
      if (z[i] != -INFINITY) order.push_back(static_cast<int64_t>(i));
    std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
      return z[static_cast<std::size_t>(x)] > z[static_cast<std::size_t>(y)];
    });
    const bool first = a.filter_order == Args::FilterOrder::min_p_first;
    if (first) min_p(order, share);
    const int64_t k = integer_at(a.top_k, row);
    if (k > 0 && k < static_cast<int64_t>(order.size())) order.resize(static_cast<std::size_t>(k));
    top_p(order, p);
    if (!first) min_p(order, share);
    for (int64_t i : order) kept[static_cast<std::size_t>(i)] = true;
    count = static_cast<int64_t>(order.size());
  }

  template <class Args>
  void choose(const Args& a, int64_t row, bool greedy) {
    const auto seed = static_cast<uint64_t>(integer_at(a.seed, row)),
               position = static_cast<uint64_t>(integer_at(a.position, row));
    float best = -INFINITY;
    for (std::size_t i = 0; i < z.size(); ++i) {
      if (!kept[i]) continue;
      uint32_t c[4] = {static_cast<uint32_t>(i >> 2), static_cast<uint32_t>(position),
                       static_cast<uint32_t>(position >> 32),
                       static_cast<uint32_t>(integer_at(a.stream, row))};
      philox(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      const float score = greedy ? z[i] : (z[i] - most) * tau + gumbel(c[i & 3]);
      if (token >= 0 && !(score > best)) continue;
      best = score, token = static_cast<int64_t>(i);
    }
  }
};

// All results of sample; logp(row, of what stays or of all) says how log-probabilities are computed.
template <class Args, class Logp>
void write_rows(const Args& a, Logp logp, Reduce reduce = lse128::reduce) {
  int32_t bad = 0;
  for (int64_t m = 0; m < a.logits.dim(0); ++m) {
    const PlainRow r(a, m, reduce);
    bad += r.token < 0;
    const auto put = [&](const Out& to, double x) {
      if (to) store(to.dtype(), to.template data<char>(), m * to.stride(0), x);
    };
    put(a.token, static_cast<double>(r.token));
    put(a.logp, logp(r, true));
    put(a.logp_raw, logp(r, false));
    put(a.count, static_cast<double>(r.count));
    for (int64_t word = 0; a.keep && word < a.keep.dim(1); ++word) {
      uint32_t bits = 0;
      for (std::size_t i = 0; i < 32; ++i)
        if (const auto id = static_cast<std::size_t>(word) * 32 + i; id < r.kept.size() && r.kept[id])
          bits |= 1u << i;
      a.keep.template data<uint32_t>()[m * a.keep.stride(0) + word] = bits;
    }
  }
  if (a.bad_count) a.bad_count.template data<int32_t>()[0] = bad;
}

// The first reason why a row is not what was recorded.
template <class Args>
int32_t status_of(const Args& a, int64_t m, Reduce reduce) {
  const PlainRow r(a, m, reduce);
  const int64_t recorded = integer_at(a.token, m);
  const auto differs = [&](const In& t, float x) {
    return t &&
           std::bit_cast<uint32_t>(canonical(number_at(t, m, 0))) != std::bit_cast<uint32_t>(canonical(x));
  };
  const bool there = recorded >= 0 && recorded < static_cast<int64_t>(r.kept.size());
  if (r.token < 0 ? recorded != -1 : !there || !r.kept[static_cast<std::size_t>(recorded)]) return 3;
  if (recorded != r.token) return 1;
  if (differs(a.logp, r.logp())) return 2;
  return differs(a.logp_raw, r.logp_raw()) ? 4 : 0;
}
template <class Args>
void write_status(const Args& a, Reduce reduce = lse128::reduce) {
  for (int64_t m = 0; m < a.logits.dim(0); ++m)
    a.status.template data<int32_t>()[m * a.status.stride(0)] = status_of(a, m, reduce);
}

}  // namespace rlk::registry::sampling
