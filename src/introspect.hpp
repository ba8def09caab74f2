// What is there, as JSON.
#pragma once

#include <string>
#include <string_view>

#include "rlk/status.hpp"

namespace rlk {

// Moves when a member of any JSON here changes its meaning or goes away; new members do not move it.
inline constexpr int kJsonSchema = 1;

// what: ops, impls, backends, plugins, env
Result<std::string> list_json(std::string_view what);

// The functions of rlk/introspect.h.
Result<std::string> probe_json(std::string_view path);
Result<std::string> examples_json(std::string_view op);

}  // namespace rlk
