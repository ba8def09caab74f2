// The matrix unit's stand-in by AVX2.
#include "native/lm_head/unit_replay.hpp"

namespace rlk::native {
#if defined(__AVX2__)
const MatrixUnit* replay_unit_avx2() { return &kReplay; }
#else
const MatrixUnit* replay_unit_avx2() { return nullptr; }
#endif
}  // namespace rlk::native
