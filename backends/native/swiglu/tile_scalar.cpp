#include "native/swiglu/tile.hpp"

namespace rlk::native::glu {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::glu
