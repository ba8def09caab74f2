#include "native/attention/backward.hpp"

namespace rlk::native::attention {
constinit const BackwardEngine kBackwardScalar = backward_engine<float, 1>();
}  // namespace rlk::native::attention
