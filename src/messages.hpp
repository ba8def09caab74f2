// Why something that was asked for by name does not serve a call: five situations, five messages that cannot
// be taken for one another. A user who reads one knows whether to correct a word, rebuild, install, move, or
// change the call.
#pragma once

#include <string>
#include <string_view>

#include "src/backend.hpp"

namespace rlk {

// 1. The name is unknown: unknown_name() in text.hpp.
// 2. Known, but not built into this installation.
std::string not_built(std::string_view backend);
// 3. Built, but not loaded, and why.
std::string not_loaded(std::string_view backend, bool refused, std::string_view why);
// 4. Loaded, but there is no device for it, and why.
std::string no_device(std::string_view backend, std::string_view why);
// 5. It runs here, but refused this request, and why.
std::string refused_request(std::string_view implementation, std::string_view why);

// 2 to 4 by the state of a backend, and the smallest change that would make it ready; empty texts for one
// that is. Put into words once: candidates hold views of it.
const Outage& outage_of(Backend& backend);

}  // namespace rlk
