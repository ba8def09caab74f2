#include "native/ratio_kl/tile.hpp"

namespace rlk::native::ratio_kl {
#if defined(__AVX2__)
constinit const Engine kAvx2 = engine<simt::Float8, 8>();
#else
constinit const Engine kAvx2 = engine<float, 1>();
#endif
}  // namespace rlk::native::ratio_kl
