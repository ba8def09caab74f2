// Replay of Hopper's bf16/fp16 tensor cores on a CPU: arithmetic sm90/t25k16, bit for bit.
//
//   acc = +0; for each group of 16 along K, ascending (a short last group is filled with zeros):
//     every product is an exact integer significand times 2^(ea + eb); subnormal inputs keep exponent 1 -
//     bias and no hidden bit, significands are not normalised, so a product's significand is in [0, 4) emax =
//     the largest exponent among the non-zero products and the accumulator (subnormal: -126) every term's
//     magnitude is cut (truncated) at 25 fraction bits below emax, terms are summed exactly acc = the sum's
//     magnitude truncated to 24 significant bits (subnormals likewise; overflow: Inf; zero: +0)
//   specials: any NaN, Inf * 0 or both infinities in a group or the accumulator: 0x7fffffff; else that
//   infinity
//
// Any subset of rows and columns can be replayed without computing the rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lm_head_chain.hpp"

namespace rlk::native {

struct ReplayProduct {
  std::int64_t rows = 0;  // of the result
  std::int64_t cols = 0;
  std::int64_t depth = 0;
  Element type = Element::bf16;  // bf16 or f16

  const std::uint16_t* hidden = nullptr;  // [.., depth], unit inner stride
  std::int64_t hidden_stride = 0;
  const std::uint16_t* weight = nullptr;  // [.., depth], unit inner stride
  std::int64_t weight_stride = 0;
  const std::int64_t* row_index = nullptr;  // result row i replays hidden row row_index[i]; null: i
  const std::int64_t* col_index = nullptr;  // likewise for weight rows and bias entries

  void* out = nullptr;  // [rows, cols], unit inner stride
  Element out_type = Element::f32;
  std::int64_t out_stride = 0;
  const void* bias = nullptr;  // by weight row, in bias_type; added as in ChainProduct
  Element bias_type = Element::f32;

  const std::uint16_t* hidden_row(std::int64_t i) const {
    return hidden + (row_index != nullptr ? row_index[i] : i) * hidden_stride;
  }
  std::int64_t weight_row(std::int64_t j) const { return col_index != nullptr ? col_index[j] : j; }
};

// One group: up to 16 products joined to the accumulator (the bits of an fp32 number).
std::uint32_t replay_group(std::uint32_t acc, const std::uint16_t* a, const std::uint16_t* b, int count,
                           Element type);

struct ReplayKernels {
  const char* isa = "";
  std::size_t scratch_bytes = 0;  // per worker
  void (*run)(const ReplayProduct&, const ChainTile&, void* scratch) = nullptr;
};

const ReplayKernels& replay_kernels_scalar();
const ReplayKernels* replay_kernels_avx512();  // null where the processor or the build lacks it
const ReplayKernels& replay_kernels_best();

}  // namespace rlk::native
