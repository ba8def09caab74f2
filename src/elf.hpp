// Reads just enough of an ELF file to know whether opening it can work: right class, right machine, a shared
// object, the wanted function among its exports. Bytes come from strangers: every offset is checked, nothing
// is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace rlk {

// Random access to the bytes of a file: copies `size` bytes at `offset`, false when they are not all there.
struct ElfBytes {
  uint64_t size = 0;
  std::function<bool(uint64_t offset, void* to, std::size_t size)> read;
};

// Empty when the file is a shared object for this machine that exports `function`; else why it is not, in
// words.
std::string check_elf(const ElfBytes& bytes, std::string_view function);

}  // namespace rlk
