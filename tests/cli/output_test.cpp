// Results that cannot be written are an error, whoever prints them; and a file is replaced whole or not at all.
#include <unistd.h>

#include <sstream>

#include "child_process.hpp"
#include "rlk/printable.hpp"

using rlk::test::Ran;

namespace {

// The words behind rlk-dispatch, with what a shell puts around them.
Ran shell(const std::string& words, const std::string& before = "") {
  return rlk::test::run({"/bin/sh", "-c", before + "exec " RLK_DISPATCH " " + words});
}

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rlk_out_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()));
    path = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(path), std::filesystem::directory_iterator()));
  }
  std::string path;
};

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

constexpr const char* kVerify = "--verify rope_tables --budget short";

}  // namespace

TEST_CASE("every command notices that stdout is full or closed, in one line") {
  for (const char* words : {"--list", "--list ops", "--list backends --json", "--env", "--version", "--help",
                            "--explain lm_head", "--explain lm_head --json"}) {
    const Ran full = shell(std::string(words) + " > /dev/full");
    CHECK_MESSAGE(full.exit == 2, words);
    // The reason is lost where the buffer was full before the end.
    CHECK_MESSAGE(full.err.rfind("error: the results could not be written to stdout: ", 0) == 0, words, ": ",
                  full.err);
    CHECK_MESSAGE(full.err.find('\n') == full.err.size() - 1, words, ": ", full.err);
    const Ran closed = shell(std::string(words) + " >&-");
    CHECK_MESSAGE(closed.exit == 2, words);
    CHECK(closed.err == "error: stdout is closed: there is nowhere to write the results\n");
  }
  CHECK(shell("--list").exit == 0);
  // A worse end keeps its own code.
  CHECK(shell("--probe /nowhere/librlk_backend_x.so > /dev/full").exit == 4);
}

TEST_CASE("a certificate that cannot be written leaves the one that was there") {
  const Folder folder;
  const std::string path = folder.path + "/trainer.json";
  std::ofstream(path) << "the one before";
  // A file size limit is a full disk that anybody can have.
  const Ran r = shell(kVerify + std::string(" --certificate ") + path, "trap '' XFSZ; ulimit -f 1; ");
  CHECK(r.exit == 2);
  CHECK_SAYS(r.err, "error: cannot write '" + path + "': File too large");
  CHECK(contents(path) == "the one before");
  CHECK(folder.files() == 1);
}

TEST_CASE("a certificate replaces what a link leads to, and may go to a device") {
  const Folder folder;
  const std::string path = folder.path + "/trainer.json", link = folder.path + "/link.json";
  std::ofstream(path) << "the one before";
  std::filesystem::create_symlink(path, link);
  const Ran r = shell(kVerify + std::string(" --certificate ") + link, "umask 022; ");
  CHECK_MESSAGE(r.exit == 0, r.err);
  CHECK(std::filesystem::is_symlink(link));
  CHECK_SAYS(contents(path), "\"schema\"");
  CHECK(folder.files() == 2);
  const auto mode = std::filesystem::status(path).permissions();
  CHECK(static_cast<unsigned>(mode) == 0644u);
  CHECK(shell(kVerify + std::string(" --certificate /dev/null")).exit == 0);
  CHECK(std::filesystem::is_character_file("/dev/null"));
  const Ran full = shell(kVerify + std::string(" --certificate /dev/full"));
  CHECK(full.exit == 2);
  CHECK_SAYS(full.err, "error: cannot write '/dev/full': No space left on device");
}

TEST_CASE("what a user or a file name says is printed so that no terminal obeys it") {
  const Folder folder;
  const std::string odd = folder.path + "/odd\x1b]0;title\x07";
  REQUIRE(std::filesystem::create_directory(odd));
  std::ofstream(odd + "/librlk_backend_text.so") << "x";
  const std::vector<std::string> variables{"RLK_PLUGIN_PATH=" + odd};
  const std::vector<std::vector<std::string>> commands{{"--list", "plugins"},
                                                       {"--list", "plugins", "--json"},
                                                       {"--list", "\x1b[2J"},
                                                       {"--explain", "\x1b[2J"},
                                                       {"--probe", odd + "/librlk_backend_text.so"},
                                                       {"--\x1b[2J"}};
  for (std::vector<std::string> words : commands) {
    words.insert(words.begin(), RLK_DISPATCH);
    const Ran r = rlk::test::run(words, variables);
    CHECK(!(r.out + r.err).empty());
    std::istringstream all(r.out + r.err);
    for (std::string line; std::getline(all, line);) CHECK_MESSAGE(rlk::is_printable(line), line);
  }
}
