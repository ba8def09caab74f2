// Calls of policy_loss worth trying: every form, level, aggregation and use of the rollout's probabilities; packed and padded,
// empty sequences and such without an active token, and numbers that are none where the mask is 0.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr const char *kForms[] = {"clip", "cispo", "reinforce", "soft_gate"},
                     *kLevels[] = {"token", "sequence"},
                     *kAggs[] = {"token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"},
                     *kModes[] = {"none", "truncate", "mask", "zero"},
                     *kEstimators[] = {"off", "k1", "k2", "k3", "k3_st"};

struct Config {
  const char* name = "packed";
  const char *form = "clip", *level = "token", *agg = "token_mean", *is_mode = "none", *is_level = "token",
             *kl = "off";
  std::vector<double> bounds{0, 7, 7, 30, 31, 75};  // of packed sequences
  int64_t width = 0;                                // of padded ones, then
  int64_t rows = 4;
  double denominator = 0;  // 0: absent
  double dual_clip = 0, moved = 0.3;
  bool per_sequence = false, entropy = false, brief = true, large = false;
  bool held = false;  // d and the estimate of the divergence, far inside the data
  DType mask = DType::f32;
};

Case base(const Config& o) {
  Case c;
  const bool packed = o.width == 0;
  const auto tokens = static_cast<int64_t>(o.bounds.back());
  const std::vector<int64_t> shape =
      packed ? std::vector<int64_t>{tokens} : std::vector<int64_t>{o.rows, o.width};
  const int64_t sequences = packed ? static_cast<int64_t>(o.bounds.size()) - 1 : o.rows;
  c.name = fmt::format("{} {} {} {} {}/{} {} [{}]", o.name, o.form, o.level, o.agg, o.is_mode, o.is_level,
                       o.kl, fmt::join(shape, ","));
  c.attributes = {{"form", std::string(o.form)},
                  {"level", std::string(o.level)},
                  {"agg", std::string(o.agg)},
                  {"is_mode", std::string(o.is_mode)},
                  {"is_level", std::string(o.is_level)},
                  {"kl", std::string(o.kl)},
                  {"dual_clip", o.dual_clip},
                  {"is_low", 0.7},
                  {"is_high", 1.4},
                  {"clip_high", 0.28}};
  const Fill logs{Fill::normal, -1, o.moved};
  c.inputs = {{"logp", shape, DType::f32, logs}, {"old_logp", shape, DType::f32, logs}};
  // Sums that nearly cancel would say nothing of a loss.
  const Fill advantages{Fill::normal, 0.8, 1};
  if (o.per_sequence) {
    c.inputs.push_back({"advantages", {sequences}, DType::f32, advantages});
    c.attributes.push_back({"advantages_per", std::string("sequence")});
  } else {
    c.inputs.push_back({"advantages", shape, DType::f32, advantages});
  }
  if (o.mask != DType::none) c.inputs.push_back({"mask", shape, o.mask, {Fill::integers, 0, 2}});
  if (packed)
    c.inputs.push_back({"cu_seqlens",
                        {static_cast<int64_t>(o.bounds.size())},
                        o.brief ? DType::i32 : DType::i64,
                        {Fill::values, 0, 0, o.bounds}});
  if (o.is_mode != std::string_view("none")) c.inputs.push_back({"rollout_logp", shape, DType::f32, logs});
  if (o.kl != std::string_view("off")) {
    c.inputs.push_back({"ref_logp", shape, DType::f32, logs});
    c.attributes.push_back({"kl_coef", 0.05});
    if (o.held) c.attributes.insert(c.attributes.end(), {{"d_clamp", 0.5}, {"kl_clamp", 0.1}});
  }
  if (o.entropy) {
    c.inputs.push_back({"entropy", shape, DType::f32, {Fill::uniform, 0, 3}});
    c.attributes.push_back({"entropy_coef", 0.01});
  }
  if (o.denominator != 0)
    c.inputs.push_back({"denominator", {1}, DType::f32, {Fill::constant, o.denominator}});
  c.results = {{"loss", DType::f32}, {"totals", DType::f32}, {"metrics", DType::f32}, {"factor", DType::f32}};
  if (o.entropy) c.results.push_back({"entropy_factor", DType::f32});
  c.brief = o.brief || o.large, c.large = o.large;
  c.reduction = o.width;
  for (std::size_t b = 1; packed && b < o.bounds.size(); ++b)
    c.reduction = std::max(c.reduction, static_cast<int64_t>(o.bounds[b] - o.bounds[b - 1]));
  // A packed token is no row of its own, and what a token is divided by is everybody's affair unless it is given.
  for (const char* t :
       {"logp", "old_logp", "advantages", "mask", "rollout_logp", "ref_logp", "entropy", "totals"})
    if (packed) c.batch_axes.emplace_back(t, -1);
  for (const char* t : {"factor", "entropy_factor"})
    if (packed || o.denominator == 0) c.batch_axes.emplace_back(t, -1);
  return c;
}

