#include "native/short_conv/tile.hpp"

namespace rlk::native::short_conv {
#if defined(__AVX2__)
constinit const Engine kAvx2 = engine<simt::Float8, 8>();
#else
constinit const Engine kAvx2 = engine<float, 1>();
#endif
}  // namespace rlk::native::short_conv
