// Calls of qk_norm_rope for its tests: heads as views of one fused product, results that hold NaN, caches that hold something.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace qknr {

using rlk::DType;
using rlk::Tensor;

inline constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

// On 64 bytes, and not a byte more than asked for, as sanitizers like it.
template <class T>
struct On64 {
  using value_type = T;
  On64() = default;
  template <class U>
  explicit On64(const On64<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const On64&) const = default;
};
using Bytes = std::vector<std::byte, On64<std::byte>>;

// Elements, all NaN or drawn.
struct Memory {
  DType type;
  Bytes bytes;

  Memory(std::int64_t count, DType t)
      : type(t), bytes(static_cast<std::size_t>(count * rlk::size_of(t)), std::byte{0xff}) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void set(std::int64_t i, double x) {
    std::byte* at = bytes.data() + i * rlk::size_of(type);
    const auto put = [&](const auto value) { std::memcpy(at, &value, sizeof value); };
    if (type == DType::i64)
      put(static_cast<std::int64_t>(x));
    else if (type == DType::i32)
      put(static_cast<std::int32_t>(x));
    else if (type == DType::f32)
      put(static_cast<float>(x));
    else if (type == DType::f8_e4m3)
      put(rlk::double_to_f8_e4m3(x));
    else
      put(type == DType::bf16 ? rlk::double_to_bf16(x) : rlk::double_to_f16(x));
  }
  Memory& drawn(std::mt19937& random, double deviation = 1) {
    std::normal_distribution<double> normal(0, deviation);
    const auto count = static_cast<std::int64_t>(bytes.size()) / rlk::size_of(type);
    for (std::int64_t i = 0; i < count; ++i) set(i, normal(random));
    return *this;
  }
  Tensor view(std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {},
              std::int64_t first = 0) {
    return Tensor(bytes.data() + first * rlk::size_of(type), std::span(shape), type, {kDLCPU, 0},
                  std::span(strides));
  }
};

// Caches of 8 bits: their factors are none, one for all heads, or one each.
enum class Fp8 { no, plain, one, each };

struct Form {
  const char* name;
  bool norm = true, wide = false, early = false, offset = false, adjacent = false;
  bool keys = true, cached = true, values = true;  // keys: k_out
  std::int64_t pad = 0;                            // elements between rows of the product and of the caches
  Fp8 f8 = Fp8::no;
};
inline constexpr Form kForms[] = {
    {.name = "cached"},
    {.name = "cached alone", .early = true, .offset = true, .adjacent = true, .keys = false},
    {.name = "no norm", .norm = false, .cached = false},
    {.name = "no norm, cached", .norm = false, .adjacent = true, .pad = 8},
    {.name = "wide", .wide = true, .pad = 3},
    {.name = "early", .early = true, .cached = false, .pad = 16},
    {.name = "keys alone", .keys = false, .values = false},
    {.name = "queries alone", .keys = false, .cached = false},
    {.name = "fp8", .f8 = Fp8::each},
    {.name = "fp8, no norm", .norm = false, .adjacent = true, .pad = 8, .f8 = Fp8::plain},
    {.name = "fp8, wide", .wide = true, .keys = false, .pad = 3, .f8 = Fp8::one},
    {.name = "fp8 keys alone", .early = true, .values = false, .f8 = Fp8::each},
};

struct Heads {
  std::int64_t dims, turned, v_dims;
};
inline constexpr Heads kHeads[] = {
    {64, 64, 64}, {128, 128, 128}, {256, 256, 192}, {20, 20, 24},   {96, 32, 40},  {44, 12, 100}, {2, 2, 7},
    {34, 34, 33}, {136, 96, 256},  {16, 16, 16},    {128, 50, 128}, {48, 48, 200}, {40, 24, 135}};

inline constexpr std::int64_t kRows = 50, kPlaces = 31;

struct Case {
  const Form form;
  const Heads size;
  const DType type, cache;
  const std::int64_t tokens, q_heads, k_heads;
  std::vector<std::int64_t> slot;
  std::int64_t row, step, value_step;  // of the product; heads of the caches
  Memory product, q_out, k_out, k_cache, v_cache, cos, sin, positions, slots, q_weight, k_weight, k_factors,
      v_factors;
  const Bytes k_before, v_before;

