// The parent's side of the probe: starts rlk-probe, waits for its report, and puts into words how it ended.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "rlk/printable.hpp"
#include "src/fd.hpp"
#include "src/plugin.hpp"
#include "src/text.hpp"

namespace rlk {
namespace {

using Clock = std::chrono::steady_clock;

// Where the child reports; also written in probe_main.cpp.
constexpr int kReportFd = 3;

struct Pipe {
  Fd read, write;
};

// Both ends above the numbers that the child's files get, so that no dup2 there can hit an end.
bool make_pipe(Pipe& out) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  const Fd low_read(ends[0]), low_write(ends[1]);
  out.read = Fd(fcntl(ends[0], F_DUPFD_CLOEXEC, 10));
  out.write = Fd(fcntl(ends[1], F_DUPFD_CLOEXEC, 10));
  return out.read.get() >= 0 && out.write.get() >= 0;
}

int spawn(const std::string& program, const std::string& backend, const std::string& file, int report,
          int output, pid_t& child) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  if (int error = posix_spawn_file_actions_init(&files)) return error;
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, output, 1);
  posix_spawn_file_actions_adddup2(&files, output, 2);
  posix_spawn_file_actions_adddup2(&files, report, kReportFd);
  // The host's signal set-up is not the child's; an own group lets a time-out take whatever the plugin
  // started.
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  const char* argv[] = {program.c_str(), file.c_str(), backend.c_str(), nullptr};
  const int error =
      posix_spawn(&child, program.c_str(), &files, &attributes, const_cast<char**>(argv), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return error;
}

// Appends what is there; false at the end of the pipe.
bool drain(const Fd& from, std::string& to) {
  char buffer[512];
  const ssize_t n = read(from.get(), buffer, sizeof buffer);
  if (n > 0 && to.size() < 4096) to.append(buffer, static_cast<std::size_t>(n));
  return n > 0 || (n < 0 && (errno == EINTR || errno == EAGAIN));
}

// Until the report is complete; false when the time is over.
bool listen(const Pipe& report, const Pipe& output, Clock::time_point deadline, std::string& said,
            std::string& printed) {
  pollfd polled[] = {{report.read.get(), POLLIN, 0}, {output.read.get(), POLLIN, 0}};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    const int ready = poll(polled, 2, static_cast<int>(left));
    if (ready < 0 && errno != EINTR) return false;
    if (ready <= 0) continue;
    if (polled[1].revents && !drain(output.read, printed)) polled[1].fd = -1;
    if (polled[0].revents && !drain(report.read, said)) return true;
  }
}

// The child's wait status; 0 when somebody else took it (a host that ignores or reaps SIGCHLD).
int reap(pid_t child, Clock::time_point deadline) {
  int status = 0;
  for (;;) {
    const pid_t done = waitpid(child, &status, WNOHANG);
    if (done == child) return status;
    if (done < 0 && errno != EINTR) return 0;
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill(-child, SIGKILL);
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return 0;
  return status;
}

// The child's last words in one line, for "terminate called after throwing ..." and the like.
std::string last_words(std::string_view printed) {
  std::string line;
  for (const char c : printed.substr(0, 300)) {
    const bool blank = c == '\n' || c == ' ' || c == '\t';
    if (!blank)
      line += c;
    else if (!line.empty() && line.back() != ' ')
      line += ' ';
  }
  if (!line.empty() && line.back() == ' ') line.pop_back();
  return line.empty() ? "" : fmt::format("; it printed: {}", printable(line));
}

std::string ending(int status, const std::string& printed) {
  if (WIFSIGNALED(status))
    return fmt::format("it crashed while loading in a child process: signal {} ({}){}", WTERMSIG(status),
                       strsignal(WTERMSIG(status)), last_words(printed));
  return fmt::format("it ended the child process while loading, with exit code {}{}", WEXITSTATUS(status),
                     last_words(printed));
}

}  // namespace

ProbeReport probe_plugin(const std::string& backend, const PlacedFile& file,
                         std::chrono::milliseconds limit) {
  const std::string program = plugin_folder() + "/rlk-probe";
  if (plugin_folder().empty() || access(program.c_str(), X_OK) != 0)
    return {
        false, true,
        fmt::format("it lies in a folder that is not trusted and {}, which would try it first, is missing: "
                    "reinstall rlk, or add the folder to RLK_PLUGIN_TRUST",
                    quoted_path(program))};
  const Result<PlacedFile> placed = place_file(program);
  if (!placed) return {false, true, fmt::format("{}: {}", quoted_path(program), placed.status().message())};

  Pipe report, output;
  pid_t child = -1;
  if (!make_pipe(report) || !make_pipe(output))
    return {false, false, fmt::format("no child process to try it in: {}", std::strerror(errno))};
  if (const int error =
          spawn(placed->path, backend, file.path, report.write.get(), output.write.get(), child))
    return {false, false, fmt::format("no child process to try it in: {}", std::strerror(error))};
  report.write.reset();
  output.write.reset();

  std::string said, printed;
  const auto deadline = Clock::now() + limit;
  if (!listen(report, output, deadline, said, printed)) {
    kill(-child, SIGKILL);
    reap(child, deadline);
    return {false, false,
            fmt::format("it did not finish loading within {} ms in a child process{}", limit.count(),
                        last_words(printed))};
  }
  const int status = reap(child, deadline);
  // First letter: loaded, refused or failed. The report decides, not the exit status, which the host may have
  // taken.
  if (said.empty()) return {false, false, ending(status, printed)};
  return {said.front() == 'l', said.front() == 'r', printable(said.substr(1))};
}

}  // namespace rlk
