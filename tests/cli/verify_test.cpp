// --verify as its users see it: an interrupt leaves a valid certificate, a failure names the command that
// shows it again, deliberate errors are caught by the program itself.
#include <signal.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "child_process.hpp"

using Json = nlohmann::json;
using rlk::test::Ran;

namespace {

const std::vector<std::string> kMutants{"RLK_PLUGIN_PATH=" RLK_MUTANTS};

std::string temporary(const char* name) {
  return (std::filesystem::temp_directory_path() / (name + std::to_string(getpid()))).string();
}

}  // namespace

TEST_CASE("Ctrl-C leaves a valid certificate that says it is partial") {
  const std::string certificate = temporary("rlk_interrupted_");
  std::vector<std::string> words{RLK_DISPATCH, "--verify",      "*",        "--budget",
                                 "full",       "--certificate", certificate};
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  REQUIRE(posix_spawn(&child, RLK_DISPATCH, &files, nullptr, argv.data(), environ) == 0);
  posix_spawn_file_actions_destroy(&files);
  // The program takes the signal from its own beginning on; before that it would end by it.
  usleep(1500 * 1000);
  REQUIRE(kill(child, SIGINT) == 0);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 1);  // what was not finished proves nothing
  const Json written = Json::parse(rlk::test::read_and_remove(certificate), nullptr, false);
  REQUIRE_FALSE(written.is_discarded());
  CHECK(written.at("complete") == false);
  CHECK(written.at("good") == false);
  CHECK_FALSE(written.at("entries").empty());
  for (const Json& e : written.at("entries"))
    CHECK((e.at("good") == false || e.at("promises").at("accuracy").at("tried") > 0));
}

TEST_CASE("a failure names the command that shows it again") {
  const Ran r = rlk::test::run({RLK_DISPATCH, "--verify", "lm_head", "--impl", "mutant.split_k_by_m",
                                "--case", "m=33 k=96 v=48 fp32->fp32 normal"},
                               kMutants);
  CHECK(r.exit == 1);
  std::smatch again;
  REQUIRE(std::regex_search(r.out, again,
                            std::regex("(batch invariance: [^\n]*); again: rlk-dispatch ([^\n]*)")));
  const Ran second = rlk::test::run({"/bin/sh", "-c", RLK_DISPATCH " " + again[2].str()}, kMutants);
  CHECK(second.exit == 1);
  CHECK_SAYS(second.out, again[1].str());
}

TEST_CASE("deliberate errors are caught and named in the certificate") {
#if defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
  MESSAGE("[skip] slow when instrumented or with assertions; mutants_test sees the same there");
  return;
#endif
  const Ran r = rlk::test::run({RLK_DISPATCH, "--verify", "lm_head", "--impl", "native.golden", "--budget",
                                "short", "--mutants", RLK_MUTANTS "/librlk_backend_mutant.so", "--json"});
  INFO(r.err);
  CHECK(r.exit == 0);
  const Json written = Json::parse(r.out, nullptr, false);
  REQUIRE_FALSE(written.is_discarded());
  CHECK(written.at("mutants_caught").size() >= 26);
  for (const Json& e : written.at("entries"))
    CHECK_SAYS(e.at("implementation").get<std::string>(), "native.golden.");
}

TEST_CASE("--verify where nothing matches says so and does not end well") {
  const Ran r = rlk::test::run({RLK_DISPATCH, "--verify", "lm_head", "--impl", "no.such", "--budget", "1"});
  CHECK(r.exit == 3);
  CHECK_SAYS(r.out, "nothing was verified");
  CHECK(r.out.find("kept in") == r.out.npos);
}
