// The one reader of the process environment. All RLK_ variables are ignored in setuid, setgid and
// file-capability processes, which is said once in the log.
#pragma once

#include <string>

namespace rlk {

struct Environment {
  std::string backend;       // RLK_BACKEND
  std::string plugin_path;   // RLK_PLUGIN_PATH
  std::string plugin_trust;  // RLK_PLUGIN_TRUST
  std::string log;           // RLK_LOG
  std::string cpu;           // RLK_CPU
  std::string trace;         // RLK_TRACE
  bool secure = false;       // true: variables were ignored
  bool operator==(const Environment&) const = default;
};

// Read by the first call of the process; the reference stays valid when another thread reloads.
const Environment& environment();
void reload_environment_variables();

}  // namespace rlk
