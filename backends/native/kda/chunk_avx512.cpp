#include "native/kda/engine.hpp"

namespace rlk::kda::chunked {
#if defined(__AVX512F__)
constinit const Engine kAvx512 = engine<simt::Float16, 16>("avx512");
#else
constinit const Engine kAvx512 = engine<float, 1>("portable");
#endif
}  // namespace rlk::kda::chunked
