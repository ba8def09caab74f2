#include "src/harness/child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace rlk::harness {
namespace {

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> out;
  out.reserve(words.size() + 1);
  for (std::string& w : words) out.push_back(w.data());
  out.push_back(nullptr);
  return out;
}

std::vector<std::string> environment_with(const Variables& extra) {
  std::vector<std::string> out;
  for (char** e = environ; *e; ++e) {
    const std::string entry = *e;
    bool replaced = false;
    for (const auto& [name, value] : extra) replaced |= entry.rfind(name + "=", 0) == 0;
    if (!replaced) out.push_back(entry);
  }
  for (const auto& [name, value] : extra) out.push_back(name + "=" + value);
  return out;
}

}  // namespace

Child::Child(const std::vector<std::string>& command, const std::vector<std::string>& arguments,
             const Variables& environment) {
  int ends[2];
  if (command.empty() || pipe2(ends, O_CLOEXEC) != 0) return;
  std::vector<std::string> words = command, variables = environment_with(environment);
  words.insert(words.end(), arguments.begin(), arguments.end());
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&files, 2, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&files, ends[1], kLines);
  // A group of its own: Ctrl-C is for the parent, which ends its children itself.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  pid_t child = 0;
  const int error = posix_spawn(&child, words[0].c_str(), &files, &attributes, pointers(words).data(),
                                pointers(variables).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  close(ends[1]);
  if (error) {
    close(ends[0]);
    return;
  }
  pid_ = child;
  lines_ = ends[0];
}

Child::~Child() {
  if (!started()) return;
  kill();
  ending();
  close(lines_);
}

Child::Read Child::read(std::string& line, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (char buffer[4096];;) {
    if (const auto at = text_.find('\n'); at != std::string::npos) {
      line = text_.substr(0, at);
      text_.erase(0, at + 1);
      return Read::line;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    pollfd ready{lines_, POLLIN, 0};
    // In short waits: a process that the child left behind may hold the other end open for ever.
    const auto wait = waited_ ? 0 : std::clamp<int64_t>(left, 0, 200);
    if (poll(&ready, 1, static_cast<int>(wait)) <= 0) {
      if (waited_) return Read::end;
      if (!gone() && left <= 0) return Read::nothing;
      continue;
    }
    const ssize_t n = ::read(lines_, buffer, sizeof buffer);
    if (n <= 0) return Read::end;
    text_.append(buffer, static_cast<std::size_t>(n));
  }
}

bool Child::gone() {
  if (!waited_ && waitpid(pid_, &status_, WNOHANG) == pid_) waited_ = true;
  return waited_;
}

void Child::kill() {
  if (!gone()) ::kill(pid_, SIGKILL);
}

std::string Child::ending() {
  if (!waited_) waitpid(pid_, &status_, 0);
  waited_ = true;
  if (WIFEXITED(status_)) return fmt::format("ended with exit code {}", WEXITSTATUS(status_));
  const char* name = sigabbrev_np(WTERMSIG(status_));
  return name ? fmt::format("died by SIG{}", name) : fmt::format("died by signal {}", WTERMSIG(status_));
}

}  // namespace rlk::harness
