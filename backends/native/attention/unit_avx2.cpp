#include "native/attention/unit_block.hpp"

namespace rlk::native::attention {
#if defined(__AVX2__)
const Engine* replay_amx_avx2() { return &kUnitEngine<simt::Float8, 8, replay_unit<Isa::avx2>>; }
#else
const Engine* replay_amx_avx2() { return nullptr; }
#endif
}  // namespace rlk::native::attention
