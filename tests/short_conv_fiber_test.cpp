// labels: conformance fibers
// quick: yes
// The portable GPU kernels of short_conv, on fibers: the bits of the native backend, at both wave sizes and in any thread order.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "arithmetic/short_conv/bind.hpp"
#include "fiber_rows.hpp"
#include "simt/short_conv/kernels.hpp"

namespace {

using namespace fiberrows;

const rlk::Options kNative{.backend = "native.tiles"};
using rlk::simt::short_conv::split::kWalks;

struct Size {
  int64_t batch, tokens, channels, taps;
  std::vector<int64_t> bounds{};
  int64_t sequences() const { return bounds.empty() ? batch : static_cast<int64_t>(bounds.size()) - 1; }
};
const Size kSizes[] = {{2, 37, 70, 4},
                       {3, 1, 24, 3},
                       {1, 130, 20, 2, {0, 0, 1, 3, 66, 66, 130}},
                       {1, 33, 8, 4, {0, 2, 4, 7, 33}},
                       {2, 0, 16, 4},
                       {1, 300, 48, 4, {0, 1, 7, 140, 140, 300}},
                       {3, 43, 32, 2},
                       {2, 47, 24, 3},
                       {2, 2, 1100, 3}};

// Rows between rows, so that packs lie on 16 bytes or not.
rlk::Tensor strided(Owned& wide, const Size& z, int64_t channels, DType t) {
  const int64_t shape[] = {z.batch, z.tokens, z.channels}, strides[] = {z.tokens * channels, channels, 1};
  return rlk::Tensor(wide.bytes.data(), shape, t, {kDLCPU, 0}, strides);
}

// A workspace starts as NaN. `walks`: from how many walks of 128 rows on they are threads enough.
void backward(const rlk::ShortConvBwd& a, int64_t walks) {
  const rlk::conv32::Problem p = rlk::conv32::problem_of(a);
  std::vector<float> workspace(
      static_cast<std::size_t>(rlk::simt::short_conv::backward_bytes(p)) / sizeof(float) + 1, NAN);
  rlk::simt::short_conv::launch_backward(p, workspace.data(), nullptr, walks);
}

// What is asked of the backward. wide: states and what is the weights' is fp32, wide_x: so is d_x. loud: numbers that d_silu's short
// form does not take.
struct Asked {
  bool states, d_x, d_weight, d_bias, d_initial = false, wide = false, wide_x = false, loud = false;
};
// Native's bits, whichever number of walks is enough; whether sums over few rows have kernels of their own here.
bool same_gradients(const Size& z, DType t, const Asked& asked, std::initializer_list<int64_t> walks,
                    std::mt19937& random) {
  CAPTURE(rlk::name_of(t));
  CAPTURE(z.tokens);
  CAPTURE(z.channels);
  const DType wide = asked.wide ? DType::f32 : t;
  const Shape state{z.sequences(), z.taps - 1, z.channels}, all{z.batch, z.tokens, z.channels};
  Owned x(all, t, random, asked.loud ? 60 : 1);
  if (asked.loud) std::memset(x.bytes.data(), 0xff, 2);  // a NaN
  const Owned d_y(all, t, random), weight({z.channels, z.taps}, t, random), bias({z.channels}, wide, random),
      start(state, t, random), d_end(state, wide, random);
  Owned d_x(all, asked.wide_x ? DType::f32 : t), d_weight({z.channels, z.taps}, wide),
      d_bias({z.channels}, wide), d_start(state, wide);
  const rlk::Tensor cu(const_cast<int64_t*>(z.bounds.data()), {z.sequences() + 1}, DType::i64);
  rlk::ShortConvBwd a{.x = x.tensor, .weight = weight.tensor, .d_y = d_y.tensor};
  std::vector<Owned*> results;
  if (asked.d_x) a.d_x = d_x.tensor, results.push_back(&d_x);
  if (asked.d_weight) a.d_weight = d_weight.tensor, results.push_back(&d_weight);
  if (asked.states) a.bias = bias.tensor, a.initial_state = start.tensor, a.d_final_state = d_end.tensor;
  if (asked.d_bias) a.d_bias = d_bias.tensor, results.push_back(&d_bias);
  if (asked.d_initial) a.d_initial_state = d_start.tensor, results.push_back(&d_start);
  if (!z.bounds.empty()) a.cu_seqlens = cu;
  REQUIRE(rlk::short_conv_bwd(a, kNative));
  const auto expected = copies(results);
  for (const int64_t enough : walks) {
    CAPTURE(enough);
    same_on_fibers(results, expected, [&] { backward(a, enough); });
  }
  return rlk::simt::short_conv::split::suits(rlk::conv32::problem_of(a), kWalks);
}

}  // namespace

