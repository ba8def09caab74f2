#if defined(__GNUC__) && !defined(__clang__)
#  pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 warns about its own _mm256_undefined_si256
#endif
#include "native/attention/backward_unit.hpp"

namespace rlk::native::attention {
#if defined(__AVX512F__)
const BackwardEngine* amx_backward() {
  return amx_unit() ? &kUnitBackward<simt::Float16, 16, amx_unit> : nullptr;
}
const BackwardEngine* replay_amx_backward_avx512() {
  return &kUnitBackward<simt::Float16, 16, replay_unit<Isa::avx512>>;
}
#else
const BackwardEngine* amx_backward() { return nullptr; }
const BackwardEngine* replay_amx_backward_avx512() { return nullptr; }
#endif
}  // namespace rlk::native::attention
