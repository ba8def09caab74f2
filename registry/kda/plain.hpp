// kda_step in plain loops over elements, independent of every kernel: in fp64 the reference, in fp32 the written rule of
// fma32/kda. `Math` has the functions that differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "registry/kda/geometry.hpp"
#include "registry/reference.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry::kda_step {

template <class T>
struct Values {
  std::vector<T> list;

  explicit Values(int64_t n = 0) : list(static_cast<std::size_t>(n)) {}
  T& operator[](int64_t i) { return list[static_cast<std::size_t>(i)]; }
  T operator[](int64_t i) const { return list[static_cast<std::size_t>(i)]; }
};

// A token as the recurrence sees it: q scaled, zeros behind K and V.
template <class T>
struct Token {
  Values<T> q, k, v, decay;
  T beta{};
};

// The open chunk of one sequence and value head.
template <class Math>
struct Chunk {
  using T = typename Math::Number;
  static constexpr int64_t kBlock = rlk::kda::kCacheBlock;
  rlk::kda::CacheLayout at;
  Values<T> cache{at.size}, state{at.keys * at.values};  // the state is [K, V]
  int64_t K = at.keys, V = at.values;

  T& key(int64_t i, int64_t d) { return cache[at.k + i * K + d]; }
  T& decay(int64_t i, int64_t d) { return cache[at.decay + i * K + d]; }
  T& tail(int64_t j, int64_t d) { return cache[at.tail + d * at.chunk + j]; }
  T& inverse(int64_t i, int64_t j) { return cache[at.inverse + i * at.chunk + j]; }
  T before(int64_t block, int64_t d) { return block == 0 ? T{1} : cache[at.start + block * K + d]; }

  // The state after a full chunk.
  void close() {
    for (int64_t d = 0; d < K; ++d) {
      T total = before((at.chunk - kBlock) / kBlock, d), to_end = 1;
      for (int64_t i = at.chunk - kBlock; i < at.chunk; ++i) total = Math::flushed(total * decay(i, d));
      Values<T> k_end(at.chunk);
      for (int64_t i = at.chunk - 1; i >= 0; --i) {
        k_end[i] = key(i, d) * to_end;
        to_end = Math::flushed(to_end * decay(i, d));
      }
      for (int64_t j = 0; j < V; ++j) {
        T sum = state[d * V + j] * total;
        for (int64_t i = 0; i < at.chunk; ++i) sum = std::fma(k_end[i], cache[at.n + i * V + j], sum);
        state[d * V + j] = sum;
      }
    }
  }

  // Row i of the chunk; returns out.
  Values<T> row(int64_t i, const Token<T>& t) {
    const int64_t first = i / kBlock * kBlock;
    Values<T> k_start(K), q_start(K), k_block(K), q_block(K), out(V);
    for (int64_t d = 0; d < K; ++d) {
      key(i, d) = t.k[d], decay(i, d) = t.decay[d];
      T from_start = before(first / kBlock, d), in_block = 1;
      for (int64_t m = first; m <= i; ++m) {
        from_start = Math::flushed(from_start * decay(m, d));
        in_block = m == first ? decay(m, d) : Math::flushed(in_block * decay(m, d));
      }
      k_start[d] = -(t.k[d] * from_start), q_start[d] = t.q[d] * from_start;
      k_block[d] = t.k[d] * in_block, q_block[d] = t.q[d] * in_block;
    }
    Values<T> M(i + 1), P(i + 1);
    for (int64_t j = 0; j <= i; ++j)
      for (int64_t d = 0; d < K; ++d) {
        const T met = key_at(i, j, d);
        M[j] = std::fma(j < first ? k_block[d] : t.k[d], met, M[j]);
        P[j] = std::fma(j < first ? q_block[d] : t.q[d], met, P[j]);
      }
    for (int64_t j = 0; j < first + kBlock; ++j) {
      T sum = j == i ? T{1} : T{0};
      for (int64_t m = j; m < i; ++m) sum = std::fma(-(t.beta * M[m]), inverse(m, j), sum);
      inverse(i, j) = sum;
    }
    for (int64_t j = 0; j < V; ++j) {
      T x = t.v[j], n = 0, o = 0;
      for (int64_t d = 0; d < K; ++d) {
        x = std::fma(k_start[d], state[d * V + j], x);
        o = std::fma(q_start[d], state[d * V + j], o);
      }
      cache[at.y + i * V + j] = x * t.beta;
      for (int64_t m = 0; m <= i; ++m) n = std::fma(inverse(i, m), cache[at.y + m * V + j], n);
      cache[at.n + i * V + j] = n;
      for (int64_t m = 0; m <= i; ++m) o = std::fma(P[m], cache[at.n + m * V + j], o);
      out[j] = o;
    }
    if (i + 1 == first + kBlock && i + 1 < at.chunk) close_block(first);
    return out;
  }

