// Calls of linear_logp worth trying: vocabularies around tiles, leaves and panels, depths around blocks, whole vocabularies of
// production, every option, rows that are masked or left out.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "registry/op.hpp"

namespace rlk::registry {

Bound lm_head_bound(const BoundQuery& query);

namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Config {
  const char* name = "plain";
  int64_t padding = 0;  // rows of the weight beyond the vocabulary
  bool bias = false, temperatures = false, keep = false, entropy = true,
       narrow = false;  // narrow: logits in hidden's dtype
  double softcap = 0;
  int64_t first = 0, count = 8;
  bool brief = false, before = false;  // before: gradients are added to others
};

const char* round_of(DType t, const Config& o) {
  return !o.narrow || t == DType::f32 ? "fp32" : t == DType::bf16 ? "bf16" : "fp16";
}

Case base(int64_t n, int64_t k, int64_t vocab, DType t, const Config& o) {
  Case c;
  c.name = fmt::format("{} n={} k={} v={} {}", o.name, n, k, vocab, name_of(t));
  const int64_t leaf = 16 * ((vocab + 127) / 128), start = std::min(vocab, o.first * leaf),
                here = std::min(vocab, (o.first + o.count) * leaf) - start, rows = here + o.padding;
  c.attributes = {{"softcap", o.softcap},
                  {"logits_round", std::string(round_of(t, o))},
                  {"vocab", o.padding || o.count != 8 ? vocab : 0},
                  {"vocab_start", start},
                  {"leaf_first", o.first},
                  {"leaf_count", o.count}};
  // Logits with a deviation of about 2.
  c.inputs = {{"hidden", {n, k}, t, {Fill::normal, 0, 2}},
              {"weight",
               {rows, k},
               t,
               {Fill::normal, 0, 1 / std::sqrt(static_cast<double>(std::max<int64_t>(k, 1)))}},
              {"target", {n}, DType::i64, {Fill::integers, -1, static_cast<double>(vocab)}}};
  if (o.bias) c.inputs.push_back({"bias", {rows}, t, {}});
  if (o.temperatures) c.inputs.push_back({"temperatures", {n}, DType::f32, {Fill::uniform, 0.5, 2}});
  if (o.keep)
    c.inputs.push_back({"keep", {n, (here + 31) / 32}, DType::i32, {Fill::integers, -0x1p31, 0x1p31}});
  c.brief = o.brief;
  c.reduction = k;
  // A logit close to the middle of two is rounded to either.
  c.ruled = o.narrow && t != DType::f32;
  return c;
}

void forward(const CaseSink& sink, int64_t n, int64_t k, int64_t vocab, DType t, const Config& o) {
  Case c = base(n, k, vocab, t, o);
  c.results = {{"stats", DType::f32}, {"bad_count", DType::i32}};
  if (o.count == 8)
    c.results.insert(c.results.end(), {{"logp", DType::f32}, {"lse", DType::f32}, {"entropy", DType::f32}});
  sink(std::move(c));
}

// Gradients so far as large as those that come, in every row of the weight.
void add_to_others(Case& c, const Config& o) {
  const std::vector<int64_t> shape = c.inputs[1].shape;
  c.inputs.push_back({"d_weight_before", shape, DType::f32, {}});
  if (o.bias) c.inputs.push_back({"d_bias_before", {shape[0]}, DType::f32, {}});
  for (std::size_t i = 1; i < c.results.size(); ++i) c.results[i].second = DType::f32;
}

void backward(const CaseSink& sink, int64_t n, int64_t k, int64_t vocab, DType t, const Config& o) {
  if (vocab > 30000) return;  // a d_weight of that many rows takes the written rule seconds
  Case c = base(n, k, vocab, t, o);
  // A part has the whole's stats, whose maximum is none of its own.
  if (o.count != 8) c.inputs.push_back({"stats", {n, 4}, DType::f32, {Fill::uniform, 8, 9}});
  c.inputs.push_back({"d_logp", {n}, DType::f32, {}});
  if (o.entropy) c.inputs.push_back({"d_entropy", {n}, DType::f32, {}});
  c.results = {{"d_hidden", o.count == 8 ? t : DType::f32}, {"d_weight", t}};
  if (o.bias) c.results.emplace_back("d_bias", t);
  if (o.before) add_to_others(c, o);
  sink(std::move(c));
}

template <class Make>
void all_cases(const CaseSink& sink, Make make) {
  for (DType t : kDTypes) {
    make(sink, 5, 40, 130, t, Config{});
    make(sink, 3, 1030, 70, t, {.name = "deep", .brief = true});
    make(sink, 4, 33, 1000, t, {.name = "bias", .bias = true, .narrow = true});
    make(sink, 4, 33, 300, t, {.name = "bias in fp32", .bias = true});
    make(sink, 6, 24, 260, t,
         {.name = "everything",
          .padding = 5,
          .bias = true,
          .temperatures = true,
          .keep = true,
          .narrow = true,
          .softcap = 30});
    make(sink, 4, 24, 500, t, {.name = "softcap", .temperatures = true, .softcap = 4});
    make(sink, 4, 24, 129, t, {.name = "no entropy", .entropy = false});
    make(sink, 3, 16, 20, t, {.name = "empty leaves", .brief = true});
    make(sink, 0, 16, 20, t, {.name = "no rows", .brief = true});
    make(sink, 3, 0, 20, t, {.name = "no depth", .brief = true});
    make(sink, 530, 8, 9, t, {.name = "many rows", .brief = true});
    make(sink, sink.draw(1, 9), sink.draw(1, 200), sink.draw(2, 900), t,
         {.name = "drawn", .bias = true, .brief = true});
  }
  make(sink, 2, 16, 20000, DType::f16, {.name = "many tokens", .brief = true});
  make(sink, 2, 16, 50257, DType::bf16, {.name = "whole vocabulary", .brief = true});
  make(sink, 2, 8, 151936, DType::f32, {.name = "whole vocabulary", .brief = true});
}

template <class Make>
void part_cases(const CaseSink& sink, Make make) {
  for (int64_t first : {0, 2, 6})
    make(sink, 4, 40, 1000, DType::bf16,
         {.name = first == 0   ? "first part"
                  : first == 2 ? "second part"
                               : "last part",
          .padding = 3,
          .keep = true,
          .first = first,
          .count = 2});
}

}  // namespace

