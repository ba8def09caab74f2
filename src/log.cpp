// The only file that includes spdlog: it costs seconds to compile, and nothing else may depend on it.
#include "src/log.hpp"

#include <fmt/format.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>

#include "rlk/printable.hpp"
#include "rlk/rlk.h"
#include "src/cancel.hpp"
#include "src/fork_mutex.hpp"
#include "src/text.hpp"

namespace rlk {
namespace {

constexpr std::string_view kLevels[] = {"trace", "debug", "info", "warn", "error", "off"};

std::atomic<int> stderr_level{static_cast<int>(LogLevel::warn)};

struct Sink {
  bool chosen = false;  // rlk_set_log_sink was called: stderr is out, even when `call` is null
  rlk_log_sink call = nullptr;
  void* context = nullptr;
};
// Never destroyed, like the logger: threads may still log while the process ends.
ForkMutex sink_mutex;
Sink sink;

// An own logger, never spdlog's global registry: the host program may use spdlog too.
spdlog::logger& stderr_logger() {
  static auto* logger = [] {
    auto* made = new spdlog::logger("rlk", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("[%n] [%l] %v");
    made->set_level(spdlog::level::trace);
    made->set_error_handler([](const std::string&) {});
    return made;
  }();
  return *logger;
}
// What a thread makes for the first time while another one forks is never made in the child, which waits for it.
[[maybe_unused]] const auto& stderr_logger_early = stderr_logger();

thread_local HeldLog* held = nullptr;  // this thread's outermost

constexpr spdlog::level::level_enum kSpdlogLevels[] = {spdlog::level::trace, spdlog::level::debug,
                                                       spdlog::level::info,  spdlog::level::warn,
                                                       spdlog::level::err,   spdlog::level::off};

}  // namespace

void log(LogLevel level, std::string_view text) noexcept try {
  if (held) return held->keep(level, text);
  const int number = std::clamp(static_cast<int>(level), 0, static_cast<int>(LogLevel::error));
  const std::string line = printable(text);
  const NoCancel whole;
  Sink now;
  {
    const std::lock_guard lock(sink_mutex);
    now = sink;
  }
  if (now.chosen) {
    // Outside the lock: a sink may take locks of its own (an interpreter's) or log through rlk again.
    if (now.call) now.call(now.context, number, line.c_str());
    return;
  }
  if (number >= stderr_level.load(std::memory_order_relaxed))
    stderr_logger().log(kSpdlogLevels[number], line);
} catch (...) {
}

HeldLog::HeldLog() noexcept {
  if (!held) held = this;
}
HeldLog::~HeldLog() {
  if (held != this) return;
  held = nullptr;
  for (const auto& [level, text] : lines_) log(level, text);
}

void configure_log(std::string_view level) {
  const auto* found = level.empty() ? std::begin(kLevels) + static_cast<int>(LogLevel::warn)
                                    : std::find(std::begin(kLevels), std::end(kLevels), level);
  const bool known = found != std::end(kLevels);
  stderr_level = known ? static_cast<int>(found - std::begin(kLevels)) : static_cast<int>(LogLevel::warn);
  if (!known)
    log(LogLevel::warn, fmt::format("RLK_LOG: {}; 'warn' is used",
                                    unknown_name("level", level, {std::begin(kLevels), std::end(kLevels)})));
}

}  // namespace rlk

extern "C" RLK_API void rlk_set_log_sink(rlk_log_sink call, void* context) {
  const std::lock_guard lock(rlk::sink_mutex);
  rlk::sink = {true, call, context};
}
