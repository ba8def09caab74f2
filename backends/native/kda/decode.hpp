// kda_decode on packs of floats, one (sequence, value head) at a time. See arithmetic/kda/decode.hpp for
// the sums.
#pragma once

#include "arithmetic/kda/decode.hpp"
#include "native/kda/team.hpp"

namespace rlk::native::kda::decode {

using namespace rlk::kda;
using namespace rlk::kda::decode;

// What a token brings, in fp32.
struct Token {
  alignas(64) float q[256], k[256], write_k[256], decay[256], v[256];
};

template <class Team>
void read_token(const Problem& p, std::int64_t b, int hv, Token& t) {
  using namespace chunked;
  Team team;
  const Place place{b, 0, 1};
  alignas(64) float sums[16], norm[1], rows[16 * 256], bias[256];
  const int K = padded(p.k_dim), h = hv / p.group();
  const auto take = [&](const rlk::kda::Tensor& from, int head, int width, float* to, bool norms) {
    read_rows(team, from, place, head, width, rows, padded(width));
    if (norms) normalise(team, from.type, 1, padded(width), rows, sums, norm);
    for (int d = 0; d < padded(width); ++d) to[d] = rows[d];
  };
  take(p.q, h, p.k_dim, t.q, p.l2norm);
  take(p.k, h, p.k_dim, t.k, p.l2norm);
  take(p.v, hv, p.v_dim, t.v, false);
  take(p.g, hv, p.k_dim, t.decay, false);
  const float beta = write_strength<float>(p, load(p.beta.data, p.beta.type, at(p.beta, b, 0, hv)));
  for (int d = 0; d < K; ++d) {
    bias[d] = p.dt_bias && d < p.k_dim ? p.dt_bias[std::int64_t(hv) * p.k_dim + d] : 0.0f;
    t.q[d] *= float(p.scale);
    t.write_k[d] = beta * t.k[d];
  }
  for (int d = 0; d < K; d += Team::kWidth) {
    const auto g = Team::load(t.decay + d);
    Team::store(t.decay + d, flushed(simt::exp(lane_gate<Team>(p, hv, bias, d).value(g))));
  }
}

// Columns j .. j + width of a [K, V] state. Team only keeps what different instruction sets compile apart.
template <class Team, class L>
void columns(const Problem& p, const Token& t, const float* state, float* state_out, int j, float* out) {
  const int K = p.k_dim, V = p.v_dim;
  const auto get = [](const float* from) {
    L x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
  };
  const auto total = [](const L(&part)[kParts]) {
    L sum = L{};
    for (int i = 0; i < kParts; ++i) sum = sum + part[i];
    return sum;
  };
  L part[kParts] = {};
  for (int d = 0; d < K; ++d) {
    const L s = get(state + d * V + j) * t.decay[d];
    part[d % kParts] = simt::fused(s, L{} + t.k[d], part[d % kParts]);
  }
  const L r = get(t.v + j) - total(part);
  for (L& x : part) x = L{};
  for (int d = 0; d < K; ++d) {
    const L s = get(state + d * V + j) * t.decay[d];
    const L next = simt::fused(L{} + t.write_k[d], r, s);
    __builtin_memcpy(state_out + d * V + j, &next, sizeof next);
    part[d % kParts] = simt::fused(next, L{} + t.q[d], part[d % kParts]);
  }
  const L o = total(part);
  __builtin_memcpy(out + j, &o, sizeof o);
}

// The sum over d of a row of a [V, K] state.
inline __attribute__((always_inline)) float row_sum(const float* a, const float* b, int K) {
  float part[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    float sum = 0;
    for (int base = 0; base < K; base += kLanes * kPack) {
      for (int d = base + l * kPack; d < base + (l + 1) * kPack && d < K; ++d)
        sum = simt::fused(a[d], b[d], sum);
    }
    part[l] = sum;
  }
  for (int step = 1; step < kLanes; step *= 2) {
    for (int l = 0; l < kLanes; l += 2 * step) part[l] = part[l] + part[l + step];
  }
  return part[0];
}

template <class Team>
void step(const Problem& p, std::int64_t task) {
  const std::int64_t b = task / p.value_heads;
  const int hv = int(task % p.value_heads), K = p.k_dim, V = p.v_dim;
  Token t;
  read_token<Team>(p, b, hv, t);
  const float* state = static_cast<const float*>(p.initial.data) + b * p.initial.row + hv * p.initial.head;
  float* next = static_cast<float*>(p.final.data) + b * p.final.row + hv * p.final.head;
  float out[256];
  if (p.v_first) {
    for (int j = 0; j < V; ++j) {
      alignas(64) float s[256];
      for (int d = 0; d < K; ++d) s[d] = state[j * K + d] * t.decay[d];
      const float r = t.v[j] - row_sum(s, t.k, K);
      for (int d = 0; d < K; ++d) next[j * K + d] = s[d] = simt::fused(t.write_k[d], r, s[d]);
      out[j] = row_sum(s, t.q, K);
    }
  } else {
    int j = 0;
    for (; j + Team::kWidth <= V; j += Team::kWidth)
      columns<Team, typename Team::Lane>(p, t, state, next, j, out);
    for (; j < V; ++j) columns<Team, float>(p, t, state, next, j, out);
  }
  const std::int64_t base = at(p.out, b, 0, hv);
  for (int j = 0; j < V; ++j) store(p.out.data, p.out.type, base + j, out[j]);
}

template <class Team>
void gate(const Problem& p, std::int64_t block) {
  const std::int64_t first = block * kGateBlock;
  const std::int64_t last = first + kGateBlock < p.tokens ? first + kGateBlock : p.tokens;
  for (int hv = 0; hv < p.value_heads; ++hv) {
    for (int d = 0; d < p.k_dim; ++d) {
      const GateParameters<float> parameters = gate_parameters<float>(p, hv, d);
      for (std::int64_t t = first; t < last; ++t) gate_element(p, parameters, t, hv, d);
    }
  }
}

template <class Team>
void gate_backward(const Problem& p, std::int64_t block, double* partials) {
  for (int hv = 0; hv < p.value_heads; ++hv) {
    double* partial = partials + (block * p.value_heads + hv) * 2 * p.k_dim;
    for (int d = 0; d < p.k_dim; ++d)
      gate_backward_channel(p, block, hv, d, partial + d, partial + p.k_dim + d);
  }
}

}  // namespace rlk::native::kda::decode
