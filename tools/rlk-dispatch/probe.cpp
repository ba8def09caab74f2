// --probe PLUGIN: every check that loading the file would make, in order, without loading it into this
// process.
#include <climits>
#include <cstdio>
#include <cstdlib>

#include "commands.hpp"
#include "library.hpp"
#include "rlk/introspect.h"
#include "table.hpp"

namespace rlk::cli {

namespace {

// What is no plugin by its name fails the first check.
Json probed(const std::string& path) {
  if (char* text = rlk_probe_json(path.c_str())) return parse(text);
  const Json name = {{"check", "name"}, {"ok", false}, {"reason", printable(rlk_last_error())}};
  return {{"schema", 1}, {"path", printable(path)},      {"name", ""}, {"trusted", false},
          {"ok", false}, {"checks", Json::array({name})}};
}

}  // namespace

int probe(const Options& options) {
  // On a command line a relative path is what the user sees before them; the library itself takes none.
  char absolute[PATH_MAX];
  const bool relative = options.plugin.find('/') != 0;
  const std::string path = relative && realpath(options.plugin.c_str(), absolute) ? absolute : options.plugin;
  const Json result = probed(path);
  if (options.json) {
    print(result);
  } else {
    std::printf(
        "plugin   %s\nbackend  %s\ntrusted  %s\n", printable(path).c_str(),
        result["name"].get<std::string>().c_str(),
        result["trusted"] ? "yes: loaded without a child process" : "no: a child process tries it first");
    Table table({"check", "passed", "reason"});
    for (const Json& c : result["checks"]) table.row({c["check"], c["ok"] ? "yes" : "no", c["reason"]});
    table.print();
  }
  return result["ok"] ? kGood : kPluginFailed;
}

}  // namespace rlk::cli
