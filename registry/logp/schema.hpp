// What the schemas of logp and linear_logp share: the tensors that have a number or a word of bits for each row, the
// attributes, and their checks.
#pragma once

#include <algorithm>

#include "registry/schema.hpp"

namespace rlk::registry::logp {

inline constexpr int64_t kStatsWidth = 4;  // maximum, sum, sum of the entropy, the target's logit
inline constexpr int64_t kLeaves = 8;

constexpr Argument row_result(const char* name, const char* doc) {
  return write(name, doc).of(RLK_F32 | RLK_F64).rank(1).rows(0).optional();
}

inline constexpr auto kRowInputs = arguments(
    read("target", "token of each row [N]; ignore_index: the row is not read")
        .of(kIntegers)
        .rank(1)
        .rows(0)
        .no_gradient()
        .saved(),
    read("temperatures", "of each row [N], above 0; absent: the attribute")
        .of(RLK_F32)
        .rank(1)
        .rows(0)
        .optional()
        .no_gradient()
        .saved(),
    read("keep",
         "bits of the entries that take part: column c is bit c % 32 of word c / 32 [N, words]; absent: all")
        .of(RLK_I32)
        .rank(2)
        .rows(0)
        .optional()
        .no_gradient()
        .saved());
inline constexpr auto kStats = write("stats", "maximum, sum, sum for the entropy, the target's logit [N, 4]")
                                   .of(RLK_F32 | RLK_F64)
                                   .rank(2)
                                   .rows(0)
                                   .optional()
                                   .saved();
inline constexpr auto kRowResults = arguments(
    row_result("logp", "[N]"), row_result("lse", "logsumexp of the scaled logits [N]"),
    row_result("entropy", "[N]"), kStats,
    write("bad_count", "how many targets are no token, or are not kept [1]").of(RLK_I32).rank(1).optional());
inline constexpr auto kRowCotangents =
    arguments(read("d_logp", "gradient of logp [N]").of(RLK_F32).rank(1).rows(0).optional(),
              read("d_entropy", "gradient of entropy [N]").of(RLK_F32).rank(1).rows(0).optional());

inline constexpr auto kTemperature = real("temperature", "logits are divided by it", 1);
inline constexpr auto kRowAttributes = attributes(
    kTemperature, choice("logits_round", "what logits are rounded to before all else", "fp32|bf16|fp16"),
    real("softcap", "logits become softcap * tanh(logits / softcap); 0: they do not", 0),
    integer("vocab", "entries of the vocabulary; 0: as many as columns", 0),
    integer("ignore_index", "target of rows that are left out: logp, entropy and gradient 0", -100),
    integer("vocab_start", "token of the first column, where this call has a part of the vocabulary", 0),
    integer("leaf_first", "the first of the vocabulary's eight leaves that this call has", 0),
    integer("leaf_count", "how many of them: 8, or 1, 2, 4 for stats of a part", 8));

// The slots of kRowAttributes.
struct Vocabulary {
  int64_t size = 0;   // of the whole vocabulary
  int64_t here = 0;   // entries that this call has
  bool whole = true;  // all of them
};

inline int32_t check_temperature(const rlk_host* host, const char* op, double temperature,
                                 const DLTensor* temperatures) {
  if (!(temperature >= 0x1p-100 && temperature <= 0x1p100))
    return fail(host, "{}: temperature is {}, it must be from 2^-100 to 2^100", op, temperature);
  if (temperatures && temperature != 1)
    return fail(host, "{}: temperatures are given, temperature must be 1, not {}", op, temperature);
  return RLK_OK;
}

// `columns` of `name` are what the call has of the vocabulary.
inline int32_t check_vocabulary_by(const auto& table, const rlk_host* host, const char* op,
                                   const rlk_slot* attributes, const char* name, int64_t columns,
                                   Vocabulary& v) {
  const auto slot = [&](std::string_view which) {
    std::size_t i = 0;
    while (which != table[i].name) ++i;
    return attributes[i];
  };
  const auto integer = [&](std::string_view which) { return slot(which).i; };
  const double softcap = slot("softcap").f;
  if (!(softcap >= 0 && softcap <= 1e30))
    return fail(host, "{}: softcap is {}, it must be from 0 to 1e30", op, softcap);
  const int64_t first = integer("leaf_first"), count = integer("leaf_count"), start = integer("vocab_start"),
                vocab = integer("vocab");
  if (count != 1 && count != 2 && count != 4 && count != 8)
    return fail(host, "{}: leaf_count is {}, it must be 1, 2, 4 or 8", op, count);
  if (first < 0 || first >= kLeaves || first % count != 0)
    return fail(host, "{}: leaf_first is {}, with leaf_count {} it must be a multiple of it below 8", op,
                first, count);
  v.whole = count == kLeaves;
  if (vocab < 0 || vocab > (int64_t{1} << 40))
    return fail(host, "{}: vocab is {}, it must be from 0 to 2^40", op, vocab);
  if (!v.whole && vocab == 0)
    return fail(host, "{}: leaf_count is {}, vocab is 0: a part needs the size of the whole vocabulary", op,
                count);
  v.size = vocab ? vocab : columns;
  constexpr int64_t kMost = INT32_MAX;  // ids are counted in 32 bits
  if (columns > kMost || v.size > int64_t{1} << 40)
    return fail(host, "{}: {} has {} columns, at most {} are served", op, name, columns, kMost);
  const int64_t leaf = 16 * ((v.size + 127) / 128);
  const int64_t begin = std::min(v.size, first * leaf), end = std::min(v.size, (first + count) * leaf);
  if (start != begin)
    return fail(host, "{}: vocab_start is {}, leaf {} of V={} starts at {}", op, start, first, v.size, begin);
  v.here = end - begin;
  if (columns < v.here)
    return fail(host, "{}: {} has {} columns, leaves {} to {} of V={} are {}", op, name, columns, first,
                first + count - 1, v.size, v.here);
  return RLK_OK;
}

inline int32_t expect_rows(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                           const char* base, int64_t rows) {
  if (!t || dim(t, 0) == rows) return RLK_OK;
  return fail(host, "{}: {} has N={}, {} has N={}", op, name, dim(t, 0), base, rows);
}

inline int32_t check_vocabulary(const rlk_host* host, const char* op, const rlk_slot* attributes,
                                const char* name, int64_t columns, Vocabulary& v) {
  return check_vocabulary_by(kRowAttributes, host, op, attributes, name, columns, v);
}

struct RowInputs {
  const DLTensor *target, *temperatures, *keep;
  double temperature;
  static RowInputs of(const auto& table, const rlk_slot* s) {
    const auto at = [&](std::string_view name) -> const DLTensor* {
      for (std::size_t i = 0; i < table.size(); ++i)
        if (name == table[i].name) return s[i].tensor;
      return nullptr;
    };
    return {at("target"), at("temperatures"), at("keep"), s[table.size()].f};
  }
};

inline int32_t check_rows(const rlk_host* host, const char* op, const char* base, int64_t rows,
                          const RowInputs& in, const Vocabulary& v) {
  if (int32_t code = expect_rows(host, op, "target", in.target, base, rows)) return code;
  if (int32_t code = expect_rows(host, op, "temperatures", in.temperatures, base, rows)) return code;
  if (int32_t code = expect_rows(host, op, "keep", in.keep, base, rows)) return code;
  const int64_t words = (v.here + 31) / 32;
  if (in.keep && dim(in.keep, 1) < words)
    return fail(host, "{}: keep has {} words for each row, {} entries need {}", op, dim(in.keep, 1), v.here,
                words);
  return check_temperature(host, op, in.temperature, in.temperatures);
}

// Shapes of kRowResults.
inline int32_t row_results(const rlk_host* host, const char* op, const auto& table, const rlk_slot* s,
                           const Vocabulary& v, int64_t rows, rlk_shape* shapes) {
  for (std::size_t i = 0; i < table.size(); ++i) {
    const std::string_view name = table[i].name;
    if (name == "logp" || name == "lse" || name == "entropy") {
      if (s[i].tensor && !v.whole)
        return fail(host, "{}: {} is asked for, leaf_count is not 8: a part of the vocabulary has only stats",
                    op, name);
      shapes[i] = shape_of({rows}, RLK_F32, DType::f32);
    } else if (name == "stats") {
      shapes[i] = shape_of({rows, kStatsWidth}, RLK_F32, DType::f32);
    } else if (name == "bad_count") {
      shapes[i] = shape_of({1}, RLK_I32, DType::i32);
    }
  }
  return RLK_OK;
}

inline int32_t check_cotangents(const rlk_host* host, const char* op, const char* base, int64_t rows,
                                const Vocabulary& v, const DLTensor* stats, const DLTensor* d_logp,
                                const DLTensor* d_entropy) {
  if (int32_t code = expect_rows(host, op, "stats", stats, base, rows)) return code;
  if (int32_t code = expect_rows(host, op, "d_logp", d_logp, base, rows)) return code;
  if (int32_t code = expect_rows(host, op, "d_entropy", d_entropy, base, rows)) return code;
  if (stats && dim(stats, 1) != kStatsWidth)
    return fail(host, "{}: stats has {} numbers for each row, expected {}", op, dim(stats, 1), kStatsWidth);
  if (!stats && !v.whole)
    return fail(
        host, "{}: stats is absent, leaf_count is not 8: a part of the vocabulary needs those of logp_merge",
        op);
  return RLK_OK;
}

}  // namespace rlk::registry::logp
