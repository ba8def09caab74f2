#if defined(__GNUC__) && !defined(__clang__)
#  pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 warns about its own _mm256_undefined_si256
#endif
#include "native/attention/unit_block.hpp"

namespace rlk::native::attention {
#if defined(__AVX512F__)
const Engine* amx_engine() { return amx_unit() ? &kUnitEngine<simt::Float16, 16, amx_unit> : nullptr; }
const Engine* replay_amx_avx512() { return &kUnitEngine<simt::Float16, 16, replay_unit<Isa::avx512>>; }
#else
const Engine* amx_engine() { return nullptr; }
const Engine* replay_amx_avx512() { return nullptr; }
#endif
}  // namespace rlk::native::attention
