// --version: of the program and of the library it runs with, which may be newer.
#include <cstdio>

#include "commands.hpp"
#include "library.hpp"

namespace rlk::cli {

int version(const Options& options) {
  if (options.json)
    print({{"schema", 1}, {"rlk-dispatch", RLK_VERSION}, {"librlk_registry", rlk_version()}});
  else
    std::printf("rlk-dispatch %s, librlk_registry %s\n", RLK_VERSION, rlk_version());
  return kGood;
}

}  // namespace rlk::cli
