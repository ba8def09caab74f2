// What a deliberate error is written with: elements of tensors, the library's own results, and a table's entries.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mutants.hpp"
#include "rlk/backend.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "rlk/resolve.hpp"

namespace rlk {
// Found in whoever loads the plugin; the program that only looks at it has none and calls nothing.
[[gnu::weak]] Status run_slots(std::string_view op, const rlk_slot* slots, const Options& options);
}  // namespace rlk

namespace rlk::mutants {

// ---- elements, whatever dtype, rank and strides

inline double load(DType t, const void* p, int64_t i) {
  if (t == DType::boolean || t == DType::u8) return static_cast<const uint8_t*>(p)[i];
  if (t == DType::f8_e4m3) return f8_e4m3_to_float(static_cast<const uint8_t*>(p)[i]);
  if (t == DType::bf16) return bf16_to_float(static_cast<const uint16_t*>(p)[i]);
  if (t == DType::f16) return f16_to_float(static_cast<const uint16_t*>(p)[i]);
  if (t == DType::f32) return static_cast<const float*>(p)[i];
  if (t == DType::i32) return static_cast<const int32_t*>(p)[i];
  return static_cast<double>(static_cast<const int64_t*>(p)[i]);
}
inline void store(DType t, void* p, int64_t i, double x) {
  if (t == DType::bf16)
    static_cast<uint16_t*>(p)[i] = double_to_bf16(x);
  else if (t == DType::f16)
    static_cast<uint16_t*>(p)[i] = double_to_f16(x);
  else
    static_cast<float*>(p)[i] = static_cast<float>(x);
}
// Element `n` in row-major order.
template <bool W>
int64_t place(const View<W>& t, int64_t n) {
  int64_t at = 0;
  for (int32_t i = t.rank() - 1; i >= 0; --i) {
    at += n % t.dim(i) * t.stride(i);
    n /= t.dim(i);
  }
  return at;
}
template <bool W>
double get(const View<W>& t, int64_t n) {
  return load(t.dtype(), t.template data<char>(), place(t, n));
}
inline void put(const Out& t, int64_t n, double x) { store(t.dtype(), t.data<char>(), place(t, n), x); }
// A visible error.
inline void spoil(const Out& t, int64_t n) {
  if (t && n >= 0 && n < t.numel()) put(t, n, 1.5 * get(t, n) + 0.25);
}
inline void spoil_all(const Out& t) {
  for (int64_t n = 0; n < t.numel(); ++n) spoil(t, n);
}
template <class T>
uintptr_t address(const T& t) {
  return reinterpret_cast<uintptr_t>(t.template data<char>());
}
template <bool W>
bool any(const View<W>& t, double value) {
  for (int64_t n = 0; t && n < t.numel(); ++n)
    if (get(t, n) == value) return true;
  return false;
}

// ---- the honest part

template <class Args>
rlk_code honest(const Args& a, const char* backend) {
  if (!&run_slots) return RLK_BACKEND_ERROR;
  return run_slots(Args::kName, reinterpret_cast<const rlk_slot*>(&a), {.backend = backend}).code();
}
template <class Args>
inline constexpr const char* kBase = "native";
template <>
inline constexpr const char* kBase<LmHead> = "native.golden";
template <>
inline constexpr const char* kBase<LmHeadBwd> = "native.golden";
template <>
inline constexpr const char* kBase<KdaFwd> = "native.fma32";
template <>
inline constexpr const char* kBase<KdaBwd> = "native.fma32";
template <>
inline constexpr const char* kBase<KdaStep> = "native.fma32";
template <>
inline constexpr const char* kBase<RmsNorm> = "native.rows";
template <>
inline constexpr const char* kBase<RmsNormBwd> = "native.rows";
template <>
inline constexpr const char* kBase<Swiglu> = "native.tiles";
template <>
inline constexpr const char* kBase<SwigluBwd> = "native.tiles";
template <>
inline constexpr const char* kBase<RatioKl> = "native.tokens";
template <>
inline constexpr const char* kBase<RatioKlBwd> = "native.tokens";
template <>
inline constexpr const char* kBase<TpSum> = "native.tiles";
template <>
inline constexpr const char* kBase<Sample> = "native.rows";
template <>
inline constexpr const char* kBase<SampleVerify> = "native.rows";
template <>
inline constexpr const char* kBase<Embedding> = "native.rows";
template <>
inline constexpr const char* kBase<EmbeddingBwd> = "native.rows";
template <>
inline constexpr const char* kBase<PolicyLoss> = "native.sequences";

template <>
inline constexpr const char* kBase<Logp> = "native.tiles";
template <>
inline constexpr const char* kBase<LogpBwd> = "native.tiles";
template <>
inline constexpr const char* kBase<LinearLogp> = "native.kb256";
template <>
inline constexpr const char* kBase<LinearLogpBwd> = "native.kb256";

template <class Args, class Break>
rlk_code run(const Args& a, const Call& call) {
  if (const rlk_code code = honest(a, kBase<Args>)) return code;
  Break{}(a, call);
  return RLK_OK;
}

template <class Args, class By>
rlk_code by(const Args& a, const Call& call) {
  return By{}(a, call);
}

struct Entry {
  rlk_implementation implementation;
  Mutant mutant;
};
inline constexpr uint32_t kAll = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT;

template <class Args, class Break>
constexpr Entry entry(Break, const char* id, const char* arithmetic, const char* promise, const char* error,
                      const char* where, uint32_t dtypes = RLK_F32, const char* transform = nullptr) {
  return {implement<Args, run<Args, Break>>({.id = id,
                                             .doc = "a deliberate error",
                                             .priority = -1000,
                                             .arithmetic = arithmetic,
                                             .dtypes = dtypes,
                                             .traits = kAll}),
          {id, promise, error, Args::kName, where, transform}};
}

// The same without an honest part: `by` is all there is.
template <class Args, class By>
constexpr Entry alone(By, const char* id, const char* arithmetic, const char* promise, const char* error,
                      const char* where, uint32_t dtypes) {
  return {implement<Args, by<Args, By>>({.id = id,
                                         .doc = "a deliberate error",
                                         .priority = -1000,
                                         .arithmetic = arithmetic,
                                         .dtypes = dtypes,
                                         .traits = kAll}),
          {id, promise, error, Args::kName, where}};
}

// Of one file: deliberate errors, and what they are made of without one.
struct Broken {
  std::span<const Entry> errors, controls;
};
Broken hopper();    // attention and its gradients under the ids of Hopper's ex2
Broken segments();  // kda_fwd by segments

// A tensor's numbers as a dense fp32 one.
struct Wide {
  std::vector<float> numbers;
  Tensor tensor;
  template <bool W>
  explicit Wide(const View<W>& t) : numbers(static_cast<std::size_t>(t.numel())) {
    for (std::size_t n = 0; n < numbers.size(); ++n)
      numbers[n] = static_cast<float>(get(t, static_cast<int64_t>(n)));
    tensor = Tensor(numbers.data(), std::span(t->shape, static_cast<std::size_t>(t.rank())), DType::f32);
  }
};

// The integer of row `n`.
template <class T>
T& integer(const Out& t, int64_t n) {
  return t.data<T>()[n * t.stride(0)];
}

}  // namespace rlk::mutants

