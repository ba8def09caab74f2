// KDA as plainly as it can be said: token by token, everything in fp64, every state kept for the backward.
#include <vector>

#include "registry/kda/layout.hpp"
#include "registry/kda/plain.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using namespace kda;
using Vector = std::vector<double>;

double sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }
double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

enum { kNone, kSoftplus, kBounded };

// The gate of one channel: log decay, and derivatives of it.
struct GateChannel {
  int64_t kind;
  double rate = 1, bias = 0, bound;

  template <class Args>
  GateChannel(const Args& a, int64_t hv, int64_t width, int64_t d)
      : kind(static_cast<int64_t>(a.gate)), bound(a.lower_bound) {
    if (a.a_log) rate = std::exp(double(a.a_log.template data<float>()[hv]));
    if (a.dt_bias) bias = a.dt_bias.template data<float>()[hv * width + d];
  }
  double value(double raw) const {
    if (kind == kNone) return raw;
    if (kind == kSoftplus) return -rate * softplus(raw + bias);
    return bound * sigmoid(rate * (raw + bias));
  }
  double slope(double raw) const {
    if (kind == kNone) return 1;
    if (kind == kSoftplus) return -rate * sigmoid(raw + bias);
    return bound * rate * sigmoid(rate * (raw + bias)) * sigmoid(-rate * (raw + bias));
  }
  double slope_a_log(double raw) const {
    return kind == kNone ? 0 : kind == kSoftplus ? value(raw) : slope(raw) * (raw + bias);
  }
};

template <class Args>
double write_strength(const Args& a, double raw, double* slope = nullptr) {
  const double c = a.allow_neg_eigval ? 2 : 1;
  if (slope) *slope = a.beta_sigmoid ? c * sigmoid(raw) * sigmoid(-raw) : 1;
  return a.beta_sigmoid ? c * sigmoid(raw) : raw;
}

// One row of q or k, normalised when asked; returns the norm's reciprocal.
double read_row(const Rows& t, int64_t row, bool norm, DType type, Vector& out) {
  double squares = 0;
  for (std::size_t d = 0; d < out.size(); ++d) {
    out[d] = t.get(row, static_cast<int64_t>(d));
    squares = std::fma(out[d], out[d], squares);
  }
  if (!norm) return 1;
  const double r = 1 / std::sqrt(squares + 1e-6);
  for (double& x : out) x = type == DType::f32 ? x * r : round_to(type, x * r);
  return r;
}

// What one token of one value head does, and everything its gradient needs.
struct Step {
  Vector q, k, v, decay, r, decayed, state;
  double beta = 0, beta_slope = 0, q_norm = 1, k_norm = 1;
};

RLK_FUSED Step take_step(const Vector& q, const Vector& k, const Vector& v, const Vector& decay, double beta,
                         const Vector& before) {
  Step s{q, k, v, decay, v, before, {}, beta};
  const std::size_t K = k.size(), V = v.size();
  Vector read(V, 0.0);
  for (std::size_t d = 0; d < K; ++d)
    for (std::size_t j = 0; j < V; ++j) {
      s.decayed[d * V + j] *= decay[d];
      read[j] = std::fma(s.decayed[d * V + j], k[d], read[j]);
    }
  for (std::size_t j = 0; j < V; ++j) s.r[j] -= read[j];
  s.state = s.decayed;
  for (std::size_t d = 0; d < K; ++d)
    for (std::size_t j = 0; j < V; ++j)
      s.state[d * V + j] = std::fma(beta * k[d], s.r[j], s.state[d * V + j]);
  return s;
}

