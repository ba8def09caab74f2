#include "library.hpp"

#include <cstdio>

namespace rlk::cli {

Exit exit_for(int code) noexcept {
  switch (code) {
    case RLK_OK:
      return kGood;
    case RLK_NO_IMPLEMENTATION:
    case RLK_UNSUPPORTED:
      return kNoImplementation;
    case RLK_PLUGIN:
      return kPluginFailed;
    default:
      return kUsage;
  }
}

void check(rlk_code code) {
  if (code != RLK_OK) throw Failure(exit_for(code), rlk_last_error());
}

Json parse(char* text, Exit otherwise) {
  if (!text) throw Failure(otherwise, rlk_last_error());
  const std::string copy = text;
  rlk_free(text);
  return Json::parse(copy);
}

Json listed(const char* what) { return parse(rlk_list_json(what)); }

void check_configuration() {
  const Json env = listed("env");
  const std::string error = env["env"]["error"];
  if (!error.empty()) throw Failure(kUsage, error);
}

void print(const Json& json) { std::puts(json.dump(2).c_str()); }

}  // namespace rlk::cli
