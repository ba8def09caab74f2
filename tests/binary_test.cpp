// labels: unit
// links: registry
// The library as a file: what it exports, and how it is hardened.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "rlk/rlk.h"

namespace {

std::string library() {
  Dl_info info{};
  REQUIRE(dladdr(reinterpret_cast<const void*>(&rlk_version), &info));
  return info.dli_fname;
}

std::string output_of(const std::string& command) {
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe);
  std::string text;
  char part[4096];
  for (std::size_t n = 0; (n = fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, n);
  REQUIRE_MESSAGE(pclose(pipe) == 0, text);
  return text;
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("the library exports what tests/data/exported_symbols.txt lists, no more and no less") {
  // Functions and data; weak symbols are inline functions that every user has too. The harness is left out: its
  // face serves the tools of the same version.
  std::set<std::string> exported, listed;
  std::istringstream symbols(output_of("nm -DC --defined-only '" + library() + "'"));
  for (std::string line; std::getline(symbols, line);) {
    std::istringstream words(line);
    std::string address, type, name;
    words >> address >> type >> std::ws;
    std::getline(words, name);
    const bool strong = type == "T" || type == "D" || type == "B" || type == "R";
    if (strong && name.rfind("rlk::harness::", 0) != 0) exported.insert(name);
  }
  std::ifstream list(RLK_TEST_DATA "/exported_symbols.txt");
  REQUIRE(list);
  for (std::string line; std::getline(list, line);)
    if (!line.empty()) listed.insert(line);
  for (const std::string& name : exported)
    CHECK_MESSAGE(listed.count(name), "exported and not listed, RLK_API by mistake? ", name);
  for (const std::string& name : listed)
    CHECK_MESSAGE(exported.count(name), "listed and not exported, so programs break: ", name);
}
#endif

TEST_CASE("the library stays when it is closed, and is settled when it is loaded") {
  const std::string dynamic = output_of("readelf -dW '" + library() + "'");
  CHECK(has(dynamic, "NODELETE"));
  CHECK(has(dynamic, "NOW"));
  CHECK(has(output_of("readelf -lW '" + library() + "'"), "GNU_RELRO"));
  CHECK(has(output_of("nm -D --undefined-only '" + library() + "'"), "__stack_chk_fail"));
}
