// A dense tensor here and its copy on the device, for tests that run a call on both.
#pragma once

#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "rlk/rlk.hpp"

namespace cuda_test {

using Shape = std::vector<int64_t>;

// One without a shape is absent from the call.
struct Array {
  Shape shape;
  rlk::DType type = rlk::DType::f32;
  std::vector<std::byte> bytes;
  std::shared_ptr<void> device;

  Array() = default;
  Array(Shape s, rlk::DType t) : shape(std::move(s)), type(t) {
    bytes.assign(static_cast<std::size_t>(count() * rlk::size_of(type)), std::byte{0xff});  // NaN
  }
  Array(const std::vector<int32_t>& values, Shape s) : Array(std::move(s), rlk::DType::i32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  explicit Array(const std::vector<int32_t>& values) : Array(values, {static_cast<int64_t>(values.size())}) {}

  int64_t count() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  void set(int64_t i, double x) {
    const auto single = static_cast<float>(x);
    const uint16_t half = type == rlk::DType::bf16 ? rlk::double_to_bf16(x) : rlk::double_to_f16(x);
    if (type == rlk::DType::f8_e4m3)
      bytes[static_cast<std::size_t>(i)] = std::byte{rlk::double_to_f8_e4m3(x)};
    else if (type == rlk::DType::f32)
      std::memcpy(bytes.data() + 4 * i, &single, 4);
    else
      std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  // Rows [from, to) of `width` elements.
  void draw(std::mt19937& random, int64_t from, int64_t to, int64_t width, double scale = 1,
            double mean = 0) {
    std::normal_distribution<double> normal;
    for (int64_t i = from * width; i < to * width; ++i) set(i, mean + scale * normal(random));
  }
  void draw(std::mt19937& random) { draw(random, 0, count(), 1); }

  rlk::Tensor on_cpu() { return rlk::Tensor(bytes.data(), std::span<const int64_t>(shape), type); }
  rlk::Tensor on_gpu() {
    if (!device) {
      void* data = nullptr;
      check(cudaMalloc(&data, bytes.size() + 16));
      device = {data, [](void* p) { cudaFree(p); }};
      send();
    }
    return rlk::Tensor(device.get(), std::span<const int64_t>(shape), type, {kDLCUDA, 0});
  }
  void send() const { check(cudaMemcpy(device.get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice)); }
  std::vector<std::byte> brought() const {
    std::vector<std::byte> to(bytes.size());
    check(cudaMemcpy(to.data(), device.get(), to.size(), cudaMemcpyDeviceToHost));
    return to;
  }
  bool same() const { return shape.empty() || brought() == bytes; }
};

template <class T>
T one_of(std::mt19937& random, std::initializer_list<T> list) {
  return *(list.begin() + random() % list.size());
}
// Of packed sequences: the one whose keys come before those of each, or -1; that one has none before it.
inline std::vector<int32_t> prefixes(int64_t count, std::mt19937& random) {
  std::vector<int32_t> of(static_cast<std::size_t>(count), -1), alone;
  for (std::size_t n = 0; n < of.size(); ++n)
    if (!alone.empty() && random() % 3 != 0)
      of[n] = alone[random() % alone.size()];
    else
      alone.push_back(static_cast<int32_t>(n));
  return of;
}
inline void ran(const rlk::Status& s) { REQUIRE_MESSAGE(s, std::string(s.message())); }

// The first `count` channels of a dense tensor of this shape.
inline rlk::Tensor first_channels(const rlk::Tensor& all, rlk::DType type, Shape shape, int64_t count) {
  Shape strides(shape.size(), 1);
  for (std::size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1];
  shape.back() = count;
  return rlk::Tensor(all.dl().data, shape, type, all.dl().device, strides);
}

}  // namespace cuda_test