  // With so many heads, or drawn.
  Case(const Form& f, const Heads& h, DType t, std::int64_t tokens_, std::mt19937& random,
       std::int64_t q_ = 0, std::int64_t k_ = 0)
      : form(f),
        size(h),
        type(t),
        cache(f.f8 == Fp8::no ? t : DType::f8_e4m3),
        tokens(tokens_),
        q_heads(q_ ? q_ : 1 + static_cast<std::int64_t>(random() % 6)),
        k_heads(k_ ? k_ : 1 + static_cast<std::int64_t>(random() % 3)),
        slot(places(tokens, random)),
        row(q_heads * h.dims + k_heads * (h.dims + h.v_dims) + f.pad),
        step(h.dims + f.pad),
        value_step(h.v_dims + f.pad),
        product(tokens * row, t),
        q_out(tokens * q_heads * step, t),
        k_out(tokens * k_heads * h.dims, t),
        k_cache(kPlaces * k_heads * step, cache),
        v_cache(kPlaces * k_heads * value_step, cache),
        cos(kRows * h.turned / 2, f.wide ? t : DType::f32),
        sin(kRows * h.turned / 2, f.wide ? t : DType::f32),
        positions(tokens, f.wide ? DType::i64 : DType::i32),
        slots(tokens, f.wide ? DType::i32 : DType::i64),
        q_weight(h.dims, f.wide ? DType::f32 : t),
        k_weight(h.dims, f.wide ? DType::f32 : t),
        k_factors(f.f8 == Fp8::each ? k_heads : 1, DType::f32),
        v_factors(f.f8 == Fp8::each ? k_heads : 1, DType::f32),
        k_before(k_cache.drawn(random).bytes),
        v_before(v_cache.drawn(random).bytes) {
    product.drawn(random, 2), cos.drawn(random), sin.drawn(random);
    q_weight.drawn(random), k_weight.drawn(random);
    // From 1 / 300, which takes some elements beyond what fp8 holds, to 3.
    for (Memory* factors : {&k_factors, &v_factors})
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(factors->bytes.size()) / 4; ++i)
        factors->set(i, std::pow(30.0, static_cast<double>(random() % 1000) / 500 - 1) / 10);
    // A NaN that is not the canonical one, where dims are copied.
    if (!f.norm && h.turned < h.dims)
      std::fill_n(product.bytes.data() + h.turned * rlk::size_of(t), rlk::size_of(t), std::byte{0xff});
    for (std::int64_t i = 0; i < tokens; ++i) {
      positions.set(i, static_cast<double>(random() % kRows));
      slots.set(i, static_cast<double>(slot[static_cast<std::size_t>(i)]));
    }
  }

  Tensor q() { return product.view({tokens, q_heads, size.dims}, {row, size.dims, 1}); }
  Tensor k() { return product.view({tokens, k_heads, size.dims}, {row, size.dims, 1}, q_heads * size.dims); }
  Tensor v() {
    return product.view({tokens, k_heads, size.v_dims}, {row, size.v_dims, 1},
                        (q_heads + k_heads) * size.dims);
  }
  Tensor keys() { return k_cache.view({kPlaces, k_heads, size.dims}, {k_heads * step, step, 1}); }
  Tensor values() {
    return v_cache.view({kPlaces, k_heads, size.v_dims}, {k_heads * value_step, value_step, 1});
  }
  void forget() {
    k_cache.bytes = k_before, v_cache.bytes = v_before;
    for (Memory* m : {&q_out, &k_out}) std::fill(m->bytes.begin(), m->bytes.end(), std::byte{0xff});
  }

 private:
  // Different places, but for tokens that have none.
  static std::vector<std::int64_t> places(std::int64_t tokens, std::mt19937& random) {
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < kPlaces; ++i) all.push_back(i);
    std::shuffle(all.begin(), all.end(), random);
    std::vector<std::int64_t> some;
    for (std::int64_t i = 0; i < tokens; ++i)
      some.push_back(i % 5 == 3                   ? -1 - i
                     : i % 5 == 4 || i >= kPlaces ? kPlaces + i
                                                  : all[static_cast<std::size_t>(i)]);
    return some;
  }
};

// The call's tensors, which its arguments point to.
struct Tensors {
  Tensor q, k, v, cos, sin, positions, slots, q_weight, k_weight, k_factors, v_factors, keys, values, q_out,
      k_out;

  explicit Tensors(Case& c)
      : q(c.q()),
        k(c.k()),
        v(c.v()),
        cos(c.cos.view({kRows, c.size.turned / 2})),
        sin(c.sin.view({kRows, c.size.turned / 2})),
        positions(c.positions.view({c.tokens})),
        slots(c.slots.view({c.tokens})),
        q_weight(c.q_weight.view({c.size.dims})),
        k_weight(c.k_weight.view({c.size.dims})),
        k_factors(c.k_factors.view({c.form.f8 == Fp8::each ? c.k_heads : 1})),
        v_factors(c.v_factors.view({c.form.f8 == Fp8::each ? c.k_heads : 1})),
        keys(c.keys()),
        values(c.values()),
        q_out(c.q_out.view({c.tokens, c.q_heads, c.size.dims}, {c.q_heads * c.step, c.step, 1})),
        k_out(c.k_out.view({c.tokens, c.k_heads, c.size.dims})) {}

  rlk::QkNormRope call(const Form& f) {
    rlk::QkNormRope a{.q = q, .k = k, .cos = cos, .sin = sin, .positions = positions, .q_out = q_out};
    if (f.norm) a.q_weight = q_weight, a.k_weight = k_weight;
    if (f.cached) a.slots = slots, a.k_cache = keys;
    if (f.cached && f.values) a.v = v, a.v_cache = values;
    if (f.f8 > Fp8::plain) a.k_scale = k_factors;
    if (f.f8 > Fp8::plain && f.values) a.v_scale = v_factors;
    if (f.keys) a.k_out = k_out;
    a.eps = 1e-5;
    a.weight_offset = f.offset;
    if (f.early) a.cast = rlk::QkNormRope::Cast::early;
    if (f.adjacent) a.pairing = rlk::QkNormRope::Pairing::adjacent;
    return a;
  }
};

}  // namespace qknr
