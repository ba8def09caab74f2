#include "src/environment.hpp"

#include <cstdlib>
namespace rlk {
namespace {
Environment read() {
  auto get = [](const char* n) {
    const char* v = secure_getenv(n);
    return std::string(v ? v : "");
  };
  return {get("RLK_BACKEND"), get("RLK_PLUGIN_PATH"), get("RLK_PLUGIN_TRUST"), get("RLK_LOG"), false};
}
Environment& current() {
  static Environment e = read();
  return e;
}
}  // namespace
const Environment& environment() { return current(); }
void reload_environment_variables() { current() = read(); }
}  // namespace rlk
