#include "native/rms_norm/rows.hpp"

namespace rlk::native::rms_norm {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::rms_norm
