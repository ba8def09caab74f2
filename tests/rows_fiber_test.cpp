// labels: conformance fibers
// The portable GPU kernels of ops on rows, on fibers: the bits of the native backend, at both wave sizes and in any thread
// order.
#include <doctest/doctest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "arithmetic/rms_norm/bind.hpp"
#include "arithmetic/swiglu/bind.hpp"
#include "fiber_rows.hpp"
#include "simt/rms_norm/kernels.hpp"
#include "simt/swiglu/kernels.hpp"

namespace {

using namespace fiberrows;

const rlk::Options kRows{.backend = "native.rows"};

// A workspace starts as NaN. `wide_blocks`: from how many blocks of rows on they are read once.
void backward(const rlk::RmsNormBwd& a, int64_t wide_blocks = rlk::simt::rms_norm::kWideBlocks) {
  const rlk::rms32::Problem p = rlk::rms32::problem_of(a);
  std::vector<float> workspace(
      static_cast<std::size_t>(rlk::simt::rms_norm::backward_bytes(p)) / sizeof(float) + 1, NAN);
  rlk::simt::rms_norm::launch_backward(p, workspace.data(), nullptr, wide_blocks);
}

}  // namespace

TEST_CASE("rms_norm on fibers is native's bits, with every option") {
  std::mt19937 random(7);
  for (DType t : kTypes)
    for (const Shape& shape :
         {Shape{5, 70}, Shape{67, 40}, Shape{35, 128}, Shape{17, 136}, Shape{9, 504}, Shape{3, 520},
          Shape{2, 3, 1100}, Shape{3, 1104}, Shape{2, 5003}, Shape{2, 5008}})
      for (int form = 0; form < 6; ++form) {
        CAPTURE(rlk::name_of(t));
        CAPTURE(form);
        const Shape width{shape.back()};
        Shape one = shape;
        one.back() = 1;
        const DType wide = form == 2 ? DType::f32 : t;
        const Owned x(shape, t, random), weight(width, wide, random), residual(shape, wide, random, 3),
            gate(shape, t, random, 30);
        Owned y(shape, t), sum(shape, wide), rstd(one, DType::f32);
        rlk::RmsNorm a{.x = x.tensor, .y = y.tensor, .rstd = rstd.tensor};
        std::vector<Owned*> results{&y, &rstd};
        if (form != 3) a.weight = weight.tensor;
        if (form >= 1 && form <= 3) a.residual = residual.tensor, a.sum = sum.tensor, results.push_back(&sum);
        if (form == 5) a.residual = residual.tensor;
        if (form == 0) a.weight_offset = true, a.gate = gate.tensor;
        if (form == 1) a.cast = rlk::RmsNorm::Cast::early;
        if (form == 3 || form == 4) a.gate = gate.tensor, a.gate_act = rlk::RmsNorm::GateAct::sigmoid;
        REQUIRE(rlk::rms_norm(a, kRows));
        same_on_fibers(results, copies(results),
                       [&] { rlk::simt::rms_norm::launch_forward(rlk::rms32::problem_of(a), nullptr); });
      }
}

