// Log lines go to the caller's sink, or to stderr through spdlog at the level RLK_LOG names (default: warn).
#pragma once

#include <string_view>

namespace rlk {

enum class LogLevel : int { trace = 0, debug = 1, info = 2, warn = 3, error = 4, off = 5 };
void log(LogLevel level, std::string_view text);

}  // namespace rlk
