// labels: conformance
// Ops on rows whose results are larger than the caches, which vectors write around them: the bits of single floats.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

// [rows, width] on a cache line, so that streaming applies; numbers in (-4, 4) that differ from row to row.
struct Large {
  std::vector<std::byte> memory;
  std::byte* data;
  std::size_t bytes;
  Tensor tensor;

  Large(std::int64_t rows, std::int64_t width, DType t, std::uint32_t seed = 0)
      : bytes(static_cast<std::size_t>(rows * width * rlk::size_of(t))) {
    memory.resize(bytes + 64);
    data = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    tensor = Tensor(data, {rows, width}, t);
    for (std::int64_t i = 0; seed != 0 && i < rows * width; ++i) {
      const std::uint32_t bits = (static_cast<std::uint32_t>(i) + seed) * 2654435761u;
      const float x = static_cast<float>(bits >> 8) * 0x1p-21f - 4;
      const std::uint16_t half = t == DType::bf16 ? rlk::float_to_bf16(x) : rlk::float_to_f16(x);
      if (t == DType::f32)
        std::memcpy(data + 4 * i, &x, 4);
      else
        std::memcpy(data + 2 * i, &half, 2);
    }
  }
  Large(const Large&) = delete;
  bool operator==(const Large& other) const { return std::memcmp(data, other.data, bytes) == 0; }
};

}  // namespace

TEST_CASE("results larger than the caches have the same bits at every width of vectors") {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (std::int64_t width : {2048, 2050}) {  // rows on cache lines, and most rows off them
      CAPTURE(rlk::name_of(t));
      CAPTURE(width);
      const std::int64_t rows = (std::int64_t{16} << 20) / width / rlk::size_of(t) + 1;
      const Large x(rows, width, t, 1), d(rows, width, t, 77), weight(1, width, t, 5);
      Large y(rows, width, t), y_scalar(rows, width, t), d_x(rows, width, t), d_x_scalar(rows, width, t);
      const Tensor w(weight.data, {width}, t);
      REQUIRE(rlk::rms_norm({.x = x.tensor, .weight = w, .y = y.tensor}, {.backend = "native.rows"}));
      REQUIRE(rlk::rms_norm({.x = x.tensor, .weight = w, .y = y_scalar.tensor},
                            {.backend = "native.rows.scalar"}));
      CHECK(y == y_scalar);
      REQUIRE(rlk::rms_norm_bwd({.d_y = d.tensor, .x = x.tensor, .weight = w, .d_x = d_x.tensor},
                                {.backend = "native.rows"}));
      REQUIRE(rlk::rms_norm_bwd({.d_y = d.tensor, .x = x.tensor, .weight = w, .d_x = d_x_scalar.tensor},
                                {.backend = "native.rows.scalar"}));
      CHECK(d_x == d_x_scalar);
      REQUIRE(rlk::swiglu({.gate = x.tensor, .up = d.tensor, .out = y.tensor}, {.backend = "native.tiles"}));
      REQUIRE(rlk::swiglu({.gate = x.tensor, .up = d.tensor, .out = y_scalar.tensor},
                          {.backend = "native.tiles.scalar"}));
      CHECK(y == y_scalar);
      REQUIRE(rlk::swiglu_bwd(
          {.d_out = y.tensor, .gate = x.tensor, .up = d.tensor, .d_gate = d_x.tensor, .d_up = {}},
          {.backend = "native.tiles"}));
      REQUIRE(rlk::swiglu_bwd(
          {.d_out = y.tensor, .gate = x.tensor, .up = d.tensor, .d_gate = d_x_scalar.tensor, .d_up = {}},
          {.backend = "native.tiles.scalar"}));
      CHECK(d_x == d_x_scalar);
    }
}