TEST_CASE("rms_norm_bwd on fibers is native's bits, with every option") {
  std::mt19937 random(8);
  for (DType t : kTypes)
    for (const Shape& shape :
         {Shape{131, 40}, Shape{2, 3, 1100}, Shape{5, 264}, Shape{3, 4104}, Shape{2, 5003}, Shape{0, 40}})
      for (int form = 0; form < 8; ++form) {
        CAPTURE(rlk::name_of(t));
        CAPTURE(form);
        const Shape width{shape.back()};
        const DType wide = form == 2 || form == 5 ? DType::f32 : t;
        const Owned residual(shape, wide, random), sum(shape, wide, random);
        const Owned d_y(shape, t, random), x(shape, form == 5 ? t : wide, random, 3),
            weight(width, t, random), gate(shape, t, random, 30), d_sum(shape, t, random);
        Owned d_x(shape, t), d_weight(width, wide), d_gate(shape, t), d_residual(shape, wide);
        rlk::RmsNormBwd a{.d_y = d_y.tensor, .x = x.tensor, .d_x = d_x.tensor};
        std::vector<Owned*> results{&d_x};
        if (form != 3) {
          a.weight = weight.tensor, a.d_weight = d_weight.tensor;
          results.push_back(&d_weight);
        }
        if (form != 1) {
          a.gate = gate.tensor, a.d_gate = d_gate.tensor;
          results.push_back(&d_gate);
        }
        if (form >= 1) a.d_sum = d_sum.tensor;
        if (form >= 4 && form <= 6) {
          a.residual = residual.tensor, a.d_residual = d_residual.tensor;
          results.push_back(&d_residual);
        }
        if (form == 6) a.sum = sum.tensor;
        if (form == 2) a.weight_offset = true;
        if (form == 2 || form == 7) a.gate_act = rlk::RmsNormBwd::GateAct::sigmoid;
        REQUIRE(rlk::rms_norm_bwd(a, kRows));
        same_on_fibers(results, copies(results), [&] { backward(a); });
      }
}

// Rows of whole packs, which have kernels of their own, in one pass or two; and more blocks of rows than are added at a time.
TEST_CASE("d_weight and d_x on fibers are native's bits, of many rows and of rows of whole packs") {
  std::mt19937 random(10);
  for (const Shape& shape :
       {Shape{33000, 8}, Shape{300, 128}, Shape{131, 2, 72}, Shape{5, 264}, Shape{130, 136}, Shape{19, 256},
        Shape{18, 512}, Shape{17, 1024}, Shape{2, 65, 1032}, Shape{6, 2048}, Shape{4, 4096}, Shape{6, 4096},
        Shape{5, 4104}})
    for (int form = 0; form < 6; ++form) {
      CAPTURE(shape[0]);
      CAPTURE(shape.back());
      CAPTURE(form);
      const bool given = form % 2 == 1;
      const Shape width{shape.back()};
      Shape one = shape;
      one.back() = 1;
      const DType t = DType::bf16;
      const Owned d_y(shape, t, random), x(shape, t, random, 3), weight(width, t, random),
          d_sum(shape, t, random);
      Owned rstd(one, DType::f32), y(shape, t), d_x(shape, t), d_weight(width, t);
      rlk::RmsNormBwd a{.d_y = d_y.tensor, .x = x.tensor, .weight = weight.tensor, .d_x = d_x.tensor};
      std::vector<Owned*> results{&d_x};
      if (form < 4) a.d_weight = d_weight.tensor, results.push_back(&d_weight);
      if (given) {
        REQUIRE(rlk::rms_norm({.x = x.tensor, .y = y.tensor, .rstd = rstd.tensor}, kRows));
        a.rstd = rstd.tensor, a.d_sum = d_sum.tensor, a.weight_offset = true;
      }
      REQUIRE(rlk::rms_norm_bwd(a, kRows));
      same_on_fibers(results, copies(results), [&] { backward(a, form / 2 == 1 ? 1 << 20 : 0); });
    }
}

