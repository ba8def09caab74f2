// The calling thread's last failure: how text crosses the C boundary.
#pragma once

#include "rlk/status.hpp"

namespace rlk {

// Keeps the text as print_into() shows it; null: no reason is given.
int32_t set_failure(int32_t code, const char* text) noexcept;
inline rlk_code set_failure(const Status& s) noexcept {
  return static_cast<rlk_code>(set_failure(s.code(), s.message().data()));
}
// Whether a number that came from a plugin is one of rlk_code.
inline bool is_code(int32_t code) noexcept { return code >= RLK_OK && code <= RLK_INTERNAL; }
const char* failure_text() noexcept;
// The last failure as a Status with this code.
// RLK_BACKEND_ERROR where it is no rlk_code.
Status failure(int32_t code);

}  // namespace rlk
