#include "native/attention/backward_unit.hpp"

namespace rlk::native::attention {
const BackwardEngine* replay_amx_backward_scalar() {
  return &kUnitBackward<float, 1, replay_unit<Isa::scalar>>;
}
}  // namespace rlk::native::attention
