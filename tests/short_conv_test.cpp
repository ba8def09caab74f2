// labels: conformance
// What short_conv promises beyond one call: a prefill, its chunks, single tokens and packed sequences have the same bits, forward and
// backward; sums over rows are by blocks of 128.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using Shape = std::vector<std::int64_t>;

// A dense tensor that owns its bytes: all NaN, or random numbers.
struct Owned {
  Shape shape;
  DType type;
  std::vector<std::byte> bytes;

  Owned(Shape s, DType t) : shape(std::move(s)), type(t) {
    std::int64_t n = rlk::size_of(t);
    for (std::int64_t d : shape) n *= d;
    bytes.assign(static_cast<std::size_t>(n), std::byte{0xff});
  }
  Owned(Shape s, DType t, std::mt19937& random) : Owned(std::move(s), t) {
    std::normal_distribution<float> normal(0, 1);
    for (std::size_t i = 0; i < bytes.size() / static_cast<std::size_t>(rlk::size_of(t)); ++i)
      set(i, normal(random));
  }
  void set(std::size_t i, float x) {
    const std::uint16_t half = type == DType::bf16 ? rlk::float_to_bf16(x) : rlk::float_to_f16(x);
    if (type == DType::f32)
      std::memcpy(bytes.data() + 4 * i, &x, 4);
    else
      std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  float get(std::size_t i) const {
    float x;
    std::uint16_t half;
    if (type == DType::f32) return std::memcpy(&x, bytes.data() + 4 * i, 4), x;
    std::memcpy(&half, bytes.data() + 2 * i, 2);
    return type == DType::bf16 ? rlk::bf16_to_float(half) : rlk::f16_to_float(half);
  }
  // `count` of the second axis from `first` on; the first axis has one.
  Tensor rows(std::int64_t first, std::int64_t count) {
    return Tensor(bytes.data() + first * shape[2] * rlk::size_of(type), {1, count, shape[2]}, type);
  }
  Tensor all() { return Tensor(bytes.data(), std::span(shape), type); }
  bool operator==(const Owned& other) const { return bytes == other.bytes; }
};

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
const rlk::Options kNative{.backend = "native.tiles"};

// Cuts of [0, tokens).
std::vector<std::int64_t> chunks_of(std::int64_t tokens, std::int64_t size) {
  std::vector<std::int64_t> cuts{0};
  while (cuts.back() < tokens) cuts.push_back(std::min(tokens, cuts.back() + size));
  return cuts;
}

}  // namespace

TEST_CASE("a prefill, any chunks of it and single tokens leave the same outputs and state") {
  for (unsigned seed : {1u, 2u, 3u})
    for (DType t : kTypes)
      for (std::int64_t taps : {2, 3, 4}) {
        std::mt19937 random(seed);
        const std::int64_t tokens = 261, d = seed == 2 ? 523 : 37;
        Owned x({1, tokens, d}, t, random), weight({d, taps}, t, random), bias({d}, t, random),
            start({1, taps - 1, d}, t, random), y({1, tokens, d}, t), end({1, taps - 1, d}, t);
        const Owned x_before = x, weight_before = weight, start_before = start;
        REQUIRE(rlk::short_conv({.x = x.all(),
                                 .weight = weight.all(),
                                 .bias = bias.all(),
                                 .initial_state = start.all(),
                                 .y = y.all(),
                                 .final_state = end.all()},
                                kNative));
        CHECK(x == x_before);
        CHECK(weight == weight_before);
        CHECK(start == start_before);
        for (std::int64_t size : {1, 2, 3, 7, 64, 127, 128, 129, 260}) {
          CAPTURE(rlk::name_of(t));
          CAPTURE(size);
          Owned part({1, tokens, d}, t), state = start;  // in place
          const std::vector<std::int64_t> cuts = chunks_of(tokens, size);
          for (std::size_t c = 1; c < cuts.size(); ++c)
            REQUIRE(rlk::short_conv({.x = x.rows(cuts[c - 1], cuts[c] - cuts[c - 1]),
                                     .weight = weight.all(),
                                     .bias = bias.all(),
                                     .initial_state = state.all(),
                                     .y = part.rows(cuts[c - 1], cuts[c] - cuts[c - 1]),
                                     .final_state = state.all()},
                                    kNative));
          CHECK(part == y);
          CHECK(state == end);
        }
      }
}

