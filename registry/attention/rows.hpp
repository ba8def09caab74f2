// The sequences of a call of attention, for the reference and the written rule: which keys a query sees, and where they lie.
#pragma once

#include <algorithm>
#include <vector>

#include "registry/factors.hpp"
#include "registry/reference.hpp"

namespace rlk::registry::attention {

inline int64_t integer(const In& t, int64_t i, int64_t j = 0) {
  const int64_t at = i * t.stride(0) + (t.rank() > 1 ? j * t.stride(1) : 0);
  return static_cast<int64_t>(load(t.dtype(), t.data<char>(), at));
}

// Of sequence n: queries [q_begin, q_begin + q_len) of the packed ones, or all of row n; kv_len keys, of which the call has
// [first, last). The first `shared` of them are those of sequence `prefix`, where that is not -1.
struct Sequence {
  int64_t n, q_begin, q_len, kv_len, first, last, prefix = -1, shared = 0;
};

// The keys that one query sees: [first, last) by absolute position.
struct Visible {
  int64_t first, last;
};

template <class Args>
class Sequences {
  static constexpr bool kOfPart = requires(const Args& a) { a.k_first; };
  static constexpr bool kCached = requires(const Args& a) { a.k_scale; };
  static constexpr bool kOfPrefix = requires(const Args& a) { a.prefix_of; };

 public:
  explicit Sequences(const Args& a) : a_(a) {
    const int64_t count = a.q.numel() == 0 ? 0 : a.cu_q ? a.cu_q.dim(0) - 1 : a.q.dim(0);
    for (int64_t n = 0; n < count; ++n) {
      Sequence s{n, 0, a.q.dim(1), a.k.dim(1), 0, 0};
      if (a.cu_q) s.q_begin = integer(a.cu_q, n), s.q_len = integer(a.cu_q, n + 1) - s.q_begin;
      if constexpr (kOfPrefix) {
        if (a.prefix_of) s.prefix = integer(a.prefix_of, n);
        if (s.prefix >= 0 && s.prefix < n) s.shared = all_[static_cast<std::size_t>(s.prefix)].kv_len;
      }
      if (a.cu_k) s.kv_len = room(s);
      if (a.kv_len) s.kv_len = integer(a.kv_len, n);
      s.last = s.kv_len;
      if constexpr (kOfPart) {
        s.first = integer(a.k_first, n);
        const int64_t last = a.k_last ? std::min(s.kv_len, integer(a.k_last, n)) : s.kv_len;
        s.last = s.first + std::clamp<int64_t>(last - s.first, 0, std::max<int64_t>(room(s), 0));
        if (a.k_last && last > s.last) fits_ = false;
      }
      all_.push_back(s);
    }
  }
  const std::vector<Sequence>& all() const { return all_; }
  // Keys of a sequence that the tensors have room for.
  int64_t room(const Sequence& s) const {
    if (a_.cu_k) return s.shared + integer(a_.cu_k, s.n + 1) - integer(a_.cu_k, s.n);
    return a_.k.dim(1) * (a_.block_table ? a_.block_table.dim(1) : 1);
  }

  // Whether bounds, lengths and pages stay inside the tensors.
  bool valid() const {
    if (all_.empty()) return true;
    if (!fits_) return false;
    if ((a_.cu_q && integer(a_.cu_q, 0) != 0) || (a_.cu_k && integer(a_.cu_k, 0) != 0)) return false;
    for (const Sequence& s : all_) {
      if (s.q_len < 0 || s.kv_len < 0) return false;
      if (s.prefix < -1 || s.prefix >= s.n) return false;
      if (s.prefix >= 0 && all_[static_cast<std::size_t>(s.prefix)].prefix != -1) return false;
      if (a_.cu_q && s.q_begin + s.q_len > a_.q.dim(0)) return false;
      if (a_.cu_k) {
        const int64_t begin = integer(a_.cu_k, s.n), end = integer(a_.cu_k, s.n + 1);
        if (begin > end || end > a_.k.dim(0)) return false;
      }
      if constexpr (kOfPart) {
        if (a_.split == 0 ? s.first != 0 : s.first < 0 || s.first % a_.split != 0) return false;
        if (s.first < s.last && s.last != s.kv_len && (a_.split == 0 || s.last % a_.split != 0)) return false;
      } else if (s.kv_len > room(s)) {
        return false;
      }
      if (!a_.block_table) continue;
      const int64_t keys = s.last - s.first, used = keys / a_.k.dim(1) + (keys % a_.k.dim(1) != 0);
      for (int64_t i = 0; i < used; ++i)
        if (const int64_t page = integer(a_.block_table, s.n, i); page < 0 || page >= a_.k.dim(0))
          return false;
    }
    return true;
  }

