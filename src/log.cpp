#include "src/log.hpp"

#include <cstdio>

#include "rlk/rlk.h"
namespace rlk {
void log(LogLevel level, std::string_view text) {
  if (level >= LogLevel::warn)
    std::fprintf(stderr, "rlk: %.*s\n", static_cast<int>(text.size()), text.data());
}
}  // namespace rlk
extern "C" void rlk_set_log_sink(rlk_log_sink, void*) {}
