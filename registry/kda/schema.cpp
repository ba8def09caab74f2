// kda_fwd, kda_bwd, kda_decode, kda_step, kda_gate, kda_gate_bwd: shapes, options and what ties them together.
#include "registry/schema.hpp"

#include <limits>

#include "registry/kda/geometry.hpp"

namespace rlk::registry {
namespace {

constexpr uint32_t kState = RLK_F32 | RLK_F64;

constexpr auto kInputs = arguments(
    read("q", "queries [B, T, H, K]").rank(4).rows(0).strided(),
    read("k", "keys [B, T, H, K]").rank(4).rows(0).strided(),
    read("v", "values [B, T, HV, V], HV a multiple of H").rank(4).rows(0).strided(),
    read("g", "log decay, or the raw gate [B, T, HV, K]").rank(4).rows(0).strided(),
    read("beta", "write strength, or its logit [B, T, HV]").rank(3).rows(0).strided(),
    read("initial_state", "[N, HV, K, V]; absent: zeros").of(RLK_F32).rank(4).rows(0).optional().strided(),
    read("a_log", "log of the gate's rate [HV]").of(RLK_F32).rank(1).optional(),
    read("dt_bias", "added to the raw gate [HV, K]").of(RLK_F32).rank(1, 2).optional(),
    read("cu_seqlens", "[N + 1] bounds of packed sequences, B = 1")
        .of(RLK_I64)
        .rank(1)
        .optional()
        .no_gradient());
enum {
  kQ = index_of(kInputs, "q"),
  kK = index_of(kInputs, "k"),
  kV = index_of(kInputs, "v"),
  kG = index_of(kInputs, "g"),
  kBeta = index_of(kInputs, "beta"),
  kInitial = index_of(kInputs, "initial_state"),
  kALog = index_of(kInputs, "a_log"),
  kDtBias = index_of(kInputs, "dt_bias"),
  kCuSeqlens = index_of(kInputs, "cu_seqlens")
};

constexpr auto kForward = arguments(
    saved(kInputs), write("out", "[B, T, HV, V]").rank(4).rows(0).strided(),
    write("final_state", "[N, HV, K, V]").of(kState).rank(4).rows(0).optional().strided(),
    write("chunk_states", "kept for the backward: the state before every chunk [slots, HV, K, V]")
        .rank(4)
        .optional()
        .saved(),
    write("chunk_inverses", "kept for the backward: (I + M)^-1 of every chunk [B, T, HV, chunk_size]")
        .rank(4)
        .rows(0)
        .optional()
        .saved(),
    write("chunk_records",
          "kept for the backward: what the arithmetic sm90/kda64 prepares, [slots, HV, 17408 + 384 K] bytes")
        .of(RLK_U8)
        .rank(3)
        .optional()
        .saved());
enum {
  kOut = index_of(kForward, "out"),
  kFinal = index_of(kForward, "final_state"),
  kStates = index_of(kForward, "chunk_states"),
  kInverses = index_of(kForward, "chunk_inverses"),
  kRecords = index_of(kForward, "chunk_records")
};

constexpr auto kBackward = arguments(
    kInputs, read("chunk_states", "as the forward left it; absent: recomputed").rank(4).optional(),
    read("chunk_inverses", "as the forward left it; absent: recomputed").rank(4).rows(0).optional(),
    read("chunk_records", "as the forward left it; absent: recomputed").of(RLK_U8).rank(3).optional(),
    read("d_out", "gradient of out [B, T, HV, V]").rank(4).rows(0).strided(),
    read("d_final_state", "gradient of final_state; absent: zeros")
        .of(RLK_F32)
        .rank(4)
        .rows(0)
        .optional()
        .strided(),
    write("d_q", "[B, T, H, K]").rank(4).rows(0).optional().strided(),
    write("d_k", "[B, T, H, K]").rank(4).rows(0).optional().strided(),
    write("d_v", "[B, T, HV, V]").rank(4).rows(0).optional().strided(),
    write("d_g", "of g as given [B, T, HV, K]").rank(4).rows(0).optional().strided(),
    write("d_beta", "of beta as given [B, T, HV]").rank(3).rows(0).optional().strided(),
    write("d_initial_state", "[N, HV, K, V]").of(kState).rank(4).rows(0).optional().strided(),
    write("d_a_log", "[HV]").of(kState).rank(1).optional(),
    write("d_dt_bias", "as dt_bias").of(kState).rank(1, 2).optional());
enum {
  kKeptStates = index_of(kBackward, "chunk_states"),
  kKeptInverses = index_of(kBackward, "chunk_inverses"),
  kKeptRecords = index_of(kBackward, "chunk_records"),
  kDOut = index_of(kBackward, "d_out"),
  kDFinal = index_of(kBackward, "d_final_state"),
  kDQ = index_of(kBackward, "d_q"),
  kDK = index_of(kBackward, "d_k"),
  kDV = index_of(kBackward, "d_v"),
  kDG = index_of(kBackward, "d_g"),
  kDBeta = index_of(kBackward, "d_beta"),
  kDInitial = index_of(kBackward, "d_initial_state"),
  kDALog = index_of(kBackward, "d_a_log"),
  kDDtBias = index_of(kBackward, "d_dt_bias")
};

constexpr char kGateDoc[] =
    "none: g is the log decay; softplus: -e^a_log softplus(g + dt_bias); bounded: "
    "lower_bound sigmoid(e^a_log (g + dt_bias))";
constexpr char kGateWords[] = "none|softplus|bounded";
enum { kNone, kSoftplus, kBounded };

constexpr rlk_attribute kLowerBound = real("lower_bound", "of the bounded gate", -5);
constexpr auto kStep =
    attributes(real("scale", "factor on q; 0: K^-1/2", 0), flag("state_v_first", "states are stored [V, K]"),
               flag("qk_l2norm", "normalise q and k over K"), flag("beta_sigmoid", "beta holds logits"),
               flag("allow_neg_eigval", "with beta_sigmoid: strengths up to 2"),
               choice("gate", kGateDoc, kGateWords), kLowerBound);
constexpr auto kAttributes = attributes(kStep, flag("safe_gate", "the caller promises log decays in [-5, 0]"),
                                        integer("chunk_size", "64 or 32", 64));
enum {
  kScaleAt = index_of(kAttributes, "scale"),
  kVFirstAt = index_of(kAttributes, "state_v_first"),
  kGateAt = index_of(kAttributes, "gate"),
  kLowerBoundAt = index_of(kAttributes, "lower_bound"),
  kChunkAt = index_of(kAttributes, "chunk_size")
};

constexpr int64_t kMaxWidth = 256;
// Kernels count heads and channels in 32 bits.
constexpr int64_t kMaxHeads = int64_t{1} << 28;
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

// Where an op with the tokens of whole sequences has what is checked alike.
struct Places {
  int state, a_log, dt_bias, cu_seqlens;
};

int32_t check_inputs(const rlk_host* host, const char* op, const rlk_slot* s, const rlk_slot* attributes,
                     Sizes& z, const Places& at = {kInitial, kALog, kDtBias, kCuSeqlens}) {
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *v = s[kV].tensor, *cu = s[at.cu_seqlens].tensor;
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
  if (int32_t code = check_state(host, op, at.state == kInitial ? "initial_state" : "state",
                                 s[at.state].tensor, z, attributes[kVFirstAt].i != 0))
    return code;
  if (int32_t code = check_real(host, op, "scale", attributes[kScaleAt].f)) return code;
  const int64_t chunk = attributes[kChunkAt].i;
  if (chunk != 64 && chunk != 32) return fail(host, "{}: chunk_size is {}, it takes 64 or 32", op, chunk);
  return check_gate(host, op, s[at.a_log].tensor, s[at.dt_bias].tensor, attributes[kGateAt].i,
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
  const rlk_slot* attributes = s + kForward.size();
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
  const rlk_slot* attributes = s + kBackward.size();
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

constexpr auto kDecode =
    arguments(read("q", "queries [B, H, K]").rank(3).rows(0).strided(),
              read("k", "keys [B, H, K]").rank(3).rows(0).strided(),
              read("v", "values [B, HV, V], HV a multiple of H").rank(3).rows(0).strided(),
              read("g", "log decay, or the raw gate [B, HV, K]").rank(3).rows(0).strided(),
              read("beta", "write strength, or its logit [B, HV]").rank(2).rows(0).strided(),
              read("state", "before the token [B, HV, K, V]").of(RLK_F32).rank(4).rows(0).strided(),
              read("a_log", "log of the gate's rate [HV]").of(RLK_F32).rank(1).optional(),
              read("dt_bias", "added to the raw gate [HV, K]").of(RLK_F32).rank(1, 2).optional(),
              write("out", "[B, HV, V]").rank(3).rows(0).strided(),
              write("state_out", "after the token [B, HV, K, V]; may be state itself")
                  .of(kState)
                  .rank(4)
                  .rows(0)
                  .strided());
enum {
  kDecodeQ = index_of(kDecode, "q"),
  kDecodeK = index_of(kDecode, "k"),
  kDecodeV = index_of(kDecode, "v"),
  kDecodeG = index_of(kDecode, "g"),
  kDecodeBeta = index_of(kDecode, "beta"),
  kStateIn = index_of(kDecode, "state"),
  kDecodeALog = index_of(kDecode, "a_log"),
  kDecodeDtBias = index_of(kDecode, "dt_bias"),
  kDecodeOut = index_of(kDecode, "out"),
  kStateOut = index_of(kDecode, "state_out")
};

int32_t infer_decode(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "kda_decode";
  const rlk_slot* attributes = s + kDecode.size();
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
  if (int32_t code = check_state(host, op, "state", s[kStateIn].tensor, z, v_first)) return code;
  if (int32_t code = check_real(host, op, "scale", attributes[kScaleAt].f)) return code;
  if (int32_t code = check_gate(host, op, s[kDecodeALog].tensor, s[kDecodeDtBias].tensor,
                                attributes[kGateAt].i, attributes[kLowerBoundAt].f, z.value_heads, z.k))
    return code;
  shapes[kDecodeOut] = shape_of({z.batch, z.value_heads, z.v}, or_fp32(q), dtype(q));
  shapes[kStateOut] = state_shape(z.batch, z, v_first, RLK_F32 | RLK_F64);
  return RLK_OK;
}

constexpr auto kOpenChunk = arguments(
    read("q", "queries [B, T, H, K]").rank(4).rows(0).strided(),
    read("k", "keys [B, T, H, K]").rank(4).rows(0).strided(),
    read("v", "values [B, T, HV, V], HV a multiple of H").rank(4).rows(0).strided(),
    read("g", "log decay, or the raw gate [B, T, HV, K]").rank(4).rows(0).strided(),
    read("beta", "write strength, or its logit [B, T, HV]").rank(3).rows(0).strided(),
    read("rows", "[N] rows of every sequence's open chunk in the cache, 0 to chunk_size")
        .of(kIntegers)
        .rank(1)
        .rows(0),
    update("state",
           "at the open chunk's start [N, HV, K, V]; where rows is chunk_size it goes on to the next")
        .of(RLK_F32)
        .rank(4)
        .rows(0)
        .strided(),
    update("cache", "the open chunk's rows [N, HV, floats by infer]; absent: rows are 0 and nothing is kept")
        .of(RLK_F32)
        .rank(3)
        .rows(0)
        .optional()
        .strided(),
    read("a_log", "log of the gate's rate [HV]").of(RLK_F32).rank(1).optional(),
    read("dt_bias", "added to the raw gate [HV, K]").of(RLK_F32).rank(1, 2).optional(),
    read("cu_seqlens", "[N + 1] bounds of packed sequences, B = 1").of(RLK_I64).rank(1).optional(),
    write("out", "[B, T, HV, V]").rank(4).rows(0).strided());
enum {
  kStepRows = index_of(kOpenChunk, "rows"),
  kStepState = index_of(kOpenChunk, "state"),
  kStepCache = index_of(kOpenChunk, "cache"),
  kStepALog = index_of(kOpenChunk, "a_log"),
  kStepDtBias = index_of(kOpenChunk, "dt_bias"),
  kStepCuSeqlens = index_of(kOpenChunk, "cu_seqlens"),
  kStepOut = index_of(kOpenChunk, "out")
};
static_assert(index_of(kOpenChunk, "q") == kQ && index_of(kOpenChunk, "k") == kK &&
              index_of(kOpenChunk, "v") == kV && index_of(kOpenChunk, "g") == kG &&
              index_of(kOpenChunk, "beta") == kBeta);

int32_t infer_step(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "kda_step";
  const rlk_slot* attributes = s + kOpenChunk.size();
  Sizes z;
  if (int32_t code =
          check_inputs(host, op, s, attributes, z, {kStepState, kStepALog, kStepDtBias, kStepCuSeqlens}))
    return code;
  const int64_t chunk = attributes[kChunkAt].i;
  if (!s[kStepCuSeqlens].tensor && z.tokens > chunk)
    return fail(host, "{}: q has T={} tokens, a chunk has {} rows", op, z.tokens, chunk);
  if (int32_t code = expect(host, op, "rows", s[kStepRows].tensor, {z.sequences})) return code;
  shapes[kStepOut] =
      shape_of({z.batch, z.tokens, z.value_heads, z.v}, or_fp32(s[kQ].tensor), dtype(s[kQ].tensor));
  shapes[kStepState] = state_shape(z.sequences, z, attributes[kVFirstAt].i != 0, RLK_F32);
  shapes[kStepCache] = shape_of({z.sequences, z.value_heads, rlk::kda::cache_layout(z.k, z.v, chunk).size},
                                RLK_F32, DType::f32);
  return RLK_OK;
}

constexpr auto kGateAttributes = attributes(choice("gate", kGateDoc, kGateWords, "softplus"), kLowerBound);

constexpr auto kGateForward =
    arguments(read("g", "raw gate [..., HV, K]").rank(2, RLK_MAX_RANK).rows(0).saved(),
              read("a_log", "log of the gate's rate [HV]").of(RLK_F32).rank(1).optional().saved(),
              read("dt_bias", "added to the raw gate [HV, K]").of(RLK_F32).rank(1, 2).optional().saved(),
              write("out", "log decay, fp32, the shape of g").of(kState).rank(2, RLK_MAX_RANK).rows(0));
enum {
  kRaw = index_of(kGateForward, "g"),
  kGateALog = index_of(kGateForward, "a_log"),
  kGateDtBias = index_of(kGateForward, "dt_bias"),
  kGateOut = index_of(kGateForward, "out")
};

int32_t infer_gate(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor* g = s[kRaw].tensor;
  const rlk_slot* attributes = s + kGateForward.size();
  if (int32_t code = check_gate(host, "kda_gate", s[kGateALog].tensor, s[kGateDtBias].tensor, attributes[0].i,
                                attributes[1].f, dim(g, -2), dim(g, -1)))
    return code;
  shapes[kGateOut] = like(g, RLK_F32 | RLK_F64, DType::f32);
  return RLK_OK;
}

constexpr auto kGateBackward =
    arguments(read("g", "raw gate [..., HV, K]").rank(2, RLK_MAX_RANK).rows(0),
              read("a_log", "[HV]").of(RLK_F32).rank(1).optional(),
              read("dt_bias", "[HV, K]").of(RLK_F32).rank(1, 2).optional(),
              read("d_out", "gradient of the log decay [..., HV, K]").rank(2, RLK_MAX_RANK).rows(0),
              write("d_g", "of the raw gate").rank(2, RLK_MAX_RANK).rows(0).optional(),
              write("d_a_log", "[HV]").of(kState).rank(1).optional(),
              write("d_dt_bias", "as dt_bias").of(kState).rank(1, 2).optional());
enum {
  kBwdRaw = index_of(kGateBackward, "g"),
  kBwdALog = index_of(kGateBackward, "a_log"),
  kBwdDtBias = index_of(kGateBackward, "dt_bias"),
  kGateDOut = index_of(kGateBackward, "d_out"),
  kGateDG = index_of(kGateBackward, "d_g"),
  kGateDALog = index_of(kGateBackward, "d_a_log"),
  kGateDDtBias = index_of(kGateBackward, "d_dt_bias")
};

int32_t infer_gate_backward(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "kda_gate_bwd";
  const DLTensor *g = s[kBwdRaw].tensor, *d_out = s[kGateDOut].tensor;
  const rlk_slot* attributes = s + kGateBackward.size();
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

extern const rlk_op_schema kda_fwd_schema =
    Schema("kda_fwd", "Kimi Delta Attention over whole sequences", kForward, kAttributes, infer_forward)
        .aliases("chunk_kda")
        .gradient("kda_bwd");
extern const rlk_op_schema kda_bwd_schema =
    Schema("kda_bwd", "gradients of kda_fwd", kBackward, kAttributes, infer_backward);
extern const rlk_op_schema kda_decode_schema =
    Schema("kda_decode", "Kimi Delta Attention, one token per sequence with a resident state", kDecode, kStep,
           infer_decode)
        .may_alias("state_out=state");
extern const rlk_op_schema kda_step_schema =
    Schema("kda_step", "the tokens after an open chunk's cached rows, with the bits of kda_fwd", kOpenChunk,
           kAttributes, infer_step);
extern const rlk_op_schema kda_gate_schema =
    Schema("kda_gate", "the log decay of Kimi Delta Attention from its raw gate", kGateForward,
           kGateAttributes, infer_gate)
        .gradient("kda_gate_bwd");
extern const rlk_op_schema kda_gate_bwd_schema =
    Schema("kda_gate_bwd", "gradients of kda_gate", kGateBackward, kGateAttributes, infer_gate_backward);

}  // namespace rlk::registry
