#include "native/kda/engine.hpp"

namespace rlk::native::kda {
#if defined(__AVX2__)
constinit const Engine kAvx2 = engine<simt::Float8, 8>("avx2");
#else
constinit const Engine kAvx2 = engine<float, 1>("portable");
#endif
}  // namespace rlk::native::kda