template <class Args>
Step step_at(const Args& a, const Sizes& z, int64_t row, int64_t hv, const Vector& before) {
  const int64_t h = hv / (z.value_heads / z.heads);
  Vector q(static_cast<std::size_t>(z.k)), k = q, decay = q, v(static_cast<std::size_t>(z.v));
  const double q_norm = read_row(Rows(a.q), row * z.heads + h, a.qk_l2norm, a.q.dtype(), q);
  const double k_norm = read_row(Rows(a.k), row * z.heads + h, a.qk_l2norm, a.k.dtype(), k);
  read_row(Rows(a.v), row * z.value_heads + hv, false, a.v.dtype(), v);
  for (int64_t d = 0; d < z.k; ++d)
    decay[static_cast<std::size_t>(d)] =
        std::exp(GateChannel(a, hv, z.k, d).value(Rows(a.g).get(row * z.value_heads + hv, d)));
  double slope = 0;
  const double beta = write_strength(a, Rows(a.beta).get(row, hv), &slope);
  Step s = take_step(q, k, v, decay, beta, before);
  s.beta_slope = slope;
  s.q_norm = q_norm;
  s.k_norm = k_norm;
  return s;
}

// The gradient through normalisation.
void unnormalise(double* dy, const Vector& y, double r) {
  double along = 0;
  for (std::size_t d = 0; d < y.size(); ++d) along = std::fma(dy[d], y[d], along);
  for (std::size_t d = 0; d < y.size(); ++d) dy[d] = r * (dy[d] - y[d] * along);
}

// Adds the gradients of one step; d_state goes from after the step to before it.
struct StepGradient {
  Vector dq, dk, dv, dg;
  double dbeta = 0;
};
RLK_FUSED StepGradient reverse(const Step& s, const Vector& d_out, double scale, Vector& d_state) {
  const std::size_t K = s.k.size(), V = s.v.size();
  StepGradient out{Vector(K), Vector(K), Vector(V), Vector(K)};
  Vector read(K, 0.0);
  for (std::size_t d = 0; d < K; ++d)
    for (std::size_t j = 0; j < V; ++j) {
      out.dq[d] = std::fma(s.state[d * V + j], d_out[j], out.dq[d]);
      d_state[d * V + j] += scale * s.q[d] * d_out[j];
      read[d] = std::fma(d_state[d * V + j], s.r[j], read[d]);
      out.dv[j] = std::fma(d_state[d * V + j], s.k[d], out.dv[j]);
    }
  for (double& x : out.dv) x *= s.beta;
  for (std::size_t d = 0; d < K; ++d) {
    out.dq[d] *= scale;
    out.dbeta = std::fma(s.k[d], read[d], out.dbeta);
    out.dk[d] = s.beta * read[d];
    for (std::size_t j = 0; j < V; ++j) {
      double& x = d_state[d * V + j];
      out.dk[d] = std::fma(-s.decayed[d * V + j], out.dv[j], out.dk[d]);
      x = std::fma(-s.k[d], out.dv[j], x);
      out.dg[d] = std::fma(s.decayed[d * V + j], x, out.dg[d]);
      x *= s.decay[d];
    }
  }
  return out;
}

void set_row(const Out& t, int64_t row, const double* values, std::size_t n) {
  if (!t) return;
  const Rows rows(t);
  for (std::size_t d = 0; d < n; ++d) rows.set(row, static_cast<int64_t>(d), values[d]);
}

}  // namespace

int32_t kda_fwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const KdaFwd*>(slots);
  const Sizes z = sizes_of(a);
  const auto matrix = static_cast<std::size_t>(z.k * z.v);
  for (int64_t n = 0; n < z.sequences; ++n)
    for (int64_t hv = 0; hv < z.value_heads; ++hv) {
      const auto [first, last] = range_of(a, n);
      Vector state(matrix, 0.0);
      if (a.initial_state)
        Matrix(a.initial_state, n * z.value_heads + hv, z.k, z.v, a.state_v_first).read(state);
      for (int64_t row = first; row < last; ++row) {
        if (a.chunk_states && (row - first) % a.chunk_size == 0) {
          Matrix(a.chunk_states, slot_of(a, n, row) * z.value_heads + hv, z.k, z.v, a.state_v_first)
              .write(state);
        }
        const Step s = step_at(a, z, row, hv, state);
        state = s.state;
        for (int64_t j = 0; j < z.v; ++j) {
          double sum = 0;
          for (int64_t d = 0; d < z.k; ++d)
            sum =
                std::fma(state[static_cast<std::size_t>(d * z.v + j)], s.q[static_cast<std::size_t>(d)], sum);
          Rows(a.out).set(row * z.value_heads + hv, j, z.scale * sum);
        }
      }
      if (a.final_state)
        Matrix(a.final_state, n * z.value_heads + hv, z.k, z.v, a.state_v_first).write(state);
    }
  return RLK_OK;
}

