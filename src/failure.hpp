// The calling thread's last failure: how text crosses the C boundary.
#pragma once

#include "rlk/status.hpp"

namespace rlk {

int32_t set_failure(rlk_code code, const char* text) noexcept;
inline rlk_code set_failure(const Status& s) noexcept {
  return static_cast<rlk_code>(set_failure(s.code(), s.message().data()));
}
const char* failure_text() noexcept;
// The last failure as a Status with this code.
Status failure(rlk_code code);

}  // namespace rlk
