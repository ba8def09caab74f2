// labels: gpu
// links: kernels
// Every way cuda.sm90 may choose from gives the same bits: each tile of the wgmma kernel and each admitted
// algorithm of cuBLASLt against the mma.sync kernel, whatever a selection by speed would have taken.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/lm_head/cublaslt.hpp"
#include "cuda/lm_head/gemm.h"
#include "cuda/lm_head/wgmma.h"
#include "memory.hpp"

namespace {

using rlk::Float;
using rlk::cuda::lm_head::Gemm;
using rlk::cuda::lm_head::Operand;
using rlk::cuda::lm_head::Sm90Tile;
using std::int64_t;
using namespace cuda_test;

struct Layout {
  bool a_k_contiguous, b_k_contiguous;
  const char* name;
};
constexpr Layout kLayouts[] = {{true, true, "logits"}, {true, false, "d_hidden"}, {false, false, "d_weight"}};

std::vector<Sm90Tile> tiles(const Layout& layout) {
  if (!layout.a_k_contiguous) return {Sm90Tile::wide};
  std::vector<Sm90Tile> all{Sm90Tile::wide, Sm90Tile::square, Sm90Tile::tall32, Sm90Tile::narrow32};
  if (layout.b_k_contiguous) {
    all.push_back(Sm90Tile::narrow128);
  } else {
    for (const Sm90Tile t : {Sm90Tile::narrow64, Sm90Tile::side32, Sm90Tile::stacked64, Sm90Tile::stacked128})
      all.push_back(t);
  }
  return all;
}

// A product whose lines are padded, all starting on 16 bytes.
struct Product {
  Memory a, b, bias, c;
  Gemm gemm;

  Product(int64_t m, int64_t n, int64_t k, const Layout& layout, Float type, Float out, bool with_bias)
      : a(padded(layout.a_k_contiguous ? m : k, layout.a_k_contiguous ? k : m), type, 1),
        b(padded(layout.b_k_contiguous ? n : k, layout.b_k_contiguous ? k : n), type, 2),
        bias(static_cast<std::size_t>(n), type, 3),
        c(padded(m, n) * bytes_of(out)) {
    gemm.a = {a.data(), line(layout.a_k_contiguous ? k : m), layout.a_k_contiguous, type};
    gemm.b = {b.data(), line(layout.b_k_contiguous ? k : n), layout.b_k_contiguous, type};
    gemm.c = c.data(), gemm.ldc = line(n), gemm.out = out;
    gemm.bias = with_bias ? bias.data() : nullptr;
    gemm.m = m, gemm.n = n, gemm.k = k;
  }
  // What `launch` leaves, the space between lines included.
  template <class Launch>
  std::vector<std::uint8_t> after(Launch&& launch) const {
    c.clear();
    check(launch());
    check(cudaDeviceSynchronize());
    return c.host();
  }

 private:
  static int64_t line(int64_t columns) { return (columns + 7) / 8 * 8 + 8; }
  static std::size_t padded(int64_t rows, int64_t columns) {
    return static_cast<std::size_t>(rows * line(columns));
  }
};

struct Size {
  int64_t m, n, k;
};
// One row; a few; batches around every tile's height; more tiles than blocks; k shorter than a step and not a
// multiple of one.
constexpr Size kSizes[] = {{1, 96, 64},     {7, 200, 1000},  {16, 264, 520},  {40, 520, 328}, {64, 1096, 72},
                           {65, 136, 1032}, {100, 264, 200}, {129, 520, 136}, {300, 776, 24}};

}  // namespace

TEST_CASE(
    "every tile of the wgmma kernel has the bits of the mma.sync kernel, also with several tiles a block") {
  if (!hopper() || !rlk::cuda::lm_head::sm90_available()) return;
  for (const Layout& layout : kLayouts)
    for (const auto& [m, n, k] : kSizes)
      for (const Float type : {Float::bf16, Float::f16})
        for (const Float out : {type, Float::f32}) {
          const Product p(m, n, k, layout, type, out, m % 2 == 0);
          const auto want = p.after([&] { return rlk::cuda::lm_head::launch_mma(p.gemm, nullptr); });
          for (const Sm90Tile tile : tiles(layout))
            for (const int multiprocessors : {132, 4}) {
              INFO(layout.name, " m=", m, " n=", n, " k=", k, " dtype ", static_cast<int>(type), " to ",
                   static_cast<int>(out), " tile ", static_cast<int>(tile), " on ", multiprocessors);
              CHECK(p.after([&] { return launch_sm90(p.gemm, tile, multiprocessors, nullptr); }) == want);
            }
        }
}

TEST_CASE("every admitted algorithm of cuBLASLt has the bits of the mma.sync kernel") {
  if (!hopper()) return;
  if (!rlk::cuda::lm_head::cublaslt().reason.empty()) {
    std::printf("[skip] %s\n", rlk::cuda::lm_head::cublaslt().reason.c_str());
    return;
  }
  const Memory space(rlk::cuda::lm_head::kLibraryWorkspace);
  int ran = 0;
  for (const Layout& layout : kLayouts)
    for (const auto& [m, n, k] : {Size{1, 512, 1024}, Size{16, 4096, 2048}, Size{100, 1096, 512},
                                  Size{512, 768, 256}, Size{1000, 1024, 4096}})
      for (const Float type : {Float::bf16, Float::f16}) {
        const Product p(m, n, k, layout, type, Float::f32, false);
        const auto want = p.after([&] { return rlk::cuda::lm_head::launch_mma(p.gemm, nullptr); });
        const rlk::cuda::lm_head::LtProduct product(p.gemm);
        if (!product) continue;
        for (const auto& algorithm : product.candidates(true, rlk::cuda::lm_head::kLibraryWorkspace, 8)) {
          if (!algorithm.admitted()) continue;
          INFO(layout.name, " m=", m, " n=", n, " k=", k, " dtype ", static_cast<int>(type), " tile ",
               algorithm.tile, " stages ", algorithm.stages, " cluster ", algorithm.cluster);
          const auto got = p.after([&] {
            return product.run(p.gemm, algorithm, space.data(), nullptr) == CUBLAS_STATUS_SUCCESS
                       ? cudaSuccess
                       : cudaErrorUnknown;
          });
          CHECK(got == want);
          ++ran;
        }
      }
  CHECK(ran > 0);
}
