// labels: conformance
// linear and tp_sum through the public face: a sum cut over 1, 2, 4 or 8 ranks has one set of bits, forward and backward,
// and calls that fit no cut are refused in clear words.
#include <doctest/doctest.h>

#include <span>
#include <string>
#include <vector>

#include "lm_head_simt.hpp"
#include "registry/linear/geometry.hpp"

namespace {

using namespace lm_head_simt;

// Columns [from, to) of a matrix.
Tensor columns(Array& a, std::int64_t from, std::int64_t to) {
  const Shape shape{a.shape[0], to - from};
  return Tensor(a.bytes.data() + from * rlk::size_of(a.type), shape, a.type, {kDLCPU, 0}, a.strides);
}
Tensor rows(Array& a, std::int64_t from, std::int64_t to) {
  return Tensor(a.bytes.data() + from * a.strides[0] * rlk::size_of(a.type), {to - from, a.shape[1]}, a.type);
}
// The n-th matrix of a stack.
Tensor layer(Array& a, std::int64_t n) {
  return Tensor(a.bytes.data() + n * a.strides[0] * rlk::size_of(a.type), {a.shape[1], a.shape[2]}, a.type);
}

// Where rank r of `ranks` starts in a sum of length n.
std::int64_t start(std::int64_t n, std::int64_t ranks, std::int64_t r) {
  return rlk::leaves::length(n, 0, 8 / ranks * r);
}

// The whole by one implementation of an id, its parts by another where there is one.
struct Way {
  const char *arithmetic, *whole, *part;
  bool fp32 = false, fp16 = true, everywhere = true;
};
constexpr Way kWays[] = {
    {"fma32/tree8", "native.scalar", "native", true},
    {"amx/k32/tree8", "native.replay_amx.scalar", "native.replay_amx", false, false},
    {"amx/k32/tree8", "native.amx", "native.replay_amx", false, false, false},
    {"avx512bf16/tree8", "native.replay_avx512bf16.scalar", "native.replay_avx512bf16", false, false},
    {"avx512bf16/tree8", "native.avx512bf16", "native.replay_avx512bf16", false, false, false},
    {"sm90/t25k16/tree8", "native.replay_sm90.scalar", "native.replay_sm90"}};
rlk::Options options(const Way& way, const char* id) { return {.backend = id, .arithmetic = way.arithmetic}; }
bool missing(const rlk::Status& status, const Way& way) {
  return status.code() == RLK_NO_IMPLEMENTATION && !way.everywhere;
}

constexpr std::int64_t kRanks[] = {1, 2, 4, 8};
constexpr std::int64_t kLengths[] = {0, 1, 16, 100, 128, 129, 300, 1040, 2304, 8300};

}  // namespace

TEST_CASE("1, 2, 4 and 8 ranks: partial sums of linear, joined by tp_sum, are the bits of the whole") {
  constexpr std::int64_t n = 37;
  for (const Way& way : kWays)
    for (const DType type : {DType::f32, DType::bf16})
      for (const std::int64_t k : kLengths)
        for (const std::int64_t m : {1, 14}) {
          if ((k > 2304 && m > 1) || (type == DType::f32 && !way.fp32)) continue;
          // Rounding to 16 bits would hide a join in another order.
          const DType out = way.fp32 ? type : DType::f32;
          Array x = normal(type, {m, k}, 1), weight = normal(type, {n, k}, 2), bias = normal(out, {n}, 3),
                residual = normal(out, {m, n}, 4), all(out, {m, n});
          const Tensor tx = x.view(), tw = weight.view(), tb = bias.view(), tr = residual.view(),
                       ty = all.view();
          const rlk::Status status = rlk::linear({.x = tx, .weight = tw, .bias = tb, .residual = tr, .y = ty},
                                                 options(way, way.whole));
          if (missing(status, way)) continue;
          REQUIRE_MESSAGE(status, status.message());
          for (const std::int64_t ranks : kRanks) {
            INFO(way.arithmetic, " ", rlk::name_of(type), " k=", k, " m=", m, " ranks ", ranks);
            Array partials(DType::f32, {ranks, m, n}), y(out, {m, n});
            for (std::int64_t r = 0; r < ranks; ++r) {
              const std::int64_t from = start(k, ranks, r), to = start(k, ranks, r + 1);
              const Tensor px = columns(x, from, to), pw = columns(weight, from, to), py = layer(partials, r);
              rlk::Linear held{.x = px, .weight = pw, .y = py};
              held.leaf_first = 8 / ranks * r, held.leaf_count = 8 / ranks, held.k_total = k;
              const rlk::Status status = rlk::linear(held, options(way, way.part));
              REQUIRE_MESSAGE(status, status.message());
            }
            const Tensor tp = partials.view(), tz = y.view();
            REQUIRE(rlk::tp_sum({.partials = tp, .bias = tb, .residual = tr, .y = tz}));
            CHECK(y.bytes == all.bytes);
          }
        }
}

