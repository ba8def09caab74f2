#include "src/failure.hpp"

#include "rlk/printable.hpp"

namespace rlk {
namespace {
// A fixed buffer: reporting a failure must not need memory.
thread_local char last[1024] = "";
}  // namespace

int32_t set_failure(int32_t code, const char* text) noexcept {
  if (code == RLK_OK) return code;
  print_into(last, sizeof last, text ? text : "");
  return code;
}

const char* failure_text() noexcept { return last; }

Status failure(int32_t code) {
  if (!is_code(code))
    return {RLK_BACKEND_ERROR,
            "an implementation returned " + std::to_string(code) + " from its run, which is no rlk_code"};
  return {static_cast<rlk_code>(code), last[0] ? std::string(last) : "the implementation gave no reason"};
}

}  // namespace rlk
