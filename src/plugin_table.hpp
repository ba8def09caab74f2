// What a plugin's description must satisfy before anyone looks further into it. Used by the library and by
// rlk-probe.
#pragma once

#include <string>
#include <string_view>

#include "rlk/plugin.h"

namespace rlk {

// Empty when the description is complete and of a version this host reads; else why not. `refusal` is set
// when the version or a struct size is the reason.
std::string check_backend_table(const rlk_backend* table, std::string_view expected_name, bool& refusal);

}  // namespace rlk
