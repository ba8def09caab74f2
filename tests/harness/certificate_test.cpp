// A certificate is what it says: unchanged, whole, and good by its contents; nothing else opens the evidence
// gate.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "child_process.hpp"
#include "rlk/evidence.hpp"
#include "rlk/harness.hpp"
#include "src/sha256.hpp"

namespace {

using rlk::harness::certificate;
using rlk::harness::check_certificate;
using rlk::harness::Promise;
using rlk::harness::Report;

// The report of a run in which everything was tried and kept, without the run.
Report sound() {
  Report r;
  r.entries.resize(1);
  rlk::harness::Entry& e = r.entries[0];
  e.op = "lm_head", e.implementation = "native.golden", e.dtype = "fp32", e.arithmetic = "fma64";
  e.complete = true;
  for (const Promise p : rlk::harness::kPromises) e.promises[p].tried = 1;
  return r;
}

std::string refusal(const std::string& text) { return std::string(check_certificate(text).message()); }

void expect_refusal(const std::string& text, const char* why) {
  const std::string said = refusal(text);
  CHECK_MESSAGE(said.find(why) != said.npos, "'", said, "' does not say '", why, "'");
}

std::string changed(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != text.npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("digests are SHA-256") {
  CHECK(rlk::sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(rlk::sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(rlk::sha256(std::string(1000, 'a')) ==
        "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3");
}

TEST_CASE("a sound certificate passes, with other white space too") {
  const std::string text = certificate(sound());
  CHECK(refusal(text) == "");
  std::string dense;
  for (const char c : text)
    if (c != '\n') dense += c;
  CHECK(refusal(dense) == "");
}

TEST_CASE("--compare shows what certificates say in printable characters") {
  const std::string dispatch = RLK_TEST_BUILD "/bin/rlk-dispatch";
  if (!std::filesystem::exists(dispatch)) {
    MESSAGE("[skip] built without rlk-dispatch");
    return;
  }
  std::string paths[2];
  for (int i = 0; i < 2; ++i) {
    Report r = sound();
    r.entries[0].implementation = "native\x1b[2J";
    r.entries[0].corpus["a case\x07"] = i ? "1" : "2";
    r.entries[0].default_for = {"a case\x07"};
    paths[i] = (std::filesystem::temp_directory_path() / fmt::format("rlk_raw{}_{}", i, getpid())).string();
    std::ofstream(paths[i]) << certificate(r);
  }
  const rlk::test::Ran ran = rlk::test::run({dispatch, "--compare", paths[0], paths[1]});
  for (const std::string& path : paths) std::filesystem::remove(path);
  INFO(ran.out, ran.err);
  CHECK(ran.exit == 1);
  CHECK_SAYS(ran.out, "native\\x1b[2J");
  CHECK_SAYS(ran.out, "first in 'a case\\x07'");
  CHECK_SILENT(ran.out, "\x1b");
  CHECK_SILENT(ran.out, "\x07");
}

TEST_CASE("a changed certificate is refused, whatever was changed") {
  const std::string text = certificate(sound());
  expect_refusal(changed(text, "native.golden", "native.vector"), "changed after it was written");
  expect_refusal(changed(text, "\"tried\": 1", "\"tried\": 2"), "changed after it was written");
  expect_refusal(changed(text, "\"\n}", "\", \"entries\": []}"), "changed after it was written");
  expect_refusal(changed(text, "\"digest\"", "\"digset\""), "no digest");
}

TEST_CASE("what is not a good certificate is refused with the reason") {
  expect_refusal("", "not JSON");
  expect_refusal("null", "not a certificate");
  expect_refusal("[]", "not a certificate");
  expect_refusal(R"({"entries":[{}]})", "not a certificate");
  expect_refusal(R"({"schema":"2","entries":[{}]})", "its schema is");
  expect_refusal(R"({"schema":2.0,"entries":[{}]})", "its schema is");
  expect_refusal(R"({"schema":1,"entries":[{}]})", "its schema is");
  expect_refusal(R"({"schema":2,"entries":[{}]})", "no digest");

  Report r = sound();
  r.entries[0].promises[Promise::strict].tried = 0;
  CHECK_FALSE(r.good());
  expect_refusal(certificate(r), "not covered: strict");
  r = sound();
  r.entries[0].promises[Promise::accuracy].failed = 1;
  expect_refusal(certificate(r), "broke a promise: accuracy");
  r = sound();
  r.complete = false;
  expect_refusal(certificate(r), "not complete");
  r = sound();
  r.restricted = true;
  expect_refusal(certificate(r), "one case or transform");
  r = sound();
  r.entries.clear();
  expect_refusal(certificate(r), "nothing was verified");
  r = sound();
  r.missing.emplace_back("some_op: no implementation is registered");
  expect_refusal(certificate(r), "no implementation is registered");
}

TEST_CASE("what is not promised need not be tried") {
  Report r = sound();
  r.entries[0].promises[Promise::repeats] = {.promised = false};
  CHECK(r.good());
  CHECK(refusal(certificate(r)) == "");
}

TEST_CASE("infinities and NaN leave the certificate valid JSON") {
  Report r = sound();
  rlk::harness::Accuracy a;
  a.worst = INFINITY;
  a.p999 = NAN;
  a.over_length = {{96, INFINITY}};
  r.entries[0].accuracy.push_back(a);
  CHECK(refusal(certificate(r)) == "");
}

TEST_CASE("the evidence gate refuses every file that is no good certificate") {
  const std::string path = std::string(RLK_TEST_BUILD) + "/certificate_test.json";
  const auto load = [&](const std::string& text) {
    std::ofstream(path) << text;
    return rlk::load_evidence(path).code();
  };
  for (const char* text : {"", "null", "[]", "1.9", R"({"schema":"1"})", R"({"entries":[{}]})"}) {
    CAPTURE(text);
    CHECK(load(text) == RLK_CONFIGURATION);
  }
  CHECK(rlk::load_evidence("/tmp").code() == RLK_CONFIGURATION);
  Report r = sound();
  r.entries[0].promises[Promise::accuracy].tried = 0;
  CHECK(load(certificate(r)) == RLK_CONFIGURATION);
  CHECK(load(certificate(sound())) == RLK_OK);
  rlk::clear_evidence();
}
