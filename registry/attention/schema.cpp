// attention: softmax(q k^T) v of packed, dense or paged sequences, for training, prefill, chunks and decode alike; its
// gradients; and the same in two steps, where ranks have a part of the keys each.
#include "registry/schema.hpp"

#include <limits>

#include "registry/factors.hpp"

namespace rlk::registry {
namespace {

// Kernels count heads and channels in 32 bits.
constexpr int64_t kMaxHeads = int64_t{1} << 20;
constexpr int64_t kMaxWidth = 256, kLatentKey = 576, kLatentValue = 512;

constexpr auto kScores =
    attributes(real("scale", "factor on the scores; 0: D^-1/2", 0),
               flag("causal", "a query sees keys up to its own position", true),
               integer("window", "with causal: a query sees so many keys, its own included; 0: all", 0),
               real("softcap", "cap tanh(score / cap) in place of the score; 0: none", 0));
constexpr auto kAttributes = attributes(
    kScores,
    integer("split", "keys of a split, by whose order sums are joined: 512, 1024, 2048, 4096; 0: one split",
            1024));
enum {
  kScale = index_of(kAttributes, "scale"),
  kCausal = index_of(kAttributes, "causal"),
  kWindow = index_of(kAttributes, "window"),
  kSoftcap = index_of(kAttributes, "softcap"),
  kSplit = index_of(kAttributes, "split")
};

constexpr auto operands(uint32_t cache) {
  const auto operand = [](const char* name, const char* doc) {
    return read(name, doc).rank(3, 4).rows(0).saved().strided();
  };
  return arguments(
      operand("q", "queries: packed [T, Hq, D], or [B, S, Hq, D]"),
      operand("k", "keys: packed [Tk, Hkv, D], or [B, L, Hkv, D], or pages [pages, page_size, Hkv, D]")
          .of(cache),
      operand("v", "values, as k [.., Hkv, Dv]").of(cache));
}
constexpr auto kOperands = operands(kFloats), kCachedOperands = operands(kFloats | RLK_F8_E4M3);
constexpr auto kFactors = arguments(factors("k_scale", "[1] or [Hkv] factor of fp8 keys; absent: 1"),
                                    factors("v_scale", "[1] or [Hkv] factor of fp8 values; absent: 1"));
constexpr Argument bounds(const char* name, const char* doc) {
  return read(name, doc).of(kIntegers).rank(1).optional().no_gradient().saved();
}
constexpr auto kBounds = arguments(bounds("cu_q", "[N + 1] bounds of packed queries"),
                                   bounds("cu_k", "[N + 1] bounds of packed keys"));
constexpr auto kTable = read("block_table", "[N, most pages] the pages of every sequence, in order")
                            .of(kIntegers)
                            .rank(2)
                            .rows(0)
                            .optional()
                            .no_gradient()
                            .saved();
constexpr auto kSinksArgument =
    read("sinks", "[Hq] a score that takes part in every softmax and has no value")
        .of(RLK_F32)
        .rank(1)
        .optional()
        .saved();
constexpr auto kSequences = arguments(
    kBounds, bounds("kv_len", "[N] keys of every sequence; absent: all there is room for").rows(0), kTable,
    bounds("prefix_of", "[N] the sequence whose keys come before one's own, or -1"), kSinksArgument);

constexpr auto kForward =
    arguments(kCachedOperands, kSequences, kFactors,
              write("out", "[T, Hq, Dv], or [B, S, Hq, Dv]").rank(3, 4).rows(0).saved().strided(),
              write("lse", "log of the sum of exp(score), natural [T, Hq], or [B, S, Hq]")
                  .of(RLK_F32 | RLK_F64)
                  .rank(2, 3)
                  .rows(0)
                  .optional()
                  .saved());
enum {
  kQ = index_of(kForward, "q"),
  kK = index_of(kForward, "k"),
  kV = index_of(kForward, "v"),
  kCuQ = index_of(kForward, "cu_q"),
  kCuK = index_of(kForward, "cu_k"),
  kKvLen = index_of(kForward, "kv_len"),
  kBlockTable = index_of(kForward, "block_table"),
  kPrefixOf = index_of(kForward, "prefix_of"),
  kSinks = index_of(kForward, "sinks"),
  kKScale = index_of(kForward, "k_scale"),
  kVScale = index_of(kForward, "v_scale"),
  kOut = index_of(kForward, "out"),
  kLse = index_of(kForward, "lse")
};

// The arguments of the forward up to sinks, in its places.
constexpr auto kBackward =
    arguments(kOperands, kSequences, read("out", "as the forward left it").rank(3, 4).rows(0).strided(),
              read("lse", "as the forward left it").of(RLK_F32).rank(2, 3).rows(0),
              read("d_out", "gradient of out, q's dtype or fp32").rank(3, 4).rows(0).strided(),
              read("d_lse", "gradient of lse").of(RLK_F32).rank(2, 3).rows(0).optional(),
              write("d_q", "as q; +0 in rows of no sequence").rank(3, 4).rows(0).optional().strided(),
              write("d_k", "as k; +0 in rows of no sequence").rank(3, 4).rows(0).optional().strided(),
              write("d_v", "as v; +0 in rows of no sequence").rank(3, 4).rows(0).optional().strided(),
              write("d_sinks", "[Hq]").of(RLK_F32 | RLK_F64).rank(1).optional());
enum {
  kOutLeft = index_of(kBackward, "out"),
  kLseLeft = index_of(kBackward, "lse"),
  kDOut = index_of(kBackward, "d_out"),
  kDLse = index_of(kBackward, "d_lse"),
  kDQ = index_of(kBackward, "d_q"),
  kDK = index_of(kBackward, "d_k"),
  kDV = index_of(kBackward, "d_v"),
  kDSinks = index_of(kBackward, "d_sinks")
};
static_assert(index_of(kBackward, "sinks") == kSinks);

// [.., Hq] of [.., Hq, D].
rlk_shape per_head(const DLTensor* q, uint32_t dtypes) {
  rlk_shape s{q->ndim - 1, dtypes, RLK_F32, {}};
  for (int32_t i = 0; i + 1 < q->ndim; ++i) s.dim[i] = dim(q, i);
  return s;
}

// Heads and widths of q, k and v.
int32_t check_heads(const rlk_host* host, const char* op, const DLTensor* q, const DLTensor* k,
                    const DLTensor* v) {
  if (dtype(k) != dtype(q) && dtype(k) != DType::f8_e4m3)
    return fail(host, "{}: k is {}, q is {}", op, name_of(dtype(k)), name_of(dtype(q)));
  if (dtype(v) != dtype(k))
    return fail(host, "{}: v is {}, k is {}", op, name_of(dtype(v)), name_of(dtype(k)));
  if (v->ndim != k->ndim) return fail(host, "{}: v has rank {}, k has rank {}", op, v->ndim, k->ndim);
  for (int32_t i = 0; i + 1 < k->ndim; ++i)
    if (dim(v, i) != dim(k, i))
      return fail(host, "{}: v has size {} in dimension {}, k has {}", op, dim(v, i), i, dim(k, i));
  const int64_t heads = dim(q, -2), kv_heads = dim(k, -2), d = dim(q, -1), dv = dim(v, -1);
  if (dim(k, -1) != d) return fail(host, "{}: k has D={}, q has D={}", op, dim(k, -1), d);
  if (kv_heads < 1 || heads < 1 || heads > kMaxHeads || heads % kv_heads != 0)
    return fail(host, "{}: q has Hq={}, k has Hkv={}: Hq must be a multiple of Hkv, from 1 to {}", op, heads,
                kv_heads, kMaxHeads);
  const bool latent = d == kLatentKey && dv == kLatentValue;
  if (!latent && (d < 16 || dv < 16 || d % 16 != 0 || dv % 16 != 0 || d > kMaxWidth || dv > kMaxWidth))
    return fail(host, "{}: D={}, Dv={}: both must be multiples of 16 up to {}, or {} and {}", op, d, dv,
                kMaxWidth, kLatentKey, kLatentValue);
  return RLK_OK;
}

int32_t expect_size(const rlk_host* host, const char* op, const char* name, const DLTensor* t, int64_t want) {
  if (!t || dim(t, 0) == want) return RLK_OK;
  return fail(host, "{}: {} has size {}, expected {}", op, name, dim(t, 0), want);
}

// v has k's dtype and heads.
int32_t check_cache(const rlk_host* host, const char* op, const DLTensor* k, const DLTensor* k_scale,
                    const DLTensor* v_scale) {
  if (int32_t code = check_factors(host, op, "k_scale", k_scale, "k", k)) return code;
  return check_factors(host, op, "v_scale", v_scale, "k", k);
}

// Where the sequences lie.
int32_t check_sequences(const rlk_host* host, const char* op, const rlk_slot* s) {
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *cu_q = s[kCuQ].tensor, *cu_k = s[kCuK].tensor,
                 *kv_len = s[kKvLen].tensor, *table = s[kBlockTable].tensor;
  if (q->ndim == 3 && !cu_q) return fail(host, "{}: q is packed (rank 3), cu_q is absent", op);
  if (q->ndim == 4 && cu_q) return fail(host, "{}: cu_q is given, q has rank 4, not 3", op);
  if (k->ndim == 3 && !cu_k) return fail(host, "{}: k is packed (rank 3), cu_k is absent", op);
  if (k->ndim == 4 && cu_k) return fail(host, "{}: cu_k is given, k has rank 4, not 3", op);
  if (k->ndim == 3 && table) return fail(host, "{}: block_table is given, k has rank 3, not 4", op);
  if (cu_q && dim(cu_q, 0) < 1) return fail(host, "{}: cu_q is empty, it holds N + 1 bounds", op);
  const int64_t sequences = cu_q ? dim(cu_q, 0) - 1 : dim(q, 0);
  if (int32_t code = expect_size(host, op, "cu_k", cu_k, sequences + 1)) return code;
  if (int32_t code = expect_size(host, op, "kv_len", kv_len, sequences)) return code;
  if (int32_t code = expect_size(host, op, "block_table", table, sequences)) return code;
  if (table && !kv_len) return fail(host, "{}: block_table is given, kv_len is absent", op);
  if (table && dim(k, 1) < 1)
    return fail(host, "{}: k has page_size={}, it must be 1 or more", op, dim(k, 1));
  if (k->ndim == 4 && !table && dim(k, 0) != sequences)
    return fail(host, "{}: k has B={}, q has {} sequences", op, dim(k, 0), sequences);
  return RLK_OK;
}

int32_t check_attributes(const rlk_host* host, const char* op, const rlk_slot* a) {
  constexpr double kMost = 1e30, kLeast = 1e-30;
  const double scale = a[kScale].f, cap = a[kSoftcap].f;
  if (scale != 0 && !(scale >= kLeast && scale <= kMost))
    return fail(host, "{}: scale is {}, it must be from {:g} to {:g}, or 0", op, scale, kLeast, kMost);
  if (cap != 0 && !(cap >= kLeast && cap <= kMost))
    return fail(host, "{}: softcap is {}, it must be from {:g} to {:g}, or 0", op, cap, kLeast, kMost);
  const int64_t window = a[kWindow].i;
  if (window < 0) return fail(host, "{}: window is {}, it must be 0 or more", op, window);
  if (window > 0 && !a[kCausal].i) return fail(host, "{}: window is {}, causal is 0, not 1", op, window);
  return RLK_OK;
}

int32_t check_prefix(const rlk_host* host, const char* op, const rlk_slot* s) {
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *prefix_of = s[kPrefixOf].tensor;
  if (!prefix_of) return RLK_OK;
  for (const auto& [name, t] : {std::pair{"q", q}, std::pair{"k", k}})
    if (t->ndim != 3)
      return fail(host, "{}: prefix_of is given, {} has rank {}, not 3: it is of packed sequences", op, name,
                  t->ndim);
  return expect_size(host, op, "prefix_of", prefix_of, dim(s[kCuQ].tensor, 0) - 1);
}

// All that the gradients have too; `attributes` come after the arguments.
int32_t check(const rlk_host* host, const char* op, const rlk_slot* s, const rlk_slot* attributes) {
  const DLTensor* q = s[kQ].tensor;
  if (int32_t code = check_heads(host, op, q, s[kK].tensor, s[kV].tensor)) return code;
  if (int32_t code = check_sequences(host, op, s)) return code;
  if (int32_t code = expect_size(host, op, "sinks", s[kSinks].tensor, dim(q, -2))) return code;
  if (int32_t code = check_prefix(host, op, s)) return code;
  return check_attributes(host, op, attributes);
}

int32_t check_split(const rlk_host* host, const char* op, int64_t split) {
  if (split == 0 || split == 512 || split == 1024 || split == 2048 || split == 4096) return RLK_OK;
  return fail(host, "{}: split is {}, it takes 512, 1024, 2048, 4096 or 0", op, split);
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "attention";
  const DLTensor *q = s[kQ].tensor, *v = s[kV].tensor;
  if (int32_t code = check(host, op, s, s + kForward.size())) return code;
  if (int32_t code = check_cache(host, op, s[kK].tensor, s[kKScale].tensor, s[kVScale].tensor)) return code;
  if (int32_t code = check_split(host, op, s[kForward.size() + kSplit].i)) return code;
  shapes[kOut] = with_last(q, dim(v, -1), static_cast<uint32_t>(dtype(q)) | RLK_F32, dtype(q));
  shapes[kLse] = per_head(q, RLK_F32);
  return RLK_OK;
}

// ---- in two steps

// The forward's arguments in its places, but for sinks.
constexpr auto kPart = arguments(
    kCachedOperands, kBounds,
    read("kv_len", "[N] keys of every sequence, those of other ranks included")
        .of(kIntegers)
        .rank(1)
        .rows(0)
        .no_gradient(),
    kTable,
    read("k_first", "[N] position of the first key of every sequence in this call, a multiple of split")
        .of(kIntegers)
        .rank(1)
        .rows(0)
        .no_gradient(),
    read("k_last", "[N] position behind the last one; absent: as many as there is room for")
        .of(kIntegers)
        .rank(1)
        .rows(0)
        .optional()
        .no_gradient(),
    kFactors,
    write("partials", "maximum, sum and weighted values of each split [.., Hq, splits, 2 + Dv]")
        .of(RLK_F32 | RLK_F64)
        .rank(4, 5)
        .rows(0)
        .no_gradient());
enum {
  kKFirst = index_of(kPart, "k_first"),
  kKLast = index_of(kPart, "k_last"),
  kPartials = index_of(kPart, "partials")
};
static_assert(index_of(kPart, "block_table") == kBlockTable && index_of(kPart, "kv_len") == kKvLen);

int32_t infer_part(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "attention_part";
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *table = s[kBlockTable].tensor;
  const rlk_slot* attributes = s + kPart.size();
  if (int32_t code = check_heads(host, op, q, k, s[kV].tensor)) return code;
  if (int32_t code = check_sequences(host, op, s)) return code;
  for (const int i : {+kKFirst, +kKLast})
    if (int32_t code = expect_size(host, op, kPart[static_cast<std::size_t>(i)].name, s[i].tensor,
                                   dim(s[kKvLen].tensor, 0)))
      return code;
  if (int32_t code = check_cache(host, op, k, s[index_of(kPart, "k_scale")].tensor,
                                 s[index_of(kPart, "v_scale")].tensor))
    return code;
  if (int32_t code = check_attributes(host, op, attributes)) return code;
  const int64_t split = attributes[kSplit].i;
  if (int32_t code = check_split(host, op, split)) return code;
  int64_t room = dim(k, -3);
  if (table && __builtin_mul_overflow(room, dim(table, 1), &room))
    return fail(host, "{}: block_table has {} pages of page_size={}, 2^63 keys or more", op, dim(table, 1),
                dim(k, 1));
  rlk_shape& partials = shapes[kPartials];
  partials = {q->ndim + 1, RLK_F32, RLK_F32, {}};
  for (int32_t i = 0; i + 1 < q->ndim; ++i) partials.dim[i] = dim(q, i);
  partials.dim[q->ndim - 1] = split == 0 ? 1 : room / split + (room % split != 0);
  partials.dim[q->ndim] = 2 + dim(s[kV].tensor, -1);
  return RLK_OK;
}

constexpr auto kMerge =
    arguments(read("partials", "of every rank, ascending [ranks, .., Hq, splits, 2 + Dv]")
                  .of(RLK_F32)
                  .rank(5, 6)
                  .rows(1)
                  .no_gradient()
                  .strided(),
              kSinksArgument.no_gradient(),
              write("out", "[T, Hq, Dv], or [B, S, Hq, Dv]").rank(3, 4).rows(0).no_gradient().strided(),
              write("lse", "log of the sum of exp(score), natural [T, Hq], or [B, S, Hq]")
                  .of(RLK_F32 | RLK_F64)
                  .rank(2, 3)
                  .rows(0)
                  .optional()
                  .no_gradient());

int32_t infer_merge(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "attention_merge";
  const DLTensor *partials = s[0].tensor, *sinks = s[1].tensor;
  const int64_t width = dim(partials, -1) - 2, heads = dim(partials, -3);
  if (width < 16 || width % 16 != 0 || width > kLatentValue)
    return fail(host,
                "{}: partials has {} numbers for each split, they are 2 + Dv, Dv a multiple of 16 up to {}",
                op, width + 2, kLatentValue);
  if (int32_t code = expect_size(host, op, "sinks", sinks, heads)) return code;
  rlk_shape out{partials->ndim - 2, kFloats, RLK_F32, {}}, lse{partials->ndim - 3, RLK_F32, RLK_F32, {}};
  for (int32_t i = 0; i < lse.ndim; ++i) out.dim[i] = lse.dim[i] = dim(partials, i + 1);
  out.dim[out.ndim - 1] = width;
  shapes[index_of(kMerge, "out")] = out;
  shapes[index_of(kMerge, "lse")] = lse;
  return RLK_OK;
}

// ---- gradients

// t has the shape of q with `width` channels, or, where that is 0, no channels.
int32_t expect_rows(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                    const DLTensor* q, int64_t width) {
  if (!t) return RLK_OK;
  const int32_t rank = width ? q->ndim : q->ndim - 1;
  if (t->ndim != rank)
    return fail(host, "{}: {} has rank {}, expected {} beside q of rank {}", op, name, t->ndim, rank,
                q->ndim);
  for (int32_t i = 0; i < rank; ++i) {
    const int64_t want = i + 1 < q->ndim ? dim(q, i) : width;
    if (dim(t, i) != want)
      return fail(host, "{}: {} has size {} in dimension {}, expected {}", op, name, dim(t, i), i, want);
  }
  if (width && dtype(t) != dtype(q) && dtype(t) != DType::f32)
    return fail(host, "{}: {} is {}, q is {}: it takes q's dtype or fp32", op, name, name_of(dtype(t)),
                name_of(dtype(q)));
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "attention_bwd";
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *v = s[kV].tensor;
  if (int32_t code = check(host, op, s, s + kBackward.size())) return code;
  if (s[kBlockTable].tensor)
    return fail(host, "{}: block_table is given, gradients need k and v packed or [B, L, Hkv, D]", op);
  for (const int i : std::initializer_list<int>{kOutLeft, kLseLeft, kDOut, kDLse}) {
    const int64_t width = i == kOutLeft || i == kDOut ? dim(v, -1) : 0;
    if (int32_t code =
            expect_rows(host, op, kBackward[static_cast<std::size_t>(i)].name, s[i].tensor, q, width))
      return code;
  }
  if (s[kDSinks].tensor && !s[kSinks].tensor)
    return fail(host, "{}: d_sinks is asked for, sinks is absent", op);
  const uint32_t dtypes = static_cast<uint32_t>(dtype(q)) | RLK_F32;
  shapes[kDQ] = like(q, dtypes, dtype(q));
  shapes[kDK] = like(k, dtypes, dtype(q));
  shapes[kDV] = like(v, dtypes, dtype(q));
  shapes[kDSinks] = shape_of({dim(q, -2)}, RLK_F32, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema attention_schema =
    Schema("attention", "softmax(scale q k^T) v over packed, dense or paged sequences", kForward, kAttributes,
           infer)
        .gradient("attention_bwd");
extern const rlk_op_schema attention_bwd_schema = Schema(
    "attention_bwd", "gradients of attention over packed or dense sequences", kBackward, kScores, infer_bwd);
extern const rlk_op_schema attention_part_schema = Schema(
    "attention_part", "what a rank's splits of the keys add to attention", kPart, kAttributes, infer_part);
extern const rlk_op_schema attention_merge_schema =
    Schema("attention_merge", "attention from what every rank's splits add to it", kMerge, infer_merge);

}  // namespace rlk::registry
