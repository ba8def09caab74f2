// labels: gpu
// links: kernels
// Every cut that linear's cuda.sm90 may choose gives the same bits: those of its rule, leaf by leaf through lm_head's
// mma.sync kernel, joined here.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/linear/tree.h"
#include "memory.hpp"
#include "registry/exp32.hpp"
#include "registry/linear/geometry.hpp"

namespace {

using rlk::Float;
using rlk::cuda::linear::Cut;
using rlk::cuda::linear::Product;
using std::int64_t;
using namespace cuda_test;

float upcast(std::uint16_t x, Float type) {
  return type == Float::f16 ? rlk::f16_to_float(x) : rlk::bf16_to_float(x);
}
// What a number becomes as an element of `type`.
float rounded(float x, Float type) {
  if (std::isnan(x)) return std::bit_cast<float>(0x7fffffffu);
  if (type == Float::f32) return x;
  return upcast(type == Float::f16 ? rlk::float_to_f16(x) : rlk::float_to_bf16(x), type);
}

enum class Form { forward, d_x, d_weight };
constexpr const char* kForms[] = {"forward", "d_x", "d_weight"};
struct Size {
  int64_t m, n, k;
  int leaves;
};

// Operands with padded lines, all starting on 16 bytes, what is added, and the sums of every leaf.
class Case {
 public:
  Case(const Size& s, Form form, Float type, Float out)
      : s_(s),
        type_(type),
        a_(lines(form == Form::d_weight ? s.k : s.m, form == Form::d_weight ? s.m : s.k), type, 1),
        b_(lines(form == Form::forward ? s.n : s.k, form == Form::forward ? s.k : s.n), type, 2),
        bias_(static_cast<std::size_t>(s.n), type, 3),
        residual_(lines(s.m, s.n), type, 4),
        c_(lines(s.m, s.n) * bytes_of(out)) {
    product.a = {a_.data(), line(form == Form::d_weight ? s.m : s.k), form != Form::d_weight, type};
    product.b = {b_.data(), line(form == Form::forward ? s.k : s.n), form == Form::forward, type};
    product.c = c_.data(), product.ldc = line(s.n), product.out = out;
    product.m = s.m, product.n = s.n, product.k = s.k;
    product.width =
        s.leaves == 8 ? rlk::leaves::width(s.k) : (s.k + s.leaves * 16 - 1) / (s.leaves * 16) * 16;
    if (form == Form::d_weight) {  // whole steps of 64, none empty
      product.width = (product.width + 63) / 64 * 64;
      s_.leaves = static_cast<int>((s.k + product.width - 1) / product.width);
    }
    product.leaves = s_.leaves;
    if (s.m % 2 == 0) {
      product.bias = bias_.data(), product.bias_type = type;
      product.residual = residual_.data(), product.residual_type = type, product.residual_ld = line(s.n);
    }
    for (int i = 0; i < s_.leaves; ++i) leaves_.push_back(leaf(i));
  }
  // swiglu of what were the product's columns.
  void gate(bool interleaved, bool twice) {
    product.n = s_.n / 2;
    const rlk::gate_up::Layout rows(interleaved, product.n);
    product.run = rows.run, product.step = rows.step, product.up = rows.up, product.twice = twice;
    product.residual = nullptr;
  }
  Product product;