// Up to 128 rows are one share, which its block rounds; of more, the last block of a slice of channels adds the shares.
TEST_CASE("d_weight on fibers is native's bits, of one share, of two and of many, with and without d_x") {
  std::mt19937 random(12);
  for (const int64_t rows : {1, 127, 128, 129, 256, 257, 1000})
    for (const int64_t width : {24, 128, 136, 264, 520, 70})
      for (int form = 0; form < 6; ++form) {
        if (rows > 257 && (width > 136 || form % 2 != 0)) continue;
        CAPTURE(rows);
        CAPTURE(width);
        CAPTURE(form);
        const DType t = DType::bf16;
        const Shape shape{rows, width};
        const Owned d_y(shape, t, random), x(shape, t, random, 3), weight({width}, t, random),
            other(shape, t, random);
        Owned rstd({rows, 1}, DType::f32), y(shape, t), d_x(shape, t),
            d_weight({width}, form == 1 ? DType::f32 : t);
        rlk::RmsNormBwd a{
            .d_y = d_y.tensor, .x = x.tensor, .weight = weight.tensor, .d_weight = d_weight.tensor};
        std::vector<Owned*> results{&d_weight};
        if (form % 2 == 0) a.d_x = d_x.tensor, results.push_back(&d_x);
        if (form == 2) a.residual = other.tensor;
        if (form == 3) a.gate = other.tensor;
        if (form == 0) a.d_sum = other.tensor;
        if (form == 0 || form == 5) {
          REQUIRE(rlk::rms_norm({.x = x.tensor, .y = y.tensor, .rstd = rstd.tensor}, kRows));
          a.rstd = rstd.tensor;
        }
        if (form == 4) a.weight_offset = true;
        REQUIRE(rlk::rms_norm_bwd(a, kRows));
        same_on_fibers(results, copies(results), [&] { backward(a, form == 1 ? 0 : 1 << 20); });
      }
}

// A chain's sum may be -0, where products are too small for fp32; the sum of shares begins with +0.
TEST_CASE("d_weight on fibers is +0 where its only share is -0") {
  for (const int64_t width : {128, 264, 270}) {
    const Shape row{1, width}, channels{width};
    Owned x(row, DType::bf16), d_y(row, DType::bf16), weight(channels, DType::bf16), d_x(row, DType::bf16),
        d_weight(channels, DType::bf16);
    const auto fill = [&](Owned& o, uint16_t bits) {
      for (int64_t i = 0; i < width; ++i) std::memcpy(o.bytes.data() + 2 * i, &bits, 2);
    };
    fill(x, 0x3f80), fill(weight, 0x3f80), fill(d_y, 0x8001);
    const uint16_t large = 0x4f80;  // so that the others' normalised values are small
    std::memcpy(x.bytes.data(), &large, 2);
    const rlk::RmsNormBwd a{.d_y = d_y.tensor,
                            .x = x.tensor,
                            .weight = weight.tensor,
                            .d_x = d_x.tensor,
                            .d_weight = d_weight.tensor};
    std::vector<Owned*> results{&d_x, &d_weight};
    REQUIRE(rlk::rms_norm_bwd(a, kRows));
    CHECK(d_weight.bytes[2] == std::byte{0});
    CHECK(d_weight.bytes[3] == std::byte{0});
    same_on_fibers(results, copies(results), [&] { backward(a, 1 << 20); });
  }
}