  // The row of q [.., Hq] flattened that query i of a sequence is.
  int64_t row(const Sequence& s, int64_t i) const { return a_.cu_q ? s.q_begin + i : s.n * a_.q.dim(1) + i; }

  Visible visible(const Sequence& s, int64_t i) const {
    const int64_t position = s.kv_len - s.q_len + i;
    Visible v{s.first, s.last};
    if (a_.causal) v.last = std::min(s.last, position + 1);
    if (a_.window > 0 && a_.window <= position) v.first = std::max(s.first, position - a_.window + 1);
    return v;
  }

  // The row of packed k [Tk, ..] that holds key j of a sequence.
  int64_t key_token(const Sequence& s, int64_t j) const {
    return j < s.shared ? integer(a_.cu_k, s.prefix) + j : integer(a_.cu_k, s.n) + j - s.shared;
  }
  // The sequences whose queries see keys of s as their first ones: s, and those of which it is the prefix.
  std::vector<Sequence> readers(const Sequence& s) const {
    std::vector<Sequence> readers{s};
    for (const Sequence& other : all_)
      if (other.prefix == s.n) readers.push_back(other);
    return readers;
  }

  // Key or value j of a head as fp64.
  void key(const Sequence& s, int64_t j, int64_t head, std::vector<double>& to) const {
    read(a_.k, place(a_.k, s, j, head), to);
    if constexpr (kCached) widen(a_.k.dtype(), a_.k_scale, head, to);
  }
  void value(const Sequence& s, int64_t j, int64_t head, std::vector<double>& to) const {
    read(a_.v, place(a_.v, s, j, head), to);
    if constexpr (kCached) widen(a_.v.dtype(), a_.v_scale, head, to);
  }
  void query(const In& t, const Sequence& s, int64_t i, int64_t head, std::vector<double>& to) const {
    read(
        t,
        head * t.stride(-2) + (a_.cu_q ? (s.q_begin + i) * t.stride(0) : s.n * t.stride(0) + i * t.stride(1)),
        to);
  }

 private:
  // The element of k or v where a key or value starts.
  int64_t place(const In& t, const Sequence& s, int64_t j, int64_t head) const {
    j -= s.first;
    const int64_t at = head * t.stride(-2);
    if (a_.block_table) {
      const int64_t size = t.dim(1);
      return at + integer(a_.block_table, s.n, j / size) * t.stride(0) + j % size * t.stride(1);
    }
    if (a_.cu_k) return at + key_token(s, j) * t.stride(0);
    return at + s.n * t.stride(0) + j * t.stride(1);
  }
  // What elements of an fp8 cache are as numbers of q's dtype: the product with their factor in fp32, rounded.
  void widen(DType type, const In& factors, int64_t head, std::vector<double>& row) const {
    if (type != DType::f8_e4m3) return;
    const float factor = factor_of(factors, head);
    for (double& x : row) x = round_to(a_.q.dtype(), static_cast<float>(x) * factor);
  }
  static void read(const In& t, int64_t at, std::vector<double>& to) {
    to.resize(static_cast<std::size_t>(t.dim(-1)));
    for (std::size_t d = 0; d < to.size(); ++d)
      to[d] = load(t.dtype(), t.data<char>(), at + static_cast<int64_t>(d));
  }
  const Args& a_;
  std::vector<Sequence> all_;
  bool fits_ = true;  // the keys that are said to be here
};

inline double scale_of(double scale, int64_t d) {
  return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(d));
}

}  // namespace rlk::registry::attention
