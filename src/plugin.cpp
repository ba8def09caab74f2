#include "src/plugin.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "src/elf.hpp"
#include "src/environment.hpp"
#include "src/host.hpp"
#include "src/plugin_table.hpp"
#include "src/text.hpp"

namespace rlk {
namespace {

constexpr std::string_view kPrefix = "librlk_backend_", kSuffix = ".so";
constexpr const char* kQuery = "rlk_backend_query";

// The path without links and dots; empty when there is no such file.
std::string canonical(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(path.c_str(), nullptr), &std::free);
  return real ? real.get() : "";
}

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? "" : slash == 0 ? "/" : path.substr(0, slash);
}

// The backend name in librlk_backend_<name>.so; empty when the file is called otherwise.
std::string_view backend_name(std::string_view file) {
  if (file.size() <= kPrefix.size() + kSuffix.size() || file.substr(0, kPrefix.size()) != kPrefix ||
      file.substr(file.size() - kSuffix.size()) != kSuffix)
    return {};
  const std::string_view name = file.substr(kPrefix.size(), file.size() - kPrefix.size() - kSuffix.size());
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
  return plain && name != "auto" ? name : std::string_view();
}

std::vector<std::string> split_folders(std::string_view list) {
  std::vector<std::string> folders;
  while (!list.empty()) {
    const auto colon = list.find(':');
    folders.emplace_back(list.substr(0, colon));
    list = colon == std::string_view::npos ? "" : list.substr(colon + 1);
  }
  return folders;
}

std::string library_path() {
  Dl_info info{};
  link_map* map = nullptr;
  static const char anchor = 0;
  if (dladdr1(&anchor, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) && map && map->l_name &&
      map->l_name[0])
    return canonical(map->l_name);
  // Linked into the program itself, whose name as typed says nothing about where it is.
  char program[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof program);
  return length > 0 ? std::string(program, static_cast<std::size_t>(length)) : "";
}

bool is_trusted(const std::string& folder) {
  const std::string real = canonical(folder);
  if (real.empty()) return false;
  if (real == canonical(plugin_folder())) return true;
  const std::vector<std::string> trusted = split_folders(environment().plugin_trust);
  return std::any_of(trusted.begin(), trusted.end(), [&](const std::string& entry) {
    return entry == "all" || (!entry.empty() && entry.front() == '/' && canonical(entry) == real);
  });
}

// Only what is neither absolute nor "all" can be a mistake: a folder that does not exist yet is none.
void check_trust_list(std::vector<std::string>& notes) {
  for (const std::string& entry : split_folders(environment().plugin_trust))
    if (entry.empty() || (entry != "all" && entry.front() != '/'))
      notes.push_back(fmt::format(
          "RLK_PLUGIN_TRUST: {} is neither an absolute folder nor 'all' and trusts nothing", quoted(entry)));
}

std::string system_error(int error) { return std::strerror(error); }

// Who else could have written this? Empty when nobody.
std::string check_owner(const struct stat& s, const std::string& what) {
  if (s.st_uid != 0 && s.st_uid != geteuid())
    return fmt::format("{} belongs to user {}, neither to root nor to user {} who runs this process", what,
                       s.st_uid, geteuid());
  if (s.st_mode & (S_IWGRP | S_IWOTH))
    return fmt::format("{} is writable by {} (mode {:04o}): chmod go-w", what,
                       s.st_mode & S_IWOTH ? "everyone" : "its group", s.st_mode & 07777u);
  return {};
}

std::string check_folder(const std::string& folder) {
  struct stat s{};
  if (stat(folder.c_str(), &s) != 0) return fmt::format("folder '{}': {}", folder, system_error(errno));
  return check_owner(s, fmt::format("its folder '{}'", folder));
}

void search_folder(const std::string& folder, std::vector<PluginFile>& found,
                   std::vector<std::string>& notes) {
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(folder.c_str()), &closedir);
  if (!dir) {
    notes.push_back(fmt::format("'{}': {}", folder, system_error(errno)));
    return;
  }
  std::vector<std::string> files;
  while (const dirent* entry = readdir(dir.get()))
    if (std::string_view(entry->d_name).substr(0, kPrefix.size()) == kPrefix)
      files.emplace_back(entry->d_name);
  std::sort(files.begin(), files.end());  // the order of a directory is nobody's intent
  const bool trusted = is_trusted(folder);
  for (const std::string& file : files) {
    const std::string path = folder + "/" + file;
    const std::string_view name = backend_name(file);
    if (name.empty()) {
      notes.push_back(fmt::format(
          "'{}' is not called librlk_backend_<name>.so with a name of letters, digits, '_' and '-'", path));
      continue;
    }
    const auto first =
        std::find_if(found.begin(), found.end(), [&](const PluginFile& f) { return f.name == name; });
    if (first != found.end()) {
      if (canonical(first->path) != canonical(path))
        notes.push_back(fmt::format("'{}' is hidden by '{}'", path, first->path));
      continue;
    }
    found.push_back({std::string(name), path, trusted});
  }
}

