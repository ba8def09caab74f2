// attention on the GPU by cuda.sm90_ex2_s<S>: prefill and decoding, 32 query heads on 8 of 128 channels, then wide and latent heads,
// bf16; and decoding from pages beside a copy. One line of JSON for every shape and split: the median in microseconds, TFLOP/s of visible keys, GB/s of the cache. attention_torch.py
// times PyTorch's kernels on the same shapes.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_memory.hpp"
#include "rlk/half.hpp"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

constexpr DLDevice kGpu{kDLCUDA, 0};

// Normal numbers in bf16, a pool of them again and again at changing offsets.
void fill(const Memory& to, std::int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> pool(1 << 20);
  for (auto& x : pool) x = rlk::float_to_bf16(normal(random));
  const auto size = static_cast<std::int64_t>(pool.size());
  for (std::int64_t at = 0; at < count; at += size / 2) {
    const auto offset = static_cast<std::int64_t>(random() % (pool.size() / 2));
    const std::int64_t n = std::min(count - at, size / 2);
    check(cudaMemcpy(static_cast<std::uint16_t*>(to.data) + at, pool.data() + offset,
                     static_cast<std::size_t>(2 * n), cudaMemcpyHostToDevice));
  }
}

template <class Run>
double median_us(Run run) {
  constexpr int kRounds = 15, kCalls = 4;
  cudaEvent_t start, end;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRounds + 3; ++i) {
    check(cudaEventRecord(start, nullptr));
    for (int j = 0; j < kCalls; ++j) run();
    check(cudaEventRecord(end, nullptr));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, end));
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2] * 1000.0 / kCalls;
}

struct Shape {
  std::int64_t batch, queries, keys;
  std::int64_t heads = 32, kv_heads = 8, d = 128, dv = 128;
};

// Latent heads' values are the first channels of their keys.
void measure(const Shape& s, std::int64_t split) {
  const bool latent = s.d > 256;
  const std::int64_t rows = s.batch * s.queries * s.heads, tokens = s.batch * s.keys * s.kv_heads;
  const Memory q(2 * rows * s.d), k(2 * tokens * s.d), v(latent ? 0 : 2 * tokens * s.dv),
      out(2 * rows * s.dv), lse(4 * rows);
  fill(q, rows * s.d), fill(k, tokens * s.d);
  if (!latent) fill(v, tokens * s.dv);
  const std::int64_t width = latent ? s.d : s.dv;  // of v in memory
  const Tensor tq(q.data, {s.batch, s.queries, s.heads, s.d}, DType::bf16, kGpu),
      tk(k.data, {s.batch, s.keys, s.kv_heads, s.d}, DType::bf16, kGpu),
      tv(latent ? k.data : v.data, {s.batch, s.keys, s.kv_heads, s.dv}, DType::bf16, kGpu,
         {s.keys * s.kv_heads * width, s.kv_heads * width, width, 1}),
      to(out.data, {s.batch, s.queries, s.heads, s.dv}, DType::bf16, kGpu),
      tl(lse.data, {s.batch, s.queries, s.heads}, DType::f32, kGpu);
  const rlk::Attention call{.q = tq, .k = tk, .v = tv, .out = to, .lse = tl, .split = split};
  const std::string id = fmt::format("cuda.sm90_ex2_s{}", split == 0 ? "none" : std::to_string(split));
  rlk::Options options{.backend = id};
  const auto bytes = rlk::workspace(call, options);
  if (!bytes) throw std::runtime_error(std::string(bytes.status().message()));
  const Memory workspace(static_cast<std::int64_t>(*bytes));
  options.workspace = workspace.data, options.workspace_bytes = *bytes;
  const double us = median_us([&] { rlk::check(rlk::attention(call, options)); });
  const double seen = static_cast<double>(s.queries) * static_cast<double>(2 * s.keys - s.queries + 1) / 2;
  fmt::print(
      "{{\"implementation\": \"{}\", \"batch\": {}, \"queries\": {}, \"keys\": {}, \"heads\": \"{}/{}\", "
      "\"width\": \"{}/{}\", \"us\": {:.2f}, \"tflops\": {:.1f}, \"cache_gbs\": {:.0f}}}\n",
      id, s.batch, s.queries, s.keys, s.heads, s.kv_heads, s.d, s.dv, us,
      2e-6 * static_cast<double>((s.d + s.dv) * s.batch * s.heads) * seen / us,
      2e-3 * static_cast<double>(tokens * (latent ? s.d : s.d + s.dv)) / us);
}

