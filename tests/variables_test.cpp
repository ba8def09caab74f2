// labels: unit
// Names of environment variables are found where a plugin would have them: among the texts of its file.
#include "src/harness/variables.hpp"

#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

TEST_CASE("names of variables are found in a file, and those that programs start by are left out") {
  const auto file = std::filesystem::temp_directory_path() / "rlk_variables_test";
  {
    std::ofstream out(file, std::ios::binary);
    const char texts[] =
        "\x7f"
        "ELF\0MYLIB_FAST_MODE\0lower_case\0LD_PRELOAD\0AB\0X9_\0two words\0TAIL_WITHOUT_END";
    out.write(texts, sizeof texts - 1);
  }
  CHECK(rlk::harness::variables_in(file) ==
        std::vector<std::string>{"MYLIB_FAST_MODE", "TAIL_WITHOUT_END", "X9_"});
  std::filesystem::remove(file);
  CHECK(rlk::harness::variables_in(file).empty());
}
