// rope on the CPU against a copy of the same bytes by memcpy on as many threads, measured in turn in the same
// run. Tensors are those of the GPU figures (q and k of 32 heads, D = 128, fp32 tables); buffers rotate
// through 1.5 GB, so that nothing is found in a cache. Every figure is the median of the rounds, a ratio the
// median of each round's ratio, so that a busy moment hits both sides.
//
//   rope_bench [rounds=15 [cpu]]   cpu: count processor time instead of wall time, for a machine that is busy
//                                  with other things
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "rlk/rlk.hpp"
#include "timing.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

constexpr std::int64_t kHeads = 32, kDim = 128;
constexpr std::size_t kRotate = std::size_t{3} << 29;  // bytes

int cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

bool count_processor_time = false;

// The memory that all tensors are cut from, touched before anything is timed.
std::byte* memory() {
  static std::byte* const all = [] {
    auto* p = static_cast<std::byte*>(std::aligned_alloc(4096, kRotate));
    // Bit patterns of numbers near 1 in fp32 and in bf16.
    for (std::size_t i = 0; i < kRotate; i += 2) {
      const auto v = static_cast<std::uint16_t>(0x3f80u | (i * 2654435761u >> 7 & 0x8007u));
      std::memcpy(p + i, &v, 2);
    }
    return p;
  }();
  return all;
}

// Two tensors in, two out.
struct Set {
  std::byte* tensor[4];
};

void copy(const Set& set, std::size_t size, int threads) {
  const std::size_t part = (size / static_cast<std::size_t>(threads) + 63) / 64 * 64;
  const auto run = [&](int i) {
    const std::size_t begin = std::min(size, part * static_cast<std::size_t>(i));
    const std::size_t length = std::min(part, size - begin);
    for (int t : {0, 1}) std::memcpy(set.tensor[2 + t] + begin, set.tensor[t] + begin, length);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (auto& t : others) t.join();
}

void row(DType type, rlk::Rope::Layout layout, std::int64_t tokens, int threads, int rounds) {
  const std::size_t size = static_cast<std::size_t>(kHeads * tokens * kDim * rlk::size_of(type));
  std::vector<Set> sets(kRotate / (4 * size));
  for (std::size_t i = 0; i < sets.size(); ++i)
    for (std::size_t t = 0; t < 4; ++t) sets[i].tensor[t] = memory() + (4 * i + t) * size;
  std::vector<float> cos(static_cast<std::size_t>(tokens * kDim / 2)), sin(cos.size());
  const Tensor cos_view(cos.data(), {tokens, kDim / 2}, DType::f32),
      sin_view(sin.data(), {tokens, kDim / 2}, DType::f32);
  rlk::check(rlk::rope_tables({.cos = cos_view, .sin = sin_view, .rotary_dim = kDim, .rows = tokens}));

  const bool heads_first = layout == rlk::Rope::Layout::bhsd;
  const auto view = [&](std::byte* data) {
    return heads_first ? Tensor(data, {1, kHeads, tokens, kDim}, type)
                       : Tensor(data, {1, tokens, kHeads, kDim}, type);
  };
  const auto turn = [&](const Set& set, bool backward) {
    const Tensor q = view(set.tensor[0]), k = view(set.tensor[1]), q_out = view(set.tensor[2]),
                 k_out = view(set.tensor[3]);
    if (backward) {
      rlk::check(rlk::rope_bwd({.d_out = q,
                                .cos = cos_view,
                                .sin = sin_view,
                                .d_k_out = k,
                                .d_x = q_out,
                                .d_k = k_out,
                                .layout = static_cast<rlk::RopeBwd::Layout>(layout)},
                               {.threads = threads}));
    } else {
      rlk::check(rlk::rope(
          {.x = q, .cos = cos_view, .sin = sin_view, .k = k, .out = q_out, .k_out = k_out, .layout = layout},
          {.threads = threads}));
    }
  };
  std::vector<double> copies, forward, backward, forward_ratio, backward_ratio;
  std::size_t next = 0;
  const auto set = [&]() -> const Set& { return sets[next++ % sets.size()]; };
  for (int round = 0; round <= rounds; ++round) {
    const clockid_t clock = count_processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
    const double c = milliseconds(clock, [&] { copy(set(), size, threads); });
    const double f = milliseconds(clock, [&] { turn(set(), false); });
    const double b = milliseconds(clock, [&] { turn(set(), true); });
    if (round == 0) continue;  // warms up
    copies.push_back(c), forward.push_back(f), backward.push_back(b);
    forward_ratio.push_back(c / f), backward_ratio.push_back(c / b);
  }
  fmt::print("{:5} {:6} {:6} {:7} {:10.2f} {:10.1f} {:10.2f} {:6.2f} {:10.2f} {:6.2f}\n", rlk::name_of(type),
             heads_first ? "bhsd" : "bshd", tokens, threads, median(copies),
             4e-6 * static_cast<double>(size) / median(copies), median(forward), median(forward_ratio),
             median(backward), median(backward_ratio));
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  count_processor_time = argc > 2 && std::string(argv[2]) == "cpu";
  if (rounds <= 0 || (argc > 2 && !count_processor_time)) {
    fmt::print(stderr, "usage: rope_bench [rounds [cpu]]\n");
    return 2;
  }
  fmt::print("q and k [1,{},T,{}], ms of {} time, median of {}; ratio: copy over rope\n", kHeads, kDim,
             count_processor_time ? "processor" : "wall", rounds);
  fmt::print("{:5} {:6} {:>6} {:>7} {:>10} {:>10} {:>10} {:>6} {:>10} {:>6}\n", "dtype", "layout", "T",
             "threads", "copy", "GB/s", "forward", "ratio", "backward", "ratio");
  for (const DType type : {DType::bf16, DType::f32})
    for (const auto layout : {rlk::Rope::Layout::bhsd, rlk::Rope::Layout::bshd})
      for (const std::int64_t tokens : {2048, 4096})
        for (const int threads : {1, cores()}) row(type, layout, tokens, threads, rounds);
}
