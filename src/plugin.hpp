// Finding and opening backend plugins: search rules, the checks before a file is loaded, and the
// child-process probe.
//
// A plugin is code that will run with all rights of this process, so:
//  - only absolute paths are ever opened: a path given to the API, folders in RLK_PLUGIN_PATH, and the folder
//    `rlk/` beside the library, found from the library's own address. Never the working directory, never a
//    bare name.
//  - nobody may decide what the path leads to who could not replace the library (plugin_place.hpp).
//  - the file must be an ELF shared object of this machine that exports rlk_backend_query, before anything
//    opens it.
//  - it is first opened in a child process, unless it is trusted: a static initialiser that throws or crashes
//    takes down whoever opens it, and no try block can help.
//
// Trusted is what lies in the library's own folder `rlk/`, and in the folders that RLK_PLUGIN_TRUST lists
// (absolute, separated by ':'; the word "all" means every folder). Trust only skips the child process; the
// other checks always hold.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "rlk/plugin.h"
#include "rlk/status.hpp"
#include "src/plugin_place.hpp"

namespace rlk {

struct PluginFile {
  std::string name;  // backend name from the file name
  std::string path;
  bool trusted = true;  // false: must be probed in a child process before loading
};

// Every librlk_backend_<name>.so of RLK_PLUGIN_PATH and of the plugin folder beside the library, first name
// wins. notes receives what was passed over, and why.
std::vector<PluginFile> find_plugins(std::vector<std::string>* notes = nullptr);

// A plugin named by path, e.g. by rlk_load_plugin. Fails for relative paths and for names that are not a
// plugin's.
Result<PluginFile> plugin_at(std::string_view path);

// What the load came to: a table, or why not. `refused`: a rule of ours said no; otherwise the dynamic linker
// or the plugin itself failed.
struct PluginLoad {
  const rlk_backend* table = nullptr;
  bool refused = false;
  std::string reason;
};
PluginLoad load_plugin(const PluginFile& file);

// A step of load_plugin before the file is opened as code; place_file() is the one before it.
Status check_plugin_elf(const PlacedFile& placed);

// What a child process saw that opened the plugin, asked it for its description and checked that. The child
// is the program rlk-probe in the plugin folder, started by posix_spawn: the child of a plain fork of a
// process with other threads may not even allocate, and forking copies the page tables of a trainer that
// holds a whole model.
struct ProbeReport {
  bool ok = false;
  bool refused = false;  // a rule of ours said no, as in PluginLoad
  std::string reason;
};
inline constexpr std::chrono::milliseconds kProbeLimit{5000};
ProbeReport probe_plugin(const std::string& backend, const PlacedFile& file,
                         std::chrono::milliseconds limit = kProbeLimit);

// The folder `rlk/` beside the library; empty when the library's own place cannot be found.
const std::string& plugin_folder();

}  // namespace rlk
