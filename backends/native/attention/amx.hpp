// attention's blocks on Intel's matrix unit (arithmetic amx/k32/attn128/s<S>), for processors that have it.
#pragma once

#include "native/attention/engine.hpp"

namespace rlk::native::attention {

// Null where this build lacks it.
const Engine* amx_engine();
std::int64_t amx_scratch_floats(const Problem& p);

}  // namespace rlk::native::attention
