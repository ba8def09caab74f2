// labels: conformance
// Ops on rows whose results are larger than the caches, which vectors write around them: the bits of single floats.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
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

// Odd rows of the table have no token, and two ids have no row.
TEST_CASE(
    "rows of a table and its gradient, larger than the caches, have the same bits at every width of "
    "vectors") {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (std::int64_t width : {2048, 2050}) {
      CAPTURE(rlk::name_of(t));
      CAPTURE(width);
      const std::int64_t rows = (std::int64_t{16} << 20) / width / rlk::size_of(t) + 5;
      const std::size_t row = static_cast<std::size_t>(width * rlk::size_of(t));
      std::vector<std::int64_t> ids(static_cast<std::size_t>(rows));
      for (std::int64_t i = 0; i < rows; ++i) ids[static_cast<std::size_t>(i)] = i * 2 % rows / 2 * 2;
      ids[3] = -1, ids[4] = rows;
      const Tensor tokens(ids.data(), {rows}, DType::i64);
      const Large table(rows, width, t, 1), d(rows, width, t, 77), before(rows, width, DType::f32, 9);
      Large out(rows, width, t, 3), want(rows, width, t);
      for (std::size_t i = 0; i < ids.size(); ++i)
        if (ids[i] >= 0 && ids[i] < rows)
          std::memcpy(want.data + i * row, table.data + static_cast<std::size_t>(ids[i]) * row, row);
      REQUIRE(rlk::embedding({.ids = tokens, .weight = table.tensor, .out = out.tensor},
                             {.backend = "native.rows"}));
      CHECK(out == want);
      Large sum(rows, width, t, 3), sum_scalar(rows, width, t);
      rlk::EmbeddingBwd a{.ids = tokens, .d_out = d.tensor, .weight = table.tensor, .d_weight = sum.tensor};
      REQUIRE(rlk::embedding_bwd(a, {.backend = "native.rows"}));
      a.d_weight = sum_scalar.tensor;
      REQUIRE(rlk::embedding_bwd(a, {.backend = "native.rows.scalar"}));
      CHECK(sum == sum_scalar);
      Large so_far(rows, width, DType::f32, 3), so_far_scalar(rows, width, DType::f32);
      a.d_weight_before = before.tensor, a.d_weight = so_far.tensor, a.scale = 0.7;
      REQUIRE(rlk::embedding_bwd(a, {.backend = "native.rows"}));
      a.d_weight = so_far_scalar.tensor;
      REQUIRE(rlk::embedding_bwd(a, {.backend = "native.rows.scalar"}));
      CHECK(so_far == so_far_scalar);
    }
}

// A norm that takes x + residual in fp32 is right to 16 bits, and other bits than a sum that was stored and read again.
TEST_CASE(
    "a norm with a residual is the norm of the rounded sum, and leaves that sum, at every width of vectors") {
  constexpr std::int64_t rows = 37, width = 200;
  for (DType t : {DType::f32, DType::bf16, DType::f16}) {
    const Large x(rows, width, t, 1), residual(rows, width, t, 77), weight(1, width, t, 5);
    const Tensor w(weight.data, {width}, t);
    Large sum(rows, width, t), wide(rows, width, DType::f32);
    const auto number = [&](const Large& a, std::int64_t i) {
      const auto half = reinterpret_cast<const std::uint16_t*>(a.data)[t == DType::f32 ? 0 : i];
      return t == DType::f32    ? reinterpret_cast<const float*>(a.data)[i]
             : t == DType::bf16 ? rlk::bf16_to_float(half)
                                : rlk::f16_to_float(half);
    };
    for (std::int64_t i = 0; i < rows * width; ++i) {
      const float s = number(x, i) + number(residual, i);
      const std::uint16_t half = t == DType::bf16 ? rlk::float_to_bf16(s) : rlk::float_to_f16(s);
      reinterpret_cast<float*>(wide.data)[i] = s;
      if (t == DType::f32)
        reinterpret_cast<float*>(sum.data)[i] = s;
      else
        reinterpret_cast<std::uint16_t*>(sum.data)[i] = half;
    }
    for (const char* backend :
         {"native.rows.avx512", "native.rows.avx2", "native.rows.scalar", "native.golden"})
      for (auto cast : {rlk::RmsNorm::Cast::end, rlk::RmsNorm::Cast::early}) {
        CAPTURE(std::string(backend));
        CAPTURE(std::string(rlk::name_of(t)));
        Large fused(rows, width, t), left(rows, width, t), apart(rows, width, t);
        rlk::RmsNorm a{.x = sum.tensor, .weight = w, .y = apart.tensor};
        a.cast = cast;
        const rlk::Status status = rlk::rms_norm(a, {.backend = backend});
        if (status.code() == RLK_NO_IMPLEMENTATION) continue;  // another processor's
        REQUIRE_MESSAGE(status, status.message());
        a.x = x.tensor, a.residual = residual.tensor, a.sum = left.tensor, a.y = fused.tensor;
        REQUIRE(rlk::rms_norm(a, {.backend = backend}));
        CHECK(left == sum);
        CHECK(fused == apart);
      }
    // The trap is one: norms of the sum in fp32 differ from these.
    Large apart(rows, width, t), unrounded(rows, width, DType::f32);
    REQUIRE(rlk::rms_norm({.x = sum.tensor, .weight = w, .y = apart.tensor}));
    std::vector<float> ones(width);
    for (std::int64_t i = 0; i < width; ++i) ones[static_cast<std::size_t>(i)] = number(weight, i);
    const Tensor w32(ones.data(), {width}, DType::f32);
    REQUIRE(rlk::rms_norm({.x = wide.tensor, .weight = w32, .y = unrounded.tensor}));
    int others = 0;
    for (std::int64_t i = 0; i < rows * width; ++i) {
      const float y = reinterpret_cast<const float*>(unrounded.data)[i];
      others += number(apart, i) != (t == DType::bf16  ? rlk::bf16_to_float(rlk::float_to_bf16(y))
                                     : t == DType::f16 ? rlk::f16_to_float(rlk::float_to_f16(y))
                                                       : y);
    }
    CHECK((others > 100) == (t != DType::f32));
  }
}