 private:
  // Key j as row i meets it: decayed row by row inside i's block, else from its block's end over the blocks between.
  T key_at(int64_t i, int64_t j, int64_t d) {
    const int64_t block = i / kBlock;
    if (j / kBlock < block) {
      T met = tail(j, d);
      for (int64_t b = j / kBlock + 1; b < block; ++b) met = met * cache[at.whole + b * K + d];
      return met;
    }
    T met = key(j, d);
    for (int64_t m = j + 1; m <= i; ++m) met = met * decay(m, d);
    return met;
  }

  void close_block(int64_t first) {
    for (int64_t d = 0; d < K; ++d) {
      T from_start = before(first / kBlock, d), in_block = 1, to_bound = 1;
      for (int64_t m = first; m < first + kBlock; ++m) {
        from_start = Math::flushed(from_start * decay(m, d));
        in_block = m == first ? decay(m, d) : Math::flushed(in_block * decay(m, d));
      }
      cache[at.start + (first / kBlock + 1) * K + d] = from_start;
      cache[at.whole + first / kBlock * K + d] = in_block;
      for (int64_t m = first + kBlock - 1; m >= first; --m) {
        tail(m, d) = key(m, d) * to_bound;
        to_bound = Math::flushed(to_bound * decay(m, d));
      }
    }
  }
};

// All tokens of a call.
template <class Math>
class Steps {
  using T = typename Math::Number;

 public:
  explicit Steps(const KdaStep& args) : a(args) {}

  bool run() {
    for (int64_t n = 0; n < sequences; ++n) {
      const auto rows = static_cast<int64_t>(load(a.rows.dtype(), a.rows.data<void>(), n)),
                 length = end(n) - begin(n);
      if (rows < 0 || rows > (a.cache ? a.chunk_size : 0) || length < 0 ||
          rows % a.chunk_size + length > a.chunk_size)
        return false;
      for (int64_t hv = 0; hv < value_heads; ++hv) one(n, hv, rows, length);
    }
    return true;
  }

 private:
  const KdaStep& a;
  int64_t tokens = a.q.dim(1), heads = a.q.dim(2), value_heads = a.v.dim(2), k_dim = a.q.dim(3),
          v_dim = a.v.dim(3), sequences = a.rows.dim(0);
  rlk::kda::CacheLayout at = rlk::kda::cache_layout(k_dim, v_dim, a.chunk_size);

  int64_t begin(int64_t n) const { return a.cu_seqlens ? a.cu_seqlens.data<int64_t>()[n] : n * tokens; }
  int64_t end(int64_t n) const {
    return a.cu_seqlens ? a.cu_seqlens.data<int64_t>()[n + 1] : (n + 1) * tokens;
  }

