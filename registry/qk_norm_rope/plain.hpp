// qk_norm_rope as the page has it, in plain loops. An Arithmetic says what numbers are and how a norm sums them.
#pragma once

#include <cstring>
#include <vector>

#include "registry/factors.hpp"
#include "registry/reference.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry::qk_norm_rope {

// One element of [tokens or slots, heads, dims].
template <class View>
char* element(const View& v, int64_t row, int64_t head, int64_t i) {
  const int64_t at = row * v.stride(0) + head * v.stride(1) + i * v.stride(2);
  return const_cast<char*>(v.template data<char>()) + at * size_of(v.dtype());
}

template <class Arithmetic>
class PlainHeads {
  using Number = typename Arithmetic::Number;
  using Head = std::vector<Number>;

 public:
  explicit PlainHeads(const QkNormRope& a) : a_(a), cos_(a.cos), sin_(a.sin) {}

  void run() const {
    for (int64_t t = 0; t < a_.q.dim(0); ++t) {
      for (int64_t h = 0; h < a_.q.dim(1); ++h) rotate(a_.q, a_.q_weight, t, h, a_.q_out, InOut());
      for (int64_t h = 0; h < a_.k.dim(1); ++h) rotate(a_.k, a_.k_weight, t, h, a_.k_out, a_.k_cache);
      const int64_t slot = a_.slots ? at(a_.slots, t) : -1;
      for (int64_t h = 0; a_.v && inside(slot, a_.v_cache) && h < a_.v.dim(1); ++h)
        for (int64_t i = 0; i < a_.v.dim(2); ++i) value(t, h, i, slot);
    }
  }

 private:
  static int64_t at(const In& list, int64_t i) {
    return static_cast<int64_t>(load(list.dtype(), list.data<char>(), i));
  }
  static bool inside(int64_t slot, const InOut& cache) { return cache && slot >= 0 && slot < cache.dim(0); }
  static bool is_fp8(const InOut& cache) { return cache && cache.dtype() == DType::f8_e4m3; }

  static void set(DType type, void* to, double x) {
    store(type, to, 0, type == DType::f32 ? canonical(static_cast<float>(x)) : x);
  }
  // A number of q's dtype, in an fp8 cache.
  static void keep(double x, const In& factors, const InOut& cache, int64_t slot, int64_t h, int64_t i) {
    store(cache.dtype(), element(cache, slot, h, i), 0, static_cast<float>(x) * (1 / factor_of(factors, h)));
  }
  // Bit for bit, where the dtype is the same.
  template <class To>
  static void copy(const In& from, int64_t t, int64_t h, int64_t i, const To& to, int64_t row) {
    const char* x = element(from, t, h, i);
    if (from.dtype() == to.dtype())
      std::memcpy(element(to, row, h, i), x, static_cast<std::size_t>(size_of(to.dtype())));
    else
      store(to.dtype(), element(to, row, h, i), 0, load(from.dtype(), x, 0));
  }

  void value(int64_t t, int64_t h, int64_t i, int64_t slot) const {
    if (is_fp8(a_.v_cache))
      keep(load(a_.v.dtype(), element(a_.v, t, h, i), 0), a_.v_scale, a_.v_cache, slot, h, i);
    else
      copy(a_.v, t, h, i, a_.v_cache, slot);
  }

  void normalise(const In& weight, Head& x) const {
    const DType type = a_.q.dtype();
    const Number r = Arithmetic::reciprocal(x, a_.eps);
    for (std::size_t i = 0; i < x.size(); ++i) {
      Number y = x[i] * r,
             w = static_cast<Number>(load(weight.dtype(), weight.data<char>(), static_cast<int64_t>(i)));
      if (a_.weight_offset) w = 1 + w;
      if (a_.cast == QkNormRope::Cast::early) y = static_cast<Number>(round_to(type, y));
      x[i] = static_cast<Number>(round_to(type, y * w));
    }
  }

  void turn(int64_t token, Head& x) const {
    const int64_t row = at(a_.positions, token), pairs = cos_.width();
    const bool adjacent = a_.pairing == QkNormRope::Pairing::adjacent;
    for (int64_t p = 0; p < pairs; ++p) {
      const auto c = static_cast<Number>(cos_.get(row, p)), s = static_cast<Number>(sin_.get(row, p));
      Number& first = x[static_cast<std::size_t>(adjacent ? 2 * p : p)];
      Number& second = x[static_cast<std::size_t>(adjacent ? 2 * p + 1 : p + pairs)];
      const Number a = first, b = second;
      first = std::fma(a, c, -(b * s));
      second = std::fma(b, c, a * s);
    }
  }

  void rotate(const In& from, const In& weight, int64_t t, int64_t h, const Out& out,
              const InOut& cache) const {
    Head x(static_cast<std::size_t>(from.dim(2)));
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<Number>(load(from.dtype(), element(from, t, h, static_cast<int64_t>(i)), 0));
    if (weight) normalise(weight, x);
    turn(t, x);
    const int64_t slot = a_.slots ? at(a_.slots, t) : -1;
    const auto put = [&](const auto& to, int64_t row) {
      for (int64_t i = 0; i < from.dim(2); ++i)
        if (weight || i < 2 * cos_.width())
          set(to.dtype(), element(to, row, h, i), x[static_cast<std::size_t>(i)]);
        else
          copy(from, t, h, i, to, row);
    };
    if (out) put(out, t);
    if (!inside(slot, cache)) return;
    if (!is_fp8(cache)) return put(cache, slot);
    for (std::size_t i = 0; i < x.size(); ++i)
      keep(round_to(from.dtype(), x[i]), a_.k_scale, cache, slot, h, static_cast<int64_t>(i));
  }

  const QkNormRope& a_;
  const Rows cos_, sin_;
};

}  // namespace rlk::registry::qk_norm_rope