TEST_CASE("1, 2, 4 and 8 ranks: d_x over shards of N, joined by tp_sum, is the bits of the whole") {
  struct Size {
    std::int64_t m, n, k;
  };
  constexpr Size kSizes[] = {{6, 16, 19},   {6, 100, 19},  {6, 300, 19},  {6, 1040, 19}, {1, 300, 19},
                             {2, 1040, 33}, {3, 8300, 19}, {4, 2304, 19}, {2, 40, 4101}, {8, 300, 1100}};
  for (const Way& way : kWays)
    for (const DType type : {DType::f32, DType::f16, DType::bf16})
      for (const auto& [m, n, k] : kSizes) {
        if (type != DType::bf16 && !way.fp32) continue;
        const DType out =
            way.fp32 ? type : DType::f32;  // rounding to 16 bits would hide a join in another order
        Array d_y = normal(type, {m, n}, 1), x = normal(type, {m, k}, 2), weight = normal(type, {n, k}, 3),
              all(out, {m, k});
        const Tensor td = d_y.view(), tx = x.view(), tw = weight.view(), ty = all.view();
        const rlk::Status status =
            rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = ty}, options(way, way.whole));
        if (missing(status, way)) continue;
        REQUIRE_MESSAGE(status, status.message());
        for (const std::int64_t ranks : kRanks) {
          INFO(way.arithmetic, " ", rlk::name_of(type), " m=", m, " n=", n, " k=", k, " ranks ", ranks);
          Array partials(DType::f32, {ranks, m, k}), d_x(out, {m, k});
          for (std::int64_t r = 0; r < ranks; ++r) {
            const std::int64_t from = start(n, ranks, r), to = start(n, ranks, r + 1);
            const Tensor pd = columns(d_y, from, to), pw = rows(weight, from, to), py = layer(partials, r);
            rlk::LinearBwd held{.d_y = pd, .x = tx, .weight = pw, .d_x = py};
            held.d_x_leaf_first = 8 / ranks * r, held.d_x_leaf_count = 8 / ranks, held.n_total = n;
            const rlk::Status status = rlk::linear_bwd(held, options(way, way.part));
            REQUIRE_MESSAGE(status, status.message());
          }
          const Tensor tp = partials.view(), tz = d_x.view();
          REQUIRE(rlk::tp_sum({.partials = tp, .y = tz}));
          CHECK(d_x.bytes == all.bytes);
        }
      }
}

// Ids whose gradients are tried with an operand type, and an implementation that has them everywhere; the last one's are no
// gradients of lm_head.
struct OfType {
  DType type;
  const char *arithmetic, *scalar;
};
constexpr OfType kOfTypes[] = {{DType::f32, "fma32/tree8", "native.scalar"},
                               {DType::bf16, "fma32/tree8", "native.scalar"},
                               {DType::bf16, "sm90/t25k16/tree8", "native.replay_sm90.scalar"},
                               {DType::bf16, "avx512bf16/tree8", "native.replay_avx512bf16.scalar"},
                               {DType::bf16, "amx/k32/tree8", "native.replay_amx.scalar"}};

