#include "src/plugin_place.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "src/text.hpp"

namespace rlk {
namespace {

constexpr int kMostLinks = 40;  // as the kernel's own limit

Status refuse(std::string why) { return {RLK_PLUGIN, std::move(why)}; }
Status cannot_open(int error) { return refuse(fmt::format("it cannot be opened: {}", std::strerror(error))); }

// Who could replace the library: who owns it or a folder above it, and the groups that may write there.
class Trusted {
 public:
  Trusted() : users_{0, geteuid()} {
    const std::string& library = library_path();
    for (std::size_t end = 1; !library.empty() && end != library.npos;) {
      end = library.find('/', end + 1);
      struct stat s{};
      if (lstat(library.substr(0, end).c_str(), &s) != 0) continue;
      users_.push_back(s.st_uid);
      if (s.st_mode & S_IWGRP && !(s.st_mode & S_ISVTX)) groups_.push_back(s.st_gid);
    }
  }

  Status check(const struct stat& s, const std::string& what) const {
    if (std::find(users_.begin(), users_.end(), s.st_uid) == users_.end())
      return refuse(fmt::format("{} belongs to user {}, neither to root nor to user {} who runs this process",
                                what, s.st_uid, geteuid()));
    // What a link's mode says means nothing, and in a sticky folder nobody replaces what is another's.
    if (S_ISLNK(s.st_mode) || (S_ISDIR(s.st_mode) && s.st_mode & S_ISVTX)) return {};
    const bool everyone = s.st_mode & S_IWOTH;
    const bool group =
        s.st_mode & S_IWGRP && std::find(groups_.begin(), groups_.end(), s.st_gid) == groups_.end();
    if (everyone || group)
      return refuse(fmt::format("{} is writable by {} (mode {:04o}): chmod go-w", what,
                                everyone ? "everyone" : "its group", s.st_mode & 07777u));
    return {};
  }

 private:
  std::vector<uid_t> users_;
  std::vector<gid_t> groups_;
};

// One way from the root to a file.
class Walk {
 public:
  Result<PlacedFile> to(const std::string& path) {
    add(path);
    if (Status s = to_root(); !s) return s;
    while (!ahead_.empty()) {
      const std::string name = std::move(ahead_.back());
      ahead_.pop_back();
      if (name == "..") {
        if (Status s = up(); !s) return s;
        continue;
      }
      Fd next(openat(folder_.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
      struct stat s{};
      if (!next || fstat(next.get(), &s) != 0) return cannot_open(errno);
      if (S_ISLNK(s.st_mode)) {
        if (Status status = follow(next, s, name); !status) return status;
      } else if (S_ISDIR(s.st_mode)) {
        if (Status status = enter(std::move(next), "/" + name); !status) return status;
      } else {
        return ahead_.empty() ? arrive(name, s) : cannot_open(ENOTDIR);
      }
    }
    return refuse("it is not a regular file");
  }

 private:
  // The components of a path, the first one last.
  void add(std::string_view path) {
    const std::size_t before = ahead_.size();
    for (const std::string_view name : split(path, '/'))
      if (!name.empty() && name != ".") ahead_.emplace_back(name);
    std::reverse(ahead_.begin() + static_cast<std::ptrdiff_t>(before), ahead_.end());
  }

  Status to_root() {
    real_.clear();
    Fd root(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
    return root ? enter(std::move(root), "") : cannot_open(errno);
  }

  // The folder above was checked on the way down.
  Status up() {
    Fd parent(openat(folder_.get(), "..", O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!parent) return cannot_open(errno);
    folder_ = std::move(parent);
    real_.resize(real_.empty() ? 0 : real_.rfind('/'));
    return {};
  }

  Status enter(Fd folder, const std::string& name) {
    struct stat s{};
    if (fstat(folder.get(), &s) != 0) return cannot_open(errno);
    real_ += name;
    folder_ = std::move(folder);
    return trusted_.check(s, fmt::format("its folder {}", quoted_path(real_.empty() ? "/" : real_)));
  }

  Status follow(const Fd& link, const struct stat& s, const std::string& name) {
    if (Status status = trusted_.check(s, fmt::format("the link {}", quoted_path(real_ + "/" + name)));
        !status)
      return status;
    if (++links_ > kMostLinks) return cannot_open(ELOOP);
    char target[PATH_MAX];
    const ssize_t length = readlinkat(link.get(), "", target, sizeof target);
    if (length <= 0 || length == sizeof target) return cannot_open(length < 0 ? errno : ENAMETOOLONG);
    add({target, static_cast<std::size_t>(length)});
    return target[0] == '/' ? to_root() : Status();
  }

  Result<PlacedFile> arrive(const std::string& name, const struct stat& seen) {
    if (!S_ISREG(seen.st_mode)) return refuse("it is not a regular file");
    if (Status status = trusted_.check(seen, "the file"); !status) return status;
    PlacedFile placed{real_ + "/" + name,
                      Fd(openat(folder_.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)),
                      seen};
    if (!placed.file) return cannot_open(errno);
    struct stat opened{};
    if (fstat(placed.file.get(), &opened) != 0) return cannot_open(errno);
    if (opened.st_dev != seen.st_dev || opened.st_ino != seen.st_ino)
      return refuse("it was replaced while it was checked");
    return placed;
  }

  const Trusted trusted_;
  std::vector<std::string> ahead_;
  Fd folder_;
  std::string real_;  // of the folder; empty for the root
  int links_ = 0;
};

}  // namespace

Result<PlacedFile> place_file(const std::string& path) {
  if (path.empty() || path.front() != '/') return refuse("its path is not absolute");
  return Walk().to(path);
}

Status check_unchanged(const PlacedFile& placed) {
  struct stat now{};
  if (lstat(placed.path.c_str(), &now) != 0) return cannot_open(errno);
  const bool same = now.st_dev == placed.status.st_dev && now.st_ino == placed.status.st_ino;
  return same ? Status() : refuse("it was replaced while it was checked");
}

const std::string& library_path() {
  static const auto* path = [] {
    Dl_info info{};
    link_map* map = nullptr;
    static const char anchor = 0;
    const bool loaded = dladdr1(&anchor, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) && map &&
                        map->l_name && map->l_name[0];
    // Linked into the program itself, whose name as typed says nothing about where it is.
    const std::unique_ptr<char, decltype(&std::free)> real(
        realpath(loaded ? map->l_name : "/proc/self/exe", nullptr), &std::free);
    return new std::string(real ? real.get() : "");
  }();
  return *path;
}

}  // namespace rlk
