#include "native/attention/block.hpp"

namespace rlk::native::attention {
#if defined(__AVX512F__)
constinit const Engine kAvx512 = engine<simt::Float16, 16>();
#else
constinit const Engine kAvx512 = engine<float, 1>();
#endif
}  // namespace rlk::native::attention
