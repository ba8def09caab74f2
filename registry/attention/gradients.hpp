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
  Visible v{0, s.q_len};
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
inline int64_t key_row(const AttentionBwd& a, const Sequence& s, int64_t j) {
  return a.cu_k ? integer(a.cu_k, s.n) + j : s.n * a.k.dim(1) + j;
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
  explicit TrueGradients(const AttentionBwd& a);
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
    double lse, delta;
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

  const AttentionBwd& a_;
  const Sequences<AttentionBwd> all_;
  const int64_t group_;
  const double scale_;
  Kept<Query> queries_;
  Kept<Key> keys_;
};

}  // namespace rlk::registry::attention
