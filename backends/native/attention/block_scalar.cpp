#include "native/attention/block.hpp"

namespace rlk::native::attention {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::attention
