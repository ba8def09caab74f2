// fma32/kda of kda_fwd, kda_decode, kda_step and kda_gate, and fma32/kda/seg4096 of kda_fwd, as the page has them, in plain loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "registry/exp32.hpp"
#include "registry/kda/layout.hpp"
#include "registry/kda/plain.hpp"
#include "registry/op.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

using namespace kda;
using Floats = std::vector<float>;

constexpr int64_t kBlock = 16, kSegment = 4096;

// Decays below 2^-100 count as zero.
float flushed(float x) { return x < 0x1p-100f ? 0.0f : x; }

float sigmoid32(float x) {
  const float e = exp32(x < 0 ? x : -x);
  return (x < 0 ? e : 1.0f) / (e + 1.0f);
}
// ln(1 + e^x): the larger of x and 0, and 2 atanh(e / (e + 2)) of e = e^-|x| as a series.
float softplus32(float x) {
  const float e = exp32(x < 0 ? x : -x), s = e / (e + 2.0f), z = s * s, twice = s + s;
  float series = 1.0f / 17;
  for (int i = 7; i >= 1; --i) series = std::fma(series, z, 1.0f / static_cast<float>(2 * i + 1));
  return (x > 0 ? x : 0.0f) + std::fma(twice * z, series, twice);
}

// The log decay of channel d of value head hv.
template <class Args>
float log_decay(const Args& a, int64_t hv, int64_t width, int64_t d, float raw) {
  if (a.gate == Args::Gate::none) return raw;
  const float rate = a.a_log ? exp32(a.a_log.template data<float>()[hv]) : 1.0f;
  const float x = raw + (a.dt_bias ? a.dt_bias.template data<float>()[hv * width + d] : 0.0f);
  if (a.gate == Args::Gate::softplus) return -(rate * softplus32(x));
  return static_cast<float>(a.lower_bound) * sigmoid32(rate * x);
}

template <class Args>
float write_strength(const Args& a, float raw) {
  if (!a.beta_sigmoid) return raw;
  const float y = sigmoid32(raw);
  return a.allow_neg_eigval ? y + y : y;
}

// rows x columns.
struct Grid {
  int64_t columns = 0;
  Floats values;
  Grid() = default;
  Grid(int64_t rows, int64_t width) : columns(width), values(static_cast<std::size_t>(rows * width)) {}
  float& operator()(int64_t i, int64_t d) { return values[static_cast<std::size_t>(i * columns + d)]; }
  float operator()(int64_t i, int64_t d) const { return values[static_cast<std::size_t>(i * columns + d)]; }
};

// The sum of products in 16 interleaved chains, added in order.
RLK_FUSED float interleaved(const float* a, const float* b, int64_t n) {
  float chains[16] = {}, sum = 0;
  for (int64_t d = 0; d < n; ++d) chains[d % 16] = std::fma(a[d], b[d], chains[d % 16]);
  for (float c : chains) sum += c;
  return sum;
}

// Row i of q or k, normalised where that is wanted.
template <class View>
void read_row(const View& t, int64_t row, bool normalise, Grid& out, int64_t i) {
  const Rows rows(t);
  for (int64_t d = 0; d < out.columns; ++d) out(i, d) = static_cast<float>(rows.get(row, d));
  if (!normalise) return;
  const float* x = &out(i, 0);
  const float r = 1.0f / std::sqrt(interleaved(x, x, out.columns) + 1e-6f);
  for (int64_t d = 0; d < out.columns; ++d)
    out(i, d) = static_cast<float>(round_to(t.dtype(), double{out(i, d) * r}));
}

// A chunk's operands, and the running products of its decays: from the chunk's start and from the block's, to the chunk's end and
// to the block's, each row's own decay in the first two alone.
struct Chunk {
  int64_t rows;
  Grid q, k, v, decay, from_start, in_block, to_end, to_bound;
  Floats beta;