int32_t kda_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const KdaBwd*>(slots);
  const Sizes z = sizes_of(a);
  const int64_t rows = a.q.dim(0) * z.tokens, group = z.value_heads / z.heads;
  const auto matrix = static_cast<std::size_t>(z.k * z.v), K = static_cast<std::size_t>(z.k);
  Vector dq(static_cast<std::size_t>(rows * z.heads) * K, 0.0), dk = dq;
  Vector d_rate(static_cast<std::size_t>(z.value_heads), 0.0),
      d_bias(static_cast<std::size_t>(z.value_heads) * K, 0.0);
  for (int64_t n = 0; n < z.sequences; ++n)
    for (int64_t hv = 0; hv < z.value_heads; ++hv) {
      const auto [first, last] = range_of(a, n);
      Vector state(matrix, 0.0), d_state(matrix, 0.0);
      if (a.initial_state)
        Matrix(a.initial_state, n * z.value_heads + hv, z.k, z.v, a.state_v_first).read(state);
      std::vector<Step> steps;
      for (int64_t row = first; row < last; ++row)
        steps.push_back(step_at(a, z, row, hv, row > first ? steps.back().state : state));
      if (a.d_final_state)
        Matrix(a.d_final_state, n * z.value_heads + hv, z.k, z.v, a.state_v_first).read(d_state);
      for (int64_t row = last; row-- > first;) {
        const Step& s = steps[static_cast<std::size_t>(row - first)];
        Vector d_out(static_cast<std::size_t>(z.v));
        read_row(Rows(a.d_out), row * z.value_heads + hv, false, a.d_out.dtype(), d_out);
        StepGradient g = reverse(s, d_out, z.scale, d_state);
        const auto at = static_cast<std::size_t>(row * z.heads + hv / group) * K;
        for (std::size_t d = 0; d < K; ++d) {
          dq[at + d] += g.dq[d];
          dk[at + d] += g.dk[d];
          const GateChannel gate(a, hv, z.k, static_cast<int64_t>(d));
          const double raw = Rows(a.g).get(row * z.value_heads + hv, static_cast<int64_t>(d));
          d_rate[static_cast<std::size_t>(hv)] += gate.slope_a_log(raw) * g.dg[d];
          g.dg[d] *= gate.slope(raw);
          d_bias[static_cast<std::size_t>(hv) * K + d] += g.dg[d];
        }
        set_row(a.d_v, row * z.value_heads + hv, g.dv.data(), g.dv.size());
        set_row(a.d_g, row * z.value_heads + hv, g.dg.data(), K);
        if (a.d_beta) Rows(a.d_beta).set(row, hv, s.beta_slope * g.dbeta);
        if (a.qk_l2norm && hv % group == group - 1) {
          unnormalise(&dq[at], s.q, s.q_norm);
          unnormalise(&dk[at], s.k, s.k_norm);
        }
      }
      if (a.d_initial_state)
        Matrix(a.d_initial_state, n * z.value_heads + hv, z.k, z.v, a.state_v_first).write(d_state);
    }
  for (int64_t row = 0; row < rows * z.heads; ++row) {
    set_row(a.d_q, row, &dq[static_cast<std::size_t>(row) * K], K);
    set_row(a.d_k, row, &dk[static_cast<std::size_t>(row) * K], K);
  }
  for (int64_t hv = 0; hv < z.value_heads; ++hv) {
    if (a.d_a_log) store(a.d_a_log.dtype(), a.d_a_log.data<void>(), hv, d_rate[static_cast<std::size_t>(hv)]);
    for (int64_t d = 0; a.d_dt_bias && d < z.k; ++d)
      store(a.d_dt_bias.dtype(), a.d_dt_bias.data<void>(), hv * z.k + d,
            d_bias[static_cast<std::size_t>(hv * z.k + d)]);
  }
  return RLK_OK;
}

