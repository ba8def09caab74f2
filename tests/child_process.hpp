// Runs a program as a user would: with these arguments, these variables, and its output collected.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace rlk::test {

struct Ran {
  int exit = -1;  // 128 + number when a signal ended it
  std::string out, err;
};

inline std::string read_and_remove(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  std::filesystem::remove(path);
  return text;
}

// variables: "NAME=value", beside those of this process that are not rlk's and not named again. The level that a
// run of the tests is held to (RLK_CPU) holds for the child too, unless it is given another.
inline Ran run(std::vector<std::string> command, std::vector<std::string> variables = {},
               const std::string& folder = "") {
  const auto given = [&](std::string_view name) {
    return std::ranges::any_of(variables,
                               [&](const std::string& variable) { return variable.starts_with(name); });
  };
  std::vector<std::string> inherited;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view line = *entry, name = line.substr(0, line.find('=') + 1);
    if ((!line.starts_with("RLK_") || name == "RLK_CPU=") && !given(name)) inherited.emplace_back(line);
  }
  variables.insert(variables.end(), inherited.begin(), inherited.end());
  std::vector<char*> argv, envp;
  for (std::string& word : command) argv.push_back(word.data());
  for (std::string& variable : variables) envp.push_back(variable.data());
  argv.push_back(nullptr), envp.push_back(nullptr);

  std::string base = (std::filesystem::temp_directory_path() / "rlk_child_XXXXXX").string();
  const int placeholder = mkstemp(base.data());
  REQUIRE(placeholder >= 0);
  close(placeholder);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, (base + ".out").c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&files, 2, (base + ".err").c_str(), O_WRONLY | O_CREAT, 0600);
  if (!folder.empty()) posix_spawn_file_actions_addchdir_np(&files, folder.c_str());
  pid_t child = 0;
  const int error = posix_spawn(&child, argv[0], &files, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&files);
  REQUIRE_MESSAGE(error == 0, "cannot run ", command[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  std::filesystem::remove(base);
  Ran ran{WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_and_remove(base + ".out"),
          read_and_remove(base + ".err")};
  return ran;
}

inline bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace rlk::test

#define CHECK_SAYS(text, part) CHECK_MESSAGE(rlk::test::has(text, part), text)
#define CHECK_SILENT(text, part) CHECK_MESSAGE(!rlk::test::has(text, part), text)
