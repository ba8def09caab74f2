// The reader of plugin headers on damaged files: bytes as they come, and a small valid shared object with
// some of its bytes replaced, which reaches every check.
#include <elf.h>
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "src/elf.hpp"

namespace {

constexpr char kNames[] = "\0rlk_backend_query\0other";

struct Image {
  Elf64_Ehdr header{};
  Elf64_Shdr sections[3]{};
  Elf64_Sym symbols[3]{};
  char names[sizeof kNames];
};

// The least that check_elf accepts: a header, a symbol table and its names.
Image valid() {
  Image image;
  std::memcpy(image.header.e_ident, ELFMAG, SELFMAG);
  image.header.e_ident[EI_CLASS] = ELFCLASS64;
  image.header.e_ident[EI_DATA] = ELFDATA2LSB;
  image.header.e_type = ET_DYN;
#if defined(__x86_64__)
  image.header.e_machine = EM_X86_64;
#else
  image.header.e_machine = EM_AARCH64;
#endif
  image.header.e_shoff = offsetof(Image, sections);
  image.header.e_shnum = 3;
  image.header.e_shentsize = sizeof(Elf64_Shdr);
  image.sections[1].sh_type = SHT_DYNSYM;
  image.sections[1].sh_offset = offsetof(Image, symbols);
  image.sections[1].sh_size = sizeof image.symbols;
  image.sections[1].sh_entsize = sizeof(Elf64_Sym);
  image.sections[1].sh_link = 2;
  image.sections[2].sh_type = SHT_STRTAB;
  image.sections[2].sh_offset = offsetof(Image, names);
  image.sections[2].sh_size = sizeof kNames;
  for (Elf64_Sym& symbol : image.symbols) symbol.st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC);
  image.symbols[1].st_name = 19, image.symbols[1].st_shndx = 1;
  image.symbols[2].st_name = 1, image.symbols[2].st_shndx = 1;
  std::memcpy(image.names, kNames, sizeof kNames);
  return image;
}

std::string check(const std::vector<uint8_t>& bytes) {
  const rlk::ElfBytes file{bytes.size(), [&](uint64_t offset, void* to, std::size_t size) {
                             // What a file would refuse, the reader must not even ask for.
                             if (offset > bytes.size() || size > bytes.size() - offset) std::abort();
                             std::memcpy(to, bytes.data() + offset, size);
                             return true;
                           }};
  return rlk::check_elf(file, "rlk_backend_query");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  check({data, data + size});

  const Image image = valid();
  const auto* first = reinterpret_cast<const uint8_t*>(&image);
  std::vector<uint8_t> bytes(first, first + sizeof image);
  static const bool accepted = check(bytes).empty();
  if (!accepted) std::abort();
  FuzzedDataProvider input(data, size);
  while (input.remaining_bytes() > 0) {
    const std::size_t at = input.ConsumeIntegralInRange<std::size_t>(0, bytes.size() - 1);
    const std::vector<uint8_t> patch =
        input.ConsumeBytes<uint8_t>(input.ConsumeIntegralInRange<std::size_t>(1, 8));
    for (std::size_t i = 0; i < patch.size() && at + i < bytes.size(); ++i) bytes[at + i] = patch[i];
    if (input.ConsumeIntegralInRange(0, 31) == 0)
      bytes.resize(input.ConsumeIntegralInRange<std::size_t>(1, bytes.size()));
  }
  for (const char c : check(bytes))
    if (c < 0x20 || c >= 0x7f) std::abort();
  return 0;
}
