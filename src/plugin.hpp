// Finding and opening backend plugins: search rules, the checks before a file is loaded, and the
// child-process probe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rlk/plugin.h"
#include "rlk/status.hpp"

namespace rlk {

struct PluginFile {
  std::string name;  // backend name from the file name
  std::string path;
  bool trusted = true;  // false: from a place that must be probed in a child process before loading
};

// Every librlk_backend_<name>.so of RLK_PLUGIN_PATH and of the plugin folder beside the library, first name
// wins.
std::vector<PluginFile> find_plugins();

// What the load came to: a table, or why not. `refused`: a rule of ours said no before loading; otherwise the
// dynamic linker or the plugin itself failed.
struct PluginLoad {
  const rlk_backend* table = nullptr;
  bool refused = false;
  std::string reason;
};
PluginLoad load_plugin(const PluginFile& file);

// Loads the plugin in a child process with a time limit and reports what happened there in words; ok when it
// came back with a valid table.
Status probe_plugin(const std::string& path);

}  // namespace rlk
