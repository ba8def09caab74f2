#include "native/short_conv/tile.hpp"

namespace rlk::native::short_conv {
#if defined(__AVX512F__)
constinit const Engine kAvx512 = engine<simt::Float16, 16>();
#else
constinit const Engine kAvx512 = engine<float, 1>();
#endif
}  // namespace rlk::native::short_conv
