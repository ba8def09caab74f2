// sample: a token of every row of logits by noise that belongs to (token, seed, stream, position); and its audit.
#include "registry/logp/schema.hpp"

namespace rlk::registry {
namespace {

constexpr int64_t kMostEntries = int64_t{1} << 22;  // so that all masses together fit 63 bits

constexpr Argument column(Argument a) { return a.rank(1).rows(0).no_gradient(); }
constexpr Argument numbers(const char* name, const char* doc) {
  return column(read(name, doc)).of(RLK_F32).optional();
}
constexpr Argument integers(const char* name, const char* doc) {
  return column(read(name, doc)).of(kIntegers);
}
constexpr Argument log_probabilities(const char* name, const char* doc) {
  return column(write(name, doc)).of(RLK_F32 | RLK_F64).optional();
}

constexpr auto kInputs =
    arguments(read("logits", "[N, V]").rank(2).rows(0).strided().no_gradient(),
              numbers("temperature", "[N], at least 0; 0: the largest entry; absent: 1"),
              integers("top_k", "[N]: how many entries stay; 0 or absent: all").optional(),
              numbers("top_p", "[N]: the share of the mass that stays; 1 or absent: all"),
              numbers("min_p", "[N]: the share of the largest entry's mass that entries must have"),
              integers("seed", "[N], 64 bits: the key of the noise"),
              integers("stream", "[N], the low 32 bits; absent: 0").optional(),
              integers("position", "[N], 64 bits; absent: 0").optional());
constexpr auto kRecorded = arguments(integers("token", "[N], as sample gave it"),
                                     numbers("logp", "[N], as sample gave it; absent: not compared"),
                                     numbers("logp_raw", "[N], likewise"));

constexpr auto kSample =
    arguments(kInputs, column(write("token", "[N]; -1: the row has none")).of(kIntegers),
              log_probabilities("logp", "[N]: of the token among the entries that stay"),
              log_probabilities("logp_raw", "[N]: of the token among all entries"),
              column(write("count", "[N]: entries that stay")).of(RLK_I32).optional(),
              write("keep", "[N, ceil(V / 32)]: bit c % 32 of word c / 32 is set where entry c stays")
                  .of(RLK_I32)
                  .rank(2)
                  .rows(0)
                  .optional()
                  .no_gradient(),
              write("bad_count", "[1]: rows without a token").of(RLK_I32).rank(1).optional().no_gradient());
constexpr auto kVerify = arguments(kInputs, kRecorded,
                                   column(write("status",
                                                "[N]: 0 as recorded, 1 another token, 2 another logp, 3 the "
                                                "token does not stay, 4 another logp_raw"))
                                       .of(RLK_I32));

constexpr auto kAttributes = attributes(
    integer("vocab", "entries of the vocabulary; 0: as many as columns", 0),
    choice("logits_round", "what logits are rounded to before all else", "fp32|bf16|fp16"),
    real("softcap", "logits become softcap * tanh(logits / softcap); 0: they do not", 0),
    choice("filter_order", "min_p after top_k and top_p, or before them", "min_p_last|min_p_first"),
    flag("raw_temperature", "logp_raw is at the row's temperature, not at 1", true));

int32_t check(const rlk_host* host, const char* op, const auto& table, const rlk_slot* s, int64_t& vocab) {
  const DLTensor* logits = s[0].tensor;
  const rlk_slot* attributes = s + table.size();
  const int64_t given = attributes[index_of(kAttributes, "vocab")].i, columns = dim(logits, 1);
  vocab = given ? given : columns;
  if (given < 0 || given > columns)
    return fail(host, "{}: vocab is {}, it must be from 0 to V={}", op, given, columns);
  if (vocab > kMostEntries)
    return fail(host, "{}: logits has V={}, at most {} are taken", op, vocab, kMostEntries);
  const double softcap = attributes[index_of(kAttributes, "softcap")].f;
  if (!(softcap >= 0 && softcap <= 1e30))
    return fail(host, "{}: softcap is {}, it must be from 0 to 1e30", op, softcap);
  for (std::size_t i = 1; i < table.size(); ++i)
    if (table[i].role == RLK_READ && s[i].tensor && dim(s[i].tensor, 0) != dim(logits, 0))
      return fail(host, "{}: {} has N={}, logits has N={}", op, table[i].name, dim(s[i].tensor, 0),
                  dim(logits, 0));
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  int64_t vocab = 0;
  if (int32_t code = check(host, "sample", kSample, s, vocab)) return code;
  const int64_t n = dim(s[0].tensor, 0);
  shapes[index_of(kSample, "token")] = shape_of({n}, kIntegers, DType::i64);
  shapes[index_of(kSample, "logp")] = shapes[index_of(kSample, "logp_raw")] =
      shape_of({n}, RLK_F32, DType::f32);
  shapes[index_of(kSample, "count")] = shape_of({n}, RLK_I32, DType::i32);
  shapes[index_of(kSample, "keep")] = shape_of({n, (vocab + 31) / 32}, RLK_I32, DType::i32);
  shapes[index_of(kSample, "bad_count")] = shape_of({1}, RLK_I32, DType::i32);
  return RLK_OK;
}

int32_t infer_verify(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  int64_t vocab = 0;
  if (int32_t code = check(host, "sample_verify", kVerify, s, vocab)) return code;
  shapes[index_of(kVerify, "status")] = shape_of({dim(s[0].tensor, 0)}, RLK_I32, DType::i32);
  return RLK_OK;
}

// ---- parts of a vocabulary

constexpr int64_t kState = 24;
constexpr int64_t kWidths[] = {1, 2048, 2048, 8};  // of partials, by step
enum { kLargest, kTopK, kTopP, kToken };           // as `step` lists them

constexpr auto kStepAttributes =
    attributes(choice("step", "what the parts are asked for", "largest|top_k|top_p|token"),
               integer("digit", "of top_k and top_p: 0, 1 and 2, one after another", 0));
constexpr auto kPartAttributes =
    attributes(kAttributes, kStepAttributes, integer("vocab_start", "token of the first column", 0),
               integer("leaf_first", "the first of the vocabulary's eight leaves that this call has", 0),
               integer("leaf_count", "how many of them: 1, 2, 4, 8", 8));
constexpr auto kMergeAttributes = attributes(
    kStepAttributes, flag("raw_temperature", "logp_raw is at the row's temperature, not at 1", true));
constexpr Argument state_argument(const char* doc) {
  return read("state", doc).of(RLK_I64).rank(2).rows(0).optional().no_gradient();
}
constexpr auto kPart =
    arguments(kInputs, state_argument("as sample_merge left it last [N, 24]; absent at the first step"),
              write("partials", "for sample_merge: [N, 1], [N, 2048] or [N, 8]")
                  .of(RLK_I64)
                  .rank(2)
                  .rows(0)
                  .no_gradient(),
              write("keep", "[N, ceil(columns / 32)], at the last step: the bits of this part")
                  .of(RLK_I32)
                  .rank(2)
                  .rows(0)
                  .optional()
                  .no_gradient());
constexpr auto kMerge = arguments(
    read("partials", "of T = 1, 2, 4 or 8 parts, ascending [T, N, width]")
        .of(RLK_I64)
        .rank(3)
        .rows(1)
        .no_gradient(),
    numbers("temperature", "as the parts have it [N]"), integers("top_k", "likewise").optional(),
    numbers("top_p", "likewise"), state_argument("as this op left it last [N, 24]; absent at the first step"),
    write("next", "the state that the parts go on with [N, 24]")
        .of(RLK_I64)
        .rank(2)
        .rows(0)
        .optional()
        .no_gradient(),
    column(write("token", "[N], at the last step; -1: the row has none")).of(kIntegers).optional(),
    log_probabilities("logp", "[N]: of the token among the entries that stay"),
    log_probabilities("logp_raw", "[N]: of the token among all entries"),
    column(write("count", "[N]: entries that stay")).of(RLK_I32).optional(),
    write("bad_count", "[1]: rows without a token").of(RLK_I32).rank(1).optional().no_gradient());

// A call's state at a step that needs one, or not.
int32_t check_state(const rlk_host* host, const char* op, const DLTensor* state, bool needed, bool taken,
                    int64_t rows, const char* base) {
  if (!state && needed) return fail(host, "{}: state is absent, step is not largest", op);
  if (state && !taken) return fail(host, "{}: state is given, step is largest, the first", op);
  if (!state) return RLK_OK;
  if (dim(state, 0) != rows)
    return fail(host, "{}: state has N={}, {} has N={}", op, dim(state, 0), base, rows);
  if (dim(state, 1) != kState)
    return fail(host, "{}: state has {} numbers for each row, expected {}", op, dim(state, 1), kState);
  return RLK_OK;
}

int32_t check_step(const rlk_host* host, const char* op, const rlk_slot* attributes, int& step) {
  step = static_cast<int>(attributes[0].i);
  const int64_t digit = attributes[1].i;
  const bool digits = step == kTopK || step == kTopP;
  if (digit < 0 || digit > (digits ? 2 : 0))
    return fail(host, "{}: digit is {}, it must be {}", op, digit, digits ? "0, 1 or 2" : "0 at this step");
  return RLK_OK;
}

int32_t infer_part(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "sample_part";
  const DLTensor* logits = s[0].tensor;
  const rlk_slot* attributes = s + kPart.size();
  const int64_t n = dim(logits, 0);
  logp::Vocabulary v;
  if (int32_t code =
          logp::check_vocabulary_by(kPartAttributes, host, op, attributes, "logits", dim(logits, 1), v))
    return code;
  if (v.size > kMostEntries)
    return fail(host, "{}: logits are of V={}, at most {} are taken", op, v.size, kMostEntries);
  for (std::size_t i = 1; i < kInputs.size(); ++i)
    if (s[i].tensor && dim(s[i].tensor, 0) != n)
      return fail(host, "{}: {} has N={}, logits has N={}", op, kPart[i].name, dim(s[i].tensor, 0), n);
  int step = 0;
  if (int32_t code = check_step(host, op, attributes + index_of(kPartAttributes, "step"), step)) return code;
  if (int32_t code = check_state(host, op, s[index_of(kPart, "state")].tensor, step != kLargest,
                                 step != kLargest, n, "logits"))
    return code;
  if (s[index_of(kPart, "keep")].tensor && step != kToken)
    return fail(host, "{}: keep is asked for, step is not token: nothing is known of it yet", op);
  shapes[index_of(kPart, "partials")] = shape_of({n, kWidths[step]}, RLK_I64, DType::i64);
  shapes[index_of(kPart, "keep")] = shape_of({n, (v.here + 31) / 32}, RLK_I32, DType::i32);
  return RLK_OK;
}

int32_t infer_merge(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "sample_merge";
  const DLTensor* partials = s[0].tensor;
  const int64_t parts = dim(partials, 0), n = dim(partials, 1);
  if (parts != 1 && parts != 2 && parts != 4 && parts != 8)
    return fail(host, "{}: partials has T={}, it must be 1, 2, 4 or 8", op, parts);
  for (int i : {index_of(kMerge, "temperature"), index_of(kMerge, "top_k"), index_of(kMerge, "top_p")})
    if (s[i].tensor && dim(s[i].tensor, 0) != n)
      return fail(host, "{}: {} has N={}, partials has N={}", op, kMerge[static_cast<std::size_t>(i)].name,
                  dim(s[i].tensor, 0), n);
  int step = 0;
  if (int32_t code = check_step(host, op, s + kMerge.size(), step)) return code;
  if (int32_t code = check_state(host, op, s[index_of(kMerge, "state")].tensor,
                                 step == kTopK || step == kTopP, step != kLargest, n, "partials"))
    return code;
  if (dim(partials, 2) != kWidths[step])
    return fail(host, "{}: partials has {} numbers for each row, at this step there are {}", op,
                dim(partials, 2), kWidths[step]);
  for (std::size_t i = index_of(kMerge, "next"); i < kMerge.size(); ++i)
    if (const bool state = kMerge[i].name == std::string_view("next");
        s[i].tensor && state == (step == kToken))
      return fail(host, "{}: {} is asked for, step is {}token", op, kMerge[i].name, state ? "" : "not ");
  shapes[index_of(kMerge, "next")] = shape_of({n, kState}, RLK_I64, DType::i64);
  shapes[index_of(kMerge, "token")] = shape_of({n}, kIntegers, DType::i64);
  shapes[index_of(kMerge, "logp")] = shapes[index_of(kMerge, "logp_raw")] =
      shape_of({n}, RLK_F32, DType::f32);
  shapes[index_of(kMerge, "count")] = shape_of({n}, RLK_I32, DType::i32);
  shapes[index_of(kMerge, "bad_count")] = shape_of({1}, RLK_I32, DType::i32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema sample_schema =
    Schema("sample", "a token for every row of logits, by noise of its own for every token id", kSample,
           kAttributes, infer);
extern const rlk_op_schema sample_verify_schema = Schema(
    "sample_verify", "whether recorded tokens are what sample gives", kVerify, kAttributes, infer_verify);

extern const rlk_op_schema sample_part_schema =
    Schema("sample_part", "what a part of the vocabulary says of sample's next step", kPart, kPartAttributes,
           infer_part);
extern const rlk_op_schema sample_merge_schema =
    Schema("sample_merge", "a step of sample, and its token, from what all parts say", kMerge,
           kMergeAttributes, infer_merge);

}  // namespace rlk::registry
