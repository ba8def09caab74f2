#include "native/ratio_kl/tile.hpp"

namespace rlk::native::ratio_kl {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::ratio_kl