void every_way(const CaseSink& sink) {
  for (const char* form : kForms)
    for (const char* level : kLevels)
      for (const char* agg : kAggs)
        for (const char* is_mode : kModes)
          sink(base({.form = form,
                     .level = level,
                     .agg = agg,
                     .is_mode = is_mode,
                     .denominator = agg == std::string_view("constant") ? 64.0 : 0}));
  for (const char* kl : kEstimators)
    if (kl != std::string_view("off")) sink(base({.name = "held", .kl = kl, .held = true}));
  for (const char* is_level : {"sequence", "geometric"})
    for (const char* is_mode : {"truncate", "mask", "zero"})
      sink(base({.name = "weights of sequences",
                 .is_mode = is_mode,
                 .is_level = is_level,
                 .kl = "k3",
                 .moved = 0.1,
                 .entropy = true}));
  for (const char* estimator : kEstimators)
    sink(base({.name = "estimators", .kl = estimator, .moved = 0.01, .entropy = true}));
}

// logp, old_logp, advantages, rollout_logp, ref_logp, entropy and mask of 16 tokens: what holds ratios, infinities on either
// side and on both, NaN where the mask is 0.
void special(const CaseSink& sink, const char* form, const char* is_mode) {
  Case c = base({.name = "special",
                 .form = form,
                 .is_mode = is_mode,
                 .kl = "k3",
                 .bounds = {0, 8, 12, 16},
                 .entropy = true});
  const std::vector<std::vector<double>> columns = {
      {-1, -30, -0.5, -kInf, -1, -kInf, -25, -1, NAN, kInf, -kInf, NAN, -1, -2, NAN, -3},
      {-30, -1, -0.5, -1, -kInf, -kInf, -1, -25, 1, NAN, -1, -kInf, -1.5, -2, kInf, -3},
      {1, 1, -2, 1, 1, 1, 1, 1, kInf, NAN, -kInf, 1, 1, -1, NAN, 2},
      {-30, -1, -0.5, -1, -2, -3, -1, -25, NAN, kInf, -kInf, 1, -1.5, -2, NAN, -3},
      {-1, -2, -0.5, -1, -1, -1, -4, -12, NAN, NAN, kInf, -kInf, -1, -2, NAN, -3},
      {0, 1, 2, 0.5, 0, 1, 2, 0.5, NAN, kInf, -kInf, NAN, 1, 1, NAN, 1},
      {1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1}};
  const char* names[] = {"logp", "old_logp", "advantages", "rollout_logp", "ref_logp", "entropy", "mask"};
  for (CaseTensor& t : c.inputs)
    for (std::size_t i = 0; i < columns.size(); ++i)
      if (t.argument == names[i]) t.fill = {Fill::values, 0, 0, columns[i]};
  sink(std::move(c));
}

}  // namespace

