#include "src/failure.hpp"

#include "rlk/printable.hpp"

namespace rlk {
namespace {
// A fixed buffer: reporting a failure must not need memory.
thread_local char last[1024] = "";
}  // namespace

int32_t set_failure(rlk_code code, const char* text) noexcept {
  if (code == RLK_OK) return code;
  print_into(last, sizeof last, text ? text : "");
  return code;
}

const char* failure_text() noexcept { return last; }

Status failure(rlk_code code) {
  return {code, last[0] ? std::string(last) : "the implementation gave no reason"};
}

}  // namespace rlk
