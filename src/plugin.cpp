#include "src/plugin.hpp"

#include <dirent.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

std::string misnamed(const std::string& path) {
  return fmt::format("{} is not called librlk_backend_<name>.so with a name of letters, digits, '_' and '-'",
                     quoted_path(path));
}

bool is_absolute(std::string_view path) { return !path.empty() && path.front() == '/'; }

bool is_trusted(const std::string& folder) {
  const std::string real = canonical(folder);
  if (real.empty()) return false;
  if (real == canonical(plugin_folder())) return true;
  for (const std::string_view entry : split(environment().plugin_trust, ':'))
    if (entry == "all" || (is_absolute(entry) && canonical(std::string(entry)) == real)) return true;
  return false;
}

// Only what is neither absolute nor "all" can be a mistake: a folder that does not exist yet is none.
void check_trust_list(std::vector<std::string>& notes) {
  for (const std::string_view entry : split(environment().plugin_trust, ':'))
    if (entry != "all" && !is_absolute(entry))
      notes.push_back(fmt::format(
          "RLK_PLUGIN_TRUST: {} is neither an absolute folder nor 'all' and trusts nothing", quoted(entry)));
}

void search_folder(const std::string& folder, std::vector<PluginFile>& found,
                   std::vector<std::string>& notes) {
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(opendir(folder.c_str()), &closedir);
  if (!dir) {
    const int error = errno;
    notes.push_back(fmt::format("{}: {}", quoted_path(folder), std::strerror(error)));
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
      notes.push_back(misnamed(path));
      continue;
    }
    const auto first =
        std::find_if(found.begin(), found.end(), [&](const PluginFile& f) { return f.name == name; });
    if (first != found.end()) {
      if (canonical(first->path) != canonical(path))
        notes.push_back(fmt::format("{} is hidden by {}", quoted_path(path), quoted_path(first->path)));
      continue;
    }
    found.push_back({std::string(name), path, trusted});
  }
}

PluginLoad refused(const Status& why) { return {nullptr, true, std::string(why.message())}; }
PluginLoad failed(std::string reason) { return {nullptr, false, std::move(reason)}; }

// The plugin's answer, kept inside: its query function is C by contract, but what it calls may throw.
PluginLoad ask(void* handle, const PluginFile& file) try {
  const auto query = reinterpret_cast<rlk_backend_query_fn>(dlsym(handle, kQuery));
  if (!query) return failed(fmt::format("it does not export {}", kQuery));
  const rlk_backend* table = query(RLK_ABI_MAJOR, &host());
  if (Status s = check_backend_table(table, file.name); !s)
    return s.code() == RLK_UNSUPPORTED ? refused(s) : failed(std::string(s.message()));
  return {table, false, ""};
} catch (const std::exception& e) {
  return failed(fmt::format("its {} threw: {}", kQuery, e.what()));
} catch (...) {
  return failed(fmt::format("its {} threw something that is not a std::exception", kQuery));
}

PluginLoad open_plugin(const PluginFile& file) {
  const Result<PlacedFile> placed = place_file(file.path);
  if (!placed) return refused(placed.status());
  if (Status s = check_plugin_elf(*placed); !s) return refused(s);
  if (!file.trusted)
    if (ProbeReport probe = probe_plugin(file.name, *placed); !probe.ok)
      return {nullptr, probe.refused, std::move(probe.reason)};
  if (Status s = check_unchanged(*placed); !s) return refused(s);
  // Never closed: tables, strings and code of a plugin must live for ever.
  void* handle = dlopen(placed->path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!handle) {
    const char* why = dlerror();
    return failed(why ? why : "the dynamic linker gave no reason");
  }
  return ask(handle, file);
}

}  // namespace

const std::string& plugin_folder() {
  static const auto* folder = [] {
    const std::string& library = library_path();
    return new std::string(library.empty() ? "" : folder_of(library) + "/rlk");
  }();
  return *folder;
}
// What a thread makes for the first time while another one forks is never made in the child, which waits for it.
[[maybe_unused]] static const auto& plugin_folder_early = plugin_folder();

std::vector<PluginFile> find_plugins(std::vector<std::string>* notes) {
  std::vector<std::string> unwanted;
  std::vector<std::string>& said = notes ? *notes : unwanted;
  std::vector<PluginFile> found;
  check_trust_list(said);
  for (const std::string_view folder : split(environment().plugin_path, ':')) {
    if (is_absolute(folder))
      search_folder(std::string(folder), found, said);
    else
      said.push_back(
          fmt::format("RLK_PLUGIN_PATH: {} is not an absolute folder and is not searched", quoted(folder)));
  }
  // No plugins beside the library is an ordinary installation, not worth a note.
  if (!plugin_folder().empty() && access(plugin_folder().c_str(), F_OK) == 0)
    search_folder(plugin_folder(), found, said);
  return found;
}

Result<PluginFile> plugin_at(std::string_view path) {
  if (!is_absolute(path))
    return Status(RLK_PLUGIN, fmt::format("{} is not an absolute path; plugins are never looked up by name",
                                          quoted(path)));
  const std::string whole(path);
  const std::string_view name = backend_name(path.substr(path.rfind('/') + 1));
  if (name.empty()) return Status(RLK_PLUGIN, misnamed(whole));
  return PluginFile{std::string(name), whole, is_trusted(folder_of(whole))};
}

Status check_plugin_elf(const PlacedFile& placed) {
  const int file = placed.file.get();
  const ElfBytes bytes{static_cast<uint64_t>(placed.status.st_size),
                       [file](uint64_t offset, void* to, std::size_t size) {
                         char* at = static_cast<char*>(to);
                         while (size) {
                           const ssize_t n = pread(file, at, size, static_cast<off_t>(offset));
                           if (n <= 0) return false;
                           at += n, offset += static_cast<uint64_t>(n), size -= static_cast<std::size_t>(n);
                         }
                         return true;
                       }};
  const std::string wrong = check_elf(bytes, kQuery);
  return wrong.empty() ? Status() : Status(RLK_PLUGIN, wrong);
}

PluginLoad load_plugin(const PluginFile& file) {
  PluginLoad load = open_plugin(file);
  if (!load.table) load.reason = fmt::format("{}: {}", quoted_path(file.path), load.reason);
  return load;
}

}  // namespace rlk