  std::vector<std::uint8_t> after(const Cut& cut, int multiprocessors) const {
    c_.clear();
    check(launch_tree(product, cut, multiprocessors, nullptr));
    check(cudaDeviceSynchronize());
    return c_.host();
  }
  // The memory of c as the rule leaves it; between lines nothing is written.
  std::vector<std::uint8_t> ruled() const {
    const std::vector<std::uint8_t> bias = bias_.host(), residual = residual_.host();
    const auto number = [&](const std::vector<std::uint8_t>& from, int64_t at) {
      std::uint16_t x;
      std::memcpy(&x, from.data() + at * 2, 2);
      return upcast(x, type_);
    };
    const auto wide = static_cast<int64_t>(bytes_of(product.out));
    std::vector<std::uint8_t> all(lines(s_.m, s_.n) * static_cast<std::size_t>(wide), 0xff);
    for (int64_t i = 0; i < s_.m; ++i)
      for (int64_t j = 0; j < product.n; ++j) {
        float x = product.up > 0 ? gated(number, bias, i, j) : column(number, bias, i * s_.n + j, j);
        if (product.residual) x = rounded(x + number(residual, i * line(s_.n) + j), product.out);
        const std::uint16_t half = product.out == Float::f16 ? rlk::float_to_f16(x) : rlk::float_to_bf16(x);
        std::uint8_t* const to = all.data() + (i * line(s_.n) + j) * wide;
        if (wide == 4)
          std::memcpy(to, &x, 4);
        else
          std::memcpy(to, &half, 2);
      }
    return all;
  }

 private:
  static int64_t line(int64_t columns) { return (columns + 7) / 8 * 8 + 8; }
  static std::size_t lines(int64_t rows, int64_t columns) {
    return static_cast<std::size_t>(rows * line(columns));
  }
  float tree(int first, int count, std::size_t at) const {
    if (count == 1) return leaves_[static_cast<std::size_t>(first)][at];
    return tree(first, count / 2, at) + tree(first + count / 2, count / 2, at);
  }
  template <class Number>
  float column(const Number& number, const std::vector<std::uint8_t>& bias, int64_t element,
               int64_t j) const {
    const auto at = static_cast<std::size_t>(element);
    const float x = rounded(product.a.k_contiguous ? tree(0, s_.leaves, at) : in_order(at), product.out);
    return product.bias ? rounded(x + number(bias, j), product.out) : x;
  }
  template <class Number>
  float gated(const Number& number, const std::vector<std::uint8_t>& bias, int64_t i, int64_t j) const {
    const int64_t gate = j / product.run * product.step + j % product.run;
    const float g = column(number, bias, i * s_.n + gate, gate),
                u = column(number, bias, i * s_.n + gate + product.up, gate + product.up);
    float value = g == -INFINITY ? -0.0f : g / (1.0f + rlk::registry::exp32(-g));
    if (product.twice) value = rounded(value, product.out);
    return rounded(value * u, product.out);
  }
  float in_order(std::size_t at) const {
    float total = leaves_[0][at];
    for (std::size_t i = 1; i < leaves_.size(); ++i) total += leaves_[i][at];
    return total;
  }
  std::vector<float> leaf(int i) const {
    std::vector<float> sums(static_cast<std::size_t>(s_.m * s_.n));
    const int64_t from = std::min(s_.k, i * product.width), to = std::min(s_.k, (i + 1) * product.width);
    if (from == to) return sums;
    const Memory out(sums.size() * 4);
    rlk::cuda::lm_head::Gemm g;
    g.m = s_.m, g.n = s_.n, g.k = to - from, g.out = Float::f32, g.c = out.data(), g.ldc = s_.n;
    const auto part = [&](const rlk::cuda::lm_head::Operand& whole) {
      auto o = whole;
      o.data = static_cast<const char*>(whole.data) + (whole.k_contiguous ? from : from * whole.ld) * 2;
      return o;
    };
    g.a = part(product.a), g.b = part(product.b);
    check(launch_mma(g, nullptr));
    check(cudaMemcpy(sums.data(), out.data(), sums.size() * 4, cudaMemcpyDeviceToHost));
    return sums;
  }

  Size s_;
  Float type_;
  Memory a_, b_, bias_, residual_, c_;
  std::vector<std::vector<float>> leaves_;
};

// One row and a few; every tile's height and one more; leaves that end within a stage or a group, and empty ones; more
// tiles than blocks; parts of a sum; leaves of one whole stage and of several.
constexpr Size kSizes[] = {{1, 64, 64, 8},     {7, 200, 1000, 8},   {16, 264, 520, 8},   {64, 1096, 72, 8},
                           {65, 136, 1032, 8}, {100, 264, 2304, 8}, {129, 520, 768, 8},  {300, 391, 2880, 8},
                           {5, 136, 512, 4},   {33, 136, 520, 2},   {130, 136, 64, 1},   {70, 72, 24, 8},
                           {129, 264, 512, 8}, {300, 392, 1024, 8}, {40, 136, 2560, 8},  {150, 136, 768, 4},
                           {33, 136, 384, 2},  {700, 264, 768, 2},  {1025, 264, 768, 2}, {67, 391, 520, 8}};

}  // namespace

