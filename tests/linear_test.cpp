// labels: conformance
// linear and tp_sum through the public face: a sum cut over 1, 2, 4 or 8 ranks has one set of bits, forward and backward,
// and calls that fit no cut are refused in clear words.
#include <doctest/doctest.h>

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
  bool fp32 = false, everywhere = true, backward = true;
};
constexpr Way kWays[] = {
    {"fma32/tree8", "native.scalar", "native", true},
    {"amx/k32/tree8", "native.amx", "native.amx", false, false},
    {"sm90/t25k16/tree8", "native.replay_sm90.scalar", "native.replay_sm90", false, true, false}};
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
  constexpr std::int64_t m = 6, k = 19;
  for (const Way& way : kWays)
    for (const DType type : {DType::f32, DType::f16, DType::bf16})
      for (const std::int64_t n : {16, 100, 300, 1040}) {
        if (!way.backward || (type != DType::bf16 && !way.fp32)) continue;
        Array d_y = normal(type, {m, n}, 1), x = normal(type, {m, k}, 2), weight = normal(type, {n, k}, 3),
              all(type, {m, k});
        const Tensor td = d_y.view(), tx = x.view(), tw = weight.view(), ty = all.view();
        const rlk::Status status =
            rlk::linear_bwd({.d_y = td, .x = tx, .weight = tw, .d_x = ty}, options(way, way.whole));
        if (missing(status, way)) continue;
        REQUIRE_MESSAGE(status, status.message());
        for (const std::int64_t ranks : kRanks) {
          INFO(way.arithmetic, " ", rlk::name_of(type), " n=", n, " ranks ", ranks);
          Array partials(DType::f32, {ranks, m, k}), d_x(type, {m, k});
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

TEST_CASE("tp_sum takes 1, 2, 4 or 8 partial sums and a slice of their rows") {
  Array three(DType::f32, {3, 2, 5}), y(DType::f32, {2, 5});
  const Tensor t3 = three.view(), ty = y.view();
  const rlk::Status status = rlk::tp_sum({.partials = t3, .y = ty});
  CHECK(std::string(status.message()).find("T=3, it must be 1, 2, 4 or 8") != std::string::npos);

  constexpr std::int64_t m = 7, n = 5;
  Array partials = normal(DType::f32, {4, m, n}, 1), whole(DType::bf16, {m, n}), slice(DType::bf16, {3, n});
  const Tensor tp = partials.view(), tw = whole.view(), ts = slice.view();
  const Shape shape{4, 3, n}, strides{m * n, n, 1};
  const Tensor rows_2_to_5(partials.bytes.data() + 2 * n * 4, shape, DType::f32, {kDLCPU, 0}, strides);
  REQUIRE(rlk::tp_sum({.partials = tp, .y = tw}));
  REQUIRE(rlk::tp_sum({.partials = rows_2_to_5, .y = ts}));
  CHECK(std::equal(slice.bytes.begin(), slice.bytes.end(), whole.bytes.begin() + 2 * n * 2));
}
