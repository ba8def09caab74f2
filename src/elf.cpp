#include "src/elf.hpp"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace rlk {
namespace {

// Pieces are read whole; a plugin whose dynamic symbols need more than this is not one.
constexpr uint64_t kLargestPiece = 64u << 20;

#if defined(__x86_64__)
constexpr uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr uint16_t kMachine = EM_AARCH64;
#elif defined(__riscv)
constexpr uint16_t kMachine = EM_RISCV;
#elif defined(__powerpc64__)
constexpr uint16_t kMachine = EM_PPC64;
#else
#  error "add this machine's ELF number"
#endif

std::string machine_name(uint16_t machine) {
  switch (machine) {
    case EM_386:
      return "i386";
    case EM_X86_64:
      return "x86-64";
    case EM_ARM:
      return "arm";
    case EM_AARCH64:
      return "aarch64";
    case EM_PPC64:
      return "ppc64";
    case EM_RISCV:
      return "riscv";
    case EM_S390:
      return "s390";
    default:
      return fmt::format("machine {}", machine);
  }
}

// Reads `count` records; false when they do not lie within the file or are unreasonably many.
template <class T>
bool read_records(const ElfBytes& bytes, uint64_t offset, uint64_t count, std::vector<T>& out) {
  if (count > kLargestPiece / sizeof(T)) return false;
  const uint64_t size = count * sizeof(T);
  if (offset > bytes.size || size > bytes.size - offset) return false;
  out.resize(count);
  return size == 0 || bytes.read(offset, out.data(), size);
}

// What the file header alone can say.
std::string check_header(const Elf64_Ehdr& header) {
  if (header.e_ident[EI_CLASS] != ELFCLASS64) return "it is a 32-bit object, this process is 64-bit";
  if (header.e_ident[EI_DATA] != ELFDATA2LSB) return "it is big-endian, this machine is little-endian";
  if (header.e_machine != kMachine)
    return fmt::format("it is built for {}, this machine is {}", machine_name(header.e_machine),
                       machine_name(kMachine));
  if (header.e_type != ET_DYN) return "it is not a shared object (compile with -fPIC, link with -shared)";
  if (header.e_shoff == 0 || header.e_shnum == 0)
    return "it has no section table, so its exports cannot be read";
  if (header.e_shentsize != sizeof(Elf64_Shdr)) return "its section table is damaged";
  return {};
}

// Whether a symbol is one that dlsym would find.
bool is_export(const Elf64_Sym& symbol) {
  const unsigned binding = ELF64_ST_BIND(symbol.st_info), visibility = ELF64_ST_VISIBILITY(symbol.st_other);
  return symbol.st_shndx != SHN_UNDEF && (binding == STB_GLOBAL || binding == STB_WEAK) &&
         (visibility == STV_DEFAULT || visibility == STV_PROTECTED) &&
         ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
}

bool has_name(const std::vector<char>& names, uint64_t at, std::string_view name) {
  return at < names.size() && names.size() - at > name.size() &&
         std::memcmp(names.data() + at, name.data(), name.size()) == 0 && names[at + name.size()] == '\0';
}

}  // namespace

std::string check_elf(const ElfBytes& bytes, std::string_view function) {
  Elf64_Ehdr header{};
  // A file shorter than the header may still show that it is for another machine; too short is too short.
  if (bytes.size < sizeof header || !bytes.read(0, &header, sizeof header) ||
      std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
    return "it is not an ELF file";
  if (std::string wrong = check_header(header); !wrong.empty()) return wrong;

  std::vector<Elf64_Shdr> sections;
  if (!read_records(bytes, header.e_shoff, header.e_shnum, sections))
    return "its section table lies outside the file: is it cut off?";
  const auto symbols_section = std::find_if(sections.begin(), sections.end(),
                                            [](const Elf64_Shdr& s) { return s.sh_type == SHT_DYNSYM; });
  if (symbols_section == sections.end()) return fmt::format("it exports nothing; {} is wanted", function);
  if (symbols_section->sh_link >= sections.size() || symbols_section->sh_entsize != sizeof(Elf64_Sym))
    return "its symbol table is damaged";
  const Elf64_Shdr& names_section = sections[symbols_section->sh_link];

  std::vector<Elf64_Sym> symbols;
  std::vector<char> names;
  if (!read_records(bytes, symbols_section->sh_offset, symbols_section->sh_size / sizeof(Elf64_Sym),
                    symbols) ||
      !read_records(bytes, names_section.sh_offset, names_section.sh_size, names))
    return "its symbol table lies outside the file: is it cut off?";
  for (const Elf64_Sym& symbol : symbols)
    if (is_export(symbol) && has_name(names, symbol.st_name, function)) return {};
  return fmt::format("it does not export {} (declare it RLK_EXPORT, and extern \"C\" in C++)", function);
}

}  // namespace rlk
