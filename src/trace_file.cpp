#include "src/trace_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>

#include "rlk/version.h"
#include "src/fork_mutex.hpp"
#include "src/gate.hpp"
#include "src/identity.hpp"
#include "src/json.hpp"
#include "src/machine.hpp"
#include "src/text.hpp"

namespace rlk {
namespace {

constexpr std::size_t kBuffer = std::size_t{1} << 20;

// One lock for everything here: a trace is written by one thread at a time anyway.
ForkMutex& mutex() {
  static auto& m = *new ForkMutex;
  return m;
}
// Never destroyed: threads may still call while the process ends.
std::shared_ptr<TraceFile>& open_trace() {
  static auto& trace = *new std::shared_ptr<TraceFile>;
  return trace;
}

// What a thread makes for the first time while another one forks is never made in the child, which waits for it.
[[maybe_unused]] const auto& mutex_early = mutex();
[[maybe_unused]] const auto& trace_early = open_trace();

std::string expanded(std::string_view name) {
  std::string path(name);
  for (std::size_t at = 0; (at = path.find("%p", at)) != path.npos;) {
    const std::string pid = std::to_string(getpid());
    path.replace(at, 2, pid);
    at += pid.size();
  }
  return path;
}

// A child that is started with its parent's RLK_TRACE must not empty the file that its parent writes. The lock belongs
// to the process, so a forked child does not keep it; where there are no locks, the file is taken as it is.
Status open_alone(const std::string& path, Fd& file) {
  file = Fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (file && fcntl(file.get(), F_SETLK, &lock) != 0 && (errno == EAGAIN || errno == EACCES)) {
    fcntl(file.get(), F_GETLK, &lock);
    return {RLK_INVALID_ARGUMENT,
            fmt::format(
                "trace: {} is being written by process {}; %p in a name stands for the process's own number",
                quoted_path(path), lock.l_pid)};
  }
  struct stat about = {};
  const bool good =
      file && fstat(file.get(), &about) == 0 && (!S_ISREG(about.st_mode) || ftruncate(file.get(), 0) == 0);
  if (good) return {};
  return {RLK_INVALID_ARGUMENT,
          fmt::format("trace: {} cannot be written: {}", quoted_path(path), std::strerror(errno))};
}

std::string head(const TraceFile::Choice& choice) {
  return JsonObject()
      .number("rlk_trace", 1)
      .text("version", RLK_VERSION)
      .text("build", library_build())
      .text("cpu", cpu_word(cpu_level()))
      .number("every", choice.every)
      .str();
}

}  // namespace

bool TraceFile::Choice::wants(std::string_view tag) const {
  if (tags.empty()) return true;
  for (const std::string& glob : tags)
    if (glob_match(glob, tag)) return true;
  return false;
}

TraceFile::TraceFile(std::string path, Fd file, Choice choice)
    : path_(std::move(path)),
      file_(std::move(file)),
      choice_(std::move(choice)),
      number_([] {
        static uint64_t traces = 0;
        return ++traces;
      }()),
      owner_(getpid()) {
  append(head(choice_));
}

std::shared_ptr<TraceFile> TraceFile::now() {
  const std::lock_guard lock(mutex());
  const auto& trace = open_trace();
  return trace && trace->owner_ == getpid() ? trace : nullptr;
}

Status TraceFile::begin(std::string_view name, Choice choice) {
  const std::string path = expanded(name);
  const std::lock_guard lock(mutex());
  auto& trace = open_trace();
  if (trace && trace->owner_ == getpid())
    return {RLK_INVALID_ARGUMENT, fmt::format("trace: {} cannot begin, {} is not ended", quoted_path(path),
                                              quoted_path(trace->path_))};
  Fd file;
  if (Status s = open_alone(path, file); !s) return s;
  [[maybe_unused]] static const int at_exit = std::atexit([] {
    if (TraceFile::now()) (void)TraceFile::end();
  });
  const bool inherited = trace != nullptr;  // whose bit the gate has already
  trace = std::make_shared<TraceFile>(path, std::move(file), std::move(choice));
  if (!inherited) set_traced(true);
  return {};
}

Status TraceFile::end() {
  const std::lock_guard lock(mutex());
  auto& trace = open_trace();
  if (!trace) return {RLK_INVALID_ARGUMENT, "trace: none has begun"};
  const std::shared_ptr<TraceFile> ended = std::move(trace);
  trace = nullptr;
  set_traced(false);
  if (ended->owner_ != getpid())
    return {RLK_INVALID_ARGUMENT, "trace: it belongs to the process that forked"};
  ended->append(fmt::format("{{\"end\": {}}}", ended->records_));
  ended->flush();
  ended->ended_ = true;
  if (ended->failure_.empty()) return {};
  return {RLK_CONFIGURATION,
          fmt::format("trace: {} is not whole: {}", quoted_path(ended->path_), ended->failure_)};
}

uint64_t TraceFile::keys_of(TraceMarks& marks) {
  if (marks.rows.empty()) return 0;
  if (marks.trace == number_) return marks.keys;
  std::string rows;
  for (const auto& [sequence, position] : marks.rows)
    fmt::format_to(std::back_inserter(rows), "{}[{},{}]", rows.empty() ? "" : ",", sequence, position);
  const std::lock_guard lock(mutex());
  marks.trace = number_;
  marks.keys = ++key_sets_;
  append(fmt::format("{{\"keys\": {}, \"rows\": [{}]}}", marks.keys, rows));
  return marks.keys;
}

void TraceFile::record(std::string_view members) {
  const std::lock_guard lock(mutex());
  append(fmt::format("{{\"n\": {}, {}}}", ++records_, members));
}

void TraceFile::lose(std::string_view why) {
  const std::lock_guard lock(mutex());
  if (failure_.empty()) failure_ = why;
}

bool TraceFile::find_weight(const Place& place, uint64_t& digest) {
  const std::lock_guard lock(mutex());
  const auto it = weights_.find(place);
  if (it == weights_.end()) return false;
  digest = it->second;
  return true;
}
void TraceFile::keep_weight(const Place& place, uint64_t digest) {
  const std::lock_guard lock(mutex());
  weights_[place] = digest;
}
void TraceFile::forget_weights() {
  const std::lock_guard lock(mutex());
  weights_.clear();
}

void TraceFile::append(std::string_view line) {
  if (ended_) return;  // a call that another thread had begun before
  pending_ += line;
  pending_ += '\n';
  if (pending_.size() >= kBuffer) flush();
}

void TraceFile::flush() {
  std::string_view rest = pending_;
  while (!rest.empty() && failure_.empty()) {
    const ssize_t n = write(file_.get(), rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      failure_ = std::strerror(errno);
    else
      rest.remove_prefix(static_cast<std::size_t>(n));
  }
  pending_.clear();
}

}  // namespace rlk
