// What scopes say in words: overrides and precisions.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "rlk/options.hpp"
#include "rlk/status.hpp"
#include "src/override.hpp"
#include "src/scope_state.hpp"

namespace rlk {

// Parsed once per (spec, source, snapshot), while it is among those last asked for.
std::shared_ptr<const Override> parsed_override(std::string_view spec, std::string_view source);

// "standard", "strict" or "golden".
Result<Precision> precision_named(std::string_view word);

}  // namespace rlk
