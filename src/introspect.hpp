// What is there, as JSON.
#pragma once

#include <string>
#include <string_view>

#include "rlk/status.hpp"

namespace rlk {

// what: ops, impls, backends, plugins, env
Result<std::string> list_json(std::string_view what);

}  // namespace rlk
