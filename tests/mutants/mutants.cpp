#include "mutants.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "rlk/backend.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace rlk::mutants {
namespace {

// ---- an honest lm_head to spoil: one fp32 chain over K, strided rows, fp32 or 16-bit results

float load(DType t, const void* p, int64_t i) {
  if (t == DType::bf16) return bf16_to_float(static_cast<const uint16_t*>(p)[i]);
  if (t == DType::f16) return f16_to_float(static_cast<const uint16_t*>(p)[i]);
  return static_cast<const float*>(p)[i];
}
void store(DType t, void* p, int64_t i, float x) {
  if (t == DType::bf16)
    static_cast<uint16_t*>(p)[i] = float_to_bf16(x);
  else if (t == DType::f16)
    static_cast<uint16_t*>(p)[i] = float_to_f16(x);
  else
    static_cast<float*>(p)[i] = x;
}

struct Shape {
  int64_t m, k, v;
};
Shape shape_of(const LmHead& a) { return {a.hidden.dim(0), a.weight.dim(1), a.weight.dim(0)}; }
float hidden(const LmHead& a, int64_t row, int64_t k) {
  return load(a.hidden.dtype(), a.hidden.data<char>(), row * a.hidden.stride(0) + k);
}
float weight(const LmHead& a, int64_t col, int64_t k) {
  return load(a.weight.dtype(), a.weight.data<char>(), col * a.weight.stride(0) + k);
}
void put(const LmHead& a, int64_t row, int64_t col, float x) {
  store(a.out.dtype(), a.out.data<char>(), row * a.out.stride(0) + col, x);
}

// Most of what the mutants compute. Without the instruction each step is a call of the C library.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#  define RLK_FUSED __attribute__((target_clones("fma", "default")))
#else
#  define RLK_FUSED
#endif
RLK_FUSED float chain_f32(const float* x, const float* w, int64_t n) {
  float sum = 0;
  for (int64_t k = 0; k < n; ++k) sum = __builtin_fmaf(x[k], w[k], sum);
  return sum;
}
RLK_FUSED float chain_bf16(const uint16_t* x, const uint16_t* w, int64_t n) {
  float sum = 0;
  for (int64_t k = 0; k < n; ++k) sum = __builtin_fmaf(bf16_to_float(x[k]), bf16_to_float(w[k]), sum);
  return sum;
}
float chain(const LmHead& a, int64_t row, int64_t col, int64_t from, int64_t to) {
  const int64_t x = row * a.hidden.stride(0) + from, w = col * a.weight.stride(0) + from;
  if (a.hidden.dtype() == DType::f32)
    return chain_f32(a.hidden.data<float>() + x, a.weight.data<float>() + w, to - from);
  if (a.hidden.dtype() == DType::bf16)
    return chain_bf16(a.hidden.data<uint16_t>() + x, a.weight.data<uint16_t>() + w, to - from);
  float sum = 0;
  for (int64_t k = from; k < to; ++k) sum = std::fma(hidden(a, row, k), weight(a, col, k), sum);
  return sum;
}
float split(const LmHead& a, int64_t row, int64_t col, int64_t k, int64_t parts) {
  float sum = 0;
  for (int64_t p = 0; p < parts; ++p) sum += chain(a, row, col, k * p / parts, k * (p + 1) / parts);
  return sum;
}
template <class Value>
rlk_code fill(const LmHead& a, Value&& value) {
  const Shape s = shape_of(a);
  for (int64_t row = 0; row < s.m; ++row)
    for (int64_t col = 0; col < s.v; ++col) put(a, row, col, value(row, col, s));
  return RLK_OK;
}
rlk_verdict plain(const LmHead& a, const rlk_request&) {
  if (a.hidden.rank() != 2) return refuse("only rank 2");
  if (a.bias) return refuse("no bias");
  return kAccept;
}

// ---- the errors

rlk_code honest(const LmHead& a, const Call&) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return chain(a, r, c, 0, s.k); });
}
rlk_code split_k_by_m(const LmHead& a, const Call&) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, s.m > 8 ? 1 : 4); });
}
rlk_code bf16_partials(const LmHead& a, const Call&) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) {
    float sum = 0;
    for (int64_t k = 0; k < s.k; k += 16)
      sum = bf16_to_float(float_to_bf16(sum + chain(a, r, c, k, std::min(s.k, k + 16))));
    return sum;
  });
}
rlk_code one_row_path(const LmHead& a, const Call&) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) {
    return s.m == 1 ? split(a, r, c, s.k, 2) : chain(a, r, c, 0, s.k);
  });
}
rlk_code tf32(const LmHead& a, const Call&) {
  const auto cut = [](float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffffe000u); };
  return fill(a, [&](int64_t r, int64_t c, Shape s) {
    float sum = 0;
    for (int64_t k = 0; k < s.k; ++k) sum = std::fma(cut(hidden(a, r, k)), cut(weight(a, c, k)), sum);
    return sum;
  });
}
rlk_code drops_tail(const LmHead& a, const Call&) {
  return fill(
      a, [&](int64_t r, int64_t c, Shape s) { return chain(a, r, c, 0, s.k > 64 ? s.k / 64 * 64 : s.k); });
}
rlk_code writes_input(const LmHead& a, const Call& call) {
  const rlk_code code = honest(a, call);
  const Shape s = shape_of(a);
  auto* bytes = const_cast<char*>(a.hidden.data<char>());
  store(a.hidden.dtype(), bytes, (s.m - 1) * a.hidden.stride(0) + s.k - 1, 0.25f);
  return code;
}
// A padded row times zero: harmless until the neighbour is not a number.
rlk_code reads_neighbour(const LmHead& a, const Call&) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) {
    return chain(a, r, c, 0, s.k) + 0 * (hidden(a, r ? r - 1 : s.m - 1, 0) + hidden(a, (r + 1) % s.m, 0));
  });
}
rlk_code writes_past_end(const LmHead& a, const Call& call) {
  const rlk_code code = honest(a, call);
  const Shape s = shape_of(a);
  put(a, s.m - 1, s.v, 0);
  return code;
}
rlk_code leaves_element(const LmHead& a, const Call&) {
  const Shape s = shape_of(a);
  for (int64_t row = 0; row < s.m; ++row)
    for (int64_t col = 0; col < s.v; ++col)
      if (row + 1 < s.m || col + 1 < s.v || s.m * s.v < 2) put(a, row, col, chain(a, row, col, 0, s.k));
  return RLK_OK;
}
rlk_code by_threads(const LmHead& a, const Call& call) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, call.threads()); });
}
rlk_code by_address(const LmHead& a, const Call&) {
  const bool aligned = reinterpret_cast<uintptr_t>(a.hidden.data<char>()) % 128 == 0;
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, aligned ? 4 : 1); });
}
rlk_code by_workspace(const LmHead& a, const Call& call) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) {
    return split(a, r, c, s.k, call.workspace().empty() ? 2 : 1);
  });
}
rlk_code by_stride(const LmHead& a, const Call&) {
  const bool dense = a.hidden.stride(0) == a.hidden.dim(1);
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, dense ? 2 : 1); });
}
rlk_code by_position(const LmHead& a, const Call&) {
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, r % 16 == 15 ? 2 : 1); });
}
rlk_code by_tile(const LmHead& a, const Call&) {
  return fill(a,
              [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, r < s.m / 64 * 64 ? 2 : 1); });
}
rlk_code by_turn(const LmHead& a, const Call&) {
  static std::atomic<int> turn{0};
  const int parts = turn.fetch_add(1) % 3 + 1;
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, parts); });
}
rlk_code by_process(const LmHead& a, const Call&) {
  static const int parts = getpid() % 5 + 1;
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, parts); });
}
// A scratch row shared by all threads of the process.
rlk_code shared_scratch(const LmHead& a, const Call&) {
  static float scratch[1 << 16];
  const Shape s = shape_of(a);
  for (int64_t row = 0; row < s.m; ++row) {
    for (int64_t col = 0; col < s.v; ++col) {
      volatile float* out = &scratch[col];
      *out = 0;
      for (int64_t k = 0; k < s.k; ++k) *out = std::fma(hidden(a, row, k), weight(a, col, k), *out);
    }
    if (row < 8)
      std::this_thread::sleep_for(std::chrono::microseconds(20));  // on two cores, luck is no proof
    for (int64_t col = 0; col < s.v; ++col) put(a, row, col, scratch[col]);
  }
  return RLK_OK;
}
rlk_code writes_gap(const LmHead& a, const Call& call) {
  const rlk_code code = honest(a, call);
  const Shape s = shape_of(a);
  if (s.m > 1 && a.out.stride(0) > s.v) put(a, 0, s.v, 1);
  return code;
}
uint64_t one_row_of_floats(const LmHead& a, const rlk_request&) {
  return static_cast<uint64_t>(a.weight.dim(0)) * 4;
}
rlk_code workspace_overrun(const LmHead& a, const Call& call) {
  std::memset(call.workspace().data(), 0, call.workspace().size() + 4);
  return honest(a, call);
}
rlk_code workspace_trusted(const LmHead& a, const Call& call) {
  const auto* sums = reinterpret_cast<const float*>(call.workspace().data());
  return fill(a,
              [&](int64_t r, int64_t c, Shape s) { return chain(a, r, c, 0, s.k) + (r == 0 ? sums[c] : 0); });
}
rlk_code refuses_late(const LmHead& a, const Call& call) {
  if (a.weight.dim(1) % 2) return call.fail(RLK_UNSUPPORTED, "K is odd");
  return honest(a, call);
}
rlk_code by_environment(const LmHead& a, const Call&) {
  const int parts = std::getenv("NVIDIA_TF32_OVERRIDE") ? 4 : 1;
  return fill(a, [&](int64_t r, int64_t c, Shape s) { return split(a, r, c, s.k, parts); });
}
// Right, under a false name: claims one fp64 chain and adds in fp32.
rlk_code false_arithmetic(const LmHead& a, const Call& call) { return honest(a, call); }
rlk_verdict refuses_odd(const LmHead& a, const rlk_request& r) {
  return a.weight.dim(1) % 2 ? refuse("K is odd") : plain(a, r);
}

