// --verify-model: hands over to rlk.verify_model of the Python package, which has the model; the page is written here. Of a
// certificate that was written before, only the page.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "commands.hpp"
#include "library.hpp"

namespace rlk::cli {
namespace {

namespace fs = std::filesystem;

// The package beside this program, in a build tree or in a wheel; empty: where python3 finds it.
std::string package_folder() {
  std::error_code failed;
  const fs::path here = fs::read_symlink("/proc/self/exe", failed).parent_path();
  for (const fs::path& folder : {here.parent_path() / "python", here.parent_path().parent_path()})
    if (!failed && fs::exists(folder / "rlk" / "verify_model.py", failed)) return folder.string();
  return {};
}

std::vector<std::string> environment_with(const std::string& folder) {
  std::vector<std::string> all;
  std::string path = "PYTHONPATH=" + folder;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view line = *entry;
    if (folder.empty() || line.rfind("PYTHONPATH=", 0) != 0)
      all.emplace_back(line);
    else if (line.size() > 11)
      path += ":" + std::string(line.substr(11));
  }
  if (!folder.empty()) all.push_back(path);
  return all;
}

// The exit code; what it says on stderr comes back in `errors` where that is not null.
int python(std::vector<std::string> words, std::string* errors) {
  words.insert(words.begin(), "python3");
  std::vector<std::string> environment = environment_with(package_folder());
  std::vector<char*> argv, envp;
  for (std::string& word : words) argv.push_back(word.data());
  for (std::string& line : environment) envp.push_back(line.data());
  argv.push_back(nullptr), envp.push_back(nullptr);
  std::array<int, 2> ends{-1, -1};
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  if (errors) {
    if (pipe2(ends.data(), O_CLOEXEC) != 0)
      throw Failure(kUsage, std::string("no pipe: ") + std::strerror(errno));
    posix_spawn_file_actions_adddup2(&files, ends[1], STDERR_FILENO);
  }
  std::fflush(stdout);
  pid_t child = 0;
  const int error = posix_spawnp(&child, "python3", &files, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&files);
  if (errors) {
    close(ends[1]);
    char part[4096];
    for (ssize_t n = 0; (n = read(ends[0], part, sizeof part)) > 0;)
      errors->append(part, static_cast<std::size_t>(n));
    close(ends[0]);
  }
  if (error != 0)
    throw Failure(kUsage, std::string("--verify-model runs in Python, and python3 cannot be started: ") +
                              std::strerror(error));
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// What is missing, in the last line of what Python says.
void check_package() {
  std::string errors;
  if (python({"-c", "import rlk.verify_model"}, &errors) == 0) return;
  while (!errors.empty() && errors.back() == '\n') errors.pop_back();
  const auto line = errors.rfind('\n');
  throw Failure(kUsage,
                "--verify-model runs in Python, and python3 on PATH cannot import rlk.verify_model: " +
                    errors.substr(line == errors.npos ? 0 : line + 1) +
                    ". It needs torch, and the package of this library (pip install .)");
}

std::string whole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string content(std::istreambuf_iterator<char>(in), {});
  if (content.empty()) throw Failure(kUsage, path + " cannot be read, or is empty");
  return content;
}

int report_of(const Options& o) {
  if (o.report.empty())
    throw Failure(kUsage, o.model + " is a certificate: --report says where its page goes");
  const std::string certificate = whole(o.model);
  try {
    write_file(o.report, model_report_page(certificate));
    return Json::parse(certificate).at("good").get<bool>() ? kGood : kVerificationFailed;
  } catch (const Json::exception& e) {
    throw Failure(kUsage, o.model + " is no certificate of a model: " + e.what());
  }
}

}  // namespace

int verify_model(const Options& o) {
  if (o.model.size() > 5 && o.model.compare(o.model.size() - 5, 5, ".json") == 0) return report_of(o);
  check_package();
  std::vector<std::string> words{"-m",     "rlk.verify_model",    o.model, "--device", o.device,
                                 "--seed", std::to_string(o.seed)};
  const std::pair<const char*, const std::string&> given[] = {
      {"--dtype", o.dtype}, {"--certificate", o.certificate}, {"--report", o.report}, {"--peer", o.peer}};
  for (const auto& [name, value] : given)
    if (!value.empty()) words.insert(words.end(), {name, value});
  if (o.replay) words.push_back("--replay");
  if (!o.ranks.empty()) words.push_back("--ranks");
  words.insert(words.end(), o.ranks.begin(), o.ranks.end());
  if (o.json) throw Failure(kUsage, "--verify-model writes JSON with --certificate FILE");
  const int exit = python(words, nullptr);
  return exit == 0 || exit == 1 ? exit : int{kUsage};
}

}  // namespace rlk::cli