  void one(int64_t n, int64_t hv, int64_t rows, int64_t length) {
    Chunk<Math> chunk{at};
    const int64_t which = n * value_heads + hv;
    const Rows state(a.state);
    const auto row_of = [&](int64_t d, int64_t j) {
      return which * (a.state_v_first ? v_dim : k_dim) + (a.state_v_first ? j : d);
    };
    for (int64_t d = 0; d < k_dim; ++d)
      for (int64_t j = 0; j < v_dim; ++j)
        chunk.state[d * at.values + j] = static_cast<T>(state.get(row_of(d, j), a.state_v_first ? d : j));
    for (int64_t i = 0; a.cache && i < at.size; ++i)
      chunk.cache[i] = static_cast<T>(Rows(a.cache).get(which, i));
    if (rows == a.chunk_size) {
      chunk.close();
      rows = 0;
      for (int64_t d = 0; d < k_dim; ++d)
        for (int64_t j = 0; j < v_dim; ++j)
          state.set(row_of(d, j), a.state_v_first ? d : j, double{chunk.state[d * at.values + j]});
    }
    for (int64_t t = 0; t < length; ++t) {
      const int64_t token = begin(n) + t;
      const Values<T> out = chunk.row(rows + t, token_of(token, hv));
      for (int64_t j = 0; j < v_dim; ++j) Rows(a.out).set(token * value_heads + hv, j, double{out[j]});
    }
    for (int64_t i = 0; a.cache && i < at.size; ++i) Rows(a.cache).set(which, i, double{chunk.cache[i]});
  }

  // A row of q or k, normalised where the call says so.
  template <class View>
  Values<T> key_like(const View& from, int64_t row) const {
    Values<T> x(at.keys);
    for (int64_t d = 0; d < k_dim; ++d) x[d] = static_cast<T>(Rows(from).get(row, d));
    if (!a.qk_l2norm) return x;
    Values<T> chain(16);
    for (int64_t d = 0; d < at.keys; ++d) chain[d % 16] = std::fma(x[d], x[d], chain[d % 16]);
    T squares = 0;
    for (int64_t l = 0; l < 16; ++l) squares += chain[l];
    const T r = 1 / std::sqrt(squares + static_cast<T>(1e-6));
    for (int64_t d = 0; d < k_dim; ++d)
      x[d] = from.dtype() == DType::f32 ? x[d] * r : static_cast<T>(round_to(from.dtype(), double{x[d] * r}));
    return x;
  }

  T decay(int64_t row, int64_t hv, int64_t d) const {
    const auto raw = static_cast<T>(Rows(a.g).get(row, d));
    T g = raw;
    if (a.gate != KdaStep::Gate::none) {
      const T rate = a.a_log ? Math::exp(static_cast<T>(a.a_log.data<float>()[hv])) : 1;
      const T x = raw + (a.dt_bias ? static_cast<T>(a.dt_bias.data<float>()[hv * k_dim + d]) : 0);
      g = a.gate == KdaStep::Gate::softplus ? -(rate * Math::softplus(x))
                                            : static_cast<T>(a.lower_bound) * Math::sigmoid(rate * x);
    }
    return Math::flushed(Math::exp(g));
  }

  Token<T> token_of(int64_t token, int64_t hv) const {
    const int64_t row = token * value_heads + hv, h = token * heads + hv / (value_heads / heads);
    Token<T> t{key_like(a.q, h), key_like(a.k, h), Values<T>(at.values), Values<T>(at.keys)};
    const auto scale = static_cast<T>(a.scale != 0 ? a.scale : 1 / std::sqrt(static_cast<double>(k_dim)));
    for (int64_t d = 0; d < k_dim; ++d) t.q[d] *= scale, t.decay[d] = decay(row, hv, d);
    for (int64_t j = 0; j < v_dim; ++j) t.v[j] = static_cast<T>(Rows(a.v).get(row, j));
    t.beta = static_cast<T>(Rows(a.beta).get(token, hv));
    if (a.beta_sigmoid) t.beta = Math::sigmoid(t.beta) * (a.allow_neg_eigval ? 2 : 1);
    return t;
  }
};

struct Double {
  using Number = double;
  static double exp(double x) { return std::exp(x); }
  static double sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }
  static double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }
  static double flushed(double x) { return x; }
};

}  // namespace rlk::registry::kda_step
