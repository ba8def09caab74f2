// sample over parts of a vocabulary as plainly as it can be said, in loops, independent of every kernel: what the reference
// and the rule of sample_part and sample_merge share. What the numbers of partials and of the state are is on the page.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "registry/sample/plain.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry::sampling {

inline constexpr int kStateWidth = 24, kBinsWidth = 2048, kDrawnWidth = 8;
inline constexpr int kDigitShift[] = {21, 10, 0}, kDigitBits[] = {11, 11, 10};

inline float float_of(int64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }
inline int64_t bits_of(float x) { return std::bit_cast<uint32_t>(canonical(x)); }

// Ascending where z descends, and back.
inline uint32_t place_of(float z) {
  const auto bits = std::bit_cast<uint32_t>(z);
  return bits >> 31 ? bits : bits ^ 0x7fffffffu;
}
inline float at_place_of(int64_t place) {
  const auto p = static_cast<uint32_t>(place);
  return std::bit_cast<float>(p >> 31 ? p : p ^ 0x7fffffffu);
}

// 1 / T and log2(e) / T; 1 and log2(e) where the largest entry is taken.
struct PlainScale {
  float tau = 1, c = 1.44269504f;
  bool greedy = true;
  explicit PlainScale(float temperature) {
    const float t = 1 / temperature;
    if (t * c < INFINITY) greedy = false, tau = t, c = t * c;
  }
};

// floor(exp2 of the distance to the largest times 2^40).
inline uint64_t plain_mass(float z, float most, float c) {
  return static_cast<uint64_t>(std::floor(std::ldexp(double{std::min(1.0f, exp2_32((z - most) * c))}, 40)));
}

struct PlainShard {
  Reduce reduce;
  const SamplePart& a;
  int64_t row, start, part;
  std::vector<float> z;
  std::vector<bool> in;  // whether an entry is still there
  float temperature, p, least_share;
  bool valid;
  PlainScale scale{1};

  PlainShard(const SamplePart& call, int64_t m, Reduce by)
      : reduce(by), a(call), row(m), start(call.vocab_start), part(call.leaf_first / call.leaf_count) {
    temperature = number_at(a.temperature, row, 1), p = number_at(a.top_p, row, 1);
    least_share = number_at(a.min_p, row, 0);
    valid = temperature >= 0 && temperature < INFINITY && !std::isnan(p) && !std::isnan(least_share);
    if (valid) scale = PlainScale(temperature);
    const Rows logits(a.logits);
    const int64_t vocab = a.vocab ? a.vocab : a.logits.dim(1), leaf = 16 * ((vocab + 127) / 128);
    const int64_t end = std::min(vocab, (a.leaf_first + a.leaf_count) * leaf);
    const DType round = a.logits_round == SamplePart::LogitsRound::bf16   ? DType::bf16
                        : a.logits_round == SamplePart::LogitsRound::fp16 ? DType::f16
                                                                          : DType::f32;
    const auto cap = static_cast<float>(a.softcap);
    for (int64_t i = 0; i < end - start; ++i) {
      auto x = static_cast<float>(round_to(round, logits.get(row, i)));
      if (cap > 0 && std::isfinite(x)) x = cap * tanh32(x / cap);
      z.push_back(x + 0.0f);
      in.push_back(z.back() > -INFINITY);
    }
  }

  int64_t state(int i) const { return a.state.data<int64_t>()[row * a.state.stride(0) + i]; }
  float most() const { return float_of(state(0)); }

  int64_t largest() const {
    float top = -INFINITY;
    bool bad = !valid;
    for (float x : z) {
      bad = bad || !(x < INFINITY);
      top = std::max(top, x);
    }
    return bits_of(bad ? canonical(NAN) : top);
  }

  void min_p() {
    if (!(least_share > 0)) return;
    const float least =
        static_cast<float>(std::floor(std::ldexp(std::min(1.0, double{least_share}), 40))) * 0x1p-40f;
    for (std::size_t i = 0; i < z.size() && least > 0; ++i)
      if (in[i] && !(exp2_32((z[i] - most()) * scale.c) >= least)) in[i] = false;
  }
  // What is left by the filter whose numbers are at `at`, if it has all its digits.
  void cut(int at, int takes) {
    const float edge = at_place_of(state(at + 1));
    if (state(at) != 3 || !(edge > -INFINITY)) return;
    int64_t take = state(takes + static_cast<int>(part));
    for (std::size_t i = 0; i < z.size(); ++i) {
      if (!in[i] || z[i] > edge) continue;
      in[i] = z[i] == edge && take != 0;
      if (z[i] == edge && take > 0) --take;
    }
  }