  Chunk(const KdaFwd& a, const Sizes& z, int64_t first, int64_t n, int64_t hv)
      : rows(n), q(n, z.k), k(n, z.k), v(n, z.v), decay(n, z.k), beta(static_cast<std::size_t>(n)) {
    const int64_t h = hv / (z.value_heads / z.heads);
    const auto scale = static_cast<float>(z.scale);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t key = (first + i) * z.heads + h, value = (first + i) * z.value_heads + hv;
      read_row(a.q, key, a.qk_l2norm, q, i);
      read_row(a.k, key, a.qk_l2norm, k, i);
      read_row(a.v, value, false, v, i);
      read_row(a.g, value, false, decay, i);
      for (int64_t d = 0; d < z.k; ++d) {
        q(i, d) *= scale;
        decay(i, d) = flushed(exp32(log_decay(a, hv, z.k, d, decay(i, d))));
      }
      beta[static_cast<std::size_t>(i)] =
          write_strength(a, static_cast<float>(Rows(a.beta).get(first + i, hv)));
    }
    multiply_decays();
  }

 private:
  void multiply_decays() {
    from_start = in_block = to_end = to_bound = Grid(rows, k.columns);
    for (int64_t d = 0; d < k.columns; ++d) {
      for (int64_t i = 0; i < rows; ++i) {
        from_start(i, d) = flushed(i == 0 ? decay(i, d) : from_start(i - 1, d) * decay(i, d));
        in_block(i, d) = i % kBlock == 0 ? decay(i, d) : flushed(in_block(i - 1, d) * decay(i, d));
      }
      for (int64_t i = rows - 1; i >= 0; --i) {
        const bool last = i == rows - 1;
        to_end(i, d) = last ? 1.0f : flushed(to_end(i + 1, d) * decay(i + 1, d));
        to_bound(i, d) =
            last || i % kBlock == kBlock - 1 ? 1.0f : flushed(to_bound(i + 1, d) * decay(i + 1, d));
      }
    }
  }
};

// x[j] = a * b[j] + x[j], each once rounded: a step of n chains side by side.
inline void step(float a, const float* b, float* x, int64_t n) {
  for (int64_t j = 0; j < n; ++j) x[j] = std::fma(a, b[j], x[j]);
}

// The two products over channels of rows i >= j: M without beta, and P. The key of row j, as row i meets it, decays inside a block
// row by row up to i; across, up to the end of its block and over the blocks between, and the other factor from the start of its own.
struct Pairs {
  Grid m, p;

  explicit Pairs(const Chunk& c) : m(c.rows, c.rows), p(c.rows, c.rows) { add_all(c); }

 private:
  RLK_FUSED void add_all(const Chunk& c) {
    Grid keys(c.k.columns, c.rows);  // of every channel, side by side
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t start = i / kBlock * kBlock;
      for (int64_t d = 0; d < c.k.columns; ++d) {
        float* const key = &keys(d, 0);
        if (i == start) leave_block(c, key, start, d);
        for (int64_t j = start; j < i; ++j) key[j] *= c.decay(i, d);
        key[i] = c.k(i, d);
        const float in_block = c.in_block(i, d);
        step(c.k(i, d) * in_block, key, &m(i, 0), start),
            step(c.k(i, d), key + start, &m(i, start), i + 1 - start);
        step(c.q(i, d) * in_block, key, &p(i, 0), start),
            step(c.q(i, d), key + start, &p(i, start), i + 1 - start);
      }
    }
  }
  // The block before `start` is over: its own keys go to its end, earlier ones over it.
  static void leave_block(const Chunk& c, float* key, int64_t start, int64_t d) {
    const int64_t last = start - kBlock;
    for (int64_t j = 0; j < last; ++j) key[j] *= c.in_block(start - 1, d);
    for (int64_t j = std::max<int64_t>(0, last); j < start; ++j) key[j] = c.k(j, d) * c.to_bound(j, d);
  }
};

// (I + M)^-1 by forward substitution.
RLK_FUSED Grid inverse(const Chunk& c, const Pairs& pairs) {
  Grid a(c.rows, c.rows);
  for (int64_t i = 0; i < c.rows; ++i) {
    a(i, i) = 1.0f;
    for (int64_t r = 0; r < i; ++r)
      step(-(c.beta[static_cast<std::size_t>(i)] * pairs.m(i, r)), &a(r, 0), &a(i, 0), r + 1);
  }
  return a;
}

