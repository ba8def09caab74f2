#include "native/kda/recurrent.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "arithmetic/kda/gate.hpp"

namespace rlk::native::kda::recurrent {
namespace {

constexpr std::int64_t kSegment = 64;

using Bump = simt::Bump<double>;
using simt::fused;

// The value rounded to odd in fp32, so that a second rounding to 16 bits equals one rounding.
float to_odd(double x) {
  const float near = static_cast<float>(x);
  if (static_cast<double>(near) == x || x != x || std::isinf(near)) return near;
  const bool past = std::fabs(static_cast<double>(near)) > std::fabs(x);
  const std::uint32_t truncated = simt::float_bits(near) - (past ? 1u : 0u);
  return simt::bits_float(truncated | 1u);
}

double chain(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum = fused(a[i], b[i], sum);
  return sum;
}

double normalise(double* x, int n, Float type) {
  const double r = 1 / std::sqrt(chain(x, x, n) + kNormEps);
  for (int d = 0; d < n; ++d) {
    const double y = x[d] * r;
    x[d] = type == Float::f32 ? y : static_cast<double>(round_to(type, to_odd(y)));
  }
  return r;
}

void read_vector(const rlk::kda::Tensor& t, std::int64_t row, std::int64_t token, std::int64_t head, int n,
                 double* out) {
  const std::int64_t base = at(t, row, token, head);
  for (int d = 0; d < n; ++d) out[d] = load(t.data, t.type, base + d);
}

std::int64_t state_index(const Problem& p, int d, int j) {
  return p.v_first ? std::int64_t(j) * p.k_dim + d : std::int64_t(d) * p.v_dim + j;
}

}  // namespace

void store64(void* p, Float type, std::int64_t i, double x) {
  if (!p) return;
  store(p, type, i, type == Float::f32 ? static_cast<float>(x) : to_odd(x));
}

void read_token(const Problem& p, std::int64_t row, std::int64_t t, int hv, Token& token) {
  const int h = hv / p.group();
  read_vector(p.q, row, t, h, p.k_dim, token.q);
  read_vector(p.k, row, t, h, p.k_dim, token.k);
  read_vector(p.v, row, t, hv, p.v_dim, token.v);
  token.q_norm = p.l2norm ? normalise(token.q, p.k_dim, p.q.type) : 1;
  token.k_norm = p.l2norm ? normalise(token.k, p.k_dim, p.k.type) : 1;
  const std::int64_t g = at(p.g, row, t, hv);
  for (int d = 0; d < p.k_dim; ++d) {
    token.decay[d] =
        simt::exp<double>(gate_parameters<double>(p, hv, d).value(load(p.g.data, p.g.type, g + d)));
  }
  token.beta = write_strength<double>(p, load(p.beta.data, p.beta.type, at(p.beta, row, t, hv)));
}

void read_state(const Problem& p, const States& s, std::int64_t n, int hv, double* out) {
  const std::int64_t base = n * s.row + hv * s.head;
  for (int d = 0; d < p.k_dim; ++d) {
    for (int j = 0; j < p.v_dim; ++j) {
      out[std::int64_t(d) * p.v_dim + j] = s ? load(s.data, s.type, base + state_index(p, d, j)) : 0.0;
    }
  }
}

void write_state(const Problem& p, const States& s, std::int64_t n, int hv, const double* in) {
  if (!s) return;
  const std::int64_t base = n * s.row + hv * s.head;
  for (int d = 0; d < p.k_dim; ++d) {
    for (int j = 0; j < p.v_dim; ++j) {
      store64(s.data, s.type, base + state_index(p, d, j), in[std::int64_t(d) * p.v_dim + j]);
    }
  }
}

Token take_token(const Problem& p, simt::Bump<double>& bump) {
  const std::int64_t K = p.k_dim, V = p.v_dim;
  return {bump.take(K), bump.take(K), bump.take(V), bump.take(K), 0, 1, 1};
}

namespace {

// S <- the state after this token; r <- v - S~^T k.
void step(const Problem& p, const Token& token, double* state, double* r) {
  const int K = p.k_dim, V = p.v_dim;
  std::fill_n(r, V, 0.0);
  for (int d = 0; d < K; ++d) {
    double* row = state + std::int64_t(d) * V;
    const double decay = token.decay[d], k = token.k[d];
    for (int j = 0; j < V; ++j) {
      row[j] *= decay;
      r[j] = fused(row[j], k, r[j]);
    }
  }
  for (int j = 0; j < V; ++j) r[j] = token.v[j] - r[j];
  for (int d = 0; d < K; ++d) {
    double* row = state + std::int64_t(d) * V;
    const double write = token.beta * token.k[d];
    for (int j = 0; j < V; ++j) row[j] = fused(write, r[j], row[j]);
  }
}

struct ForwardScratch {
  Token token;
  double *state, *r;
  explicit ForwardScratch(const Problem& p, Bump& bump)
      : token(take_token(p, bump)),
        state(bump.take(std::int64_t(p.k_dim) * p.v_dim)),
        r(bump.take(p.v_dim)) {}
};

std::int64_t longest(const Problem& p) { return p.tokens; }

struct BackwardScratch {
  Token token;
  double *checkpoints, *segment, *d_state, *r, *dr, *d_out, *decayed, *dk_read, *d_q, *d_k;
  explicit BackwardScratch(const Problem& p, Bump& bump) : token(take_token(p, bump)) {
    const std::int64_t K = p.k_dim, V = p.v_dim, T = longest(p);
    checkpoints = bump.take((T / kSegment + 1) * K * V);
    segment = bump.take((kSegment + 1) * K * V);
    d_state = bump.take(K * V);
    r = bump.take(kSegment * V);
    dr = bump.take(V);
    d_out = bump.take(V);
    decayed = bump.take(K * V);
    dk_read = bump.take(K);
    d_q = bump.take(T * K);
    d_k = bump.take(T * K);
  }
};

// The gradient through x -> x * r(x): dx = r (dy - y (dy . y)).
void unnormalise(double* dy, const double* y, double r, int n) {
  const double along = chain(dy, y, n);
  for (int d = 0; d < n; ++d) dy[d] = r * fused(-along, y[d], dy[d]);
}

// One token of the reverse recurrence (d_state goes from after the token to before it).
void reverse_step(const Problem& p, std::int64_t row, std::int64_t t, int hv, const BackwardScratch& s,
                  const double* before, const double* after, const double* r, double* dq, double* dk,
                  double* partial) {
  const int K = p.k_dim, V = p.v_dim;
  const Token& token = s.token;
  read_vector(p.d_out, row, t, hv, V, s.d_out);
  for (int d = 0; d < K; ++d) {
    const std::int64_t line = std::int64_t(d) * V;
    dq[d] = fused(p.scale, chain(after + line, s.d_out, V), dq[d]);
    const double qs = p.scale * token.q[d];
    for (int j = 0; j < V; ++j) s.d_state[line + j] = fused(qs, s.d_out[j], s.d_state[line + j]);
  }
  std::fill_n(s.dr, V, 0.0);
  for (int d = 0; d < K; ++d) {
    const double* line = s.d_state + std::int64_t(d) * V;
    s.dk_read[d] = chain(line, r, V);
    for (int j = 0; j < V; ++j) s.dr[j] = fused(line[j], token.k[d], s.dr[j]);
  }
  for (int j = 0; j < V; ++j) {
    s.dr[j] *= token.beta;
    store64(p.d_v.data, p.d_v.type, at(p.d_v, row, t, hv) + j, s.dr[j]);
  }
  const double d_beta = chain(token.k, s.dk_read, K);
  const double raw_beta = load(p.beta.data, p.beta.type, at(p.beta, row, t, hv));
  store64(p.d_beta.data, p.d_beta.type, at(p.d_beta, row, t, hv),
          write_strength_grad<double>(p, raw_beta, d_beta));
  for (int d = 0; d < K; ++d) {
    const std::int64_t line = std::int64_t(d) * V;
    double d_gate = 0, through_read = 0;
    for (int j = 0; j < V; ++j) {
      const double decayed = before[line + j] * token.decay[d];
      double& d_state = s.d_state[line + j];
      d_state = fused(-token.k[d], s.dr[j], d_state);
      through_read = fused(decayed, s.dr[j], through_read);
      d_gate = fused(decayed, d_state, d_gate);
      d_state *= token.decay[d];
    }
    dk[d] += fused(token.beta, s.dk_read[d], -through_read);
    const auto gate = gate_parameters<double>(p, hv, d);
    const double raw = load(p.g.data, p.g.type, at(p.g, row, t, hv) + d);
    const double d_raw = gate.grad(raw, d_gate);
    store64(p.d_g.data, p.d_g.type, at(p.d_g, row, t, hv) + d, d_raw);
    partial[d] += gate.grad_a_log(raw, d_gate);
    partial[K + d] += d_raw;
  }
}

void backward_head(const Problem& p, std::int64_t n, int hv, const BackwardScratch& s, Token token,
                   double* partial) {
  const std::int64_t row = p.row(n), first = p.start(n), length = p.length(n);
  const std::int64_t matrix = std::int64_t(p.k_dim) * p.v_dim;
  read_state(p, p.initial, n, hv, s.segment);
  for (std::int64_t t = 0; t < length; ++t) {
    if (t % kSegment == 0) std::copy_n(s.segment, matrix, s.checkpoints + t / kSegment * matrix);
    read_token(p, row, first + t, hv, token);
    step(p, token, s.segment, s.r);
  }
  read_state(p, p.d_final, n, hv, s.d_state);
  for (std::int64_t start = (length - 1) / kSegment * kSegment; start >= 0 && length > 0; start -= kSegment) {
    const std::int64_t count = std::min(kSegment, length - start);
    std::copy_n(s.checkpoints + start / kSegment * matrix, matrix, s.segment);
    for (std::int64_t i = 0; i < count; ++i) {
      std::copy_n(s.segment + i * matrix, matrix, s.segment + (i + 1) * matrix);
      read_token(p, row, first + start + i, hv, token);
      step(p, token, s.segment + (i + 1) * matrix, s.r + i * p.v_dim);
    }
    for (std::int64_t i = count - 1; i >= 0; --i) {
      BackwardScratch now = s;
      read_token(p, row, first + start + i, hv, token);
      now.token = token;
      const std::int64_t t = start + i;
      reverse_step(p, row, first + t, hv, now, s.segment + i * matrix, s.segment + (i + 1) * matrix,
                   s.r + i * p.v_dim, s.d_q + t * p.k_dim, s.d_k + t * p.k_dim, partial);
    }
  }
  write_state(p, p.d_initial, n, hv, s.d_state);
}

}  // namespace

std::int64_t forward_tasks(const Problem& p) { return p.sequences * p.value_heads; }

std::size_t forward_scratch(const Problem& p) {
  Bump bump{nullptr};
  ForwardScratch count(p, bump);
  return std::size_t(bump.used) * sizeof(double);
}

void forward(const Problem& p, std::int64_t task, void* scratch) {
  Bump bump{static_cast<double*>(scratch)};
  ForwardScratch s(p, bump);
  const std::int64_t n = task / p.value_heads, row = p.row(n), first = p.start(n), length = p.length(n);
  const int hv = static_cast<int>(task % p.value_heads);
  read_state(p, p.initial, n, hv, s.state);
  for (std::int64_t t = 0; t < length; ++t) {
    if (t % p.chunk == 0) write_state(p, p.chunk_states, p.slot(n) + t / p.chunk, hv, s.state);
    read_token(p, row, first + t, hv, s.token);
    step(p, s.token, s.state, s.r);
    std::fill_n(s.r, p.v_dim, 0.0);
    for (int d = 0; d < p.k_dim; ++d) {
      const double* line = s.state + std::int64_t(d) * p.v_dim;
      for (int j = 0; j < p.v_dim; ++j) s.r[j] = fused(line[j], s.token.q[d], s.r[j]);
    }
    const std::int64_t base = at(p.out, row, first + t, hv);
    for (int j = 0; j < p.v_dim; ++j) store64(p.out.data, p.out.type, base + j, p.scale * s.r[j]);
  }
  write_state(p, p.final, n, hv, s.state);
}

std::int64_t backward_tasks(const Problem& p) { return p.sequences * p.heads; }

std::size_t backward_scratch(const Problem& p) {
  Bump bump{nullptr};
  BackwardScratch count(p, bump);
  return std::size_t(bump.used) * sizeof(double);
}

std::size_t partials_bytes(const Problem& p) {
  return sizeof(double) * 2 * std::size_t(p.sequences) * std::size_t(p.value_heads) * std::size_t(p.k_dim);
}

void backward(const Problem& p, std::int64_t task, void* scratch, double* partials) {
  Bump bump{static_cast<double*>(scratch)};
  BackwardScratch s(p, bump);
  const std::int64_t n = task / p.heads, row = p.row(n), first = p.start(n), length = p.length(n);
  const int h = static_cast<int>(task % p.heads);
  const int K = p.k_dim;
  std::fill_n(s.d_q, length * K, 0.0);
  std::fill_n(s.d_k, length * K, 0.0);
  for (int hv = h * p.group(); hv < (h + 1) * p.group(); ++hv) {
    double* partial = partials + (n * p.value_heads + hv) * 2 * K;
    std::fill_n(partial, 2 * K, 0.0);
    backward_head(p, n, hv, s, s.token, partial);
  }
  for (std::int64_t t = 0; t < length; ++t) {
    if (p.l2norm && p.group() > 0) {
      read_token(p, row, first + t, h * p.group(), s.token);
      unnormalise(s.d_q + t * K, s.token.q, s.token.q_norm, K);
      unnormalise(s.d_k + t * K, s.token.k, s.token.k_norm, K);
    }
    for (int d = 0; d < K; ++d) {
      store64(p.d_q.data, p.d_q.type, at(p.d_q, row, first + t, h) + d, s.d_q[t * K + d]);
      store64(p.d_k.data, p.d_k.type, at(p.d_k, row, first + t, h) + d, s.d_k[t * K + d]);
    }
  }
}

void finish(const Problem& p, const double* partials) {
  const int K = p.k_dim;
  for (int hv = 0; hv < p.value_heads; ++hv) {
    double a_log = 0;
    for (int d = 0; d < K; ++d) {
      double a = 0, bias = 0;
      for (std::int64_t n = 0; n < p.sequences; ++n) {
        const double* partial = partials + (n * p.value_heads + hv) * 2 * K;
        a += partial[d];
        bias += partial[K + d];
      }
      a_log += a;
      if (p.d_dt_bias) store(p.d_dt_bias, Float::f32, std::int64_t(hv) * K + d, static_cast<float>(bias));
    }
    if (p.d_a_log) store(p.d_a_log, Float::f32, hv, static_cast<float>(a_log));
  }
}

void gate(const Problem& p, std::int64_t token) {
  for (int hv = 0; hv < p.value_heads; ++hv) {
    for (int d = 0; d < p.k_dim; ++d) {
      const double raw = load(p.g.data, p.g.type, at(p.g, 0, token, hv) + d);
      store64(p.out.data, p.out.type, at(p.out, 0, token, hv) + d,
              gate_parameters<double>(p, hv, d).value(raw));
    }
  }
}

void gate_backward(const Problem& p, int hv) {
  double a_log = 0;
  for (int d = 0; d < p.k_dim; ++d) {
    const auto parameters = gate_parameters<double>(p, hv, d);
    double share = 0, bias = 0;
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      const double raw = load(p.g.data, p.g.type, at(p.g, 0, t, hv) + d);
      const double dy = load(p.d_out.data, p.d_out.type, at(p.d_out, 0, t, hv) + d);
      const double d_raw = parameters.grad(raw, dy);
      store64(p.d_g.data, p.d_g.type, at(p.d_g, 0, t, hv) + d, d_raw);
      share += parameters.grad_a_log(raw, dy);
      bias += d_raw;
    }
    a_log += share;
    if (p.d_dt_bias) store(p.d_dt_bias, Float::f32, std::int64_t(hv) * p.k_dim + d, static_cast<float>(bias));
  }
  if (p.d_a_log) store(p.d_a_log, Float::f32, hv, static_cast<float>(a_log));
}

}  // namespace rlk::native::kda::recurrent
