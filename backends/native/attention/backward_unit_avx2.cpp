#include "native/attention/backward_unit.hpp"

namespace rlk::native::attention {
#if defined(__AVX2__)
const BackwardEngine* replay_amx_backward_avx2() {
  return &kUnitBackward<simt::Float8, 8, replay_unit<Isa::avx2>>;
}
#else
const BackwardEngine* replay_amx_backward_avx2() { return nullptr; }
#endif
}  // namespace rlk::native::attention
