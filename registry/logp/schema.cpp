// logp: log-probability of each row's token under its logits; its gradient; and the joining of vocabulary shards.
#include "registry/logp/schema.hpp"

namespace rlk::registry {
namespace {

using namespace logp;

// ---- logp

constexpr auto kForward =
    arguments(read("logits", "[N, columns]: one column for each entry of the vocabulary, or more")
                  .rank(2)
                  .rows(0)
                  .saved()
                  .strided(),
              kRowInputs, kRowResults);
constexpr int kLogits = index_of(kForward, "logits");

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "logp";
  const DLTensor* logits = s[kLogits].tensor;
  const int64_t rows = dim(logits, 0);
  Vocabulary v;
  if (int32_t code = check_vocabulary(host, op, s + kForward.size(), "logits", dim(logits, 1), v))
    return code;
  if (int32_t code = check_rows(host, op, "logits", rows, RowInputs::of(kForward, s), v)) return code;
  return row_results(host, op, kForward, s, v, rows, shapes);
}

// ---- logp_bwd

constexpr auto kBackward =
    arguments(read("logits", "as in the forward [N, columns]").rank(2).rows(0).strided(), kRowInputs,
              read("stats", "as the forward or logp_merge left them [N, 4]; absent: computed again")
                  .of(RLK_F32)
                  .rank(2)
                  .rows(0)
                  .optional(),
              kRowCotangents,
              write("d_logits", "[N, columns], +0 where an entry takes no part").rank(2).rows(0).strided());
enum {
  kLogitsB = index_of(kBackward, "logits"),
  kStatsB = index_of(kBackward, "stats"),
  kDLogits = index_of(kBackward, "d_logits")
};

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "logp_bwd";
  const DLTensor *logits = s[kLogitsB].tensor, *stats = s[kStatsB].tensor;
  const int64_t rows = dim(logits, 0);
  Vocabulary v;
  if (int32_t code = check_vocabulary(host, op, s + kBackward.size(), "logits", dim(logits, 1), v))
    return code;
  if (int32_t code = check_rows(host, op, "logits", rows, RowInputs::of(kBackward, s), v)) return code;
  if (int32_t code =
          check_cotangents(host, op, "logits", rows, v, stats, s[index_of(kBackward, "d_logp")].tensor,
                           s[index_of(kBackward, "d_entropy")].tensor))
    return code;
  shapes[kDLogits] = like(logits, static_cast<uint32_t>(dtype(logits)) | RLK_F32, dtype(logits));
  return RLK_OK;
}

// ---- logp_merge

constexpr auto kMerge =
    arguments(read("partials", "stats of T = 1, 2, 4 or 8 shards of the vocabulary, ascending [T, N, 4]")
                  .of(RLK_F32)
                  .rank(3)
                  .rows(1)
                  .no_gradient(),
              read("temperatures", "of each row [N]; absent: the attribute")
                  .of(RLK_F32)
                  .rank(1)
                  .rows(0)
                  .optional()
                  .no_gradient(),
              row_result("logp", "[N]"), row_result("lse", "logsumexp of the scaled logits [N]"),
              row_result("entropy", "[N]"), kStats);
constexpr auto kMergeAttributes = attributes(kTemperature);
enum {
  kPartials = index_of(kMerge, "partials"),
  kTemperatures = index_of(kMerge, "temperatures"),
  kLogpM = index_of(kMerge, "logp"),
  kLseM = index_of(kMerge, "lse"),
  kEntropyM = index_of(kMerge, "entropy"),
  kStatsM = index_of(kMerge, "stats")
};

int32_t infer_merge(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "logp_merge";
  const DLTensor *partials = s[kPartials].tensor, *temperatures = s[kTemperatures].tensor;
  const int64_t parts = dim(partials, 0), rows = dim(partials, 1);
  if (parts != 1 && parts != 2 && parts != 4 && parts != 8)
    return fail(host, "{}: partials has T={}, it must be 1, 2, 4 or 8", op, parts);
  if (dim(partials, 2) != kStatsWidth)
    return fail(host, "{}: partials has {} numbers for each row, stats have {}", op, dim(partials, 2),
                kStatsWidth);
  if (int32_t code = expect_rows(host, op, "temperatures", temperatures, "partials", rows)) return code;
  if (int32_t code = check_temperature(host, op, s[kMerge.size()].f, temperatures)) return code;
  for (int i : {kLogpM, kLseM, kEntropyM}) shapes[i] = shape_of({rows}, RLK_F32, DType::f32);
  shapes[kStatsM] = shape_of({rows, kStatsWidth}, RLK_F32, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema logp_schema =
    Schema("logp", "log-probability of each row's token under its logits, with entropy", kForward,
           kRowAttributes, infer)
        .gradient("logp_bwd");
extern const rlk_op_schema logp_bwd_schema =
    Schema("logp_bwd", "gradient of logp and of its entropy with respect to logits", kBackward,
           kRowAttributes, infer_bwd)
        .may_alias("d_logits=logits");
extern const rlk_op_schema logp_merge_schema =
    Schema("logp_merge", "logp, logsumexp and entropy from the stats of vocabulary shards", kMerge,
           kMergeAttributes, infer_merge);

}  // namespace rlk::registry
