#include "src/failure.hpp"

#include "rlk/printable.hpp"
#include "src/thread_state.hpp"

namespace rlk {

int32_t set_failure(int32_t code, const char* text) noexcept {
  if (code == RLK_OK) return code;
  if (ThreadState* state = ThreadState::get())
    print_into(state->failure, sizeof state->failure, text ? text : "");
  return code;
}

const char* failure_text() noexcept { return ThreadState::here ? ThreadState::here->failure : ""; }

Status failure(int32_t code) {
  if (!is_code(code))
    return {RLK_BACKEND_ERROR,
            "an implementation returned " + std::to_string(code) + " from its run, which is no rlk_code"};
  const char* last = failure_text();
  return {static_cast<rlk_code>(code), last[0] ? std::string(last) : "the implementation gave no reason"};
}

}  // namespace rlk
