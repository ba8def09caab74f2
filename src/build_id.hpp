// The linker's build id of the object (library or plugin) that holds an address: names the code that ran.
#pragma once

#include <cstdint>
#include <string>

namespace rlk {

// First 64 bits of the GNU build id; 0 when the object has none.
uint64_t build_id_of(const void* address) noexcept;

}  // namespace rlk