void linear_logp_cases(const CaseSink& sink) {
  all_cases(sink, forward);
  part_cases(sink, forward);
}
void linear_logp_bwd_cases(const CaseSink& sink) {
  all_cases(sink, backward);
  part_cases(sink, backward);
  for (DType t : kDTypes) {
    backward(sink, 5, 40, 300, t, {.name = "before", .padding = 3, .bias = true, .before = true});
    backward(sink, 0, 16, 20, t, {.name = "before, no rows", .brief = true, .before = true});
  }
  backward(sink, 4, 40, 1000, DType::bf16,
           {.name = "before, second part", .padding = 3, .first = 2, .count = 2, .before = true});
}

// What logp allows, and the logits' own error where they are near 3.
Bound linear_logp_bound(const BoundQuery& q) {
  const double logits = 3 * lm_head_bound({q.result, q.input, DType::f32, q.arithmetic, q.reduction}).value;
  if (q.result == "stats")
    return {.metric = Bound::elementwise, .value = 2e-6 + logits, .ulps = 4, .absolute = 3e-6 + logits};
  return {.metric = Bound::elementwise, .ulps = 2, .absolute = 3e-6 + logits};
}
// Sums of gradients of probabilities, which the logits' error moves by as much of themselves, times the cotangents. Where a
// matrix unit sums them each is rounded to 16 bits, by up to half an ulp of itself, which stays where terms near 1 cancel.
Bound linear_logp_bwd_bound(const BoundQuery& q) {
  const double logits = lm_head_bound({q.result, q.input, DType::f32, q.arithmetic, q.reduction}).value;
  const bool rounds = q.arithmetic.starts_with("amx/") || q.arithmetic.starts_with("avx512bf16/") ||
                      q.arithmetic.starts_with("sm90/");
  const double halves = !rounds ? 0 : q.input == DType::bf16 ? 0x3p-9 : 0x3p-12;
  return {
      .metric = Bound::elementwise, .value = 20 * logits + halves, .ulps = 1, .absolute = 2e-6 + halves / 3};
}

}  // namespace rlk::registry