rlk_verdict only_narrow(const LmHead& a, const rlk_request& r) {
  return a.out.dtype() == DType::f32 ? refuse("only 16-bit results") : plain(a, r);
}

// Plain C, no guard around it: the caller's control register reaches its sums.
int32_t by_control_register(const rlk_slot* slots, const rlk_call* call) {
  return honest(*reinterpret_cast<const LmHead*>(slots), Call(*call));
}

// A gradient that is right when the cotangent is all ones: the classic of tests that call sum().
rlk_code ones_only(const LmHeadBwd& a, const Call&) {
  const int64_t k = a.weight.dim(1), v = a.weight.dim(0), m = k ? a.hidden.numel() / k : 0;
  for (int64_t r = 0; r < m && a.d_hidden; ++r)
    for (int64_t i = 0; i < k; ++i) {
      float sum = 0;
      for (int64_t c = 0; c < v; ++c)
        sum += load(a.weight.dtype(), a.weight.data<char>(), c * a.weight.stride(0) + i);
      store(a.d_hidden.dtype(), a.d_hidden.data<char>(), r * a.d_hidden.stride(-2) + i, sum);
    }
  return RLK_OK;
}
rlk_verdict only_d_hidden(const LmHeadBwd& a, const rlk_request&) {
  return a.hidden.rank() == 2 ? kAccept : refuse("only rank 2");
}

