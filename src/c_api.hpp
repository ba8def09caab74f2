// What all functions of the C face share: nothing is thrown through them, and options are read one way.
#pragma once

#include <string>

#include "rlk/options.hpp"
#include "rlk/status.hpp"

namespace rlk {

// What was thrown, as a code and a text. Says so without memory when there is none.
rlk_code caught() noexcept;

// No exception leaves a function of the C face.
template <class Body>
rlk_code guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (...) {
    return caught();
  }
}
template <class T, class Body>
T guarded_or(T on_failure, Body&& body) noexcept {
  try {
    return body();
  } catch (...) {
    return caught(), on_failure;
  }
}

rlk_code fail(rlk_code code, const std::string& text);

// A pointer that must not be null is: says which.
rlk_code null_argument(const char* name) noexcept;

// The caller's, by the rule for structs that grow; null: all defaults.
Result<Options> read_options(const rlk_options* given);

// For rlk_free; null when there is no memory.
char* copy_text(const std::string& text);

}  // namespace rlk
