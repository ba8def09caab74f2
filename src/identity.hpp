// What code would run and on what: the words by which a certificate and a running process are held against
// each other.
#pragma once

#include <string>

#include "src/backend.hpp"

namespace rlk {

// The library itself, by the linker's build id.
std::string library_build();

// A backend's object, by its build id, else by the digest of its file; empty when it has neither, and then
// nothing can be said to be the same code.
std::string build_of(const Backend& backend);

// "NVIDIA H200", or the processor's model.
std::string device_text(const rlk_device& device);

// The instruction set that CPU code may use now: "avx512". Empty on a GPU.
std::string level_text(const rlk_device& device);

// Driver and libraries, in the backend's own words; empty when it has none.
std::string versions_text(const Backend& backend, const rlk_device& device);

}  // namespace rlk