// The classic: a rotation's backward that is the forward once more, the sine not negated.
void rotate(const RopeBwd& a, const In& from, const Out& to) {
  const int64_t pairs = from.dim(3) / 2;
  const auto at = [](const auto& t, int64_t b, int64_t h, int64_t r) {
    return b * t.stride(0) + h * t.stride(1) + r * t.stride(2);
  };
  for (int64_t b = 0; b < from.dim(0); ++b)
    for (int64_t h = 0; h < from.dim(1); ++h)
      for (int64_t r = 0; r < from.dim(2); ++r)
        for (int64_t p = 0; p < pairs; ++p) {
          const int64_t in = at(from, b, h, r) + p, out = at(to, b, h, r) + p;
          const float x = load(from.dtype(), from.data<char>(), in),
                      y = load(from.dtype(), from.data<char>(), in + pairs),
                      c = a.cos.data<float>()[r * a.cos.stride(0) + p],
                      s = a.sin.data<float>()[r * a.sin.stride(0) + p];
          store(to.dtype(), to.data<char>(), out, x * c - y * s);
          store(to.dtype(), to.data<char>(), out + pairs, y * c + x * s);
        }
}
rlk_code forward_again(const RopeBwd& a, const Call&) {
  rotate(a, a.d_out, a.d_x);
  if (a.d_k_out) rotate(a, a.d_k_out, a.d_k);
  return RLK_OK;
}
rlk_verdict plain_rotation(const RopeBwd& a, const rlk_request&) {
  if (a.d_out.rank() != 4 || a.layout != RopeBwd::Layout::bhsd) return refuse("only [B, H, S, D]");
  if (a.pairing != RopeBwd::Pairing::half || a.transpose || a.rotary_offset) return refuse("only halves");
  if (a.cos.rank() != 2 || a.cos.dtype() != DType::f32 || 2 * a.cos.dim(1) != a.d_out.dim(3))
    return refuse("only fp32 tables of half the width");
  if (a.positions || a.starts || a.cu_seqlens || a.cp_size != 1) return refuse("only rows in order");
  return kAccept;
}

