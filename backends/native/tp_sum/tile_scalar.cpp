#include "native/tp_sum/tile.hpp"

namespace rlk::native::tp_sum {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::tp_sum
