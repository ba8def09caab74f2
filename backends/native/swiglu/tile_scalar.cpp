#include "native/swiglu/tile.hpp"

namespace rlk::native::swiglu {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::swiglu
