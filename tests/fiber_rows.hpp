// What the tests of row ops on host fibers share: tensors that own their bytes, and a comparison of launches with what native
// left.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "simt/simt.hpp"

namespace fiberrows {

using rlk::DType;
using Shape = std::vector<int64_t>;

// A dense tensor that owns its bytes.
struct Owned {
  std::vector<std::byte> bytes;
  rlk::Tensor tensor;

  Owned(const Shape& shape, DType t) {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    bytes.assign(static_cast<std::size_t>(n * rlk::size_of(t)) + 1, std::byte{0x7f});
    tensor = rlk::Tensor(bytes.data(), std::span(shape), t);
  }
  Owned(const Shape& shape, DType t, std::mt19937& random, double deviation = 1) : Owned(shape, t) {
    std::normal_distribution<double> normal(0, deviation);
    const auto count = (bytes.size() - 1) / static_cast<std::size_t>(rlk::size_of(t));
    for (std::size_t i = 0; i < count; ++i) {
      const double x = normal(random);
      const uint16_t half = t == DType::bf16 ? rlk::double_to_bf16(x) : rlk::double_to_f16(x);
      const auto single = static_cast<float>(x);
      if (t == DType::f32)
        std::memcpy(bytes.data() + 4 * i, &single, 4);
      else
        std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
};

// launch() at every wave size and order leaves in `results` what native left in `expected`.
template <class Launch>
void same_on_fibers(std::vector<Owned*> results, const std::vector<std::vector<std::byte>>& expected,
                    const Launch& launch) {
  for (int wave : {32, 64})
    for (auto order :
         {rlk_fiber::Order::ascending, rlk_fiber::Order::descending, rlk_fiber::Order::shuffled}) {
      for (Owned* r : results) std::fill(r->bytes.begin(), r->bytes.end(), std::byte{0x7f});
      rlk_fiber::wave_size = wave;
      rlk_fiber::order = order;
      launch();
      CAPTURE(wave);
      for (std::size_t i = 0; i < results.size(); ++i) CHECK(results[i]->bytes == expected[i]);
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

inline std::vector<std::vector<std::byte>> copies(const std::vector<Owned*>& results) {
  std::vector<std::vector<std::byte>> all;
  for (const Owned* r : results) all.push_back(r->bytes);
  return all;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

}  // namespace fiberrows