void narrow() {
  for (std::int64_t split : {1024, 0}) {
    measure({1, 8192, 8192}, split);
    measure({4, 4096, 4096}, split);
    measure({4, 4096, 4096, 64, 8, 64, 64}, split);
  }
  for (std::int64_t batch : {1, 16})
    for (std::int64_t keys : {2048, 16384, 65536})
      for (std::int64_t split : {512, 1024, 4096}) measure({batch, 1, keys}, split);
}

// 256 channels, 192 and 128, 576 and 512.
void wide() {
  for (std::int64_t split : {1024, 0}) {
    measure({1, 8192, 8192, 16, 2, 256, 256}, split);
    measure({1, 8192, 8192, 16, 16, 192, 128}, split);
    measure({1, 1024, 1024, 16, 1, 576, 512}, split);
  }
  for (std::int64_t keys : {2048, 16384, 65536}) {
    measure({1, 1, keys, 16, 2, 256, 256}, 1024);
    measure({16, 1, keys, 16, 2, 256, 256}, 1024);
    measure({16, 1, keys, 64, 1, 576, 512}, 1024);
  }
}

// One query of each sequence, 8 key heads, pages of 16 tokens in any order; and a copy of as many bytes as keys and values
// are, half of which it reads and half writes.
void measure_decode(std::int64_t batch, std::int64_t keys, std::int64_t group) {
  constexpr std::int64_t kHeads = 8, kWidth = 128, kPage = 16;
  const std::int64_t tokens = batch * keys, pages = tokens / kPage, row = kHeads * kWidth;
  const Memory q(2 * batch * group * row), k(2 * tokens * row), v(2 * tokens * row),
      out(2 * batch * group * row), lengths(4 * batch), table(4 * pages);
  fill(q, batch * group * row), fill(k, tokens * row), fill(v, tokens * row);
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages)),
      all(static_cast<std::size_t>(batch), static_cast<std::int32_t>(keys));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  check(cudaMemcpy(table.data, order.data(), 4 * order.size(), cudaMemcpyHostToDevice));
  check(cudaMemcpy(lengths.data, all.data(), 4 * all.size(), cudaMemcpyHostToDevice));
  const auto tensor = [&](const Memory& m, std::vector<std::int64_t> shape, DType type) {
    return Tensor(m.data, std::span<const std::int64_t>(shape), type, kGpu);
  };
  const Tensor tq = tensor(q, {batch, 1, kHeads * group, kWidth}, DType::bf16),
               tk = tensor(k, {pages, kPage, kHeads, kWidth}, DType::bf16),
               tv = tensor(v, {pages, kPage, kHeads, kWidth}, DType::bf16),
               to = tensor(out, {batch, 1, kHeads * group, kWidth}, DType::bf16),
               tl = tensor(lengths, {batch}, DType::i32),
               tt = tensor(table, {batch, keys / kPage}, DType::i32);
  const rlk::Attention call{.q = tq, .k = tk, .v = tv, .kv_len = tl, .block_table = tt, .out = to};
  rlk::Options options{.backend = "cuda.sm90_ex2_s1024"};
  const auto bytes = rlk::workspace(call, options);
  if (!bytes) throw std::runtime_error(std::string(bytes.status().message()));
  const Memory workspace(static_cast<std::int64_t>(*bytes));
  options.workspace = workspace.data, options.workspace_bytes = *bytes;
  const double us = median_us([&] { rlk::check(rlk::attention(call, options)); });
  const auto half = static_cast<std::size_t>(2 * tokens * row);
  const double copy =
      median_us([&] { check(cudaMemcpyAsync(v.data, k.data, half, cudaMemcpyDeviceToDevice)); });
  const double all_bytes = 2e-3 * static_cast<double>(half);
  fmt::print(
      "{{\"decode\": \"{}\", \"batch\": {}, \"keys\": {}, \"group\": {}, \"us\": {:.2f}, \"cache_gbs\": "
      "{:.0f}, "
      "\"copy_us\": {:.2f}, \"copy_gbs\": {:.0f}, \"share\": {:.2f}}}\n",
      options.backend, batch, keys, group, us, all_bytes / us, copy, all_bytes / copy, copy / us);
}