// Heads as a layer's product has them: of each token some, beside others; and of every second token of every sequence.
TEST_CASE("rms_norm of heads among others on fibers is native's bits, and so are its gradients") {
  std::mt19937 random(11);
  for (const auto& [sequences, tokens, width] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {1, 1, 72}, {1, 41, 72}, {3, 1, 128}, {3, 41, 72}, {3, 5, 136}, {1, 7, 392}}) {
    constexpr int64_t kAll = 5, kHeads = 3;
    const DType t = DType::bf16;
    const Shape whole{sequences, 2 * tokens, kAll, width}, heads{sequences, tokens, kHeads, width};
    const Shape strides{2 * tokens * kAll * width, (sequences > 1 ? 2 : 1) * kAll * width, width, 1};
    const auto view = [&](const Owned& o) {
      return rlk::Tensor(o.tensor.dl().data, heads, t, o.tensor.dl().device, strides);
    };
    const Owned x(whole, t, random, 3), d_y(whole, t, random), gate(whole, t, random, 30),
        weight({width}, t, random);
    Owned y(whole, t), sum(whole, t), d_x(whole, t), d_gate(whole, t), d_weight({width}, t),
        rstd({sequences, tokens, kHeads, 1}, DType::f32);
    const rlk::Tensor vx = view(x), vd_y = view(d_y), vgate = view(gate), vy = view(y), vsum = view(sum),
                      vd_x = view(d_x), vd_gate = view(d_gate);
    for (const int form : {0, 1, 2, 3}) {
      CAPTURE(sequences);
      CAPTURE(width);
      CAPTURE(form);
      for (Owned* o : {&y, &sum, &d_x, &d_gate}) std::fill(o->bytes.begin(), o->bytes.end(), std::byte{0x7f});
      rlk::RmsNorm a{.x = vx, .weight = weight.tensor, .y = vy, .rstd = rstd.tensor};
      if (form == 1) a.gate = vgate;
      if (form == 2) a.residual = vgate, a.sum = vsum;
      REQUIRE(rlk::rms_norm(a, kRows));
      std::vector<Owned*> results{&y, &rstd, &sum};
      same_on_fibers(results, copies(results),
                     [&] { rlk::simt::rms_norm::launch_forward(rlk::rms32::problem_of(a), nullptr); });
      if (form == 2) continue;
      rlk::RmsNormBwd g{.d_y = vd_y, .x = vx, .weight = weight.tensor, .d_x = vd_x};
      g.d_weight = d_weight.tensor;
      if (form == 1) g.gate = vgate, g.d_gate = vd_gate;
      if (form == 3) g.d_sum = vgate;
      REQUIRE(rlk::rms_norm_bwd(g, kRows));
      results = {&d_x, &d_weight, &d_gate};
      const int block_memory = rlk_fiber::block_memory;
      for (const int bytes : {block_memory, 64 << 10, 16 << 10}) {  // a share at a time, half a share, none
        rlk_fiber::block_memory = bytes;
        same_on_fibers(results, copies(results), [&] { backward(g); });
      }
      rlk_fiber::block_memory = block_memory;
    }
  }
}

TEST_CASE("swiglu and its gradients on fibers are native's bits, packed or not") {
  using rlk::Swiglu;
  using rlk::SwigluBwd;
  std::mt19937 random(9);
  for (DType t : kTypes)
    for (const Shape& shape : {Shape{5, 70}, Shape{2, 3, 1100}, Shape{3, 0}, Shape{6, 72}, Shape{1040, 1032}})
      for (int form = 0; form < 7; ++form) {
        if (shape[0] > 1000 && (form % 3 != 0 || t == DType::f16))
          continue;  // many tiles: two packs a thread
        CAPTURE(rlk::name_of(t));
        CAPTURE(form);
        const bool packed = form >= 3;
        Shape both = shape;
        if (packed) both.back() *= 2;
        const Owned gate(both, t, random, 30), up(shape, t, random, 5), d_out(shape, t, random);
        Owned out(shape, t), d_gate(both, t), d_up(shape, t);
        Swiglu a{.gate = gate.tensor, .out = out.tensor};
        SwigluBwd b{.d_out = d_out.tensor, .gate = gate.tensor, .d_gate = d_gate.tensor};
        std::vector<Owned*> gradients{&d_gate};
        if (!packed) a.up = b.up = up.tensor, b.d_up = d_up.tensor, gradients.push_back(&d_up);
        a.act = b.act = static_cast<Swiglu::Act>(form % 3);
        if (form % 2) a.roundings = b.roundings = Swiglu::Roundings::twice;
        REQUIRE(rlk::swiglu(a, {.backend = "native.tiles"}));
        REQUIRE(rlk::swiglu_bwd(b, {.backend = "native.tiles"}));
        same_on_fibers({&out}, copies({&out}),
                       [&] { rlk::simt::swiglu::launch_forward(rlk::act32::problem_of(a), nullptr); });
        same_on_fibers(gradients, copies(gradients),
                       [&] { rlk::simt::swiglu::launch_backward(rlk::act32::problem_of(b), nullptr); });
      }
}