TEST_CASE("every cut of linear's tree kernel has the bits of its rule, also with several tiles a block") {
  if (!hopper() || !rlk::cuda::linear::tree_available()) return;
  for (const Size& s : kSizes)
    for (const Form form : {Form::forward, Form::d_x, Form::d_weight})
      for (const Float type : {Float::bf16, Float::f16})
        for (const Float out : {type, Float::f32}) {
          const Case c(s, form, type, out);
          const auto want = c.ruled();
          for (const Cut& cut : rlk::cuda::linear::kCuts)
            for (const int multiprocessors : {132, 10}) {
              if (cut.split > s.leaves || (form == Form::d_weight && cut.split > 1)) continue;
              if (cut.columns == 96 && form != Form::forward) continue;
              INFO(kForms[static_cast<int>(form)], " m=", s.m, " n=", s.n, " k=", s.k, " leaves ", s.leaves,
                   " dtype ", static_cast<int>(type), " to ", static_cast<int>(out), " cut ", cut.rows, "x",
                   cut.columns, " split ", cut.split, " pair ", cut.pair, " on ", multiprocessors);
              CHECK(c.after(cut, multiprocessors) == want);
            }
        }
}

TEST_CASE("every cut of linear's tree kernel has the bits of swiglu of its rule, stacked and interleaved") {
  if (!hopper() || !rlk::cuda::linear::tree_available()) return;
  constexpr Size kGated[] = {{1, 64, 64, 8},     {7, 200, 1000, 8},  {16, 256, 520, 8},
                             {65, 384, 1032, 8}, {100, 264, 304, 8}, {300, 1408, 768, 8},
                             {130, 136, 24, 8},  {65, 384, 512, 8},  {300, 1408, 1536, 8}};
  for (const Size& s : kGated)
    for (const bool interleaved : {false, true})
      for (const Float type : {Float::bf16, Float::f16})
        for (const Float out : {type, Float::f32}) {
          if (interleaved && s.n % 128 != 0) continue;
          Case c(s, Form::forward, type, out);
          c.gate(interleaved, s.m % 3 == 1);
          const auto want = c.ruled();
          for (const Cut& cut : rlk::cuda::linear::kCuts)
            for (const int multiprocessors : {132, 10}) {
              if (cut.columns < 128) continue;
              INFO("m=", s.m, " n=", s.n, " k=", s.k, " interleaved ", interleaved, " dtype ",
                   static_cast<int>(type), " to ", static_cast<int>(out), " cut ", cut.rows, "x", cut.columns,
                   " split ", cut.split, " pair ", cut.pair, " on ", multiprocessors);
              CHECK(c.after(cut, multiprocessors) == want);
            }
        }
}

