// kda_fwd, kda_bwd, kda_decode, kda_gate, kda_gate_bwd: shapes, options and what ties them together.
#include "registry/schema.hpp"

#include <limits>

namespace rlk::registry {
namespace {

constexpr uint32_t kResults = kFloats | RLK_F64;
constexpr uint32_t kParameter = RLK_OPTIONAL | RLK_SAVED;

#define RLK_KDA_INPUTS(saved)                                                                                 \
  {"q", "queries [B, T, H, K]", RLK_READ, kFloats, 4, 4, 0, RLK_STRIDED | (saved)},                           \
      {"k", "keys [B, T, H, K]", RLK_READ, kFloats, 4, 4, 0, RLK_STRIDED | (saved)},                          \
      {"v", "values [B, T, HV, V], HV a multiple of H", RLK_READ, kFloats, 4, 4, 0, RLK_STRIDED | (saved)},   \
      {"g", "log decay, or the raw gate [B, T, HV, K]", RLK_READ, kFloats, 4, 4, 0, RLK_STRIDED | (saved)},   \
      {"beta", "write strength, or its logit [B, T, HV]", RLK_READ, kFloats, 3, 3, 0, RLK_STRIDED | (saved)}, \
      {"initial_state",                                                                                       \
       "[N, HV, K, V]; absent: zeros",                                                                        \
       RLK_READ,                                                                                              \
       RLK_F32,                                                                                               \
       4,                                                                                                     \
       4,                                                                                                     \
       0,                                                                                                     \
       RLK_OPTIONAL | RLK_STRIDED | (saved)},                                                                 \
      {"a_log", "log of the gate's rate [HV]", RLK_READ, RLK_F32, 1, 1, -1, RLK_OPTIONAL | (saved)},          \
      {"dt_bias", "added to the raw gate [HV, K]", RLK_READ, RLK_F32, 1, 2, -1, RLK_OPTIONAL | (saved)}, {    \
    "cu_seqlens", "[N + 1] bounds of packed sequences, B = 1", RLK_READ, RLK_I64, 1, 1, -1,                   \
        RLK_OPTIONAL | RLK_NO_GRADIENT | (saved)                                                              \
  }

enum { kQ, kK, kV, kG, kBeta, kInitial, kALog, kDtBias, kCuSeqlens, kInputs };

enum { kOut = kInputs, kFinal, kStates, kInverses, kRecords, kForwardArguments };
constexpr rlk_argument kForward[] = {
    RLK_KDA_INPUTS(RLK_SAVED),
    {"out", "[B, T, HV, V]", RLK_WRITE, kResults, 4, 4, 0, RLK_STRIDED},
    {"final_state", "[N, HV, K, V]", RLK_WRITE, RLK_F32 | RLK_F64, 4, 4, 0, RLK_OPTIONAL | RLK_STRIDED},
    {"chunk_states", "kept for the backward: the state before every chunk [slots, HV, K, V]", RLK_WRITE,
     kResults, 4, 4, -1, RLK_OPTIONAL | RLK_SAVED},
    {"chunk_inverses", "kept for the backward: (I + M)^-1 of every chunk [B, T, HV, chunk_size]", RLK_WRITE,
     kResults, 4, 4, 0, RLK_OPTIONAL | RLK_SAVED},
    {"chunk_records",
     "kept for the backward: what the arithmetic sm90/kda64 prepares, [slots, HV, 17408 + 384 K] bytes",
     RLK_WRITE, RLK_U8, 3, 3, -1, RLK_OPTIONAL | RLK_SAVED},
};

enum {
  kKeptStates = kInputs,
  kKeptInverses,
  kKeptRecords,
  kDOut,
  kDFinal,
  kDQ,
  kDK,
  kDV,
  kDG,
  kDBeta,
  kDInitial,
  kDALog,
  kDDtBias,
  kBackwardArguments
};
constexpr uint32_t kGradient = RLK_OPTIONAL | RLK_STRIDED;
constexpr rlk_argument kBackward[] = {
    RLK_KDA_INPUTS(0u),
    {"chunk_states", "as the forward left it; absent: recomputed", RLK_READ, kFloats, 4, 4, -1, RLK_OPTIONAL},
    {"chunk_inverses", "as the forward left it; absent: recomputed", RLK_READ, kFloats, 4, 4, 0,
     RLK_OPTIONAL},
    {"chunk_records", "as the forward left it; absent: recomputed", RLK_READ, RLK_U8, 3, 3, -1, RLK_OPTIONAL},
    {"d_out", "gradient of out [B, T, HV, V]", RLK_READ, kFloats, 4, 4, 0, RLK_STRIDED},
    {"d_final_state", "gradient of final_state; absent: zeros", RLK_READ, RLK_F32, 4, 4, 0,
     RLK_OPTIONAL | RLK_STRIDED},
    {"d_q", "[B, T, H, K]", RLK_WRITE, kResults, 4, 4, 0, kGradient},
    {"d_k", "[B, T, H, K]", RLK_WRITE, kResults, 4, 4, 0, kGradient},
    {"d_v", "[B, T, HV, V]", RLK_WRITE, kResults, 4, 4, 0, kGradient},
    {"d_g", "of g as given [B, T, HV, K]", RLK_WRITE, kResults, 4, 4, 0, kGradient},
    {"d_beta", "of beta as given [B, T, HV]", RLK_WRITE, kResults, 3, 3, 0, kGradient},
    {"d_initial_state", "[N, HV, K, V]", RLK_WRITE, RLK_F32 | RLK_F64, 4, 4, 0, kGradient},
    {"d_a_log", "[HV]", RLK_WRITE, RLK_F32 | RLK_F64, 1, 1, -1, RLK_OPTIONAL},
    {"d_dt_bias", "as dt_bias", RLK_WRITE, RLK_F32 | RLK_F64, 1, 2, -1, RLK_OPTIONAL},
};

constexpr rlk_attribute kScale = {"scale", "factor on q; 0: K^-1/2", RLK_FLOAT, 0, 0, nullptr};
constexpr rlk_attribute kVFirst = {"state_v_first", "states are stored [V, K]", RLK_FLAG, 0, 0, nullptr};
constexpr rlk_attribute kNorm = {"qk_l2norm", "normalise q and k over K", RLK_FLAG, 0, 0, nullptr};
constexpr rlk_attribute kSigmoid = {"beta_sigmoid", "beta holds logits", RLK_FLAG, 0, 0, nullptr};
constexpr rlk_attribute kNegative = {
    "allow_neg_eigval", "with beta_sigmoid: strengths up to 2", RLK_FLAG, 0, 0, nullptr};
constexpr rlk_attribute kGate = {
    "gate",
    "none: g is the log decay; softplus: -e^a_log softplus(g + dt_bias); bounded: "
    "lower_bound sigmoid(e^a_log (g + dt_bias))",
    RLK_CHOICE,
    0,
    0,
    "none|softplus|bounded"};
constexpr rlk_attribute kLowerBound = {"lower_bound", "of the bounded gate", RLK_FLOAT, 0, -5, nullptr};
constexpr rlk_attribute kSafe = {"safe_gate", "the caller promises log decays in [-5, 0]", RLK_FLAG, 0, 0,
                                 nullptr};
constexpr rlk_attribute kChunk = {"chunk_size", "64 or 32", RLK_INT, 64, 0, nullptr};

enum { kScaleAt, kVFirstAt, kNormAt, kSigmoidAt, kNegativeAt, kGateAt, kLowerBoundAt, kSafeAt, kChunkAt };
constexpr rlk_attribute kAttributes[] = {kScale, kVFirst,     kNorm, kSigmoid, kNegative,
                                         kGate,  kLowerBound, kSafe, kChunk};

constexpr int64_t kMaxWidth = 256;
// Kernels count heads and channels in 32 bits.
constexpr int64_t kMaxHeads = int64_t{1} << 28;
enum { kNone, kSoftplus, kBounded };

struct Sizes {
  int64_t batch, tokens, heads, value_heads, k, v, sequences;
};

template <class... T>
int32_t expect(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
               std::initializer_list<int64_t> want) {
  int32_t i = 0;
  for (int64_t size : want) {
    if (dim(t, i) != size)
      return fail(host, "{}: {} has size {} in dimension {}, expected {}", op, name, dim(t, i), i, size);
    ++i;
  }
  return RLK_OK;
}

// H q/k heads, HV value heads of K x V.
int32_t check_heads(const rlk_host* host, const char* op, const Sizes& z) {
  if (z.heads < 1 || z.value_heads % z.heads)
    return fail(host, "{}: v has HV={} heads, q has H={}: HV must be a multiple of H", op, z.value_heads,
                z.heads);
  if (z.heads > kMaxHeads || z.value_heads > kMaxHeads)
    return fail(host, "{}: v has HV={} heads, q has H={}, at most {} are served", op, z.value_heads, z.heads,
                kMaxHeads);
  if (z.k < 1 || z.v < 1 || z.k > kMaxWidth || z.v > kMaxWidth)
    return fail(host, "{}: K={}, V={}, both must be from 1 to {}", op, z.k, z.v, kMaxWidth);
  return RLK_OK;
}

// Attributes that fp32 forms use as fp32 numbers.
int32_t check_real(const rlk_host* host, const char* op, const char* name, double value) {
  constexpr double kMost = std::numeric_limits<float>::max();
  if (!(value >= -kMost && value <= kMost))
    return fail(host, "{}: {} is {}, it must be a finite fp32 number, at most {:g}", op, name, value, kMost);
  return RLK_OK;
}

int32_t check_gate(const rlk_host* host, const char* op, const DLTensor* a_log, const DLTensor* dt_bias,
                   int64_t gate, double bound, int64_t heads, int64_t width) {
  if (heads > kMaxHeads || width > kMaxHeads)
    return fail(host, "{}: g has HV={}, K={}, at most {} of each are served", op, heads, width, kMaxHeads);
  if (a_log)
    if (int32_t code = expect(host, op, "a_log", a_log, {heads})) return code;
  if (dt_bias && In(dt_bias).numel() != heads * width)
    return fail(host, "{}: dt_bias has {} elements, expected HV * K = {}", op, In(dt_bias).numel(),
                heads * width);
  if (gate == kSoftplus && !a_log) return fail(host, "{}: the softplus gate needs a_log", op);
  if (int32_t code = check_real(host, op, "lower_bound", bound)) return code;
  if (gate == kBounded && !(bound < 0))
    return fail(host, "{}: lower_bound is {}, it must be negative", op, bound);
  if (gate == kNone && (a_log || dt_bias))
    return fail(host, "{}: {} is given, but gate=none does not use it", op, a_log ? "a_log" : "dt_bias");
  return RLK_OK;
}

int32_t check_state(const rlk_host* host, const char* op, const char* name, const DLTensor* t, const Sizes& z,
                    bool v_first) {
  if (!t) return RLK_OK;
  return expect(host, op, name, t, {z.sequences, z.value_heads, v_first ? z.v : z.k, v_first ? z.k : z.v});
}

int32_t check_inputs(const rlk_host* host, const char* op, const rlk_slot* s, const rlk_slot* attributes,
                     Sizes& z) {
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *v = s[kV].tensor, *cu = s[kCuSeqlens].tensor;
  z = {dim(q, 0), dim(q, 1), dim(q, 2), dim(v, 2), dim(q, 3), dim(v, 3), cu ? dim(cu, 0) - 1 : dim(q, 0)};
  for (const auto& [name, t] : {std::pair{"k", k}, std::pair{"v", v}})
    if (dtype(t) != dtype(q))
      return fail(host, "{}: {} is {}, q is {}", op, name, name_of(dtype(t)), name_of(dtype(q)));
  if (int32_t code = expect(host, op, "k", k, {z.batch, z.tokens, z.heads, z.k})) return code;
  if (int32_t code = expect(host, op, "v", v, {z.batch, z.tokens})) return code;
  if (int32_t code = check_heads(host, op, z)) return code;
  if (int32_t code = expect(host, op, "g", s[kG].tensor, {z.batch, z.tokens, z.value_heads, z.k}))
    return code;
  if (int32_t code = expect(host, op, "beta", s[kBeta].tensor, {z.batch, z.tokens, z.value_heads}))
    return code;
  if (cu && z.batch != 1) return fail(host, "{}: cu_seqlens is given, B={} must be 1", op, z.batch);
  if (cu && z.sequences < 0) return fail(host, "{}: cu_seqlens is empty, it holds N + 1 bounds", op);
  if (int32_t code =
          check_state(host, op, "initial_state", s[kInitial].tensor, z, attributes[kVFirstAt].i != 0))
    return code;
  if (int32_t code = check_real(host, op, "scale", attributes[kScaleAt].f)) return code;
  const int64_t chunk = attributes[kChunkAt].i;
  if (chunk != 64 && chunk != 32) return fail(host, "{}: chunk_size is {}, it takes 64 or 32", op, chunk);
  return check_gate(host, op, s[kALog].tensor, s[kDtBias].tensor, attributes[kGateAt].i,
                    attributes[kLowerBoundAt].f, z.value_heads, z.k);
}

rlk_shape state_shape(int64_t rows, const Sizes& z, bool v_first, uint32_t dtypes) {
  return shape_of({rows, z.value_heads, v_first ? z.v : z.k, v_first ? z.k : z.v}, dtypes, DType::f32);
}

int64_t slots_of(const Sizes& z, bool packed, int64_t chunk) {
  const int64_t whole = z.tokens / chunk;
  return packed ? whole + z.sequences : z.sequences * (whole + (z.tokens % chunk != 0));
}

// What sm90/kda64 knows of a chunk and head once it is prepared: three 64 x K and two 64 x 64 tiles in 16
// bits, and 1 KiB for the write strengths and the decay.
int64_t record_bytes(const Sizes& z) { return 3 * 128 * z.k + 2 * 8192 + 1024; }

uint32_t or_fp32(const DLTensor* t) { return static_cast<uint32_t>(dtype(t)) | RLK_F32 | RLK_F64; }

int32_t infer_forward(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const rlk_slot* attributes = s + kForwardArguments;
  Sizes z;
  if (int32_t code = check_inputs(host, "kda_fwd", s, attributes, z)) return code;
  const DLTensor* q = s[kQ].tensor;
  const bool v_first = attributes[kVFirstAt].i != 0;
  const int64_t chunk = attributes[kChunkAt].i;
  shapes[kOut] = shape_of({z.batch, z.tokens, z.value_heads, z.v}, or_fp32(q), dtype(q));
  shapes[kFinal] = state_shape(z.sequences, z, v_first, RLK_F32 | RLK_F64);
  const int64_t slots = slots_of(z, s[kCuSeqlens].tensor, chunk);
  shapes[kStates] = state_shape(slots, z, v_first, or_fp32(q));
  shapes[kInverses] = shape_of({z.batch, z.tokens, z.value_heads, chunk}, or_fp32(q), DType::f32);
  shapes[kRecords] = shape_of({slots, z.value_heads, record_bytes(z)}, RLK_U8, DType::u8);
  return RLK_OK;
}

int32_t infer_backward(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "kda_bwd";
  const rlk_slot* attributes = s + kBackwardArguments;
  Sizes z;
  if (int32_t code = check_inputs(host, op, s, attributes, z)) return code;
  const bool v_first = attributes[kVFirstAt].i != 0;
  const int64_t chunk = attributes[kChunkAt].i;
  Sizes kept = z;
  kept.sequences = slots_of(z, s[kCuSeqlens].tensor, chunk);
  if (int32_t code = check_state(host, op, "chunk_states", s[kKeptStates].tensor, kept, v_first)) return code;
  if (s[kKeptInverses].tensor)
    if (int32_t code = expect(host, op, "chunk_inverses", s[kKeptInverses].tensor,
                              {z.batch, z.tokens, z.value_heads, chunk}))
      return code;
  if (s[kKeptRecords].tensor)
    if (int32_t code = expect(host, op, "chunk_records", s[kKeptRecords].tensor,
                              {kept.sequences, z.value_heads, record_bytes(z)}))
      return code;
  if (int32_t code = expect(host, op, "d_out", s[kDOut].tensor, {z.batch, z.tokens, z.value_heads, z.v}))
    return code;
  if (int32_t code = check_state(host, op, "d_final_state", s[kDFinal].tensor, z, v_first)) return code;
  if (s[kDALog].tensor && !s[kALog].tensor)
    return fail(host, "{}: d_a_log is asked for, a_log is absent", op);
  if (s[kDDtBias].tensor && !s[kDtBias].tensor)
    return fail(host, "{}: d_dt_bias is asked for, dt_bias is absent", op);
  const auto as = [](const DLTensor* t) { return like(t, or_fp32(t), dtype(t)); };
  shapes[kDQ] = as(s[kQ].tensor);
  shapes[kDK] = as(s[kK].tensor);
  shapes[kDV] = as(s[kV].tensor);
  shapes[kDG] = as(s[kG].tensor);
  shapes[kDBeta] = as(s[kBeta].tensor);
  shapes[kDInitial] = state_shape(z.sequences, z, v_first, RLK_F32 | RLK_F64);
  if (s[kALog].tensor) shapes[kDALog] = as(s[kALog].tensor);
  if (s[kDtBias].tensor) shapes[kDDtBias] = as(s[kDtBias].tensor);
  return RLK_OK;
}

enum {
  kDecodeQ,
  kDecodeK,
  kDecodeV,
  kDecodeG,
  kDecodeBeta,
  kState,
  kDecodeALog,
  kDecodeDtBias,
  kDecodeOut,
  kStateOut,
  kDecodeArguments
};
constexpr rlk_argument kDecode[] = {
    {"q", "queries [B, H, K]", RLK_READ, kFloats, 3, 3, 0, RLK_STRIDED},
    {"k", "keys [B, H, K]", RLK_READ, kFloats, 3, 3, 0, RLK_STRIDED},
    {"v", "values [B, HV, V], HV a multiple of H", RLK_READ, kFloats, 3, 3, 0, RLK_STRIDED},
    {"g", "log decay, or the raw gate [B, HV, K]", RLK_READ, kFloats, 3, 3, 0, RLK_STRIDED},
    {"beta", "write strength, or its logit [B, HV]", RLK_READ, kFloats, 2, 2, 0, RLK_STRIDED},
    {"state", "before the token [B, HV, K, V]", RLK_READ, RLK_F32, 4, 4, 0, RLK_STRIDED},
    {"a_log", "log of the gate's rate [HV]", RLK_READ, RLK_F32, 1, 1, -1, RLK_OPTIONAL},
    {"dt_bias", "added to the raw gate [HV, K]", RLK_READ, RLK_F32, 1, 2, -1, RLK_OPTIONAL},
    {"out", "[B, HV, V]", RLK_WRITE, kResults, 3, 3, 0, RLK_STRIDED},
    {"state_out", "after the token [B, HV, K, V]; may be state itself", RLK_WRITE, RLK_F32 | RLK_F64, 4, 4, 0,
     RLK_STRIDED},
};
enum { kDecodeGateAt = 5, kDecodeLowerBoundAt = 6 };
constexpr rlk_attribute kDecodeAttributes[] = {kScale,    kVFirst, kNorm,      kSigmoid,
                                               kNegative, kGate,   kLowerBound};

int32_t infer_decode(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "kda_decode";
  const rlk_slot* attributes = s + kDecodeArguments;
  const DLTensor *q = s[kDecodeQ].tensor, *k = s[kDecodeK].tensor, *v = s[kDecodeV].tensor;
  const Sizes z{dim(q, 0), 1, dim(q, 1), dim(v, 1), dim(q, 2), dim(v, 2), dim(q, 0)};
  const bool v_first = attributes[kVFirstAt].i != 0;
  for (const auto& [name, t] : {std::pair{"k", k}, std::pair{"v", v}})
    if (dtype(t) != dtype(q))
      return fail(host, "{}: {} is {}, q is {}", op, name, name_of(dtype(t)), name_of(dtype(q)));
  if (int32_t code = expect(host, op, "k", k, {z.batch, z.heads, z.k})) return code;
  if (int32_t code = expect(host, op, "v", v, {z.batch})) return code;
  if (int32_t code = check_heads(host, op, z)) return code;
  if (int32_t code = expect(host, op, "g", s[kDecodeG].tensor, {z.batch, z.value_heads, z.k})) return code;
  if (int32_t code = expect(host, op, "beta", s[kDecodeBeta].tensor, {z.batch, z.value_heads})) return code;
  if (int32_t code = check_state(host, op, "state", s[kState].tensor, z, v_first)) return code;
  if (int32_t code = check_real(host, op, "scale", attributes[kScaleAt].f)) return code;
  if (int32_t code =
          check_gate(host, op, s[kDecodeALog].tensor, s[kDecodeDtBias].tensor, attributes[kDecodeGateAt].i,
                     attributes[kDecodeLowerBoundAt].f, z.value_heads, z.k))
    return code;
  shapes[kDecodeOut] = shape_of({z.batch, z.value_heads, z.v}, or_fp32(q), dtype(q));
  shapes[kStateOut] = state_shape(z.batch, z, v_first, RLK_F32 | RLK_F64);
  return RLK_OK;
}

constexpr rlk_attribute kGateOnly = {"gate", kGate.doc, RLK_CHOICE, kSoftplus, 0, "none|softplus|bounded"};
constexpr rlk_attribute kGateAttributes[] = {kGateOnly, kLowerBound};

enum { kRaw, kGateALog, kGateDtBias, kGateOut, kGateArguments };
constexpr rlk_argument kGateForward[] = {
    {"g", "raw gate [..., HV, K]", RLK_READ, kFloats, 2, RLK_MAX_RANK, 0, RLK_SAVED},
    {"a_log", "log of the gate's rate [HV]", RLK_READ, RLK_F32, 1, 1, -1, kParameter},
    {"dt_bias", "added to the raw gate [HV, K]", RLK_READ, RLK_F32, 1, 2, -1, kParameter},
    {"out", "log decay, fp32, the shape of g", RLK_WRITE, RLK_F32 | RLK_F64, 2, RLK_MAX_RANK, 0, 0},
};

int32_t infer_gate(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor* g = s[kRaw].tensor;
  const rlk_slot* attributes = s + kGateArguments;
  if (int32_t code = check_gate(host, "kda_gate", s[kGateALog].tensor, s[kGateDtBias].tensor, attributes[0].i,
                                attributes[1].f, dim(g, -2), dim(g, -1)))
    return code;
  shapes[kGateOut] = like(g, RLK_F32 | RLK_F64, DType::f32);
  return RLK_OK;
}

enum { kBwdRaw, kBwdALog, kBwdDtBias, kGateDOut, kGateDG, kGateDALog, kGateDDtBias, kGateBackwardArguments };
constexpr rlk_argument kGateBackward[] = {
    {"g", "raw gate [..., HV, K]", RLK_READ, kFloats, 2, RLK_MAX_RANK, 0, 0},
    {"a_log", "[HV]", RLK_READ, RLK_F32, 1, 1, -1, RLK_OPTIONAL},
    {"dt_bias", "[HV, K]", RLK_READ, RLK_F32, 1, 2, -1, RLK_OPTIONAL},
    {"d_out", "gradient of the log decay [..., HV, K]", RLK_READ, kFloats, 2, RLK_MAX_RANK, 0, 0},
    {"d_g", "of the raw gate", RLK_WRITE, kResults, 2, RLK_MAX_RANK, 0, RLK_OPTIONAL},
    {"d_a_log", "[HV]", RLK_WRITE, RLK_F32 | RLK_F64, 1, 1, -1, RLK_OPTIONAL},
    {"d_dt_bias", "as dt_bias", RLK_WRITE, RLK_F32 | RLK_F64, 1, 2, -1, RLK_OPTIONAL},
};

int32_t infer_gate_backward(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "kda_gate_bwd";
  const DLTensor *g = s[kBwdRaw].tensor, *d_out = s[kGateDOut].tensor;
  const rlk_slot* attributes = s + kGateBackwardArguments;
  if (int32_t code = check_gate(host, op, s[kBwdALog].tensor, s[kBwdDtBias].tensor, attributes[0].i,
                                attributes[1].f, dim(g, -2), dim(g, -1)))
    return code;
  if (d_out->ndim != g->ndim)
    return fail(host, "{}: d_out has rank {}, g has rank {}", op, d_out->ndim, g->ndim);
  for (int32_t i = 0; i < g->ndim; ++i)
    if (dim(d_out, i) != dim(g, i))
      return fail(host, "{}: d_out has size {} in dimension {}, g has {}", op, dim(d_out, i), i, dim(g, i));
  if (s[kGateDALog].tensor && !s[kBwdALog].tensor)
    return fail(host, "{}: d_a_log is asked for, a_log is absent", op);
  if (s[kGateDDtBias].tensor && !s[kBwdDtBias].tensor)
    return fail(host, "{}: d_dt_bias is asked for, dt_bias is absent", op);
  shapes[kGateDG] = like(g, or_fp32(g), dtype(g));
  if (s[kBwdALog].tensor) shapes[kGateDALog] = like(s[kBwdALog].tensor, RLK_F32 | RLK_F64, DType::f32);
  if (s[kBwdDtBias].tensor) shapes[kGateDDtBias] = like(s[kBwdDtBias].tensor, RLK_F32 | RLK_F64, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema kda_fwd_schema = {
    .struct_size = sizeof(rlk_op_schema),
    .version = 1,
    .name = "kda_fwd",
    .aliases = "chunk_kda",
    .doc = "Kimi Delta Attention over whole sequences",
    .arguments = kForward,
    .num_arguments = std::size(kForward),
    .attributes = kAttributes,
    .num_attributes = std::size(kAttributes),
    .backward = "kda_bwd",
    .saves = "q,k,v,g,beta,initial_state,a_log,dt_bias,cu_seqlens,chunk_states,chunk_inverses,chunk_records",
    .infer = infer_forward,
    .may_alias = ""};

extern const rlk_op_schema kda_bwd_schema = {.struct_size = sizeof(rlk_op_schema),
                                             .version = 1,
                                             .name = "kda_bwd",
                                             .aliases = "",
                                             .doc = "gradients of kda_fwd",
                                             .arguments = kBackward,
                                             .num_arguments = std::size(kBackward),
                                             .attributes = kAttributes,
                                             .num_attributes = std::size(kAttributes),
                                             .backward = nullptr,
                                             .saves = "",
                                             .infer = infer_backward,
                                             .may_alias = ""};

extern const rlk_op_schema kda_decode_schema = {
    .struct_size = sizeof(rlk_op_schema),
    .version = 1,
    .name = "kda_decode",
    .aliases = "",
    .doc = "Kimi Delta Attention, one token per sequence with a resident state",
    .arguments = kDecode,
    .num_arguments = std::size(kDecode),
    .attributes = kDecodeAttributes,
    .num_attributes = std::size(kDecodeAttributes),
    .backward = nullptr,
    .saves = "",
    .infer = infer_decode,
    .may_alias = "state_out=state"};

extern const rlk_op_schema kda_gate_schema = {
    .struct_size = sizeof(rlk_op_schema),
    .version = 1,
    .name = "kda_gate",
    .aliases = "",
    .doc = "the log decay of Kimi Delta Attention from its raw gate",
    .arguments = kGateForward,
    .num_arguments = std::size(kGateForward),
    .attributes = kGateAttributes,
    .num_attributes = std::size(kGateAttributes),
    .backward = "kda_gate_bwd",
    .saves = "g,a_log,dt_bias",
    .infer = infer_gate,
    .may_alias = ""};

extern const rlk_op_schema kda_gate_bwd_schema = {.struct_size = sizeof(rlk_op_schema),
                                                  .version = 1,
                                                  .name = "kda_gate_bwd",
                                                  .aliases = "",
                                                  .doc = "gradients of kda_gate",
                                                  .arguments = kGateBackward,
                                                  .num_arguments = std::size(kGateBackward),
                                                  .attributes = kGateAttributes,
                                                  .num_attributes = std::size(kGateAttributes),
                                                  .backward = nullptr,
                                                  .saves = "",
                                                  .infer = infer_gate_backward,
                                                  .may_alias = ""};

}  // namespace rlk::registry