// The chunk's results; the state goes from before it to behind it.
RLK_FUSED Grid advance(const Chunk& c, const Pairs& pairs, const Grid& a, Grid& state) {
  const int64_t K = c.k.columns, V = c.v.columns;
  Grid y = c.v, n(c.rows, V), out(c.rows, V);
  if (V == 0) return out;
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t d = 0; d < K; ++d) step(-(c.k(i, d) * c.from_start(i, d)), &state(d, 0), &y(i, 0), V);
    for (int64_t j = 0; j < V; ++j) y(i, j) *= c.beta[static_cast<std::size_t>(i)];
    for (int64_t r = 0; r <= i; ++r) step(a(i, r), &y(r, 0), &n(i, 0), V);
    for (int64_t d = 0; d < K; ++d) step(c.q(i, d) * c.from_start(i, d), &state(d, 0), &out(i, 0), V);
    for (int64_t r = 0; r <= i; ++r) step(pairs.p(i, r), &n(r, 0), &out(i, 0), V);
  }
  for (int64_t d = 0; d < K; ++d) {
    for (int64_t j = 0; j < V; ++j) state(d, j) *= c.from_start(c.rows - 1, d);
    for (int64_t i = 0; i < c.rows; ++i) step(c.k(i, d) * c.to_end(i, d), &n(i, 0), &state(d, 0), V);
  }
  return out;
}

void set(const Out& t, int64_t row, int64_t i, float x) {
  Rows(t).set(row, i, t.dtype() == DType::f32 ? canonical(x) : x);
}

// The state behind a whole segment that begins at `row`: T S + U, T what the chunks make of the unit matrix without values, U of zeros
// with them.
RLK_FUSED Grid joined(const KdaFwd& a, const Sizes& z, int64_t row, int64_t hv, const Grid& state) {
  Grid t(z.k, z.k), u(z.k, z.v), out(z.k, z.v);
  for (int64_t d = 0; d < z.k; ++d) t(d, d) = 1;
  for (int64_t at = row; at < row + kSegment; at += a.chunk_size) {
    Chunk c(a, z, at, a.chunk_size, hv);
    const Pairs pairs(c);
    const Grid inverted = inverse(c, pairs);
    advance(c, pairs, inverted, u);
    c.v = Grid(c.rows, z.k);
    advance(c, pairs, inverted, t);
  }
  for (int64_t d = 0; d < z.k; ++d)
    for (int64_t j = 0; j < z.v; ++j) {
      float x = 0;
      for (int64_t m = 0; m < z.k; ++m) x = std::fma(t(d, m), state(m, j), x);
      out(d, j) = x + u(d, j);
    }
  return out;
}

void forward(const KdaFwd& a, const Sizes& z, int64_t n, int64_t hv, bool segments) {
  const auto [first, last] = range_of(a, n);
  Grid state(z.k, z.v);
  if (a.initial_state)
    Matrix(a.initial_state, n * z.value_heads + hv, z.k, z.v, a.state_v_first).read(state.values);
  Grid next;  // behind the open segment, if it is whole
  for (int64_t row = first; row < last; row += a.chunk_size) {
    if (segments && (row - first) % kSegment == 0) {
      if (row > first) state = next;
      if (last - row >= kSegment) next = joined(a, z, row, hv, state);
    }
    if (a.chunk_states)
      Matrix(a.chunk_states, slot_of(a, n, row) * z.value_heads + hv, z.k, z.v, a.state_v_first)
          .write(state.values);
    const Chunk c(a, z, row, std::min(a.chunk_size, last - row), hv);
    const Pairs pairs(c);
    const Grid inverted = inverse(c, pairs), out = advance(c, pairs, inverted, state);
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t at = (row + i) * z.value_heads + hv;
      for (int64_t j = 0; j < z.v; ++j) set(a.out, at, j, out(i, j));
      for (int64_t j = 0; a.chunk_inverses && j < a.chunk_size; ++j)
        set(a.chunk_inverses, at, j, j <= i ? inverted(i, j) : 0.0f);
    }
  }
  if (segments && last > first && (last - first) % kSegment == 0) state = next;
  if (a.final_state)
    Matrix(a.final_state, n * z.value_heads + hv, z.k, z.v, a.state_v_first).write(state.values);
}

