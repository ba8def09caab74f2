// What a plugin's description must satisfy before anyone looks further into it. Used by the library and by
// rlk-probe.
#pragma once

#include <string_view>

#include "rlk/plugin.h"
#include "rlk/status.hpp"

namespace rlk {

// Fine when the description is complete and of a version this host reads. RLK_UNSUPPORTED when the version or
// a struct size is the reason, RLK_PLUGIN when the description is wrong.
Status check_backend_table(const rlk_backend* table, std::string_view expected_name);

}  // namespace rlk