PluginLoad refused(std::string reason) { return {nullptr, true, std::move(reason)}; }
PluginLoad failed(std::string reason) { return {nullptr, false, std::move(reason)}; }

// The plugin's answer, kept inside: its query function is C by contract, but what it calls may throw.
PluginLoad ask(void* handle, const PluginFile& file) try {
  const auto query = reinterpret_cast<rlk_backend_query_fn>(dlsym(handle, kQuery));
  if (!query) return failed(fmt::format("it does not export {}", kQuery));
  const rlk_backend* table = query(RLK_ABI_MAJOR, &host());
  bool refusal = false;
  if (std::string wrong = check_backend_table(table, file.name, refusal); !wrong.empty())
    return refusal ? refused(std::move(wrong)) : failed(std::move(wrong));
  return {table, false, ""};
} catch (const std::exception& e) {
  return failed(fmt::format("its {} threw: {}", kQuery, e.what()));
} catch (...) {
  return failed(fmt::format("its {} threw something that is not a std::exception", kQuery));
}

PluginLoad open_plugin(const PluginFile& file) {
  if (std::string wrong = check_plugin_place(file.path); !wrong.empty()) return refused(std::move(wrong));
  if (std::string wrong = check_plugin_elf(file.path); !wrong.empty()) return refused(std::move(wrong));
  if (!file.trusted)
    if (ProbeReport probe = probe_plugin(file); !probe.ok)
      return {nullptr, probe.refused, std::move(probe.reason)};
  // Never closed: tables, strings and code of a plugin must live for ever.
  void* handle = dlopen(file.path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!handle) {
    const char* why = dlerror();
    return failed(why ? why : "the dynamic linker gave no reason");
  }
  return ask(handle, file);
}

}  // namespace

const std::string& plugin_folder() {
  static const auto* folder = [] {
    const std::string library = library_path();
    return new std::string(library.empty() ? "" : folder_of(library) + "/rlk");
  }();
  return *folder;
}

std::vector<PluginFile> find_plugins(std::vector<std::string>* notes) {
  std::vector<std::string> unwanted;
  std::vector<std::string>& said = notes ? *notes : unwanted;
  std::vector<PluginFile> found;
  check_trust_list(said);
  for (const std::string& folder : split_folders(environment().plugin_path)) {
    if (folder.empty() || folder.front() != '/')
      said.push_back(
          fmt::format("RLK_PLUGIN_PATH: {} is not an absolute folder and is not searched", quoted(folder)));
    else
      search_folder(folder, found, said);
  }
  // No plugins beside the library is an ordinary installation, not worth a note.
  if (!plugin_folder().empty() && access(plugin_folder().c_str(), F_OK) == 0)
    search_folder(plugin_folder(), found, said);
  return found;
}

Result<PluginFile> plugin_at(std::string_view path) {
  if (path.empty() || path.front() != '/')
    return Status(RLK_PLUGIN, fmt::format("{} is not an absolute path; plugins are never looked up by name",
                                          quoted(path)));
  const std::string whole(path);
  const std::string_view name = backend_name(path.substr(path.rfind('/') + 1));
  if (name.empty())
    return Status(
        RLK_PLUGIN,
        fmt::format("'{}' is not called librlk_backend_<name>.so with a name of letters, digits, '_' and '-'",
                    whole));
  return PluginFile{std::string(name), whole, is_trusted(folder_of(whole))};
}

std::string check_plugin_place(const std::string& path) {
  if (path.empty() || path.front() != '/') return "its path is not absolute";
  const std::string real = canonical(path);
  struct stat s{};
  if (real.empty() || stat(real.c_str(), &s) != 0)
    return fmt::format("it cannot be opened: {}", system_error(errno));
  if (!S_ISREG(s.st_mode)) return "it is not a regular file";
  if (std::string wrong = check_owner(s, "the file"); !wrong.empty()) return wrong;
  // Behind a link both folders count: either's writer could decide what is opened.
  if (std::string wrong = check_folder(folder_of(path)); !wrong.empty()) return wrong;
  return folder_of(real) == folder_of(path) ? "" : check_folder(folder_of(real));
}

std::string check_plugin_elf(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat s{};
  if (file < 0 || fstat(file, &s) != 0) {
    const std::string why = system_error(errno);
    if (file >= 0) close(file);
    return fmt::format("it cannot be read: {}", why);
  }
  const ElfBytes bytes{static_cast<uint64_t>(s.st_size), [file](uint64_t offset, void* to, std::size_t size) {
                         char* at = static_cast<char*>(to);
                         while (size) {
                           const ssize_t n = pread(file, at, size, static_cast<off_t>(offset));
                           if (n <= 0) return false;
                           at += n, offset += static_cast<uint64_t>(n), size -= static_cast<std::size_t>(n);
                         }
                         return true;
                       }};
  std::string wrong = check_elf(bytes, kQuery);
  close(file);
  return wrong;
}

PluginLoad load_plugin(const PluginFile& file) {
  PluginLoad load = open_plugin(file);
  if (!load.table) load.reason = fmt::format("'{}': {}", file.path, load.reason);
  return load;
}

}  // namespace rlk