void decode() {
  for (const std::int64_t group : {1, 2, 4, 8})
    for (const std::int64_t batch : {1, 16, 128})
      for (const std::int64_t keys : {1024, 8192, 32768})
        if (batch * keys <= 1 << 20) measure_decode(batch, keys, group);
}

// Causal, of five products: what a kernel has to do that computes scores once.
void measure_backward(std::int64_t batch, std::int64_t tokens) {
  constexpr std::int64_t kHeads = 32, kKvHeads = 8, kWidth = 128;
  const std::int64_t rows = batch * tokens * kHeads, keys = batch * tokens * kKvHeads;
  const Memory q(2 * rows * kWidth), k(2 * keys * kWidth), v(2 * keys * kWidth), out(2 * rows * kWidth),
      lse(4 * rows), d_out(2 * rows * kWidth), d_q(2 * rows * kWidth), d_k(2 * keys * kWidth),
      d_v(2 * keys * kWidth);
  fill(q, rows * kWidth), fill(k, keys * kWidth), fill(v, keys * kWidth), fill(d_out, rows * kWidth);
  const auto of = [&](const Memory& m, std::int64_t heads) {
    return Tensor(m.data, {batch, tokens, heads, kWidth}, DType::bf16, kGpu);
  };
  const Tensor tq = of(q, kHeads), tk = of(k, kKvHeads), tv = of(v, kKvHeads), to = of(out, kHeads),
               tl(lse.data, {batch, tokens, kHeads}, DType::f32, kGpu), td = of(d_out, kHeads),
               tdq = of(d_q, kHeads), tdk = of(d_k, kKvHeads), tdv = of(d_v, kKvHeads);
  rlk::check(rlk::attention({.q = tq, .k = tk, .v = tv, .out = to, .lse = tl, .split = 0},
                            {.backend = "cuda.sm90_ex2_snone"}));
  const rlk::AttentionBwd call{
      .q = tq, .k = tk, .v = tv, .out = to, .lse = tl, .d_out = td, .d_q = tdq, .d_k = tdk, .d_v = tdv};
  rlk::AttentionBwd queries = call;
  queries.d_k = {}, queries.d_v = {};
  for (const char* id : {"cuda.sm90", "cuda.sm90_ex2"})
    for (const rlk::AttentionBwd* one : {&call, static_cast<const rlk::AttentionBwd*>(&queries)}) {
      rlk::Options options{.backend = id};
      const auto bytes = rlk::workspace(*one, options);
      if (!bytes) throw std::runtime_error(std::string(bytes.status().message()));
      const Memory workspace(static_cast<std::int64_t>(*bytes));
      options.workspace = workspace.data, options.workspace_bytes = *bytes;
      const double us = median_us([&] { rlk::check(rlk::attention_bwd(*one, options)); });
      const double seen = static_cast<double>(tokens) * static_cast<double>(tokens + 1) / 2;
      fmt::print(
          "{{\"implementation\": \"{}\", \"gradients\": \"{}\", \"batch\": {}, \"tokens\": {}, \"us\": "
          "{:.1f}, \"tflops\": {:.1f}}}\n",
          id, one == &call ? "all" : "d_q", batch, tokens, us,
          (one == &call ? 10e-6 : 6e-6) * kWidth * static_cast<double>(batch * kHeads) * seen / us);
    }
}

}  // namespace

// With `wide`, only these; with `backward`, only gradients; with `decode`, only that.
int main(int count, char** arguments) {
  try {
    if (count > 1 && arguments[1] == std::string("wide"))
      wide();
    else if (count > 1 && arguments[1] == std::string("backward"))
      measure_backward(4, 4096), measure_backward(1, 8192);
    else if (count > 1 && arguments[1] == std::string("decode"))
      decode();
    else
      narrow(), wide();
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