TEST_CASE("lm_head_bwd by tree8 is what 1, 2, 4 and 8 shards of the vocabulary, joined by tp_sum, give") {
  constexpr std::int64_t m = 5, k = 19, v = 1000;
  for (const auto& [type, arithmetic, scalar] : std::span(kOfTypes).first(std::size(kOfTypes) - 1)) {
    CAPTURE(arithmetic);
    Array d_out = normal(type, {m, v}, 31), hidden = normal(type, {m, k}, 32),
          weight = normal(type, {v, k}, 33), d_hidden(type, {m, k}), d_weight(type, {v, k}),
          d_bias(type, {v});
    const Tensor td = d_out.view(), th = hidden.view(), tw = weight.view(), to = d_hidden.view(),
                 tg = d_weight.view(), tb = d_bias.view();
    const rlk::LmHeadBwd whole{
        .d_out = td, .hidden = th, .weight = tw, .d_hidden = to, .d_weight = tg, .d_bias = tb};
    REQUIRE(rlk::lm_head_bwd(whole, {.backend = "native", .arithmetic = arithmetic}));
    const std::vector<std::uint8_t> chain_of_tree = d_hidden.bytes;
    for (const std::int64_t ranks : kRanks) {
      INFO(rlk::name_of(type), " ranks ", ranks);
      Array partials(DType::f32, {ranks, m, k}), y(type, {m, k}), mine(type, {v, k});
      for (std::int64_t r = 0; r < ranks; ++r) {
        const std::int64_t from = start(v, ranks, r), to_row = start(v, ranks, r + 1);
        const Tensor pd = columns(d_out, from, to_row), pw = rows(weight, from, to_row),
                     px = layer(partials, r), pg = rows(mine, from, to_row);
        rlk::LinearBwd held{.d_y = pd, .x = th, .weight = pw, .d_x = px, .d_weight = pg};
        held.d_x_leaf_first = 8 / ranks * r, held.d_x_leaf_count = 8 / ranks, held.n_total = v;
        REQUIRE(rlk::linear_bwd(held, {.backend = "native", .arithmetic = arithmetic}));
      }
      const Tensor tp = partials.view(), ty = y.view();
      REQUIRE(rlk::tp_sum({.partials = tp, .y = ty}));
      CHECK(y.bytes == chain_of_tree);
      CHECK(mine.bytes == d_weight.bytes);
    }
    REQUIRE(rlk::lm_head_bwd(whole, {.backend = "native"}));  // nobody gets it unasked
    if (type == DType::f32) CHECK(d_hidden.bytes != chain_of_tree);
  }
}

TEST_CASE("d_x of fused projections over 1, 2, 4 and 8 ranks, joined by tp_sum, is the bits of the whole") {
  constexpr std::int64_t m = 6, k = 19;
  for (const auto& [type, arithmetic, everywhere] : kOfTypes)
    for (std::vector<std::int64_t> sizes :
         {std::vector<std::int64_t>{256, 128, 128}, {150, 40, 3}, {70, 0, 200}, {1040}}) {
      std::int64_t n = 0;
      for (const std::int64_t size : sizes) n += size;
      Array d_y = normal(type, {m, n}, 1), x = normal(type, {m, k}, 2), weight = normal(type, {n, k}, 3),
            all(DType::f32, {m, k}), plain(DType::f32, {m, k});
      const Tensor td = d_y.view(), tx = x.view(), tw = weight.view(), ty = all.view(), tz = plain.view();
      const Tensor segments(sizes.data(), {static_cast<std::int64_t>(sizes.size())}, DType::i64);
      const std::string by = arithmetic;
      const rlk::Options scalar{.backend = everywhere, .arithmetic = by};
      REQUIRE(rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = ty, .segments = segments}, scalar));
      REQUIRE(rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = tz}, scalar));
      CHECK((all.bytes == plain.bytes) == (sizes.size() == 1));  // another order of sums
      for (const std::int64_t ranks : kRanks) {
        INFO(by, " ", rlk::name_of(type), " n=", n, " ranks ", ranks);
        Array partials(DType::f32, {ranks, m, k}), d_x(DType::f32, {m, k});
        for (std::int64_t r = 0; r < ranks; ++r) {
          // A rank's own rows of every projection, one after the other.
          std::vector<std::int64_t> own;
          std::int64_t at = 0;
          for (const std::int64_t size : sizes) {
            for (std::int64_t i = start(size, ranks, r); i < start(size, ranks, r + 1); ++i)
              own.push_back(at + i);
            at += size;
          }
          const auto held = static_cast<std::int64_t>(own.size());
          Array part_d(type, {m, held}), part_w(type, {held, k});
          for (std::int64_t i = 0; i < held; ++i) {
            for (std::int64_t j = 0; j < m; ++j)
              part_d.set(j * held + i, d_y.get(j * n + own[static_cast<std::size_t>(i)]));
            for (std::int64_t j = 0; j < k; ++j)
              part_w.set(i * k + j, weight.get(own[static_cast<std::size_t>(i)] * k + j));
          }
          const Tensor pd = part_d.view(), pw = part_w.view(), py = layer(partials, r);
          rlk::LinearBwd b{.d_y = pd, .x = tx, .weight = pw, .d_x = py, .segments = segments};
          b.d_x_leaf_first = 8 / ranks * r, b.d_x_leaf_count = 8 / ranks, b.n_total = n;
          const rlk::Status status = rlk::linear_bwd(b, {.backend = "native", .arithmetic = by});
          REQUIRE_MESSAGE(status, status.message());
        }
        const Tensor tp = partials.view(), tj = d_x.view();
        REQUIRE(rlk::tp_sum({.partials = tp, .y = tj}));
        CHECK(d_x.bytes == all.bytes);
      }
    }
}

