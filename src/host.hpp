// The services that implementations and plugins are handed.
#pragma once

#include "rlk/plugin.h"

namespace rlk {

const rlk_host& host();

}  // namespace rlk
