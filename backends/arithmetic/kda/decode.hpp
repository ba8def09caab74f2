// One KDA token per sequence with a resident state, fp32 (arithmetic fma32/kda): what every executor agrees on.
//
//     s_dj = S_dj e^{g_d}             r_j = v_j - sum_d s_dj k_d
//     S'_dj = s_dj + (beta k_d) r_j   out_j = sum_d S'_dj (scale q_d)
//
// The order of the sums over d follows the layout, so that memory is read once, in wide pieces:
//   [K, V]: kParts interleaved chains (d mod kParts), added in order starting from 0;
//   [V, K]: a chain over d = 4l .. 4l+3 and 128+4l .. 128+4l+3 for each l in 0..31, then a butterfly over l
//           (1, 2, .. 16).
#pragma once

#include "arithmetic/kda/gate.hpp"

namespace rlk::kda::decode {

inline constexpr int kParts = 16;
inline constexpr int kLanes = 32;  // of the butterfly
inline constexpr int kPack = 4;

// Tokens summed into one partial of the gate's parameter gradients; the partials are added in order, in fp64.
inline constexpr int kGateBlock = 1024;

RLK_HD std::int64_t gate_blocks(const Problem& p) { return (p.tokens + kGateBlock - 1) / kGateBlock; }

// The gate, or its gradient, for one token and channel.
RLK_HD void gate_element(const Problem& p, const GateParameters<float>& gate, std::int64_t token, int hv,
                         int d) {
  const float raw = load(p.g.data, p.g.type, at(p.g, 0, token, hv) + d);
  store(p.out.data, p.out.type, at(p.out, 0, token, hv) + d, gate.value(raw));
}

// One channel of one block of tokens, backward: d_g, and the sums of its shares of d_a_log and d_dt_bias.
RLK_HD void gate_backward_channel(const Problem& p, std::int64_t block, int hv, int d, double* a_log,
                                  double* bias) {
  const GateParameters<float> gate = gate_parameters<float>(p, hv, d);
  const std::int64_t first = block * kGateBlock;
  const std::int64_t last = first + kGateBlock < p.tokens ? first + kGateBlock : p.tokens;
  double sum_a_log = 0, sum_bias = 0;
  for (std::int64_t t = first; t < last; ++t) {
    const float raw = load(p.g.data, p.g.type, at(p.g, 0, t, hv) + d);
    const float dy = load(p.d_out.data, p.d_out.type, at(p.d_out, 0, t, hv) + d);
    const float d_raw = gate.grad(raw, dy);
    sum_a_log += double(gate.grad_a_log(raw, dy));
    sum_bias += double(d_raw);
    if (p.d_g) store(p.d_g.data, p.d_g.type, at(p.d_g, 0, t, hv) + d, d_raw);
  }
  *a_log = sum_a_log;
  *bias = sum_bias;
}

}  // namespace rlk::kda::decode