TEST_CASE("segments that do not add up are refused with both values") {
  Array d_y(DType::bf16, {2, 48}), x(DType::bf16, {2, 8}), weight(DType::bf16, {48, 8}),
      d_x(DType::bf16, {2, 8});
  const Tensor td = d_y.view(), tx = x.view(), tw = weight.view(), ty = d_x.view();
  const auto refused = [&](std::vector<std::int64_t> sizes, const char* why) {
    const Tensor segments(sizes.data(), {static_cast<std::int64_t>(sizes.size())}, DType::i64);
    const rlk::Status status =
        rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = ty, .segments = segments});
    CHECK(status.code() == RLK_INVALID_ARGUMENT);
    CHECK_MESSAGE(std::string(status.message()).find(why) != std::string::npos, status.message());
  };
  // Whether values fit is asked again at every call of the same shapes.
  std::vector<std::int64_t> fine{32, 16};
  const Tensor segments(fine.data(), {2}, DType::i64);
  REQUIRE(rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = ty, .segments = segments}));
  fine[1] = 8;
  CHECK(rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = ty, .segments = segments}).code() ==
        RLK_INVALID_ARGUMENT);
  refused({32, 8}, "segments add up to 40, n_total is 48");
  refused({32, 32}, "segments[1] is 32, of n_total=48 there are 16 left");
  refused({-1, 49}, "segments[0] is -1");
  refused(std::vector<std::int64_t>(9, 1), "segments has 9 sizes, it must have 1 to 8");
}

TEST_CASE("d_weight and d_bias go on from what they are added to, in place, in fp32") {
  constexpr std::int64_t m = 4100, n = 5, k = 7;
  for (const auto& [type, arithmetic, everywhere] : kOfTypes) {
    CAPTURE(arithmetic);
    Array d_y = normal(type, {m, n}, 1), x = normal(type, {m, k}, 2), weight = normal(type, {n, k}, 3);
    Array d_w(DType::f32, {n, k}), d_b(DType::f32, {n}), w = normal(DType::f32, {n, k}, 4),
                                                         b = normal(DType::f32, {n}, 5);
    Array other(DType::f32, {n, k}), half_precision(DType::bf16, {n, k});
    const Tensor td = d_y.view(), tx = x.view(), tw = weight.view(), t1 = d_w.view(), t2 = d_b.view(),
                 t3 = w.view(), t4 = b.view(), t5 = other.view(), t6 = half_precision.view();
    const rlk::Options options{.backend = "native", .arithmetic = arithmetic};
    REQUIRE(rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_weight = t1, .d_bias = t2}, options));
    Array want_w(DType::f32, {n, k}), want_b(DType::f32, {n});
    for (std::int64_t i = 0; i < n * k; ++i) want_w.set(i, d_w.get(i) + w.get(i));
    for (std::int64_t i = 0; i < n; ++i) want_b.set(i, d_b.get(i) + b.get(i));
    rlk::LinearBwd a{.d_y = td,
                     .x = tx,
                     .weight = tw,
                     .d_weight = t5,
                     .d_bias = t2,
                     .d_weight_before = t3,
                     .d_bias_before = t4};
    REQUIRE(rlk::linear_bwd(a, options));
    CHECK(other.bytes == want_w.bytes);
    CHECK(d_b.bytes == want_b.bytes);
    a.d_weight = t3, a.d_bias = t4;
    REQUIRE(rlk::linear_bwd(a, options));
    CHECK(w.bytes == want_w.bytes);
    CHECK(b.bytes == want_b.bytes);
    a.d_weight = t6;
    const rlk::Status status = rlk::linear_bwd(a, options);
    CHECK_MESSAGE(std::string(status.message()).find("d_weight is bf16, expected fp32") != std::string::npos,
                  status.message());
  }
}

