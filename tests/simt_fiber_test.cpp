// labels: unit fibers
// The fiber executor itself: barriers, shuffles, shared memory, every fiber order, both wave sizes.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "simt/simt.hpp"

namespace {

// Reverses each block through dynamic shared memory, then adds the block's sum computed with shuffles and
// static shared.
template <int Wave>
__global__ void reverse_and_sum(const float* in, float* out) {
  __shared__ float partial[64];
  float* mine = rlk::simt::dynamic_shared<float>();
  const int t = int(threadIdx.x), n = int(blockDim.x);
  const long base = long(blockIdx.x) * n;
  mine[t] = in[base + t];
  const float wave_total = rlk::simt::group_sum<Wave>(in[base + t]);
  if (t % Wave == 0) partial[t / Wave] = wave_total;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < n / Wave; ++i) total += partial[i];
  out[base + t] = mine[n - 1 - t] + total;
}

__global__ void lanes(int* up, int* down, int* pick, unsigned long long* votes) {
  const int t = int(threadIdx.x);
  up[t] = __shfl_up(t, 3u, 16);
  down[t] = __shfl_down(t, 3u, 16);
  pick[t] = __shfl(t * 10, 5);
  votes[t] = __ballot(t % 3 == 0);
}

template <int Wave>
void check_reverse(rlk_fiber::Order order) {
  rlk_fiber::wave_size = Wave;
  rlk_fiber::order = order;
  const int blocks = 3, threads = 128;
  std::vector<float> in(blocks * threads), out(in.size(), NAN);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = float(i % 37);
  hipLaunchKernelGGL((reverse_and_sum<Wave>), dim3(blocks), dim3(threads), threads * sizeof(float), nullptr,
                     in.data(), out.data());
  for (int b = 0; b < blocks; ++b) {
    float total = 0;
    for (int t = 0; t < threads; ++t) total += in[std::size_t(b * threads + t)];
    for (int t = 0; t < threads; ++t) {
      CHECK(out[std::size_t(b * threads + t)] == in[std::size_t(b * threads + threads - 1 - t)] + total);
    }
  }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

TEST_CASE("fibers give the same result in every order and at both wave sizes") {
  for (auto order : {rlk_fiber::Order::ascending, rlk_fiber::Order::descending, rlk_fiber::Order::shuffled}) {
    check_reverse<32>(order);
    check_reverse<64>(order);
  }
}

TEST_CASE("fiber shuffles stay inside their group and votes cover the wave") {
  std::vector<int> up(64), down(64), pick(64);
  std::vector<unsigned long long> votes(64);
  hipLaunchKernelGGL(lanes, 1, 64, 0, nullptr, up.data(), down.data(), pick.data(), votes.data());
  for (int t = 0; t < 64; ++t) {
    const auto i = std::size_t(t);
    CHECK(up[i] == (t % 16 >= 3 ? t - 3 : t));
    CHECK(down[i] == (t % 16 + 3 < 16 ? t + 3 : t));
    CHECK(pick[i] == (t / 32 * 32 + 5) * 10);
    for (int lane = 0; lane < 32; ++lane)
      CHECK(((votes[i] >> lane) & 1) == unsigned((t / 32 * 32 + lane) % 3 == 0));
  }
}
