#include "native/short_conv/tile.hpp"

namespace rlk::native::short_conv {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::short_conv