// The sum over the channels of a state's column: of [K, V] in interleaved chains; of [V, K] one chain for every four neighbours and
// the four 128 further on, and the 32 chains as a tree of neighbours.
RLK_FUSED float column_sum(const Floats& a, const Floats& b, bool v_first) {
  const auto n = static_cast<int64_t>(a.size());
  if (!v_first) return interleaved(a.data(), b.data(), n);
  float chains[32] = {};
  for (std::size_t d = 0; d < a.size(); ++d) {
    float& c = chains[d / 4 % 32];
    c = std::fma(a[d], b[d], c);
  }
  for (std::size_t step = 1; step < 32; step *= 2)
    for (std::size_t l = 0; l < 32; l += 2 * step) chains[l] += chains[l + step];
  return chains[0];
}

// One token of sequence b and value head hv.
RLK_FUSED void decode(const KdaDecode& a, int64_t b, int64_t hv) {
  const int64_t heads = a.q.dim(1), value_heads = a.v.dim(1), K = a.q.dim(2), V = a.v.dim(2),
                key = b * heads + hv / (value_heads / heads), value = b * value_heads + hv;
  const auto scale = static_cast<float>(a.scale != 0 ? a.scale : 1 / std::sqrt(double(K)));
  const float beta = write_strength(a, static_cast<float>(Rows(a.beta).get(b, hv)));
  Grid q(1, K), k(1, K), v(1, V), decay(1, K), state(K, V);
  read_row(a.q, key, a.qk_l2norm, q, 0);
  read_row(a.k, key, a.qk_l2norm, k, 0);
  read_row(a.v, value, false, v, 0);
  read_row(a.g, value, false, decay, 0);
  for (int64_t d = 0; d < K; ++d) {
    q(0, d) *= scale;
    decay(0, d) = flushed(exp32(log_decay(a, hv, K, d, decay(0, d))));
  }
  Matrix(a.state, value, K, V, a.state_v_first).read(state.values);
  Floats column(static_cast<std::size_t>(K));
  for (int64_t j = 0; j < V; ++j) {
    const auto at = [&](int64_t d) -> float& { return column[static_cast<std::size_t>(d)]; };
    for (int64_t d = 0; d < K; ++d) at(d) = state(d, j) * decay(0, d);
    const float r = v(0, j) - column_sum(column, k.values, a.state_v_first);
    for (int64_t d = 0; d < K; ++d) state(d, j) = at(d) = std::fma(beta * k(0, d), r, at(d));
    set(a.out, value, j, column_sum(column, q.values, a.state_v_first));
  }
  Matrix(a.state_out, value, K, V, a.state_v_first).write(state.values);
}

struct Single {
  using Number = float;
  static float exp(float x) { return exp32(x); }
  static float sigmoid(float x) { return sigmoid32(x); }
  static float softplus(float x) { return softplus32(x); }
  static float flushed(float x) { return registry::flushed(x); }
};

}  // namespace

bool kda_fwd_rule(const RuleQuery& q) {
  const bool segments = q.arithmetic == "fma32/kda/seg4096";
  if (!segments && q.arithmetic != "fma32/kda") return false;
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const KdaFwd*>(q.slots);
  const Sizes z = sizes_of(a);
  for (int64_t n = 0; n < z.sequences; ++n)
    for (int64_t hv = 0; hv < z.value_heads; ++hv) forward(a, z, n, hv, segments);
  return true;
}

bool kda_decode_rule(const RuleQuery& q) {
  if (q.arithmetic != "fma32/kda") return false;
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const KdaDecode*>(q.slots);
  for (int64_t b = 0; b < a.q.dim(0); ++b)
    for (int64_t hv = 0; hv < a.v.dim(1); ++hv) decode(a, b, hv);
  return true;
}

bool kda_step_rule(const RuleQuery& q) {
  if (q.arithmetic != "fma32/kda") return false;
  const FloatGuard guard;
  return kda_step::Steps<Single>(*reinterpret_cast<const KdaStep*>(q.slots)).run();
}

bool kda_gate_rule(const RuleQuery& q) {
  if (q.arithmetic != "fma32/kda") return false;
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const KdaGate*>(q.slots);
  const Rows g(a.g);
  const int64_t heads = a.g.dim(-2);
  for (int64_t row = 0; row < g.count(); ++row)
    for (int64_t d = 0; d < g.width(); ++d)
      set(a.out, row, d, log_decay(a, row % heads, g.width(), d, static_cast<float>(g.get(row, d))));
  return true;
}

}  // namespace rlk::registry