// Products of few tokens have a path of their own; with zeros behind them they are many.
TEST_CASE("d_weight of few tokens is that of these and of tokens that are zeros") {
  constexpr std::int64_t n = 31, k = 4101, many = 70;
  constexpr std::pair<DType, const char*> kWays[] = {{DType::f32, "fma32/tree8"},
                                                     {DType::f16, "fma32/tree8"},
                                                     {DType::bf16, "fma32/tree8"},
                                                     {DType::bf16, "avx512bf16/tree8"}};
  for (const auto& [type, arithmetic] : kWays)
    for (const bool onward : {false, true})
      for (const std::int64_t m : {1, 2, 3, 4, 5, 8, 9, 33, 64}) {
        CAPTURE(arithmetic);
        CAPTURE(onward);
        CAPTURE(m);
        Array d_y = normal(type, {m, n}, 1), x = normal(type, {m, k}, 2), weight(type, {n, k});
        Array all_d_y(type, {many, n}), all_x(type, {many, k}), before = normal(DType::f32, {n, k}, 3);
        for (Array* zeros : {&all_d_y, &all_x}) std::fill(zeros->bytes.begin(), zeros->bytes.end(), 0);
        std::copy(d_y.bytes.begin(), d_y.bytes.end(), all_d_y.bytes.begin());
        std::copy(x.bytes.begin(), x.bytes.end(), all_x.bytes.begin());
        Array few(onward ? DType::f32 : type, {n, k}), want(onward ? DType::f32 : type, {n, k});
        const Tensor td = d_y.view(), tx = x.view(), tw = weight.view(), tf = few.view(), t1 = all_d_y.view(),
                     t2 = all_x.view(), t3 = want.view(), tb = before.view();
        rlk::LinearBwd a{.d_y = td, .x = tx, .weight = tw, .d_weight = tf};
        if (onward) a.d_weight_before = tb;
        const rlk::Options options{.backend = "native", .arithmetic = arithmetic, .threads = 1};
        REQUIRE(rlk::linear_bwd(a, options));
        a.d_y = t1, a.x = t2, a.d_weight = t3;
        REQUIRE(rlk::linear_bwd(a, options));
        CHECK(few.bytes == want.bytes);
      }
}

TEST_CASE("a part of linear that is no subtree, or of another length, is refused with both values") {
  Array x(DType::bf16, {2, 48}), weight(DType::bf16, {3, 48}), y(DType::f32, {2, 3}), bias(DType::bf16, {3});
  const Tensor tx = x.view(), tw = weight.view(), ty = y.view(), tb = bias.view();
  const auto refused = [&](std::int64_t first, std::int64_t count, std::int64_t total, const char* why,
                           bool with_bias = false) {
    rlk::Linear a{.x = tx, .weight = tw, .y = ty};
    if (with_bias) a.bias = tb;
    a.leaf_first = first, a.leaf_count = count, a.k_total = total;
    const rlk::Status status = rlk::linear(a);
    CHECK(status.code() == RLK_INVALID_ARGUMENT);
    CHECK_MESSAGE(std::string(status.message()).find(why) != std::string::npos, status.message());
  };
  refused(0, 3, 128, "leaf_count is 3, it must be 1, 2, 4 or 8");
  refused(2, 4, 128, "leaf_first is 2, with leaf_count=4 it must be a multiple of that from 0 to 4");
  refused(8, 1, 128, "leaf_first is 8");
  refused(0, 4, 128, "K=48, but leaves 0 to 3 of k_total=128 have 64");
  refused(0, 4, 0, "K=48, but leaves 0 to 3 of k_total=0 have 0");
  refused(0, 8, 49, "K=48, but leaves 0 to 7 of k_total=49 have 49");
  refused(0, 4, -1, "k_total is -1, it must be from 0 to 2^53");
  refused(4, 4, 112, "bias is given with leaf_count=4", true);
  rlk::Linear fits{.x = tx, .weight = tw, .y = ty};
  fits.leaf_first = 4, fits.leaf_count = 4, fits.k_total = 112;
  CHECK(rlk::linear(fits));
}

namespace {

// Columns of gate and of up, from products whose columns lie as the weight's rows do.
Array half(Array& products, bool interleaved, bool up) {
  const std::int64_t m = products.shape[0], width = products.shape[1] / 2;
  const rlk::gate_up::Layout rows(interleaved, width);
  Array out(products.type, {m, width});
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < width; ++j)
      out.set(i * width + j, products.get(i * 2 * width + rows.gate(j) + (up ? rows.up : 0)));
  return out;
}