TEST_CASE("packed sequences leave what each leaves alone, empty and short ones too") {
  for (unsigned seed : {1u, 2u, 3u})
    for (DType t : kTypes) {
      CAPTURE(rlk::name_of(t));
      std::mt19937 random(seed);
      std::vector<std::int64_t> bounds{0, 0, 1, 3, 130, 130, 133, 261};
      const std::int64_t tokens = bounds.back(), d = 45, taps = 2 + seed % 3, back = taps - 1,
                         n = static_cast<std::int64_t>(bounds.size()) - 1;
      const Tensor cu(bounds.data(), {n + 1}, DType::i64);
      Owned x({1, tokens, d}, t, random), d_y({1, tokens, d}, t, random), weight({d, taps}, t, random);
      Owned start({1, n * back, d}, t, random), d_end({1, n * back, d}, t, random);
      Owned y({1, tokens, d}, t), end({1, n * back, d}, t), d_x({1, tokens, d}, t),
          d_start({1, n * back, d}, t);
      Owned y1 = y, end1 = end, d_x1 = d_x, d_start1 = d_start;
      const auto states = [&](Owned& o) { return Tensor(o.bytes.data(), {n, back, d}, t); };
      REQUIRE(rlk::short_conv({.x = x.all(),
                               .weight = weight.all(),
                               .initial_state = states(start),
                               .cu_seqlens = cu,
                               .y = y.all(),
                               .final_state = states(end)},
                              kNative));
      REQUIRE(rlk::short_conv_bwd({.x = x.all(),
                                   .weight = weight.all(),
                                   .initial_state = states(start),
                                   .cu_seqlens = cu,
                                   .d_y = d_y.all(),
                                   .d_final_state = states(d_end),
                                   .d_x = d_x.all(),
                                   .d_initial_state = states(d_start)},
                                  kNative));
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t first = bounds[static_cast<std::size_t>(i)],
                           count = bounds[static_cast<std::size_t>(i) + 1] - first;
        REQUIRE(rlk::short_conv({.x = x.rows(first, count),
                                 .weight = weight.all(),
                                 .initial_state = start.rows(i * back, back),
                                 .y = y1.rows(first, count),
                                 .final_state = end1.rows(i * back, back)},
                                kNative));
        REQUIRE(rlk::short_conv_bwd({.x = x.rows(first, count),
                                     .weight = weight.all(),
                                     .initial_state = start.rows(i * back, back),
                                     .d_y = d_y.rows(first, count),
                                     .d_final_state = d_end.rows(i * back, back),
                                     .d_x = d_x1.rows(first, count),
                                     .d_initial_state = d_start1.rows(i * back, back)},
                                    kNative));
      }
      CHECK(y == y1);
      CHECK(end == end1);
      CHECK(d_x == d_x1);
      CHECK(d_start == d_start1);
    }
}