// ---- their table

constexpr const char* kControl = "a control";  // nothing wrong with it
constexpr uint32_t kAll = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT;
template <auto Run, auto Supports = plain, auto Workspace = nullptr>
constexpr rlk_implementation lm_head_with(const char* id, const char* arithmetic,
                                          const char* doc = "a deliberate error", uint32_t dtypes = RLK_F32) {
  return implement<LmHead, Run, Supports, Workspace>(
      {.id = id, .doc = doc, .priority = -1000, .arithmetic = arithmetic, .dtypes = dtypes, .traits = kAll});
}

// Every name is its own arithmetic: only false_arithmetic may clash.
#define LM_HEAD(name) lm_head_with<name>("mutant." #name, "mutant/" #name)
const rlk_implementation kImplementations[] = {
    lm_head_with<honest>("mutant.honest", "mutant/honest", kControl, RLK_F32 | RLK_BF16 | RLK_F16),
    LM_HEAD(split_k_by_m),
    LM_HEAD(bf16_partials),
    LM_HEAD(one_row_path),
    LM_HEAD(tf32),
    LM_HEAD(drops_tail),
    LM_HEAD(writes_input),
    LM_HEAD(reads_neighbour),
    LM_HEAD(writes_past_end),
    LM_HEAD(leaves_element),
    LM_HEAD(by_threads),
    LM_HEAD(by_address),
    [] {
      rlk_implementation i =
          lm_head_with<by_workspace, plain, one_row_of_floats>("mutant.by_workspace", "mutant/by_workspace");
      i.traits |= RLK_WORKSPACE_OPTIONAL;
      return i;
    }(),
    LM_HEAD(by_stride),
    LM_HEAD(by_position),
    LM_HEAD(by_tile),
    LM_HEAD(by_turn),
    LM_HEAD(by_process),
    LM_HEAD(shared_scratch),
    LM_HEAD(writes_gap),
    lm_head_with<workspace_overrun, plain, one_row_of_floats>("mutant.workspace_overrun",
                                                              "mutant/workspace_overrun"),
    lm_head_with<workspace_trusted, plain, one_row_of_floats>("mutant.workspace_trusted",
                                                              "mutant/workspace_trusted"),
    LM_HEAD(refuses_late),
    LM_HEAD(by_environment),
    lm_head_with<false_arithmetic>("mutant.false_arithmetic", "fma64"),
    lm_head_with<honest, refuses_odd>("mutant.refuses_odd", "mutant/refuses_odd", kControl),
    lm_head_with<honest, only_narrow>("mutant.only_narrow", "mutant/only_narrow", kControl, RLK_BF16),
    [] {
      rlk_implementation i = lm_head_with<honest>("mutant.by_control_register", "mutant/by_control_register");
      i.run = by_control_register;
      return i;
    }(),
    implement<LmHeadBwd, ones_only, only_d_hidden>({.id = "mutant.ones_only",
                                                    .doc = "a deliberate error",
                                                    .priority = -1000,
                                                    .arithmetic = "mutant/ones_only",
                                                    .dtypes = RLK_F32,
                                                    .traits = kAll}),
    implement<RopeBwd, forward_again, plain_rotation>({.id = "mutant.forward_again",
                                                       .doc = "a deliberate error",
                                                       .priority = -1000,
                                                       .arithmetic = "mutant/forward_again",
                                                       .dtypes = RLK_F32,
                                                       .traits = kAll}),
};

