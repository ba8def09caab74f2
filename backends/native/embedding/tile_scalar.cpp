#include "native/embedding/tile.hpp"

namespace rlk::native::embedding {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::embedding