// A break in its own arithmetic, after the honest part: `a` are the arguments.
#define WRONG(Args, name, promise, where, error, ...)                                            \
  entry<Args>([]([[maybe_unused]] const Args& a, [[maybe_unused]] const Call& call) __VA_ARGS__, \
              "mutant." #name, "mutant/" #name, promise, error, where)
// The same under the name of an arithmetic that has a written rule.
#define LIES(Args, name, arithmetic, where, error, ...)                                          \
  entry<Args>([]([[maybe_unused]] const Args& a, [[maybe_unused]] const Call& call) __VA_ARGS__, \
              "mutant." #name, arithmetic, "equal bits", error, where)

// The same in bf16, where roundings show.
#define LIES_BF16(Args, name, arithmetic, where, error, ...)                                     \
  entry<Args>([]([[maybe_unused]] const Args& a, [[maybe_unused]] const Call& call) __VA_ARGS__, \
              "mutant." #name, arithmetic, "equal bits", error, where, RLK_BF16)

// An op whose first argument are ids.
#define WRONG_BY_IDS(Args, name, arithmetic, promise, where, error, ...)                         \
  entry<Args>([]([[maybe_unused]] const Args& a, [[maybe_unused]] const Call& call) __VA_ARGS__, \
              "mutant." #name, arithmetic, promise, error, where, RLK_I32)