int32_t kda_decode_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const KdaDecode*>(slots);
  const int64_t heads = a.q.dim(1), value_heads = a.v.dim(1), K = a.q.dim(2), V = a.v.dim(2);
  const double scale = a.scale != 0 ? a.scale : 1 / std::sqrt(double(K));
  for (int64_t row = 0; row < a.q.dim(0) * value_heads; ++row) {
    const int64_t b = row / value_heads, hv = row % value_heads, h = b * heads + hv / (value_heads / heads);
    Vector q(static_cast<std::size_t>(K)), k = q, decay = q, v(static_cast<std::size_t>(V));
    read_row(Rows(a.q), h, a.qk_l2norm, a.q.dtype(), q);
    read_row(Rows(a.k), h, a.qk_l2norm, a.k.dtype(), k);
    read_row(Rows(a.v), row, false, a.v.dtype(), v);
    for (int64_t d = 0; d < K; ++d)
      decay[static_cast<std::size_t>(d)] = std::exp(GateChannel(a, hv, K, d).value(Rows(a.g).get(row, d)));
    Vector state(static_cast<std::size_t>(K * V));
    Matrix(a.state, row, K, V, a.state_v_first).read(state);
    const Step s = take_step(q, k, v, decay, write_strength(a, Rows(a.beta).get(b, hv)), state);
    for (int64_t j = 0; j < V; ++j) {
      double sum = 0;
      for (int64_t d = 0; d < K; ++d)
        sum = std::fma(s.state[static_cast<std::size_t>(d * V + j)], q[static_cast<std::size_t>(d)], sum);
      Rows(a.out).set(row, j, scale * sum);
    }
    Matrix(a.state_out, row, K, V, a.state_v_first).write(s.state);
  }
  return RLK_OK;
}

// By the cache's definition: what it holds takes part, whoever filled it.
int32_t kda_step_reference(const rlk_slot* slots, const rlk_host* host) {
  if (kda_step::Steps<kda_step::Double>(*reinterpret_cast<const KdaStep*>(slots)).run()) return RLK_OK;
  return host->fail(RLK_INVALID_ARGUMENT, "kda_step: rows are beyond the chunk");
}

int32_t kda_gate_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const KdaGate*>(slots);
  const Rows g(a.g), out(a.out);
  const int64_t heads = a.g.dim(-2);
  for (int64_t row = 0; row < g.count(); ++row)
    for (int64_t d = 0; d < g.width(); ++d)
      out.set(row, d, GateChannel(a, row % heads, g.width(), d).value(g.get(row, d)));
  return RLK_OK;
}

int32_t kda_gate_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const KdaGateBwd*>(slots);
  const Rows g(a.g), d_out(a.d_out);
  const int64_t heads = a.g.dim(-2), K = g.width();
  Vector d_rate(static_cast<std::size_t>(heads), 0.0), d_bias(static_cast<std::size_t>(heads * K), 0.0);
  for (int64_t row = 0; row < g.count(); ++row)
    for (int64_t d = 0; d < K; ++d) {
      const GateChannel gate(a, row % heads, K, d);
      const double raw = g.get(row, d), dg = d_out.get(row, d), d_raw = gate.slope(raw) * dg;
      if (a.d_g) Rows(a.d_g).set(row, d, d_raw);
      d_rate[static_cast<std::size_t>(row % heads)] += gate.slope_a_log(raw) * dg;
      d_bias[static_cast<std::size_t>(row % heads * K + d)] += d_raw;
    }
  for (int64_t h = 0; h < heads; ++h) {
    if (a.d_a_log) store(a.d_a_log.dtype(), a.d_a_log.data<void>(), h, d_rate[static_cast<std::size_t>(h)]);
    for (int64_t d = 0; a.d_dt_bias && d < K; ++d)
      store(a.d_dt_bias.dtype(), a.d_dt_bias.data<void>(), h * K + d,
            d_bias[static_cast<std::size_t>(h * K + d)]);
  }
  return RLK_OK;
}

}  // namespace rlk::registry
