// labels: conformance fibers
// The portable attention kernels on fibers: the bits of the native backend, at both wave sizes and in any thread order, with
// splits one after another and side by side.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

#include "arithmetic/attention/bind.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "simt/attention/kernels.hpp"

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
  REQUIRE(rlk::attention(a, {.backend = "native"}));
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