struct Gated {
  DType type, out;
  std::int64_t m, k, width;
  bool bias, interleaved, twice;
  unsigned seed;
};

// y of linear with swiglu, and by two calls.
void fused_is_composed(const Way& way, const Gated& g) {
  INFO(way.arithmetic, " ", rlk::name_of(g.type), " to ", rlk::name_of(g.out), " m=", g.m, " k=", g.k,
       " width ", g.width, " bias ", g.bias, " interleaved ", g.interleaved, " twice ", g.twice);
  const std::int64_t n = 2 * g.width;
  Array x = normal(g.type, {g.m, g.k}, g.seed, {g.k + 3, 1}),
        weight = normal(g.type, {n, g.k}, g.seed + 1, {g.k + 5, 1}), bias = normal(g.out, {n}, g.seed + 2),
        y(g.out, {g.m, g.width}, {g.width + 7, 1});
  Array products(g.out, {g.m, n}), want(g.out, {g.m, g.width}, {g.width + 7, 1});
  const auto before = std::vector{x.bytes, weight.bytes, bias.bytes};
  const Tensor tx = x.view(), tw = weight.view(), tb = bias.view(), ty = y.view(), tp = products.view(),
               tz = want.view();
  rlk::Linear fused{.x = tx, .weight = tw, .y = ty};
  if (g.bias) fused.bias = tb;
  rlk::Linear plain = fused;
  plain.y = tp;
  fused.activation = rlk::Linear::Activation::swiglu;
  if (g.interleaved) fused.gate_up = rlk::Linear::GateUp::interleaved64;
  if (g.twice) fused.roundings = rlk::Linear::Roundings::twice;
  const rlk::Status status = rlk::linear(plain, options(way, way.whole));
  if (missing(status, way)) return;
  REQUIRE_MESSAGE(status, status.message());
  Array gate = half(products, g.interleaved, false), up = half(products, g.interleaved, true);
  const Tensor tg = gate.view(), tu = up.view();
  rlk::Swiglu act{.gate = tg, .up = tu, .out = tz};
  if (g.twice) act.roundings = rlk::Swiglu::Roundings::twice;
  const bool golden = std::string(way.arithmetic) == "fma64";
  REQUIRE(rlk::swiglu(act, {.backend = golden ? "native.golden" : "native.tiles"}));
  const rlk::Status done = rlk::linear(fused, options(way, way.part));
  REQUIRE_MESSAGE(done, done.message());
  CHECK(y.bytes == want.bytes);
  CHECK(std::vector{x.bytes, weight.bytes, bias.bytes} == before);
}

}  // namespace

TEST_CASE("linear with swiglu is linear, then swiglu, bit for bit") {
  struct Size {
    std::int64_t m, k, width;
  };
  constexpr Way kGolden{"fma64", "native.golden.scalar", "native.golden", true};
  unsigned seed = 0;
  std::vector<Way> ways(std::begin(kWays), std::end(kWays));
  ways.push_back(kGolden);
  for (const Way& way : ways)
    for (const DType type : {DType::f32, DType::bf16, DType::f16})
      for (const bool interleaved : {false, true})
        for (const auto& [m, k, width] :
             {Size{1, 1, 1}, Size{3, 300, 70}, Size{1, 130, 64}, Size{17, 96, 192}, Size{2, 2304, 33},
              Size{300, 40, 320}, Size{5, 0, 64}, Size{0, 64, 64}, Size{3, 64, 0}}) {
          if ((type == DType::f32 && !way.fp32) || (interleaved && width % 64 != 0)) continue;
          if (type == DType::f16 && !way.fp16) continue;
          for (const bool bias : {false, true})
            fused_is_composed(way, {type, bias && m == 17 ? DType::f32 : type, m, k, width, bias, interleaved,
                                    m % 2 == 0, ++seed});
        }
}

