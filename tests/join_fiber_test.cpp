// labels: unit fibers
// The last step of a sum over rows: whatever the shares are, what is stored is the sum of adding them one after another in fp64.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "arithmetic/rows.hpp"
#include "simt/join.hpp"

namespace {

using rlk::simt::kJoinChannels;

template <int Threads, int Channels>
__global__ void join(const float* shares, double* out, int channels, int blocks) {
  const int at = int(blockIdx.x) * Channels + int(threadIdx.x) % Channels;
  const double sum =
      rlk::simt::ascending_sum<Threads, Channels>(shares + at, channels, blocks, at < channels);
  if (at < channels && int(threadIdx.x) < Channels) out[at] = sum;
}

// A channel's shares, by their kind.
float share_of(int kind, int block, std::mt19937& random) {
  const float x = std::normal_distribution<float>()(random);
  switch (kind) {
    case 0:
      return x;
    case 1:  // magnitudes that fp64 cannot hold at once
      return std::ldexp(x, int(random() % 160) - 80);
    case 2:
      return random() % 50 == 0 ? std::numeric_limits<float>::quiet_NaN() : x;
    case 3:
      return random() % 50 == 0 ? std::copysign(std::numeric_limits<float>::infinity(), x) : x;
    case 4:
      return random() % 2 ? 0.0f : -0.0f;
    case 5:
      return -0.0f;
    case 6:  // subnormal
      return x * 1e-39f;
    case 7:  // just what fp64 holds, and then a little more
      return block == 0   ? 0x1.000002p30f
             : block == 1 ? 0x1p-23f
             : block % 2  ? 0x1.fffffep29f
                          : -0x1.fffffep29f;
    case 8:  // the least magnitudes that may round, and here do in one order of two
      return block == 0 ? 0x1p30f : block == 1 || block == 3 ? 0x1.000002p0f : 0.0f;
    case 9:  // some that cancel, which swallow what lies between them
      return block % 5 == 0 ? 0x1p60f : block % 5 == 3 ? -0x1p60f : x;
    case 10:  // the same, of which a little is left
      return block % 5 == 0 ? 0x1p30f : block % 5 == 3 ? -0x1p30f : x;
    case 11:  // one far below the others, as one of two thousand may be
      return block == 11 ? 0x1p-40f : x;
    default:  // the middle of two numbers of bf16, and what a chain loses and a sum of it would not
      return block == 0 ? 0x1.01p0f : 0x1p-53f;
  }
}
constexpr int kKinds = 13;

// As tensors of every dtype hold them.
bool same(double a, double b) {
  for (const auto type : {rlk::rows::Type::f32, rlk::rows::Type::bf16, rlk::rows::Type::f16}) {
    std::uint32_t of_a = 0, of_b = 0;
    rlk::rows::store(type, &of_a, 0, a);
    rlk::rows::store(type, &of_b, 0, b);
    if (of_a != of_b) return false;
  }
  return true;
}

template <int Threads, int Channels = kJoinChannels>
void check(int blocks) {
  constexpr int kChannels = 3 * kKinds;
  std::mt19937 random(static_cast<unsigned>(blocks));
  std::vector<float> shares(std::size_t(blocks) * kChannels);
  shares.reserve(kChannels);  // an address to count from even without a share
  for (int b = 0; b < blocks; ++b)
    for (int c = 0; c < kChannels; ++c)
      shares[std::size_t(b) * kChannels + c] = share_of(c % kKinds, b, random);
  std::vector<double> out(kChannels, 7);
  const int grid = (kChannels + Channels - 1) / Channels;
  hipLaunchKernelGGL((join<Threads, Channels>), dim3(unsigned(grid)), dim3(Threads), 0, nullptr,
                     shares.data(), out.data(), kChannels, blocks);
  for (int c = 0; c < kChannels; ++c) {
    double sum = 0;
    for (int b = 0; b < blocks; ++b) sum += double(shares[std::size_t(b) * kChannels + c]);
    CAPTURE(blocks);
    CAPTURE(c);
    CHECK(same(out[std::size_t(c)], sum));
  }
}

}  // namespace

TEST_CASE("shares side by side are stored as a chain of additions is, or are added by one") {
  for (const int blocks : {0, 1, 2, 3, 31, 100, 513, 700}) {
    check<256>(blocks);
    check<1024>(blocks);
    check<256, 64>(blocks);
  }
}
