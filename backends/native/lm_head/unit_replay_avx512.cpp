// The matrix unit's stand-in by AVX-512.
#include "native/lm_head/unit_replay.hpp"

namespace rlk::native {
#if defined(__AVX512F__)
const MatrixUnit* replay_unit_avx512() { return &kReplay; }
#else
const MatrixUnit* replay_unit_avx512() { return nullptr; }
#endif
}  // namespace rlk::native