TEST_CASE("what swiglu of linear cannot be is refused by name") {
  Array x(DType::bf16, {2, 48}), weight(DType::bf16, {192, 48}), odd(DType::bf16, {7, 48}),
      y(DType::bf16, {2, 96}), wide(DType::bf16, {2, 192}), part(DType::f32, {2, 96});
  const Tensor tx = x.view(), tw = weight.view(), to = odd.view(), ty = y.view(), tr = wide.view(),
               tf = part.view();
  const auto refused = [&](auto change, const char* why) {
    rlk::Linear a{.x = tx, .weight = tw, .y = ty};
    a.activation = rlk::Linear::Activation::swiglu;
    change(a);
    const rlk::Status status = rlk::linear(a);
    CHECK(status.code() == RLK_INVALID_ARGUMENT);
    CHECK_MESSAGE(std::string(status.message()).find(why) != std::string::npos, status.message());
  };
  refused([&](auto& a) { a.residual = tr; }, "residual is given with activation=swiglu");
  refused([&](auto& a) { a.weight = to; },
          "weight has N=7, activation=swiglu with gate_up=stacked takes a multiple of 2");
  refused([&](auto& a) { a.gate_up = rlk::Linear::GateUp::interleaved64; },
          "weight has N=192, activation=swiglu with gate_up=interleaved64 takes a multiple of 128");
  refused([&](auto& a) { a.leaf_first = 4, a.leaf_count = 4, a.k_total = 112, a.y = tf; },
          "activation is swiglu with leaf_count=4");
  refused([&](auto& a) { a.y = tr; }, "y");
  rlk::LinearBwd b{.d_y = tr, .x = tx, .weight = tw, .d_weight = tw};
  b.activation = rlk::LinearBwd::Activation::swiglu;
  const rlk::Status status = rlk::linear_bwd(b);
  CHECK_MESSAGE(std::string(status.message()).find("linear_bwd: activation is swiglu") != std::string::npos,
                status.message());
}

TEST_CASE("tp_sum takes 1, 2, 4 or 8 partial sums and a slice of their rows") {
  Array three(DType::f32, {3, 2, 5}), y(DType::f32, {2, 5});
  const Tensor t3 = three.view(), ty = y.view();
  const rlk::Status status = rlk::tp_sum({.partials = t3, .y = ty});
  CHECK(std::string(status.message()).find("T=3, it must be 1, 2, 4 or 8") != std::string::npos);
  const rlk::Status gradients = rlk::tp_sum_bwd({.d_y = ty, .partials = t3, .d_partials = t3});
  CHECK(std::string(gradients.message()).find("T=3, it must be 1, 2, 4 or 8") != std::string::npos);

  constexpr std::int64_t m = 7, n = 5;
  Array partials = normal(DType::f32, {4, m, n}, 1), whole(DType::bf16, {m, n}), slice(DType::bf16, {3, n});
  const Tensor tp = partials.view(), tw = whole.view(), ts = slice.view();
  const Shape shape{4, 3, n}, strides{m * n, n, 1};
  const Tensor rows_2_to_5(partials.bytes.data() + 2 * n * 4, shape, DType::f32, {kDLCPU, 0}, strides);
  REQUIRE(rlk::tp_sum({.partials = tp, .y = tw}));
  REQUIRE(rlk::tp_sum({.partials = rows_2_to_5, .y = ts}));
  CHECK(std::equal(slice.bytes.begin(), slice.bytes.end(), whole.bytes.begin() + 2 * n * 2));
}

namespace {

// Matrices of a stack, each in memory of its own.
std::vector<Array> apart(Array& stack) {
  std::vector<Array> all;
  const auto size = static_cast<std::ptrdiff_t>(stack.shape[1] * stack.shape[2] * rlk::size_of(stack.type));
  for (std::int64_t t = 0; t < stack.shape[0]; ++t) {
    all.emplace_back(stack.type, Shape{stack.shape[1], stack.shape[2]});
    std::copy_n(stack.bytes.begin() + t * size, size, all.back().bytes.begin());
  }
  return all;
}
std::vector<Tensor> views(std::vector<Array>& arrays) {
  std::vector<Tensor> all;
  for (Array& a : arrays) all.push_back(a.view());
  return all;
}

}  // namespace

