// labels: conformance fibers
// The portable attention kernels on fibers: the bits of the native backend, at both wave sizes and in any thread order, with
// splits one after another and side by side.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "arithmetic/attention/bind.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "simt/attention/backward.hpp"

namespace {

using rlk::Attention;
using rlk::DType;
using rlk::Tensor;

// Normal numbers, or where `out`, bytes that no result has.
struct Owned {
  std::vector<std::byte> bytes;
  Tensor tensor;

  Owned(const std::vector<int64_t>& shape, DType t, std::mt19937* random = nullptr) {
    std::size_t n = 1;
    for (int64_t d : shape) n *= static_cast<std::size_t>(d);
    bytes.assign(n * static_cast<std::size_t>(rlk::size_of(t)), std::byte{0x7f});
    std::normal_distribution<double> normal;
    for (std::size_t i = 0; random != nullptr && i < n; ++i) {
      const double x = normal(*random);
      const uint16_t half = t == DType::bf16 ? rlk::double_to_bf16(x) : rlk::double_to_f16(x);
      const auto single = static_cast<float>(x);
      if (t == DType::f32)
        std::memcpy(bytes.data() + 4 * i, &single, 4);
      else
        std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
    tensor = Tensor(bytes.data(), std::span(shape), t);
  }
};

// Native's bits of a call, then the kernels' at every wave size and order.
void same_on_fibers(const Attention& a, Owned& out, Owned& lse, bool spreads) {
  const std::string arithmetic = "fma32/attn128/s" + (a.split == 0 ? "none" : std::to_string(a.split));
  REQUIRE(rlk::attention(a, {.backend = "native", .arithmetic = arithmetic}));
  const auto expected = out.bytes, expected_lse = lse.bytes;
  const rlk::attn128::Problem p = rlk::attn128::problem_of(a);
  CHECK((rlk::simt::attention::spread(p) > 1) == spreads);
  for (int wave : {32, 64})
    for (auto order : {rlk_fiber::Order::ascending, rlk_fiber::Order::shuffled}) {
      out.bytes.assign(out.bytes.size(), std::byte{0x7f}),
          lse.bytes.assign(lse.bytes.size(), std::byte{0x7f});
      std::vector<std::byte> workspace(static_cast<std::size_t>(rlk::simt::attention::workspace_bytes_of(p)),
                                       std::byte{0x7f});
      rlk_fiber::wave_size = wave;
      rlk_fiber::order = order;
      rlk::simt::attention::launch_forward(p, workspace.data(), nullptr);
      CHECK(out.bytes == expected);
      CHECK(lse.bytes == expected_lse);
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

}  // namespace

TEST_CASE("attention of few queries on fibers is native's bits, splits side by side") {
  std::mt19937 random(1);
  for (DType t : kTypes) {
    const Owned q({2, 2, 4, 32}, t, &random), k({24, 100, 2, 32}, t, &random),
        v({24, 100, 2, 160}, t, &random), sinks({4}, DType::f32, &random);
    Owned out({2, 2, 4, 160}, t), lse({2, 2, 4}, DType::f32);
    std::vector<int32_t> lengths{1101, 3}, table;
    for (int32_t i = 0; i < 24; ++i) table.push_back((i * 7 + 5) % 24);
    const Tensor kv_len(lengths.data(), {2}, DType::i32), blocks(table.data(), {2, 12}, DType::i32);
    Attention a{.q = q.tensor, .k = k.tensor, .v = v.tensor, .kv_len = kv_len, .block_table = blocks};
    a.sinks = sinks.tensor, a.out = out.tensor, a.lse = lse.tensor;
    same_on_fibers(a, out, lse, true);
    a.split = 512, a.window = 700, a.softcap = 3;
    same_on_fibers(a, out, lse, true);
    a.split = 0;
    same_on_fibers(a, out, lse, false);
  }
}

TEST_CASE("attention of packed queries on fibers is native's bits, splits one after another") {
  std::mt19937 random(2);
  for (DType t : kTypes) {
    const Owned q({150, 16, 16}, t, &random), k({700, 8, 16}, t, &random), v({700, 8, 16}, t, &random);
    Owned out({150, 16, 16}, t), lse({150, 16}, DType::f32);
    std::vector<int64_t> cu_q{0, 10, 10, 150}, cu_k{0, 5, 30, 700};
    const Tensor bounds_q(cu_q.data(), {4}, DType::i64), bounds_k(cu_k.data(), {4}, DType::i64);
    Attention a{.q = q.tensor, .k = k.tensor, .v = v.tensor, .cu_q = bounds_q, .cu_k = bounds_k};
    a.out = out.tensor, a.lse = lse.tensor, a.split = 512;
    same_on_fibers(a, out, lse, false);
  }
}

namespace {

// Native's bits of a part or of a merge, by the kernels' arithmetic, then the kernels'.
template <class Args, class Launch>
void same_step(const Args& a, rlk::Status (*op)(const Args&, const rlk::Options&), const char* arithmetic,
               const std::vector<Owned*>& results, Launch launch) {
  REQUIRE(op(a, {.backend = "native", .arithmetic = arithmetic}));
  std::vector<std::vector<std::byte>> expected;
  for (const Owned* r : results) expected.push_back(r->bytes);
  for (int wave : {32, 64}) {
    for (Owned* r : results) r->bytes.assign(r->bytes.size(), std::byte{0x7f});
    rlk_fiber::wave_size = wave;
    rlk_fiber::order = wave == 32 ? rlk_fiber::Order::ascending : rlk_fiber::Order::shuffled;
    launch();
    for (std::size_t i = 0; i < results.size(); ++i) CHECK(results[i]->bytes == expected[i]);
  }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

TEST_CASE("attention_part and attention_merge on fibers are native's bits") {
  std::mt19937 random(6);
  for (DType t : kTypes)
    for (int64_t dv : {48, 160}) {
      const Owned q({7, 4, 32}, t, &random), k({24, 100, 2, 32}, t, &random), v({24, 100, 2, dv}, t, &random),
          sinks({4}, DType::f32, &random);
      std::vector<int32_t> lengths{1712, 3, 3}, firsts{512, 512, 512}, cu{0, 4, 6, 6}, table;
      for (int32_t i = 0; i < 36; ++i) table.push_back((i * 7 + 5) % 24);
      const Tensor bounds(cu.data(), {4}, DType::i32), kv_len(lengths.data(), {3}, DType::i32),
          k_first(firsts.data(), {3}, DType::i32), blocks(table.data(), {3, 12}, DType::i32);
      Owned partials({7, 4, 3, 2 + dv}, DType::f32);
      rlk::AttentionPart a{.q = q.tensor, .k = k.tensor, .v = v.tensor, .cu_q = bounds, .kv_len = kv_len};
      a.block_table = blocks, a.k_first = k_first, a.partials = partials.tensor, a.split = 512;
      a.window = dv == 48 ? 900 : 0;
      same_step<rlk::AttentionPart>(a, rlk::attention_part, "fma32/attn128/s512", {&partials}, [&] {
        rlk::simt::attention::launch_part(rlk::attn128::problem_of(a), nullptr);
      });
      // Each row and the next one as two ranks' sums: rows 4 and 5 see no key here, row 6 is nobody's.
      Owned out({5, 4, dv}, t), lse({5, 4}, DType::f32);
      const int64_t shape[] = {2, 5, 4, 3, 2 + dv}, row = 4 * 3 * (2 + dv),
                    strides[] = {row, row, 3 * (2 + dv), 2 + dv, 1};
      const Tensor both(partials.bytes.data(), shape, DType::f32, {kDLCPU, 0}, strides);
      rlk::AttentionMerge m{.partials = both, .sinks = sinks.tensor, .out = out.tensor, .lse = lse.tensor};
      same_step<rlk::AttentionMerge>(m, rlk::attention_merge, "attn128/merge", {&out, &lse}, [&] {
        rlk::simt::attention::launch_merge(rlk::attn128::merge_of(m), nullptr);
      });
    }
}

namespace {

// Native's bits of the gradients, then the kernels'.
void same_gradients(const rlk::AttentionBwd& b, const std::vector<Owned*>& results) {
  REQUIRE(rlk::attention_bwd(b, {.backend = "native"}));
  std::vector<std::vector<std::byte>> expected;
  for (const Owned* r : results) expected.push_back(r->bytes);
  const rlk::attn128::Backward g = rlk::attn128::backward_of(b);
  for (int wave : {32, 64}) {
    for (Owned* r : results) r->bytes.assign(r->bytes.size(), std::byte{0x7f});
    std::vector<std::byte> workspace(static_cast<std::size_t>(rlk::simt::attention::backward_bytes_of(g)),
                                     std::byte{0x7f});
    rlk_fiber::wave_size = wave;
    rlk_fiber::order = wave == 32 ? rlk_fiber::Order::ascending : rlk_fiber::Order::shuffled;
    rlk::simt::attention::launch_backward(g, workspace.data(), nullptr);
    for (std::size_t i = 0; i < results.size(); ++i) {
      CAPTURE(i);
      CHECK(results[i]->bytes == expected[i]);
    }
  }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

TEST_CASE("attention_bwd on fibers is native's bits: groups, sinks, windows, a softcap, lengths") {
  std::mt19937 random(3);
  for (DType t : kTypes)
    for (int64_t kv_heads : {1, 2, 6}) {  // groups of 6, 3 and 1; and of 4 below
      const Owned q({2, 3, 6, 32}, t, &random), k({2, 140, kv_heads, 32}, t, &random),
          v({2, 140, kv_heads, 144}, t, &random), sinks({6}, DType::f32, &random),
          d_out({2, 3, 6, 144}, t, &random), d_lse({2, 3, 6}, DType::f32, &random);
      Owned out({2, 3, 6, 144}, t), lse({2, 3, 6}, DType::f32), d_q({2, 3, 6, 32}, t),
          d_k({2, 140, kv_heads, 32}, t), d_v({2, 140, kv_heads, 144}, t), d_sinks({6}, DType::f32);
      std::vector<int32_t> lengths{138, 2};
      const Tensor kv_len(lengths.data(), {2}, DType::i32);
      Attention f{.q = q.tensor, .k = k.tensor, .v = v.tensor, .kv_len = kv_len, .sinks = sinks.tensor};
      f.out = out.tensor, f.lse = lse.tensor;
      rlk::AttentionBwd b{
          .q = q.tensor, .k = k.tensor, .v = v.tensor, .kv_len = kv_len, .sinks = sinks.tensor};
      b.out = out.tensor, b.lse = lse.tensor, b.d_out = d_out.tensor, b.d_lse = d_lse.tensor;
      b.d_q = d_q.tensor, b.d_k = d_k.tensor, b.d_v = d_v.tensor, b.d_sinks = d_sinks.tensor;
      if (kv_heads == 2) f.window = b.window = 131, f.softcap = b.softcap = 3;
      REQUIRE(rlk::attention(f));
      same_gradients(b, {&d_q, &d_k, &d_v, &d_sinks});
    }
}

TEST_CASE("attention_bwd of packed sequences on fibers is native's bits, with rows of no sequence") {
  std::mt19937 random(4);
  for (DType t : kTypes) {
    const Owned q({152, 4, 16}, t, &random), k({170, 1, 16}, t, &random), v({170, 1, 16}, t, &random),
        d_out({152, 4, 16}, t, &random), sinks({4}, DType::f32, &random);
    Owned out({152, 4, 16}, t, &random), lse({152, 4}, DType::f32, &random), d_q({152, 4, 16}, t),
        d_k({170, 1, 16}, t), d_v({170, 1, 16}, t), d_sinks({4}, DType::f32);
    std::vector<int64_t> cu_q{0, 10, 10, 150}, cu_k{0, 5, 10, 165}, lengths{5, 3, 150};
    const Tensor bounds_q(cu_q.data(), {4}, DType::i64), bounds_k(cu_k.data(), {4}, DType::i64),
        kv_len(lengths.data(), {3}, DType::i64);
    rlk::AttentionBwd b{.q = q.tensor, .k = k.tensor, .v = v.tensor, .cu_q = bounds_q, .cu_k = bounds_k};
    b.kv_len = kv_len, b.sinks = sinks.tensor, b.out = out.tensor, b.lse = lse.tensor, b.d_out = d_out.tensor;
    b.d_q = d_q.tensor, b.d_k = d_k.tensor, b.d_v = d_v.tensor, b.d_sinks = d_sinks.tensor;
    same_gradients(b, {&d_q, &d_k, &d_v, &d_sinks});
  }
}

TEST_CASE("attention and attention_bwd over a shared prefix on fibers are native's bits") {
  std::mt19937 random(7);
  for (DType t : kTypes) {
    const Owned q({23, 2, 16}, t, &random), k({170, 1, 16}, t, &random), v({170, 1, 16}, t, &random),
        d_out({23, 2, 16}, t, &random), sinks({2}, DType::f32, &random);
    Owned out({23, 2, 16}, t), lse({23, 2}, DType::f32), d_q({23, 2, 16}, t), d_k({170, 1, 16}, t),
        d_v({170, 1, 16}, t), d_sinks({2}, DType::f32);
    std::vector<int64_t> cu_q{0, 4, 9, 9, 20, 22}, cu_k{0, 130, 140, 141, 152, 165},
        lengths{129, 137, 1, 140, 20};
    std::vector<int32_t> prefixes{-1, 0, -1, 0, 0};
    const Tensor bounds_q(cu_q.data(), {6}, DType::i64), bounds_k(cu_k.data(), {6}, DType::i64),
        kv_len(lengths.data(), {5}, DType::i64), prefix_of(prefixes.data(), {5}, DType::i32);
    for (bool causal : {true, false}) {
      Attention f{.q = q.tensor, .k = k.tensor, .v = v.tensor, .cu_q = bounds_q, .cu_k = bounds_k};
      f.kv_len = kv_len, f.prefix_of = prefix_of, f.sinks = sinks.tensor, f.causal = causal;
      f.out = out.tensor, f.lse = lse.tensor;
      same_on_fibers(f, out, lse, false);
      rlk::AttentionBwd b{.q = q.tensor, .k = k.tensor, .v = v.tensor, .cu_q = bounds_q, .cu_k = bounds_k};
      b.kv_len = kv_len, b.prefix_of = prefix_of, b.sinks = sinks.tensor, b.causal = causal;
      b.out = out.tensor, b.lse = lse.tensor, b.d_out = d_out.tensor;
      b.d_q = d_q.tensor, b.d_k = d_k.tensor, b.d_v = d_v.tensor, b.d_sinks = d_sinks.tensor;
      same_gradients(b, {&d_q, &d_k, &d_v, &d_sinks});
    }
  }
}

TEST_CASE("attention and attention_bwd of wide and latent heads on fibers are native's bits") {
  std::mt19937 random(5);
  struct Widths {
    int64_t d, dv;
  };
  for (const auto& [d, dv] : {Widths{256, 256}, Widths{192, 128}, Widths{576, 512}}) {
    CAPTURE(d);
    const DType t = DType::bf16;
    const Owned q({1, 3, 2, d}, t, &random), k({1, 140, 1, d}, t, &random), own({1, 140, 1, dv}, t, &random),
        d_out({1, 3, 2, dv}, t, &random);
    Owned out({1, 3, 2, dv}, t), lse({1, 3, 2}, DType::f32), d_q({1, 3, 2, d}, t), d_k({1, 140, 1, d}, t),
        d_v({1, 140, 1, dv}, t);
    // The first channels of k, as latent heads have it.
    const int64_t shape[] = {1, 140, 1, dv}, strides[] = {140 * d, d, d, 1};
    const Tensor view(const_cast<std::byte*>(k.bytes.data()), shape, t, {kDLCPU, 0}, strides),
        v = d > 256 ? view : own.tensor;
    Attention f{.q = q.tensor, .k = k.tensor, .v = v, .out = out.tensor, .lse = lse.tensor};
    same_on_fibers(f, out, lse, false);
    rlk::AttentionBwd b{.q = q.tensor, .k = k.tensor, .v = v, .out = out.tensor, .lse = lse.tensor};
    b.d_out = d_out.tensor, b.d_q = d_q.tensor, b.d_k = d_k.tensor, b.d_v = d_v.tensor;
    same_gradients(b, {&d_q, &d_k, &d_v});
  }
}
