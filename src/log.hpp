// Log lines go to the caller's sink, or to stderr through spdlog at the level RLK_LOG names (default: warn).
#pragma once

#include <string_view>

namespace rlk {

enum class LogLevel : int { trace = 0, debug = 1, info = 2, warn = 3, error = 4, off = 5 };

// Never throws and never fails: a line that cannot be written is lost.
void log(LogLevel level, std::string_view text) noexcept;

// Sets the level of stderr from the text of RLK_LOG; a word that is no level is reported and means warn.
void configure_log(std::string_view level);

}  // namespace rlk