TEST_CASE("tp_sum of tensors of their own, and of a slice of rows, is that of the stack") {
  constexpr std::int64_t m = 7, n = 37;
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t ranks : kRanks) {
      INFO(rlk::name_of(type), " ranks ", ranks);
      Array stack = normal(DType::f32, {ranks, m, n}, 1), bias = normal(type, {n}, 2),
            residual = normal(type, {m, n}, 3), whole(type, {m, n}), out(type, {m, n}), slice(type, {3, n});
      std::vector<Array> own = apart(stack);
      const std::vector<Tensor> p = views(own);
      const Tensor ts = stack.view(), tb = bias.view(), tr = residual.view(), tw = whole.view(),
                   to = out.view(), tl = slice.view(), part = rows(residual, 2, 5);
      REQUIRE(rlk::tp_sum({.partials = ts, .bias = tb, .residual = tr, .y = tw}));
      rlk::TpSum a{.partials = p[0], .bias = tb, .residual = tr, .y = to};
      if (ranks > 1) a.p1 = p[1];
      if (ranks > 2) a.p2 = p[2], a.p3 = p[3];
      if (ranks > 4) a.p4 = p[4], a.p5 = p[5], a.p6 = p[6], a.p7 = p[7];
      REQUIRE(rlk::tp_sum(a));
      CHECK(out.bytes == whole.bytes);
      a.residual = part, a.y = tl, a.row_first = 2, a.row_count = 3;
      REQUIRE(rlk::tp_sum(a));
      const auto size = static_cast<std::ptrdiff_t>(n * rlk::size_of(type));
      CHECK(std::equal(slice.bytes.begin(), slice.bytes.end(), whole.bytes.begin() + 2 * size));
    }
}

TEST_CASE("what tp_sum cannot join is refused with both values") {
  Array stack(DType::f32, {2, 4, 5}), one(DType::f32, {4, 5}), small(DType::f32, {3, 5}),
      y(DType::f32, {4, 5});
  const Tensor ts = stack.view(), t1 = one.view(), t2 = small.view(), ty = y.view();
  const auto refused = [&](auto change, const char* why) {
    rlk::TpSum a{.partials = t1, .y = ty};
    change(a);
    const rlk::Status status = rlk::tp_sum(a);
    CHECK(status.code() == RLK_INVALID_ARGUMENT);
    CHECK_MESSAGE(std::string(status.message()).find(why) != std::string::npos, status.message());
  };
  refused([&](auto& a) { a.p1 = t1, a.p2 = t1; }, "partials has T=3, it must be 1, 2, 4 or 8");
  refused([&](auto& a) { a.p2 = t1; }, "p2 is given without p1");
  refused([&](auto& a) { a.partials = ts, a.p1 = t1; }, "p1 is given beside partials of rank 3");
  refused([&](auto& a) { a.p1 = t2; }, "p1 is [3, 5], partials is [4, 5]");
  refused([&](auto& a) { a.row_first = 5; }, "row_first is 5, partials have 4 rows");
  refused([&](auto& a) { a.row_first = 2, a.row_count = 3; },
          "row_count is 3, from row_first=2 on partials have 2 rows");
}

TEST_CASE("every partial sum has y's gradient, a row that was not summed has none, d_bias is linear's") {
  constexpr std::int64_t m = 9, n = 21, first = 2, count = 5;
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    INFO(rlk::name_of(type));
    Array d_y = normal(type, {count, n}, 1), stack(DType::f32, {4, m, n}), d_stack(DType::f32, {4, m, n}),
          d_bias(type, {n}), want(type, {n}), d_residual(type, {count, n}), x(type, {count, 0}),
          weight(type, {n, 0});
    const Tensor td = d_y.view(), ts = stack.view(), t1 = d_stack.view(), t2 = d_bias.view(),
                 t3 = d_residual.view(), tx = x.view(), tw = weight.view(), t4 = want.view();
    rlk::TpSumBwd a{.d_y = td, .partials = ts, .d_partials = t1, .d_bias = t2, .d_residual = t3};
    a.row_first = first, a.row_count = count;
    REQUIRE(rlk::tp_sum_bwd(a));
    std::size_t wrong = 0;
    for (std::int64_t i = 0; i < 4 * m * n; ++i) {
      const std::int64_t row = i / n % m - first;
      wrong += d_stack.get(i) != (row < 0 || row >= count ? 0 : d_y.get(row * n + i % n));
    }
    CHECK(wrong == 0);
    CHECK(d_residual.bytes == d_y.bytes);
    REQUIRE(rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_bias = t4}, {.arithmetic = "fma32/tree8"}));
    CHECK(d_bias.bytes == want.bytes);

    std::vector<Array> own = apart(d_stack);
    Array one(DType::f32, {m, n}), e0(DType::f32, {m, n}), e1(DType::f32, {m, n});
    const Tensor to = one.view(), d0 = e0.view(), d1 = e1.view();
    rlk::TpSumBwd b{.d_y = td, .partials = to, .d_partials = d0, .d_p1 = d1};
    b.row_first = first, b.row_count = count;
    REQUIRE(rlk::tp_sum_bwd(b));
    CHECK(e0.bytes == own[0].bytes);
    CHECK(e1.bytes == own[1].bytes);
  }
}
