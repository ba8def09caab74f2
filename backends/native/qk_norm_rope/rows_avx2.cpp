#include "native/qk_norm_rope/rows.hpp"

namespace rlk::native::qk_norm_rope {
#if defined(__AVX2__)
constinit const Engine kAvx2 = engine<simt::Float8, 8>();
#else
constinit const Engine kAvx2 = engine<float, 1>();
#endif
}  // namespace rlk::native::qk_norm_rope
