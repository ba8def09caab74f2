// Replay of Hopper's bf16/fp16 tensor cores on a CPU: arithmetic sm90/t25k16, bit for bit.
//
// acc = +0. For each group of 16 along K, ascending (a short last group is filled with zeros):
//
//   1. Products. Each is an exact integer significand times 2^(ea + eb). Subnormal inputs keep the exponent
//      1 - bias and have no hidden bit; significands are not normalised, so a product's lies in [0, 4).
//   2. emax = the largest ea + eb of the products that are not zero, and the accumulator's exponent unless
//      the accumulator is zero (a subnormal one has -126). A zero takes no part, whatever its exponent field
//      says. With no term left the sum is +0.
//   3. Truncation. Each term's magnitude, the accumulator's too, is cut at 25 fraction bits below emax.
//   4. Sum. The signed terms are added exactly, as integers.
//   5. Truncation. acc = the sum's magnitude cut to 24 significant bits, or where a subnormal ends; beyond
//      the largest finite number it is infinite, and a zero is +0.
//
// Specials, in place of 2 to 5: a NaN, an infinity times zero, or infinities of both signs among the products
// and the accumulator give 0x7fffffff; otherwise an infinity gives that infinity.
//
// Any subset of rows and columns can be replayed without computing the rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/levels.hpp"
#include "native/lm_head/chain.hpp"

namespace rlk::native {

struct ReplayProduct {
  std::int64_t rows = 0;  // of the result
  std::int64_t cols = 0;
  std::int64_t depth = 0;
  Float type = Float::bf16;  // bf16 or f16

  const std::uint16_t* hidden = nullptr;  // [.., depth], unit inner stride
  std::int64_t hidden_stride = 0;
  const std::uint16_t* weight = nullptr;  // [.., depth], unit inner stride
  std::int64_t weight_stride = 0;
  const std::int64_t* row_index = nullptr;  // result row i replays hidden row row_index[i]; null: i
  const std::int64_t* col_index = nullptr;  // likewise for weight rows and bias entries

  const float* initial = nullptr;  // [rows, cols], unit inner stride: what the sums continue from; null: +0
  std::int64_t initial_stride = 0;

  void* out = nullptr;  // [rows, cols], unit inner stride
  Float out_type = Float::f32;
  std::int64_t out_stride = 0;
  const void* bias = nullptr;  // by weight row, in bias_type; added as in ChainProduct
  Float bias_type = Float::f32;

  const std::uint16_t* hidden_row(std::int64_t i) const {
    return hidden + (row_index != nullptr ? row_index[i] : i) * hidden_stride;
  }
  float initial_at(std::int64_t i, std::int64_t j) const {
    if (initial == nullptr) return 0;
    const float x = initial[i * initial_stride + j];
    return x == 0 ? 0 : x;  // -0 leaves a chain as +0
  }
  std::int64_t weight_row(std::int64_t j) const { return col_index != nullptr ? col_index[j] : j; }
};

// One group: up to 16 products joined to the accumulator (the bits of an fp32 number).
std::uint32_t replay_group(std::uint32_t acc, const std::uint16_t* a, const std::uint16_t* b, int count,
                           Float type);

struct ReplayKernels {
  const char* isa = "";
  std::size_t scratch_bytes = 0;  // per worker
  void (*run)(const ReplayProduct&, const ChainTile&, void* scratch) = nullptr;
};

const ReplayKernels& replay_kernels_scalar();
const ReplayKernels* replay_kernels_avx512();  // null where the build lacks it
// There are two: AVX2 has none of its own.
template <Isa I>
const ReplayKernels* replay_kernels() {
  return I == Isa::avx512 ? replay_kernels_avx512() : &replay_kernels_scalar();
}

}  // namespace rlk::native
