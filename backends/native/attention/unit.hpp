// attention's blocks on a matrix unit (arithmetic amx/k32/attn128/s<S>): Intel's, or what stands for it on other processors.
#pragma once

#include "native/attention/backward_engine.hpp"
#include "native/lm_head/unit.hpp"

namespace rlk::native::attention {

// Null where this build lacks it.
const Engine* amx_engine();
const Engine* replay_amx_scalar();
const Engine* replay_amx_avx2();
const Engine* replay_amx_avx512();
template <Isa I>
const Engine* replay_amx() {
  if constexpr (I == Isa::avx512) return replay_amx_avx512();
  if constexpr (I == Isa::avx2) return replay_amx_avx2();
  return replay_amx_scalar();
}

// Likewise, of the gradients.
const BackwardEngine* amx_backward();
const BackwardEngine* replay_amx_backward_scalar();
const BackwardEngine* replay_amx_backward_avx2();
const BackwardEngine* replay_amx_backward_avx512();
template <Isa I>
const BackwardEngine* replay_amx_backward() {
  if constexpr (I == Isa::avx512) return replay_amx_backward_avx512();
  if constexpr (I == Isa::avx2) return replay_amx_backward_avx2();
  return replay_amx_backward_scalar();
}

// Scratch as what operands are.
template <class T>
std::byte* bytes(T* x) {
  return reinterpret_cast<std::byte*>(x);
}
inline std::uint16_t* halves(float* x) { return reinterpret_cast<std::uint16_t*>(x); }
// A row of `width`, or zeros where it is null, with zeros behind up to `room`.
inline void copy_row(const void* from, std::int64_t width, std::uint16_t* to, std::int64_t room) {
  if (from == nullptr) width = 0;
  if (width > 0) std::memcpy(to, from, static_cast<std::size_t>(2 * width));
  std::fill(to + width, to + room, std::uint16_t{0});
}

inline std::int64_t steps_of(const Problem& p) { return up(p.width, kStep) / kStep; }
inline std::int64_t columns_of(const Problem& p) { return up(p.value_width, kWidth); }

// Of a product of fewer rows than it takes, which reads and writes beyond them.
inline constexpr int kSpareRows = kWidth - 1;
inline std::int64_t unit_scratch_floats(const Problem& p) {
  constexpr std::int64_t kUnitFloats = native::kTile / 4, kSteps = kTile / kStep, kGroups = kTile / kSide,
                         kAll = kRows + kSpareRows;
  const std::int64_t steps = steps_of(p), depth = steps * kStep, columns = columns_of(p);
  const std::int64_t operands = kGroups * steps * kUnitFloats + columns / kSide * kSteps * kUnitFloats +
                                kAll * (depth + kTile) / 2 + kStep * std::max(depth, columns) / 2 +
                                kWidth * columns;
  return operands + kAll * (kTile + columns) + std::int64_t{kRows} * p.value_width + 4 * kRows;
}

}  // namespace rlk::native::attention
