#include "native/attention/backward.hpp"

namespace rlk::native::attention {
#if defined(__AVX2__)
constinit const BackwardEngine kBackwardAvx2 = backward_engine<simt::Float8, 8>();
#else
constinit const BackwardEngine kBackwardAvx2 = backward_engine<float, 1>();
#endif
}  // namespace rlk::native::attention
