#include "native/attention/unit_block.hpp"

namespace rlk::native::attention {
const Engine* replay_amx_scalar() { return &kUnitEngine<float, 1, replay_unit<Isa::scalar>>; }
}  // namespace rlk::native::attention
