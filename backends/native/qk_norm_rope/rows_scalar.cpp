#include "native/qk_norm_rope/rows.hpp"

namespace rlk::native::qk_norm_rope {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::qk_norm_rope