  void histogram(bool masses, int64_t* bins) {
    const int at = masses ? 4 : 1;
    const auto digit = static_cast<int>(a.digit);
    const bool on = masses ? p < 1 : integer_at(a.top_k, row) > 0 && integer_at(a.top_k, row) < whole();
    if (!on || (digit > 0 && state(at) != digit)) return;
    if (a.filter_order == SamplePart::FilterOrder::min_p_first) min_p();
    if (masses) cut(1, 8);
    for (std::size_t i = 0; i < z.size(); ++i) {
      const uint64_t place = place_of(z[i]);
      const int shift = kDigitShift[digit], bits = kDigitBits[digit];
      if (!in[i] || (digit > 0 && place >> (shift + bits) != static_cast<uint64_t>(state(at + 1)))) continue;
      bins[place >> shift & ((1u << bits) - 1)] +=
          masses ? static_cast<int64_t>(plain_mass(z[i], most(), scale.c)) : 1;
    }
  }
  int64_t whole() const { return a.vocab ? a.vocab : a.logits.dim(1); }

  void token(int64_t* out) {
    cut(1, 8);
    cut(4, 16);
    min_p();
    const auto seed = static_cast<uint64_t>(integer_at(a.seed, row)),
               position = static_cast<uint64_t>(integer_at(a.position, row));
    float best = -INFINITY;
    for (std::size_t i = 0; i < z.size(); ++i) {
      if (!in[i]) continue;
      ++out[3];
      const auto id = static_cast<uint32_t>(start + static_cast<int64_t>(i));
      uint32_t c[4] = {id >> 2, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                       static_cast<uint32_t>(integer_at(a.stream, row))};
      philox(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      const float score = scale.greedy ? z[i] : (z[i] - most()) * scale.tau + gumbel(c[id & 3]);
      if (out[1] >= 0 && !(score > best)) continue;
      best = score, out[0] = bits_of(score), out[1] = id, out[2] = bits_of(z[i]);
    }
    const auto put = [&](bool of_kept, lse128::Scale k, int64_t* to) {
      std::vector<float> there = z;
      for (std::size_t i = 0; of_kept && i < z.size(); ++i)
        if (!in[i]) there[i] = -INFINITY;
      const lse128::State sum = reduce(there, whole(), a.leaf_first, a.leaf_count, k);
      to[0] = bits_of(sum.m), to[1] = bits_of(sum.s);
    };
    put(true, {scale.tau, scale.c}, out + 4);
    put(false, a.raw_temperature ? lse128::Scale{scale.tau, scale.c} : lse128::Scale{1, 1.44269504f},
        out + 6);
  }
};

inline void write_parts(const SamplePart& a, Reduce reduce = lse128::reduce) {
  for (int64_t m = 0; m < a.logits.dim(0); ++m) {
    PlainShard s(a, m, reduce);
    int64_t* out = a.partials.data<int64_t>() + m * a.partials.stride(0);
    std::fill_n(out, a.partials.dim(1), 0);
    const bool there = a.step == SamplePart::Step::largest || std::isfinite(s.most());
    if (a.step == SamplePart::Step::largest) out[0] = s.largest();
    if (a.step == SamplePart::Step::top_k && there) s.histogram(false, out);
    if (a.step == SamplePart::Step::top_p && there) s.histogram(true, out);
    if (a.step != SamplePart::Step::token) continue;
    out[1] = -1;
    if (there) s.token(out);
    for (int64_t word = 0; a.keep && word < a.keep.dim(1); ++word) {
      uint32_t bits = 0;
      for (std::size_t i = 0; i < 32; ++i)
        if (const auto at = static_cast<std::size_t>(word) * 32 + i; there && at < s.in.size() && s.in[at])
          bits |= 1u << i;
      a.keep.data<uint32_t>()[m * a.keep.stride(0) + word] = bits;
    }
  }
}

// ---- sample_merge

struct PlainMerge {
  const SampleMerge& a;
  int64_t row, parts = a.partials.dim(0);
  PlainScale scale{number_at(a.temperature, row, 1)};

  int64_t partial(int64_t t, int64_t i) const {
    return a.partials.data<int64_t>()[t * a.partials.stride(0) + row * a.partials.stride(1) + i];
  }

  void largest(int64_t* next) const {
    float top = -INFINITY;
    bool bad = false;
    for (int64_t t = 0; t < parts; ++t) {
      const float x = float_of(partial(t, 0));
      bad = bad || std::isnan(x);
      top = std::max(top, x);
    }
    next[0] = bits_of(bad || !std::isfinite(top) ? canonical(NAN) : top);
  }

