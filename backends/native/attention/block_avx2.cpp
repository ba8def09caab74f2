#include "native/attention/block.hpp"

namespace rlk::native::attention {
#if defined(__AVX2__)
constinit const Engine kAvx2 = engine<simt::Float8, 8>();
#else
constinit const Engine kAvx2 = engine<float, 1>();
#endif
}  // namespace rlk::native::attention
