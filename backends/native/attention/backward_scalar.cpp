#include "native/attention/backward.hpp"

namespace rlk::native::attn {
constinit const BackwardEngine kBackwardScalar = backward_engine<float, 1>();
}  // namespace rlk::native::attn