const std::vector<const rlk_implementation*> kPointers = [] {
  std::vector<const rlk_implementation*> out;
  for (const rlk_implementation& i : kImplementations) out.push_back(&i);
  for (const rlk_implementation* i : broken_implementations()) out.push_back(i);
  return out;
}();

constexpr Mutant kMutants[] = {
    {"mutant.split_k_by_m", "batch invariance", "splits K when the batch is small"},
    {"mutant.bf16_partials", "accuracy", "rounds partial sums to bf16"},
    {"mutant.one_row_path", "batch invariance", "has a special path for M=1"},
    {"mutant.tf32", "accuracy", "multiplies in TF32"},
    {"mutant.drops_tail", "accuracy", "drops the tail of K"},
    {"mutant.writes_input", "purity", "writes its input"},
    {"mutant.reads_neighbour", "batch invariance", "lets a neighbour's NaN through"},
    {"mutant.writes_past_end", "purity", "writes past the end of its result"},
    {"mutant.leaves_element", "accuracy", "leaves one element unwritten"},
    {"mutant.by_threads", "batch invariance", "splits K by the number of threads"},
    {"mutant.by_address", "batch invariance", "adds differently on aligned pointers"},
    {"mutant.by_workspace", "batch invariance", "adds differently without its optional workspace"},
    {"mutant.by_stride", "batch invariance", "adds differently on strided rows"},
    {"mutant.by_position", "batch invariance", "adds differently in the last row of a tile"},
    {"mutant.by_tile", "batch invariance", "adds differently in full tiles"},
    {"mutant.by_turn", "batch invariance", "adds differently from call to call"},
    {"mutant.by_process", "repeats", "adds differently in another process"},
    {"mutant.shared_scratch", "batch invariance", "keeps its sums where other threads write theirs"},
    {"mutant.writes_gap", "purity", "writes between the rows of its result"},
    {"mutant.workspace_overrun", "purity", "writes past its workspace"},
    {"mutant.workspace_trusted", "accuracy", "takes its workspace to be zero"},
    {"mutant.refuses_late", "predicate", "accepts, then refuses to run"},
    {"mutant.by_environment", "strict", "obeys an ambient variable"},
    {"mutant.false_arithmetic", "equal bits", "claims an arithmetic it does not compute"},
    {"mutant.by_control_register", "strict", "adds in the caller's rounding mode"},
    {"mutant.ones_only", "accuracy", "a gradient that is right for a cotangent of ones only", "lm_head_bwd"},
    {"mutant.forward_again", "accuracy", "a rotation's backward that forgets to negate the sine", "rope_bwd"},
};

}  // namespace

#if defined(RLK_MUTANTS_OF_PROMISES_ONLY)
std::vector<const rlk_implementation*> broken_implementations() { return {}; }
std::vector<Mutant> broken() { return {}; }
#endif

std::span<const Mutant> all() {
  static const std::vector<Mutant> everything = [] {
    std::vector<Mutant> out(std::begin(kMutants), std::end(kMutants));
    for (const Mutant& m : broken()) out.push_back(m);
    return out;
  }();
  return everything;
}

const rlk_backend backend = {.struct_size = sizeof(rlk_backend),
                             .abi_major = RLK_ABI_MAJOR,
                             .abi_minor = RLK_ABI_MINOR,
                             .name = "mutant",
                             .version = "1",
                             .doc = "deliberate errors",
                             .implementations = kPointers.data(),
                             .num_implementations = static_cast<uint32_t>(kPointers.size()),
                             .ops = nullptr,
                             .num_ops = 0,
                             .devices = nullptr,
                             .activate = nullptr,
                             .services = nullptr};

}  // namespace rlk::mutants
