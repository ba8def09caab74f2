// attention: softmax(q k^T) v of packed, dense or paged sequences, for training, prefill, chunks and decode alike.
#include "registry/schema.hpp"

#include <limits>

namespace rlk::registry {
namespace {

// Kernels count heads and channels in 32 bits.
constexpr int64_t kMaxHeads = int64_t{1} << 20;
constexpr int64_t kMaxWidth = 256, kLatentKey = 576, kLatentValue = 512;

constexpr auto kAttributes = attributes(
    real("scale", "factor on the scores; 0: D^-1/2", 0),
    flag("causal", "a query sees keys up to its own position", true),
    integer("window", "with causal: a query sees so many keys, its own included; 0: all", 0),
    real("softcap", "cap tanh(score / cap) in place of the score; 0: none", 0),
    integer("split", "keys of a split, by whose order sums are joined: 512, 1024, 2048, 4096; 0: one split",
            1024));
enum {
  kScale = index_of(kAttributes, "scale"),
  kCausal = index_of(kAttributes, "causal"),
  kWindow = index_of(kAttributes, "window"),
  kSoftcap = index_of(kAttributes, "softcap"),
  kSplit = index_of(kAttributes, "split")
};

constexpr auto kForward =
    arguments(read("q", "queries: packed [T, Hq, D], or [B, S, Hq, D]").rank(3, 4).rows(0).strided(),
              read("k", "keys: packed [Tk, Hkv, D], or [B, L, Hkv, D], or pages [pages, page_size, Hkv, D]")
                  .rank(3, 4)
                  .rows(0)
                  .strided(),
              read("v", "values, as k [.., Hkv, Dv]").rank(3, 4).rows(0).strided(),
              read("cu_q", "[N + 1] bounds of packed queries").of(kIntegers).rank(1).optional().no_gradient(),
              read("cu_k", "[N + 1] bounds of packed keys").of(kIntegers).rank(1).optional().no_gradient(),
              read("kv_len", "[N] keys of every sequence; absent: all there is room for")
                  .of(kIntegers)
                  .rank(1)
                  .rows(0)
                  .optional()
                  .no_gradient(),
              read("block_table", "[N, most pages] the pages of every sequence, in order")
                  .of(kIntegers)
                  .rank(2)
                  .rows(0)
                  .optional()
                  .no_gradient(),
              read("sinks", "[Hq] a score that takes part in every softmax and has no value")
                  .of(RLK_F32)
                  .rank(1)
                  .optional(),
              write("out", "[T, Hq, Dv], or [B, S, Hq, Dv]").rank(3, 4).rows(0).strided(),
              write("lse", "log of the sum of exp(score), natural [T, Hq], or [B, S, Hq]")
                  .of(RLK_F32 | RLK_F64)
                  .rank(2, 3)
                  .rows(0)
                  .optional());
enum {
  kQ = index_of(kForward, "q"),
  kK = index_of(kForward, "k"),
  kV = index_of(kForward, "v"),
  kCuQ = index_of(kForward, "cu_q"),
  kCuK = index_of(kForward, "cu_k"),
  kKvLen = index_of(kForward, "kv_len"),
  kBlockTable = index_of(kForward, "block_table"),
  kSinks = index_of(kForward, "sinks"),
  kOut = index_of(kForward, "out"),
  kLse = index_of(kForward, "lse")
};

constexpr char kOp[] = "attention";

// Heads and widths of q, k and v.
int32_t check_heads(const rlk_host* host, const DLTensor* q, const DLTensor* k, const DLTensor* v) {
  for (const auto& [name, t] : {std::pair{"k", k}, std::pair{"v", v}})
    if (dtype(t) != dtype(q))
      return fail(host, "{}: {} is {}, q is {}", kOp, name, name_of(dtype(t)), name_of(dtype(q)));
  if (v->ndim != k->ndim) return fail(host, "{}: v has rank {}, k has rank {}", kOp, v->ndim, k->ndim);
  for (int32_t i = 0; i + 1 < k->ndim; ++i)
    if (dim(v, i) != dim(k, i))
      return fail(host, "{}: v has size {} in dimension {}, k has {}", kOp, dim(v, i), i, dim(k, i));
  const int64_t heads = dim(q, -2), kv_heads = dim(k, -2), d = dim(q, -1), dv = dim(v, -1);
  if (dim(k, -1) != d) return fail(host, "{}: k has D={}, q has D={}", kOp, dim(k, -1), d);
  if (kv_heads < 1 || heads < 1 || heads > kMaxHeads || heads % kv_heads != 0)
    return fail(host, "{}: q has Hq={}, k has Hkv={}: Hq must be a multiple of Hkv, from 1 to {}", kOp, heads,
                kv_heads, kMaxHeads);
  const bool latent = d == kLatentKey && dv == kLatentValue;
  if (!latent && (d < 16 || dv < 16 || d % 16 != 0 || dv % 16 != 0 || d > kMaxWidth || dv > kMaxWidth))
    return fail(host, "{}: D={}, Dv={}: both must be multiples of 16 up to {}, or {} and {}", kOp, d, dv,
                kMaxWidth, kLatentKey, kLatentValue);
  return RLK_OK;
}

int32_t expect_size(const rlk_host* host, const char* name, const DLTensor* t, int64_t want) {
  if (!t || dim(t, 0) == want) return RLK_OK;
  return fail(host, "{}: {} has size {}, expected {}", kOp, name, dim(t, 0), want);
}

// Where the sequences lie.
int32_t check_sequences(const rlk_host* host, const rlk_slot* s) {
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *cu_q = s[kCuQ].tensor, *cu_k = s[kCuK].tensor,
                 *kv_len = s[kKvLen].tensor, *table = s[kBlockTable].tensor;
  if (q->ndim == 3 && !cu_q) return fail(host, "{}: q is packed (rank 3), cu_q is absent", kOp);
  if (q->ndim == 4 && cu_q) return fail(host, "{}: cu_q is given, q has rank 4, not 3", kOp);
  if (k->ndim == 3 && !cu_k) return fail(host, "{}: k is packed (rank 3), cu_k is absent", kOp);
  if (k->ndim == 4 && cu_k) return fail(host, "{}: cu_k is given, k has rank 4, not 3", kOp);
  if (k->ndim == 3 && table) return fail(host, "{}: block_table is given, k has rank 3, not 4", kOp);
  if (cu_q && dim(cu_q, 0) < 1) return fail(host, "{}: cu_q is empty, it holds N + 1 bounds", kOp);
  const int64_t sequences = cu_q ? dim(cu_q, 0) - 1 : dim(q, 0);
  if (int32_t code = expect_size(host, "cu_k", cu_k, sequences + 1)) return code;
  if (int32_t code = expect_size(host, "kv_len", kv_len, sequences)) return code;
  if (int32_t code = expect_size(host, "block_table", table, sequences)) return code;
  if (table && !kv_len) return fail(host, "{}: block_table is given, kv_len is absent", kOp);
  if (table && dim(k, 1) < 1)
    return fail(host, "{}: k has page_size={}, it must be 1 or more", kOp, dim(k, 1));
  if (k->ndim == 4 && !table && dim(k, 0) != sequences)
    return fail(host, "{}: k has B={}, q has {} sequences", kOp, dim(k, 0), sequences);
  return RLK_OK;
}

int32_t check_attributes(const rlk_host* host, const rlk_slot* a) {
  constexpr double kMost = 1e30, kLeast = 1e-30;
  const double scale = a[kScale].f, cap = a[kSoftcap].f;
  if (scale != 0 && !(scale >= kLeast && scale <= kMost))
    return fail(host, "{}: scale is {}, it must be from {:g} to {:g}, or 0", kOp, scale, kLeast, kMost);
  if (cap != 0 && !(cap >= kLeast && cap <= kMost))
    return fail(host, "{}: softcap is {}, it must be from {:g} to {:g}, or 0", kOp, cap, kLeast, kMost);
  const int64_t window = a[kWindow].i, split = a[kSplit].i;
  if (window < 0) return fail(host, "{}: window is {}, it must be 0 or more", kOp, window);
  if (window > 0 && !a[kCausal].i) return fail(host, "{}: window is {}, causal is 0, not 1", kOp, window);
  if (split != 0 && split != 512 && split != 1024 && split != 2048 && split != 4096)
    return fail(host, "{}: split is {}, it takes 512, 1024, 2048, 4096 or 0", kOp, split);
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor *q = s[kQ].tensor, *v = s[kV].tensor;
  if (int32_t code = check_heads(host, q, s[kK].tensor, v)) return code;
  if (int32_t code = check_sequences(host, s)) return code;
  if (int32_t code = expect_size(host, "sinks", s[kSinks].tensor, dim(q, -2))) return code;
  if (int32_t code = check_attributes(host, s + kForward.size())) return code;
  shapes[kOut] = with_last(q, dim(v, -1), static_cast<uint32_t>(dtype(q)) | RLK_F32 | RLK_F64, dtype(q));
  shapes[kLse] = {q->ndim - 1, RLK_F32 | RLK_F64, RLK_F32, {}};
  for (int32_t i = 0; i + 1 < q->ndim; ++i) shapes[kLse].dim[i] = dim(q, i);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema attention_schema =
    Schema("attention", "softmax(scale q k^T) v over packed, dense or paged sequences", kForward, kAttributes,
           infer);

}  // namespace rlk::registry
