// Gradients of one query and of one key in fp64, for the reference and for samples of large calls.
#pragma once

#include <optional>
#include <vector>

#include "registry/attention/rows.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry::attention {

// The queries of a sequence that see a key: [first, last).
template <class Args>
Visible seen_by(const Args& a, const Sequence& s, int64_t j) {
  Visible v{0, j < s.kv_len ? s.q_len : 0};
  const int64_t offset = s.kv_len - s.q_len;
  if (a.causal) v.first = std::max<int64_t>(0, j - offset);
  if (a.window > 0 && a.window < s.q_len + offset - j) v.last = j - offset + a.window;
  return v;
}

// [.., Hq] of a query and head.
inline double scalar(const In& t, const Sequence& s, int64_t i, int64_t head) {
  const int64_t token = t.rank() == 2 ? (s.q_begin + i) * t.stride(0) : s.n * t.stride(0) + i * t.stride(1);
  return load(t.dtype(), t.data<char>(), token + head * t.stride(-1));
}

// The row of k [.., Hkv] flattened that key j of a sequence is.
inline int64_t key_row(const AttentionBwd& a, const Sequences<AttentionBwd>& all, const Sequence& s,
                       int64_t j) {
  return a.cu_k ? all.key_token(s, j) : s.n * a.k.dim(1) + j;
}

// All rows of one head width, each read once, when it is first asked for.
template <class Row>
class Kept {
 public:
  explicit Kept(int64_t rows) : rows_(static_cast<std::size_t>(rows)) {}
  template <class Make>
  const Row& get(int64_t row, Make make) {
    auto& at = rows_[static_cast<std::size_t>(row)];
    if (!at) at = make();
    return *at;
  }

 private:
  std::vector<std::optional<Row>> rows_;
};

class TrueGradients {
 public:
  // magnitudes: of all sums but delta and d_sink, those of their terms' magnitudes.
  explicit TrueGradients(const AttentionBwd& a, bool magnitudes = false);
  const Sequences<AttentionBwd>& sequences() const { return all_; }

  std::vector<double> d_q(const Sequence& s, int64_t i, int64_t head);
  struct OfKey {
    std::vector<double> d_k, d_v;
  };
  OfKey d_kv(const Sequence& s, int64_t j, int64_t kv_head);
  double d_sink(int64_t head);

 private:
  struct Query {
    std::vector<double> q, d_out;
    double lse, delta, terms;  // terms: of delta, in magnitude
  };
  struct Key {
    std::vector<double> k, v;
  };
  struct Pair {
    double p, ds;
  };
  const Query& query(const Sequence& s, int64_t i, int64_t head);
  const Key& key(const Sequence& s, int64_t j, int64_t kv_head);
  Pair pair(const Query& x, const Key& y) const;
  void add(double p, const std::vector<double>& v, std::vector<double>& sum) const;

  const AttentionBwd& a_;
  const Sequences<AttentionBwd> all_;
  const int64_t group_;
  const double scale_;
  const bool magnitudes_;
  Kept<Query> queries_;
  Kept<Key> keys_;
};

// The sums of magnitudes in place of d_q, d_k and d_v, in which they may cancel: what P and dS are off by their rounding to v's
// dtype is relative to these. dS is itself a difference, whose terms count as far as fp32 is finer than that dtype.
int32_t attention_bwd_magnitudes(const rlk_slot* slots, const rlk_host* host);

}  // namespace rlk::registry::attention
