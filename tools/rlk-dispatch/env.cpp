// --env: the variables rlk reads, what they are set to, and whether they make sense.
#include <cstdio>

#include "commands.hpp"
#include "library.hpp"
#include "table.hpp"

namespace rlk::cli {

int env(const Options& options) {
  const Json all = listed("env");
  const Json& env = all["env"];
  const std::string error = env["error"];
  if (options.json) {
    print(all);
  } else {
    Table table({"variable", "value", "meaning"});
    for (const Json& v : env["variables"])
      table.row({v["name"], v["set"] ? v["value"].get<std::string>() : "(not set)", v["meaning"]});
    table.print();
    std::printf("\ninstruction sets in use: %s\n", env["cpu"].get<std::string>().c_str());
    if (env["ignored"]) std::puts("All are ignored: this process runs with raised rights.");
  }
  if (!error.empty()) throw Failure(kUsage, error);
  return kGood;
}

}  // namespace rlk::cli
