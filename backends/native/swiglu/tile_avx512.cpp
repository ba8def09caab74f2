#include "native/swiglu/tile.hpp"

namespace rlk::native::swiglu {
#if defined(__AVX512F__)
constinit const Engine kAvx512 = engine<simt::Float16, 16>();
#else
constinit const Engine kAvx512 = engine<float, 1>();
#endif
}  // namespace rlk::native::swiglu
