#include "src/build_id.hpp"

#include <elf.h>
#include <link.h>

#include <cstring>

namespace rlk {
namespace {

struct Search {
  uintptr_t address;
  uint64_t id = 0;
};

uint64_t id_in_notes(const char* at, const char* end) noexcept {
  while (at + sizeof(ElfW(Nhdr)) <= end) {
    ElfW(Nhdr) note;
    std::memcpy(&note, at, sizeof note);
    const char* name = at + sizeof note;
    const char* content = name + ((note.n_namesz + 3u) & ~3u);
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0 &&
        note.n_descsz >= 8) {
      uint64_t id;
      std::memcpy(&id, content, sizeof id);
      return id;
    }
    at = content + ((note.n_descsz + 3u) & ~3u);
  }
  return 0;
}

int visit(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  bool holds = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& p = info->dlpi_phdr[i];
    const uintptr_t low = info->dlpi_addr + p.p_vaddr;
    if (p.p_type == PT_LOAD && search.address >= low && search.address < low + p.p_memsz) holds = true;
  }
  if (!holds) return 0;
  for (int i = 0; i < info->dlpi_phnum && !search.id; ++i) {
    const auto& p = info->dlpi_phdr[i];
    const auto* start = reinterpret_cast<const char*>(info->dlpi_addr + p.p_vaddr);
    if (p.p_type == PT_NOTE) search.id = id_in_notes(start, start + p.p_memsz);
  }
  return 1;
}

}  // namespace

uint64_t build_id_of(const void* address) noexcept {
  Search search{reinterpret_cast<uintptr_t>(address)};
  dl_iterate_phdr(visit, &search);
  return search.id;
}

}  // namespace rlk