TEST_CASE("gradients of chunks are those of the whole, where the state's is handed on in fp32") {
  for (unsigned seed : {1u, 2u, 3u})
    for (DType t : kTypes)
      for (std::int64_t size : {1, 2, 5, 100, 128, 150}) {
        CAPTURE(rlk::name_of(t));
        CAPTURE(size);
        std::mt19937 random(seed);
        const std::int64_t tokens = 200, d = 29, taps = 4;
        Owned x({1, tokens, d}, t, random), d_y({1, tokens, d}, t, random), weight({d, taps}, t, random);
        Owned zeros({1, taps - 1, d}, t), d_x({1, tokens, d}, t), part({1, tokens, d}, t);
        std::fill(zeros.bytes.begin(), zeros.bytes.end(), std::byte{0});
        Owned none({1, taps - 1, d}, DType::f32), d_start = none, handed = none, next = none,
                                                  zero_gradient = none;
        std::fill(zero_gradient.bytes.begin(), zero_gradient.bytes.end(), std::byte{0});
        REQUIRE(rlk::short_conv_bwd({.x = x.all(),
                                     .weight = weight.all(),
                                     .d_y = d_y.all(),
                                     .d_x = d_x.all(),
                                     .d_initial_state = d_start.all()},
                                    kNative));
        const std::vector<std::int64_t> cuts = chunks_of(tokens, size);
        for (std::size_t c = cuts.size() - 1; c > 0; --c) {
          const std::int64_t first = cuts[c - 1], count = cuts[c] - first;
          // The state before the chunk: the inputs that lie before it, or zeros.
          Owned state = zeros;
          for (std::int64_t r = 0; r < taps - 1; ++r)
            for (std::int64_t i = 0; i < d; ++i)
              if (const std::int64_t row = first - (taps - 1) + r; row >= 0)
                state.set(static_cast<std::size_t>(r * d + i), x.get(static_cast<std::size_t>(row * d + i)));
          const Tensor d_end = c + 1 < cuts.size() ? handed.all() : zero_gradient.all();
          REQUIRE(rlk::short_conv_bwd({.x = x.rows(first, count),
                                       .weight = weight.all(),
                                       .initial_state = state.all(),
                                       .d_y = d_y.rows(first, count),
                                       .d_final_state = d_end,
                                       .d_x = part.rows(first, count),
                                       .d_initial_state = next.all()},
                                      kNative));
          handed = next;
        }
        CHECK(part == d_x);
        CHECK(handed == d_start);
      }
}

TEST_CASE("gradients of the filter are chains over blocks of 128 rows, added in fp64") {
  std::mt19937 random(5);
  const std::int64_t batch = 3, tokens = 131, d = 17, taps = 3, rows = batch * tokens;
  const DType t = DType::f32;
  Owned x({batch, tokens, d}, t, random), d_y({batch, tokens, d}, t, random), weight({d, taps}, t, random);
  Owned bias({d}, t, random), d_weight({d, taps}, t), d_bias({d}, t);
  REQUIRE(rlk::short_conv_bwd({.x = x.all(),
                               .weight = weight.all(),
                               .bias = bias.all(),
                               .d_y = d_y.all(),
                               .d_weight = d_weight.all(),
                               .d_bias = d_bias.all()},
                              kNative));
  // Gradients of the sums, row by row.
  Owned g({batch * tokens, 1, d}, t);
  for (std::int64_t row = 0; row < rows; ++row) {
    Owned state({1, taps - 1, d}, t);
    std::fill(state.bytes.begin(), state.bytes.end(), std::byte{0});
    for (std::int64_t r = 0; r < taps - 1; ++r)
      if (const std::int64_t at = row % tokens - (taps - 1) + r; at >= 0)
        std::memcpy(state.bytes.data() + r * d * 4, x.bytes.data() + (row - (taps - 1) + r) * d * 4,
                    static_cast<std::size_t>(d) * 4);
    // d_bias of a single row is that row's g.
    REQUIRE(rlk::short_conv_bwd({.x = Tensor(x.bytes.data() + row * d * 4, {1, 1, d}, t),
                                 .weight = weight.all(),
                                 .bias = bias.all(),
                                 .initial_state = state.all(),
                                 .d_y = Tensor(d_y.bytes.data() + row * d * 4, {1, 1, d}, t),
                                 .d_bias = Tensor(g.bytes.data() + row * d * 4, {d}, t)},
                                kNative));
  }
  for (std::int64_t c = 0; c < d; ++c)
    for (std::int64_t tap = 0; tap <= taps; ++tap) {
      double total = 0;
      for (std::int64_t block = 0; block < rows; block += 128) {
        float sum = 0;
        for (std::int64_t row = block; row < std::min(rows, block + 128); ++row) {
          const std::int64_t from = row % tokens - (taps - 1) + tap;
          const float in = tap == taps ? 1.0f
                           : from < 0  ? 0.0f
                                       : x.get(static_cast<std::size_t>((row - (taps - 1) + tap) * d + c));
          sum = std::fma(g.get(static_cast<std::size_t>(row * d + c)), in, sum);
        }
        total += double{sum};
      }
      const Owned& got = tap == taps ? d_bias : d_weight;
      CHECK(got.get(static_cast<std::size_t>(tap == taps ? c : c * taps + tap)) == static_cast<float>(total));
    }
}

