#include "native/logp/tiles.hpp"

namespace rlk::native::logp {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::logp
