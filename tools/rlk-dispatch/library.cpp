#include "library.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

namespace rlk::cli {
namespace {

bool write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(file, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

}  // namespace

Exit exit_for(int code) noexcept {
  switch (code) {
    case RLK_OK:
      return kGood;
    case RLK_NO_IMPLEMENTATION:
    case RLK_UNSUPPORTED:
      return kNoImplementation;
    case RLK_PLUGIN:
      return kPluginFailed;
    default:
      return kUsage;
  }
}

void check(rlk_code code) {
  if (code != RLK_OK) throw Failure(exit_for(code), rlk_last_error());
}

Json printable_strings(Json json) {
  if (json.is_string()) return printable(json.get_ref<const std::string&>());
  if (json.is_structured())
    for (Json& part : json) part = printable_strings(std::move(part));
  return json;
}

Json parse(char* text, Exit otherwise) {
  if (!text) throw Failure(otherwise, rlk_last_error());
  const std::string copy = text;
  rlk_free(text);
  return printable_strings(Json::parse(copy));
}

Json listed(const char* what) { return parse(rlk_list_json(what)); }

void check_configuration() {
  const Json env = listed("env");
  const std::string error = env["env"]["error"];
  if (!error.empty()) throw Failure(kUsage, error);
}

void print(const Json& json) { std::puts(json.dump(2).c_str()); }

void write_file(const std::string& path, const std::string& text) {
  const auto failure = [&](int error) {
    return Failure(kUsage, "cannot write '" + path + "': " + std::strerror(error));
  };
  // What a link leads to is replaced, not the link; a device or pipe cannot be.
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(path.c_str(), nullptr), &std::free);
  const std::string target = real ? real.get() : path;
  struct stat there{};
  if (stat(target.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    const int file = open(target.c_str(), O_WRONLY | O_CLOEXEC);
    const bool whole = file >= 0 && write_all(file, text);
    const int error = errno;
    if (file >= 0) close(file);
    if (!whole) throw failure(error);
    return;
  }
  std::string beside = target + ".XXXXXX";
  const int file = mkostemp(beside.data(), O_CLOEXEC);
  if (file < 0) throw failure(errno);
  // As any new file, not for its owner alone.
  const mode_t mask = umask(0);
  umask(mask);
  const bool whole = fchmod(file, 0666 & ~mask) == 0 && write_all(file, text) && fsync(file) == 0 &&
                     std::rename(beside.c_str(), target.c_str()) == 0;
  const int error = errno;
  close(file);
  if (whole) return;
  unlink(beside.c_str());
  throw failure(error);
}

int finish(int exit) {
  errno = 0;
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return exit;
  std::fprintf(stderr, "error: the results could not be written to stdout: %s\n",
               errno ? std::strerror(errno) : "an earlier write failed");
  return exit == kGood ? int{kUsage} : exit;
}

}  // namespace rlk::cli
