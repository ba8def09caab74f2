// qk_norm_rope: the norms of q's and k's heads, their rotation, and k's and v's places in a cache, in one op.
#include "registry/schema.hpp"

#include <initializer_list>

#include "registry/factors.hpp"

namespace rlk::registry {
namespace {

// Heads of more than that are no heads of attention.
constexpr int64_t kMostDims = 256;

// [T, heads, dims]
constexpr Argument heads(Argument a) { return a.rank(3).rows(0).strided(); }
constexpr Argument table(const char* name, const char* doc) {
  return read(name, doc).rank(2).no_gradient().strided();
}
constexpr Argument cache(const char* name, const char* doc) {
  return update(name, doc).of(kFloats | RLK_F8_E4M3).rank(3).optional().strided();
}

constexpr auto kArguments = arguments(
    heads(read("q", "queries [T, Hq, D]")), heads(read("k", "keys [T, Hkv, D]")),
    table("cos", "[rows, rotary_dim / 2], fp32 or q's dtype"), table("sin", "as cos"),
    read("positions", "table row of each token [T]").of(kIntegers).rank(1).rows(0).no_gradient(),
    heads(read("v", "values [T, Hkv, Dv], which v_cache takes")).optional(),
    read("q_weight", "of the norm of q's heads [D], q's dtype or fp32; absent: no norm").rank(1).optional(),
    read("k_weight", "of the norm of k's heads, as q_weight").rank(1).optional(),
    read("slots", "row of the caches that each token has [T]; negative or too large: none")
        .of(kIntegers)
        .rank(1)
        .rows(0)
        .optional()
        .no_gradient(),
    factors("k_scale", "[1] or [Hkv] factor of an fp8 k_cache; absent: 1"),
    factors("v_scale", "[1] or [Hkv] factor of an fp8 v_cache; absent: 1"),
    cache("k_cache", "[S, Hkv, D], q's dtype or fp8: rows named by slots become those of k_out"),
    cache("v_cache", "[S, Hkv, Dv], k_cache's dtype: rows named by slots become those of v"),
    heads(write("q_out", "[T, Hq, D]")), heads(write("k_out", "[T, Hkv, D]")).optional());
enum {
  kQ = index_of(kArguments, "q"),
  kK = index_of(kArguments, "k"),
  kCos = index_of(kArguments, "cos"),
  kSin = index_of(kArguments, "sin"),
  kPositions = index_of(kArguments, "positions"),
  kV = index_of(kArguments, "v"),
  kQWeight = index_of(kArguments, "q_weight"),
  kKWeight = index_of(kArguments, "k_weight"),
  kSlots = index_of(kArguments, "slots"),
  kKScale = index_of(kArguments, "k_scale"),
  kVScale = index_of(kArguments, "v_scale"),
  kKCache = index_of(kArguments, "k_cache"),
  kVCache = index_of(kArguments, "v_cache"),
  kQOut = index_of(kArguments, "q_out"),
  kKOut = index_of(kArguments, "k_out")
};

constexpr auto kAttributes = attributes(
    real("eps", "added to the mean of squares", 1e-6),
    flag("weight_offset", "weights are stored less one: 1 + weight multiplies"),
    choice("cast", "where the normalised value is rounded to q's dtype: after the weight, or before it too",
           "end|early"),
    choice("pairing", "which dims turn together: p and p + rotary_dim/2, or 2p and 2p + 1",
           "half|adjacent|adjacent_to_half"),
    integer("rotary_dim", "dims that turn, the first of a head; 0: as the tables say", 0));
enum {
  kEps = index_of(kAttributes, "eps"),
  kOffset = index_of(kAttributes, "weight_offset"),
  kPairing = index_of(kAttributes, "pairing"),
  kRotaryDim = index_of(kAttributes, "rotary_dim")
};

constexpr const char* kOp = "qk_norm_rope";

int32_t expect(const rlk_host* host, const char* name, const DLTensor* t,
               std::initializer_list<int64_t> want) {
  int32_t i = 0;
  for (int64_t size : want) {
    if (t && size >= 0 && dim(t, i) != size)
      return fail(host, "{}: {} has size {} in dimension {}, expected {}", kOp, name, dim(t, i), i, size);
    ++i;
  }
  return RLK_OK;
}

int32_t expect_dtype(const rlk_host* host, const char* name, const DLTensor* t, const DLTensor* q,
                     DType also = DType::none) {
  if (!t || dtype(t) == dtype(q) || dtype(t) == also) return RLK_OK;
  return fail(host, "{}: {} is {}, q is {}: it takes q's dtype{}{}", kOp, name, name_of(dtype(t)),
              name_of(dtype(q)), also == DType::none ? "" : " or ", also == DType::none ? "" : name_of(also));
}

int32_t check_norm(const rlk_host* host, const rlk_slot* s, const rlk_slot* a) {
  const DLTensor *q = s[kQ].tensor, *q_weight = s[kQWeight].tensor, *k_weight = s[kKWeight].tensor;
  const int64_t d = dim(q, 2);
  if (!q_weight != !k_weight)
    return fail(host, "{}: {} is given, {} is absent: q and k are both normalised, or neither", kOp,
                q_weight ? "q_weight" : "k_weight", q_weight ? "k_weight" : "q_weight");
  if (!q_weight && a[kOffset].i) return fail(host, "{}: weight_offset is 1, but q_weight is absent", kOp);
  for (const auto& [name, t] : {std::pair{"q_weight", q_weight}, std::pair{"k_weight", k_weight}}) {
    if (int32_t code = expect(host, name, t, {d})) return code;
    if (int32_t code = expect_dtype(host, name, t, q, DType::f32)) return code;
  }
  if (q_weight && dtype(q_weight) != dtype(k_weight))
    return fail(host, "{}: k_weight is {}, q_weight is {}: both have one dtype", kOp,
                name_of(dtype(k_weight)), name_of(dtype(q_weight)));
  const double eps = a[kEps].f;
  if (!(eps >= 0 && eps <= 1e30)) return fail(host, "{}: eps is {}, it must be from 0 to 1e30", kOp, eps);
  return RLK_OK;
}

int32_t check_turn(const rlk_host* host, const rlk_slot* s, const rlk_slot* a) {
  const DLTensor *q = s[kQ].tensor, *cos = s[kCos].tensor, *sin = s[kSin].tensor;
  if (a[kPairing].i == 2)
    return fail(host, "{}: pairing is adjacent_to_half, it must be half or adjacent", kOp);
  if (int32_t code = expect(host, "sin", sin, {dim(cos, 0), dim(cos, 1)})) return code;
  if (dtype(cos) != dtype(sin))
    return fail(host, "{}: sin is {}, cos is {}: both have one dtype", kOp, name_of(dtype(sin)),
                name_of(dtype(cos)));
  if (int32_t code = expect_dtype(host, "cos", cos, q, DType::f32)) return code;
  const int64_t turned = a[kRotaryDim].i ? a[kRotaryDim].i : 2 * dim(cos, 1);
  if (turned < 2 || turned % 2 != 0 || turned > dim(q, 2))
    return fail(host, "{}: {} dims turn, it must be an even number from 2 to D={}", kOp, turned, dim(q, 2));
  if (2 * dim(cos, 1) != turned)
    return fail(host, "{}: cos has {} columns, rotary_dim {} needs {}: tables have half the width", kOp,
                dim(cos, 1), turned, turned / 2);
  return expect(host, "positions", s[kPositions].tensor, {dim(q, 0)});
}

int32_t check_caches(const rlk_host* host, const rlk_slot* s) {
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor, *v = s[kV].tensor, *slots = s[kSlots].tensor,
                 *k_cache = s[kKCache].tensor, *v_cache = s[kVCache].tensor;
  if (!slots != !(k_cache || v_cache))
    return fail(host, "{}: {} given, {}: slots say where the caches are written", kOp,
                slots ? "slots are" : "a cache is", slots ? "there is no cache" : "slots are absent");
  if (!v != !v_cache)
    return fail(host, "{}: {} is given, {} is absent: v goes to v_cache and nowhere else", kOp,
                v ? "v" : "v_cache", v ? "v_cache" : "v");
  if (int32_t code = expect(host, "slots", slots, {dim(q, 0)})) return code;
  if (int32_t code = expect(host, "k_cache", k_cache, {-1, dim(k, 1), dim(k, 2)})) return code;
  if (int32_t code = expect_dtype(host, "k_cache", k_cache, q, DType::f8_e4m3)) return code;
  if (!v) return RLK_OK;
  if (int32_t code = expect(host, "v", v, {dim(k, 0), dim(k, 1)})) return code;
  if (int32_t code = expect_dtype(host, "v", v, q)) return code;
  if (dim(v, 2) > kMostDims)
    return fail(host, "{}: v has Dv={}, it must be at most {}", kOp, dim(v, 2), kMostDims);
  if (int32_t code = expect(host, "v_cache", v_cache, {k_cache ? dim(k_cache, 0) : -1, dim(v, 1), dim(v, 2)}))
    return code;
  if (k_cache && dtype(v_cache) != dtype(k_cache))
    return fail(host, "{}: v_cache is {}, k_cache is {}: both have one dtype", kOp, name_of(dtype(v_cache)),
                name_of(dtype(k_cache)));
  return expect_dtype(host, "v_cache", v_cache, q, DType::f8_e4m3);
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor *q = s[kQ].tensor, *k = s[kK].tensor;
  const rlk_slot* a = s + kArguments.size();
  if (dim(q, 2) < 2 || dim(q, 2) > kMostDims)
    return fail(host, "{}: q has D={}, it must be from 2 to {}", kOp, dim(q, 2), kMostDims);
  if (int32_t code = expect(host, "k", k, {dim(q, 0), -1, dim(q, 2)})) return code;
  if (int32_t code = expect_dtype(host, "k", k, q)) return code;
  if (int32_t code = check_norm(host, s, a)) return code;
  if (int32_t code = check_turn(host, s, a)) return code;
  if (int32_t code = check_caches(host, s)) return code;
  if (int32_t code = check_factors(host, kOp, "k_scale", s[kKScale].tensor, "k_cache", s[kKCache].tensor))
    return code;
  if (int32_t code = check_factors(host, kOp, "v_scale", s[kVScale].tensor, "v_cache", s[kVCache].tensor))
    return code;
  const auto as = [](const DLTensor* t) { return like(t, static_cast<uint32_t>(dtype(t)), dtype(t)); };
  shapes[kQOut] = as(q);
  shapes[kKOut] = as(k);
  if (s[kKCache].tensor) shapes[kKCache] = as(s[kKCache].tensor);
  if (s[kVCache].tensor) shapes[kVCache] = as(s[kVCache].tensor);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema qk_norm_rope_schema =
    Schema("qk_norm_rope", "norms of q's and k's heads, rope of both, and k and v into a cache", kArguments,
           kAttributes, infer);

}  // namespace rlk::registry
