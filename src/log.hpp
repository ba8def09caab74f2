// Log lines go to the caller's sink, or to stderr through spdlog at the level RLK_LOG names (default: warn).
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rlk {

enum class LogLevel : int { trace = 0, debug = 1, info = 2, warn = 3, error = 4, off = 5 };

// Never throws and never fails: a line that cannot be written is lost. Lines are shown as printable.hpp shows
// them.
void log(LogLevel level, std::string_view text) noexcept;

// Sets the level of stderr from the text of RLK_LOG; a word that is no level is reported and means warn.
void configure_log(std::string_view level);

// While one lives, what this thread logs waits until it goes. A sink may ask the library, so nothing is said
// under a lock, nor while something is done that may be done only once. Inside another one it does nothing.
class HeldLog {
 public:
  HeldLog() noexcept;
  ~HeldLog();
  HeldLog(const HeldLog&) = delete;
  HeldLog& operator=(const HeldLog&) = delete;
  void keep(LogLevel level, std::string_view text) { lines_.emplace_back(level, text); }

 private:
  std::vector<std::pair<LogLevel, std::string>> lines_;
};

}  // namespace rlk
