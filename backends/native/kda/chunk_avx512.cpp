#include "native/kda/engine.hpp"

namespace rlk::native::kda {
#if defined(__AVX512F__)
constinit const Engine kAvx512 = engine<simt::Float16, 16>("avx512");
#else
constinit const Engine kAvx512 = engine<float, 1>("portable");
#endif
}  // namespace rlk::native::kda