  // One digit of a filter whose numbers are at `at`.
  void digit(bool masses, int at, int takes, int64_t* next) const {
    const auto d = static_cast<int>(a.digit);
    if (d == 0) {
      std::fill_n(next + at, masses ? 4 : 3, 0);
      std::fill_n(next + takes, 8, 0);
    }
    if (!std::isfinite(float_of(next[0])) || next[at] != d) return;
    std::vector<uint64_t> bins(std::size_t{1} << kDigitBits[d]);
    uint64_t total = 0;
    for (std::size_t b = 0; b < bins.size(); ++b) {
      for (int64_t t = 0; t < parts; ++t)
        bins[b] += static_cast<uint64_t>(partial(t, static_cast<int64_t>(b)));
      total += bins[b];
    }
    const float p = number_at(a.top_p, row, 1);
    if (masses && d == 0) next[7] = p < 1 && total > 0 ? static_cast<int64_t>(wanted_of(p, total)) : 0;
    const auto target =
        static_cast<uint64_t>(masses ? next[7] : std::max<int64_t>(0, integer_at(a.top_k, row)));
    auto before = static_cast<uint64_t>(next[at + 2]);
    std::size_t bin = 0;
    while (bin < bins.size() && before + bins[bin] < target) before += bins[bin++];
    if (target == 0 || bin == bins.size()) {
      std::fill_n(next + at, 3, 0);
      return;
    }
    next[at] = d + 1;
    next[at + 1] = static_cast<int64_t>(static_cast<uint64_t>(next[at + 1]) * bins.size() + bin);
    next[at + 2] = static_cast<int64_t>(before);
    if (d < 2) return;
    uint64_t each = masses ? plain_mass(at_place_of(next[at + 1]), float_of(next[0]), scale.c) : 1;
    if (each == 0) each = 1;
    uint64_t left = (target - before + each - 1) / each;
    for (int64_t t = 0; t < parts; ++t) {
      const uint64_t there = static_cast<uint64_t>(partial(t, static_cast<int64_t>(bin))) / each;
      next[takes + t] = there <= left ? -1 : static_cast<int64_t>(left);
      left -= std::min(left, there);
    }
  }

  static uint64_t wanted_of(float p, uint64_t all) {
    if (!(p > 0)) return 1;
    int exponent = 0;
    const auto digits = static_cast<uint64_t>(std::ldexp(std::frexp(p, &exponent), 24));
    const int shift = 24 - exponent;
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(digits) * all;
    return shift >= 127 ? 1 : static_cast<uint64_t>((product + ((Wide{1} << shift) - 1)) >> shift);
  }

  struct Answer {
    int64_t token = -1;
    uint64_t count = 0;
    float logp = NAN, logp_raw = NAN;
  };
  Answer token() const {
    Answer out;
    float best = 0, z = 0;
    for (int64_t t = 0; t < parts; ++t) {
      const int64_t id = partial(t, 1);
      const float score = float_of(partial(t, 0));
      out.count += static_cast<uint64_t>(partial(t, 3));
      if (id < 0 || (out.token >= 0 && !(score > best) && !(score == best && id < out.token))) continue;
      best = score, out.token = id, z = float_of(partial(t, 2));
    }
    const auto logp = [&](int at, lse128::Scale k) {
      std::vector<lse128::State> sums;
      sums.reserve(static_cast<std::size_t>(parts));
      for (int64_t t = 0; t < parts; ++t)
        sums.push_back({float_of(partial(t, at)), float_of(partial(t, at + 1)), 0});
      return lse128::Answer{lse128::pairwise(sums, k), z, k}.logp();
    };
    if (out.token < 0) return Answer{};
    out.logp = logp(4, {scale.tau, scale.c});
    out.logp_raw =
        logp(6, a.raw_temperature ? lse128::Scale{scale.tau, scale.c} : lse128::Scale{1, 1.44269504f});
    return out;
  }
};

inline void write_merged(const SampleMerge& a) {
  int32_t bad = 0;
  for (int64_t m = 0; m < a.partials.dim(1); ++m) {
    const PlainMerge row{a, m};
    int64_t next[kStateWidth] = {};
    if (a.state && a.step != SampleMerge::Step::largest)
      std::copy_n(a.state.data<int64_t>() + m * a.state.stride(0), kStateWidth, next);
    if (a.step == SampleMerge::Step::largest) row.largest(next);
    if (a.step == SampleMerge::Step::top_k) row.digit(false, 1, 8, next);
    if (a.step == SampleMerge::Step::top_p) row.digit(true, 4, 16, next);
    if (a.next) std::copy_n(next, kStateWidth, a.next.data<int64_t>() + m * a.next.stride(0));
    if (a.step != SampleMerge::Step::token) continue;
    const PlainMerge::Answer out = row.token();
    const auto put = [&](const Out& to, double x) {
      if (to) store(to.dtype(), to.template data<char>(), m * to.stride(0), x);
    };
    if (a.token && a.token.dtype() == DType::i64)
      a.token.data<int64_t>()[m * a.token.stride(0)] = out.token;
    else if (a.token)
      a.token.data<int32_t>()[m * a.token.stride(0)] = static_cast<int32_t>(out.token);
    put(a.logp, canonical(out.logp));
    put(a.logp_raw, canonical(out.logp_raw));
    put(a.count, static_cast<double>(static_cast<int32_t>(out.count)));
    bad += out.token < 0;
  }
  if (a.bad_count) a.bad_count.data<int32_t>()[0] = bad;
}

}  // namespace rlk::registry::sampling
