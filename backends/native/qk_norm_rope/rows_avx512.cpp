#include "native/qk_norm_rope/rows.hpp"

namespace rlk::native::qk_norm_rope {
#if defined(__AVX512F__)
constinit const Engine kAvx512 = engine<simt::Float16, 16>();
#else
constinit const Engine kAvx512 = engine<float, 1>();
#endif
}  // namespace rlk::native::qk_norm_rope
