#include "native/tp_sum/tile.hpp"

namespace rlk::native::tp_sum {
#if defined(__AVX2__)
constinit const Engine kAvx2 = engine<simt::Float8, 8>();
#else
constinit const Engine kAvx2 = engine<float, 1>();
#endif
}  // namespace rlk::native::tp_sum