TEST_CASE("every cut of linear's kernel for few rows has the bits of its rule, of swiglu too") {
  if (!hopper() || !rlk::cuda::linear::tree_available()) return;
  // Leaves of less than a group, of a few, of several stages, and empty ones; parts of a sum; more tiles than blocks.
  constexpr Size kFew[] = {{1, 64, 64, 8},   {2, 130, 24, 8},    {7, 200, 1000, 8},  {16, 264, 520, 8},
                           {8, 1096, 72, 8}, {3, 384, 1024, 8},  {16, 391, 2880, 8}, {5, 136, 512, 4},
                           {4, 137, 520, 2}, {13, 136, 64, 1},   {6, 264, 768, 2},   {12, 2000, 384, 1},
                           {1, 72, 9000, 8}, {32, 264, 2304, 8}, {23, 384, 1032, 8}, {17, 136, 768, 4}};
  for (const Size& s : kFew)
    for (const int gated : {0, 1, 2})
      for (const Float type : {Float::bf16, Float::f16})
        for (const Float out : {type, Float::f32}) {
          if (gated > 0 && (s.leaves < 8 || s.n % (gated == 2 ? 128 : 2) != 0)) continue;
          Case c(s, Form::forward, type, out);
          if (gated > 0) c.gate(gated == 2, s.m % 3 == 1);
          const auto want = c.ruled();
          for (const Cut& cut : rlk::cuda::linear::kFewCuts)
            for (const int multiprocessors : {132, 10}) {
              if (s.m > cut.rows) continue;
              INFO("m=", s.m, " n=", s.n, " k=", s.k, " leaves ", s.leaves, " swiglu ", gated, " dtype ",
                   static_cast<int>(type), " to ", static_cast<int>(out), " cut ", cut.rows, "x", cut.columns,
                   " on ", multiprocessors);
              CHECK(c.after(cut, multiprocessors) == want);
            }
        }
}

TEST_CASE("d_x of segments has the bits of d_x of their leaves laid one after the other") {
  if (!hopper() || !rlk::cuda::linear::tree_available()) return;
  constexpr int64_t sizes[] = {1024, 512, 512}, n = 2048, columns = 136;
  for (const int64_t leaf_count : {8, 2})
    for (const int64_t m : {5, 130}) {
      const int64_t held = n * leaf_count / 8;
      const Memory a(static_cast<std::size_t>(m * held), Float::bf16, 1),
          b(static_cast<std::size_t>(held * columns), Float::bf16, 2);
      const Memory in_order(static_cast<std::size_t>(m * held * 2)),
          rows(static_cast<std::size_t>(held * columns * 2)), c(static_cast<std::size_t>(m * columns * 4));
      Product p;
      p.a = {a.data(), held, true, Float::bf16}, p.b = {b.data(), columns, false, Float::bf16};
      p.c = c.data(), p.ldc = columns, p.out = Float::f32;
      p.m = m, p.n = columns, p.k = held, p.leaves = static_cast<int>(leaf_count), p.width = n / 8;
      p.segments = rlk::leaves::segments_of(sizes, 3, 0, leaf_count);
      Product plain = p;
      plain.segments = {}, plain.a.data = in_order.data(), plain.b.data = rows.data();
      int64_t to = 0;
      for (int64_t leaf = 0; leaf < leaf_count; ++leaf)
        for (int i = 0; i < 3; ++i) {
          const auto width = static_cast<std::size_t>(p.segments.width[i]);
          const int64_t from = p.segments.start[i] + leaf * p.segments.width[i];
          check(cudaMemcpy2D(static_cast<char*>(in_order.data()) + to * 2, held * 2,
                             static_cast<const char*>(a.data()) + from * 2, held * 2, width * 2,
                             static_cast<std::size_t>(m), cudaMemcpyDeviceToDevice));
          check(cudaMemcpy(static_cast<char*>(rows.data()) + to * columns * 2,
                           static_cast<const char*>(b.data()) + from * columns * 2, width * columns * 2,
                           cudaMemcpyDeviceToDevice));
          to += p.segments.width[i];
        }
      const auto after = [&](const Product& product, const Cut& cut) {
        c.clear();
        check(launch_tree(product, cut, 132, nullptr));
        check(cudaDeviceSynchronize());
        return c.host();
      };
      for (const Cut& cut : rlk::cuda::linear::kCuts) {
        if (cut.split > leaf_count || cut.columns == 96) continue;
        INFO("m=", m, " leaves ", leaf_count, " cut ", cut.rows, "x", cut.columns, " split ", cut.split,
             " pair ", cut.pair);
        CHECK(after(p, cut) == after(plain, cut));
      }
      Product other = p;  // another order of the same sums
      other.segments = {};
      CHECK(after(p, rlk::cuda::linear::kCuts[0]) != after(other, rlk::cuda::linear::kCuts[0]));
    }
}
