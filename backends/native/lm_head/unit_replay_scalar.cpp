// The matrix unit's stand-in without vector instructions.
#include "native/lm_head/unit_replay.hpp"

namespace rlk::native {
const MatrixUnit& replay_unit_scalar() { return kReplay; }
}  // namespace rlk::native
