#include "src/environment.hpp"

#include <fmt/format.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "src/fork_mutex.hpp"
#include "src/log.hpp"
#include "src/text.hpp"

namespace rlk {
namespace {

// There are no others; a seventh needs a line here, in Environment, in env_json and in the README.
struct Variable {
  const char* name;
  std::string Environment::* field;
};
constexpr Variable kVariables[] = {{"RLK_BACKEND", &Environment::backend},
                                   {"RLK_PLUGIN_PATH", &Environment::plugin_path},
                                   {"RLK_PLUGIN_TRUST", &Environment::plugin_trust},
                                   {"RLK_LOG", &Environment::log},
                                   {"RLK_CPU", &Environment::cpu},
                                   {"RLK_TRACE", &Environment::trace}};

// Every environment that was ever read stays, once: references to it are out.
ForkMutex history_mutex;
std::vector<std::unique_ptr<const Environment>>& history() {
  static auto* all = new std::vector<std::unique_ptr<const Environment>>;
  return *all;
}
std::atomic<const Environment*> current{nullptr};

std::unique_ptr<const Environment> read() {
  auto read = std::make_unique<Environment>();
  // The kernel's word for "runs with more rights than who started it": setuid, setgid or file capabilities.
  read->secure = getauxval(AT_SECURE) != 0;
  if (!read->secure)
    for (const Variable& v : kVariables)
      if (const char* value = secure_getenv(v.name)) (*read).*v.field = value;
  return read;
}

// Names of the process's RLK_ variables, known or not.
std::vector<std::string> present_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view line = *entry;
    if (line.substr(0, 4) == "RLK_") names.emplace_back(line.substr(0, line.find('=')));
  }
  return names;
}

void report(const Environment& env) {
  const std::vector<std::string> present = present_variables();
  if (env.secure) {
    static std::atomic<bool> said{false};
    if (!present.empty() && !said.exchange(true))
      log(LogLevel::warn,
          fmt::format("this process runs with raised rights: {} ignored", fmt::join(present, ", ")));
    return;
  }
  std::vector<std::string_view> known;
  for (const Variable& v : kVariables) known.emplace_back(v.name);
  // What resembles none is another program's, or a build system's: RLK_ is not this library's alone.
  for (const std::string& name : present)
    if (std::find(known.begin(), known.end(), name) == known.end() && !nearest_name(name, known).empty())
      log(LogLevel::warn, unknown_name("variable", name, known));
}

// Reports only after the new values are out and the lock is free: a log sink may ask the library.
const Environment& publish(bool reload) {
  const Environment* now = nullptr;
  {
    const std::lock_guard lock(history_mutex);
    if (!reload && current) return *current;
    std::unique_ptr<const Environment> fresh = read();
    for (const auto& old : history())
      if (*old == *fresh) now = old.get();
    if (!now) {
      history().push_back(std::move(fresh));
      now = history().back().get();
    }
    current = now;
  }
  configure_log(now->log);
  report(*now);
  return *now;
}

}  // namespace

const Environment& environment() {
  const Environment* now = current.load(std::memory_order_acquire);
  return now ? *now : publish(false);
}

void reload_environment_variables() { publish(true); }

}  // namespace rlk