void policy_loss_cases(const CaseSink& sink) {
  every_way(sink);
  for (const char* form : kForms)
    for (const char* is_mode : kModes) special(sink, form, is_mode);
  sink(base({.name = "padded", .width = 40, .denominator = 100, .entropy = true, .brief = false}));
  sink(base({.name = "padded",
             .level = "sequence",
             .agg = "seq_mean_token_mean",
             .is_mode = "mask",
             .is_level = "geometric",
             .kl = "k3",
             .width = 33,
             .denominator = 8,
             .per_sequence = true,
             .brief = false,
             .mask = DType::boolean}));
  sink(base({.name = "whole", .kl = "k2", .per_sequence = true, .brief = false, .mask = DType::none}));
  sink(base({.name = "dual", .dual_clip = 1.5, .moved = 2, .mask = DType::u8}));
  sink(base({.name = "no sequences", .bounds = {0}}));
  sink(base({.name = "nobody in", .agg = "seq_mean_token_mean", .bounds = {0, 0, 0}}));
  sink(base({.name = "long", .bounds = {0, 1000, 1001, 3000}, .mask = DType::none}));
  sink(base({.name = "production",
             .form = "clip",
             .is_mode = "truncate",
             .kl = "k3",
             .bounds = {0, 4096, 9000, 9001, 40000, 65536},
             .entropy = true,
             .large = true,
             .mask = DType::boolean}));
}

void policy_loss_bwd_cases(const CaseSink& sink) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{75}, {5, 33}, {0}}) {
    Case c;
    c.name = fmt::format("plain [{}]", fmt::join(shape, ","));
    c.inputs = {{"d_loss", {1}, DType::f32, {Fill::normal, 1, 0.1}},
                {"factor", shape, DType::f32},
                {"entropy_factor", shape, DType::f32, {Fill::integers, 0, 2}}};
    c.results = {{"d_logp", DType::f32}, {"d_entropy", DType::f32}};
    sink(std::move(c));
  }
  Case c;
  c.name = "special";
  c.brief = true;
  c.inputs = {{"d_loss", {1}, DType::f32, {Fill::constant, kInf}},
              {"factor", {4}, DType::f32, {Fill::values, 0, 0, {0, 1, -1, NAN}}}};
  c.results = {{"d_logp", DType::f32}};
  sink(std::move(c));
}

void loss_reduce_cases(const CaseSink& sink) {
  for (const char* agg : kAggs)
    for (double denominator : {0.0, 40.0})
      for (int64_t rows : {33, 0, 1, 700}) {
        if (agg == std::string_view("constant") && denominator == 0) continue;
        Case c;
        c.name = fmt::format("{} B={}{}", agg, rows, denominator == 0 ? "" : " given");
        c.inputs = {{"totals", {rows, 5}, DType::f32, {Fill::integers, 0, 9}}};
        if (denominator != 0)
          c.inputs.push_back({"denominator", {1}, DType::i64, {Fill::constant, denominator}});
        c.attributes = {{"agg", std::string(agg)}, {"kl_coef", 0.05}, {"entropy_coef", 0.01}};
        c.results = {{"loss", DType::f32}, {"metrics", DType::f32}};
        c.brief = rows != 33;
        sink(std::move(c));
      }
}

// A chain of n additions in fp32 is off by at most n 2^-24 of its terms; half of that, beside what a token is off by.
Bound policy_loss_bound(const BoundQuery& q) {
  return {Bound::elementwise, 0x1p-19 + static_cast<double>(q.reduction) * 0x1p-25,
          q.result == "factor" ? 16.0 : 8.0};
}
Bound policy_loss_bwd_bound(const BoundQuery&) { return {Bound::elementwise, 0, 1}; }
Bound loss_reduce_bound(const BoundQuery&) { return {Bound::elementwise, 0, 1}; }

}  // namespace rlk::registry