TEST_CASE("NaN and Inf reach the tokens within the filter, and nothing else") {
  for (DType t : kTypes)
    for (float bad : {NAN, INFINITY}) {
      std::mt19937 random(9);
      const std::int64_t tokens = 20, d = 33, taps = 4, at = 7;
      Owned x({1, tokens, d}, t, random), weight({d, taps}, t, random), y({1, tokens, d}, t), spoiled = y;
      REQUIRE(rlk::short_conv({.x = x.all(), .weight = weight.all(), .y = y.all()}, kNative));
      x.set(static_cast<std::size_t>(at * d + 5), bad);
      REQUIRE(rlk::short_conv({.x = x.all(), .weight = weight.all(), .y = spoiled.all()}, kNative));
      for (std::int64_t row = 0; row < tokens; ++row)
        for (std::int64_t c = 0; c < d; ++c) {
          const auto i = static_cast<std::size_t>(row * d + c);
          if (c == 5 && row >= at && row < at + taps)
            CHECK(!(std::fabs(spoiled.get(i)) < 1e30f && spoiled.get(i) != 0));
          else
            CHECK(spoiled.get(i) == y.get(i));
        }
    }
}

TEST_CASE("wrong calls of short_conv are refused with the argument and both values") {
  std::mt19937 random(1);
  const DType t = DType::f32;
  Owned x({1, 6, 8}, t, random), weight({8, 4}, t, random), wide({8, 5}, t, random), other({7, 4}, t, random),
      state({1, 2, 8}, t, random), y({1, 6, 8}, t);
  const auto says = [](const rlk::Status& s, const char* text) {
    CAPTURE(s.message());
    CHECK(s.code() == RLK_INVALID_ARGUMENT);
    CHECK(std::string(s.message()).find(text) != std::string::npos);
  };
  says(rlk::short_conv({.x = x.all(), .weight = wide.all(), .y = y.all()}),
       "weight has W=5 taps, it must have from 2 to 4");
  says(rlk::short_conv({.x = x.all(), .weight = other.all(), .y = y.all()}), "weight has D=7, x has D=8");
  says(rlk::short_conv({.x = x.all(), .weight = weight.all(), .initial_state = state.all(), .y = y.all()}),
       "initial_state has size 2 in dimension 1, expected 3");
  for (const auto& [bounds, text] :
       {std::pair{std::vector<std::int64_t>{1, 6}, "cu_seqlens[0] is 1, expected 0"},
        {{0, 4, 3, 6}, "cu_seqlens[2] is 3, expected at least 4"},
        {{0, 5}, "cu_seqlens[1] is 5, expected T=6"}}) {
    const Tensor cu(const_cast<std::int64_t*>(bounds.data()), {static_cast<std::int64_t>(bounds.size())},
                    DType::i64);
    says(rlk::short_conv({.x = x.all(), .weight = weight.all(), .cu_seqlens = cu, .y = y.all()}), text);
    says(rlk::short_conv_bwd(
             {.x = x.all(), .weight = weight.all(), .cu_seqlens = cu, .d_y = x.all(), .d_x = y.all()}),
         text);
  }
  Owned d_bias({8}, t);
  says(rlk::short_conv_bwd({.x = x.all(), .weight = weight.all(), .d_y = x.all(), .d_bias = d_bias.all()}),
       "d_bias is asked for, bias is absent");
}
