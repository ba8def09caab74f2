// sample: a token of every row of logits by noise that belongs to (token, seed, stream, position); and its audit.
#include "registry/schema.hpp"

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

}  // namespace

extern const rlk_op_schema sample_schema =
    Schema("sample", "a token for every row of logits, by noise of its own for every token id", kSample,
           kAttributes, infer);
extern const rlk_op_schema sample_verify_schema = Schema(
    "sample_verify", "whether recorded tokens are what sample gives", kVerify, kAttributes, infer_verify);

}  // namespace rlk::registry
