#include "native/attention/backward.hpp"

namespace rlk::native::attention {
#if defined(__AVX512F__)
constinit const BackwardEngine kBackwardAvx512 = backward_engine<simt::Float16, 16>();
#else
constinit const BackwardEngine kBackwardAvx512 = backward_engine<float, 1>();
#endif
}  // namespace rlk::native::attention
