// Calls of embedding worth trying: ids that repeat, that all are one, that lie in no shard, both widths of ids, scales, padding.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Config {
  const char* name = "plain";
  double scale = 1;
  int64_t padding = -1, start = 0, vocab = 0;
  Fill ids{}, values{};  // ids: by default all of the vocabulary, and some beside it
  bool brief = false, wide = false, sampled = false;
  bool before = false;  // gradients are added to others
};

// `wide`: fp32 beside 16 bits. What gradients are added to is of their size, so that neither hides the other.
Case base(std::vector<int64_t> tokens, int64_t v, int64_t h, DType ids, DType t, const Config& o) {
  Case c;
  c.name = fmt::format("{} ids={} {} v={} h={} {}", o.name, fmt::join(tokens, "x"), name_of(ids), v, h,
                       name_of(t));
  const Fill any{Fill::integers, static_cast<double>(o.start - 2), static_cast<double>(o.start + v + 2)};
  c.inputs = {{"ids", tokens, ids, o.ids.kind == Fill::normal ? any : o.ids}};
  c.attributes = {{"scale", o.scale}, {"padding_idx", o.padding}, {"vocab_start", o.start}};
  c.brief = o.brief || o.sampled, c.sampled = c.large = o.sampled;
  return c;
}

void forward(const CaseSink& sink, const std::vector<int64_t>& tokens, int64_t v, int64_t h, DType ids,
             DType t, const Config& o = {}) {
  if (o.before) return;
  Case c = base(tokens, v, h, ids, t, o);
  c.inputs.push_back({"weight", {v, h}, t, o.values});
  c.results = {{"out", t}, {"bad_count", DType::i32}};
  c.attributes.push_back({"vocab", o.vocab});
  sink(std::move(c));
}
void backward(const CaseSink& sink, const std::vector<int64_t>& tokens, int64_t v, int64_t h, DType ids,
              DType t, const Config& o = {}) {
  Case c = base(tokens, v, h, ids, t, o);
  std::vector<int64_t> shape = tokens;
  shape.push_back(h);
  c.inputs.push_back({"d_out", shape, o.wide ? DType::f32 : t, o.values});
  c.inputs.push_back({"weight", {v, h}, t, {}});
  if (o.before) c.inputs.push_back({"d_weight_before", {v, h}, DType::f32, {Fill::integers, -3, 4}});
  c.results = {{"d_weight", o.wide || o.before ? DType::f32 : t}};
  c.reduction = 1;
  for (int64_t n : tokens) c.reduction *= n;
  c.cancels = true;
  sink(std::move(c));
}

template <class Make>
void all_cases(const CaseSink& sink, Make make) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  for (DType ids : {DType::i32, DType::i64})
    for (DType t : kDTypes) {
      make(sink, {9}, 5, 70, ids, t, Config{});
      make(sink, {3, 7}, 40, 33, ids, t, Config{.name = "scale", .scale = 3.1});
      make(sink, {2, 3, 4}, 7, 16, ids, t, Config{.name = "padding", .padding = 3});
      make(sink, {20}, 6, 24, ids, t, Config{.name = "shard", .scale = -0.5, .padding = 1001, .start = 1000});
      make(sink, {40}, 6, 9, ids, t,
           Config{.name = "ids of other shards", .start = 4, .vocab = 11, .brief = true});
      make(sink, {50}, 9, 40, ids, t, Config{.name = "one id", .ids = {Fill::constant, 4}});
      make(sink, {30}, 4, 12, ids, t, Config{.name = "fp32 gradients", .brief = true, .wide = true});
      make(sink, {30}, 12, 20, ids, t,
           Config{.name = "before", .scale = 3.1, .padding = 2, .brief = true, .before = true});
      make(sink, {11}, 3, 2100, ids, t, Config{.name = "several tiles", .brief = true});
      make(sink, {8}, 8, 6, ids, t,
           Config{.name = "special values",
                  .values = {Fill::values, 0, 0, {-0.0, inf, -inf, NAN, 1e-40, 3e38, 1}},
                  .brief = true});
      make(sink, {6}, 5, 8, ids, t,
           Config{.name = "far ids",
                  .ids = {Fill::values, 0, 0, {-1, 5, 2147483647, -2147483648.0, 4, 0}},
                  .brief = true});
      make(sink, {0}, 5, 8, ids, t, Config{.name = "no tokens", .brief = true});
      make(sink, {5}, 0, 8, ids, t, Config{.name = "no rows", .brief = true});
      make(sink, {5}, 4, 0, ids, t, Config{.name = "no columns", .brief = true});
      if (ids == DType::i32)
        make(sink, {12}, 33001, 40, ids, t,
             Config{.name = "served", .values = {Fill::quick}, .sampled = true});
    }
}

}  // namespace

void embedding_cases(const CaseSink& sink) { all_cases(sink, forward); }
void embedding_bwd_cases(const CaseSink& sink) { all_cases(sink, backward); }

// One product; its rounding to 16 bits may follow that to fp32.
Bound embedding_bound(const BoundQuery&) { return {Bound::elementwise, 0, 1}; }
// Sums of as many tokens as have the id, each addition rounded.
Bound embedding_bwd_bound(const BoundQuery& q) {
  return {Bound::elementwise, 0x1p-24 * static_cast<double>(q.reduction + 1), 1};
}

}  // namespace rlk::registry