TEST_CASE("short_conv on fibers is native's bits, packed, with states, and in place") {
  std::mt19937 random(11);
  for (DType t : kTypes)
    for (const Size& z : kSizes)
      for (int form = 0; form < 4; ++form) {
        CAPTURE(rlk::name_of(t));
        CAPTURE(z.tokens);
        CAPTURE(form);
        const DType wide = form == 1 ? DType::f32 : t;
        const Shape state{z.sequences(), z.taps - 1, z.channels};
        const int64_t row = form == 2 ? z.channels + 3 : z.channels;
        Owned x({z.batch, z.tokens, row}, t, random);
        const Owned weight({z.channels, z.taps}, wide, random), bias({z.channels}, wide, random),
            start(state, t, random);
        Owned y({z.batch, z.tokens, row}, t), end(state, t);
        const rlk::Tensor x_of = strided(x, z, row, t), y_of = strided(y, z, row, t);
        const rlk::Tensor cu(const_cast<int64_t*>(z.bounds.data()), {z.sequences() + 1}, DType::i64);
        rlk::ShortConv a{.x = x_of, .weight = weight.tensor, .y = y_of, .final_state = end.tensor};
        if (form != 0) a.bias = bias.tensor;
        if (form != 1) a.initial_state = start.tensor;
        if (!z.bounds.empty()) a.cu_seqlens = cu;
        REQUIRE(rlk::short_conv(a, kNative));
        const auto expected = copies({&y, &end});
        same_on_fibers({&y, &end}, expected,
                       [&] { rlk::simt::short_conv::launch_forward(rlk::conv32::problem_of(a), nullptr); });
        if (form == 1) continue;
        a.initial_state = end.tensor;
        same_on_fibers({&y, &end}, expected, [&] {
          end.bytes = start.bytes;
          rlk::simt::short_conv::launch_forward(rlk::conv32::problem_of(a), nullptr);
        });
      }
}

TEST_CASE("short_conv_bwd on fibers is native's bits, whatever is asked for") {
  std::mt19937 random(12);
  constexpr Asked kAsked[] = {
      {.states = false, .d_x = true, .d_weight = true, .d_bias = false},
      {.states = true,
       .d_x = true,
       .d_weight = true,
       .d_bias = true,
       .d_initial = true,
       .wide = true,
       .wide_x = true},
      {.states = true, .d_x = true, .d_weight = false, .d_bias = false, .d_initial = true},
      {.states = true, .d_x = false, .d_weight = true, .d_bias = true}};
  for (DType t : kTypes)
    for (const Size& z : kSizes)
      for (const Asked& asked : kAsked) same_gradients(z, t, asked, {0, kWalks}, random);
}

// Blocks of rows and of channels that are whole and that are not, sequences that begin at a block's first row, among a thread's and
// in its last ones.
TEST_CASE("sums over few rows on fibers are native's bits, of one block of rows, of two and of more") {
  std::mt19937 random(14);
  constexpr Asked kAsked[] = {{.states = false, .d_x = true, .d_weight = true, .d_bias = false},
                              {.states = true, .d_x = true, .d_weight = true, .d_bias = true, .wide = true},
                              {.states = true, .d_x = false, .d_weight = true, .d_bias = false},
                              {.states = true, .d_x = true, .d_weight = false, .d_bias = true},
                              {.states = true, .d_x = true, .d_weight = true, .d_bias = false, .loud = true}};
  const Size sizes[] = {{1, 1, 8, 4},
                        {1, 17, 72, 3},
                        {1, 64, 32, 4},
                        {1, 127, 40, 4},
                        {1, 128, 40, 2},
                        {1, 129, 72, 4},
                        {1, 131, 8, 4},
                        {2, 128, 32, 3},
                        {3, 127, 32, 4},
                        {1, 400, 40, 4, {0, 5, 5, 6, 9, 125, 128, 130, 256, 257, 398, 400}},
                        {1, 256, 8, 3, {0, 127, 128, 255, 256}},
                        {1, 1000, 8, 4}};
  for (const Size& z : sizes)
    for (const Asked& asked : kAsked) CHECK(same_gradients(z, DType::bf16, asked, {kWalks}, random));
}

TEST_CASE("short_conv on fibers has the same bits in runs of any length") {
  std::mt19937 random(13);
  for (const Size& z : kSizes)
    for (int run : {1, 3, 6, 32, 128}) {
      CAPTURE(z.tokens);
      CAPTURE(run);
      const Shape state{z.sequences(), z.taps - 1, z.channels}, all{z.batch, z.tokens, z.channels};
      const Owned x(all, DType::bf16, random), d_y(all, DType::bf16, random),
          weight({z.channels, z.taps}, DType::bf16, random), start(state, DType::bf16, random),
          d_end(state, DType::f32, random);
      Owned y(all, DType::bf16), d_x(all, DType::bf16);
      const rlk::Tensor cu(const_cast<int64_t*>(z.bounds.data()), {z.sequences() + 1}, DType::i64);
      rlk::ShortConv a{.x = x.tensor, .weight = weight.tensor, .initial_state = start.tensor, .y = y.tensor};
      rlk::ShortConvBwd b{.x = x.tensor,
                          .weight = weight.tensor,
                          .initial_state = start.tensor,
                          .d_y = d_y.tensor,
                          .d_final_state = d_end.tensor,
                          .d_x = d_x.tensor};
      if (!z.bounds.empty()) a.cu_seqlens = cu, b.cu_seqlens = cu;
      const rlk::conv32::Problem p = rlk::conv32::problem_of(a), q = rlk::conv32::problem_of(b);
      if (z.tokens == 0 || !rlk::simt::short_conv::whole::serves(p)) continue;
      REQUIRE(rlk::short_conv(a, kNative));
      REQUIRE(rlk::short_conv_bwd(b, kNative));
      same_on_fibers({&y, &d_x}, copies({&y, &d_x}), [&] {
        rlk::simt::short_conv::whole::launch_forward(p, run, nullptr);
        rlk::simt::short_conv::whole::launch_backward(q, run, nullptr, nullptr);
      });
    }
}
