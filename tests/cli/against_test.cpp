// rlk-dispatch --against: logits of another machine, replayed to the bit.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "child_process.hpp"

using rlk::test::Ran;

namespace {

// hidden [2, 48] and weight [3, 48] of ones in bf16, out as given in fp32.
std::string dump(const char* name, const std::vector<float>& out, const std::string& columns = "") {
  const std::vector<std::uint16_t> ones(5 * 48, 0x3f80);
  const auto cols = static_cast<int>(out.size() / 2);
  std::string header = R"({"hidden":{"dtype":"BF16","shape":[2,48],"data_offsets":[0,192]},)"
                       R"("weight":{"dtype":"BF16","shape":[3,48],"data_offsets":[192,480]},)"
                       R"("out":{"dtype":"F32","shape":[2,)" +
                       std::to_string(cols) + R"(],"data_offsets":[480,)" +
                       std::to_string(480 + out.size() * 4) + "]}";
  std::vector<std::int64_t> index;
  if (!columns.empty()) {
    index = {2};
    header += R"(,"columns":{"dtype":"I64","shape":[1],"data_offsets":[)" +
              std::to_string(480 + out.size() * 4) + "," + std::to_string(480 + out.size() * 4 + 8) + "]}";
  }
  header += "}";
  const std::string path = std::string(RLK_TEST_BUILD) + "/" + name + ".safetensors";
  std::ofstream file(path, std::ios::binary);
  const std::uint64_t size = header.size();
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << header;
  file.write(reinterpret_cast<const char*>(ones.data()), 480);
  file.write(reinterpret_cast<const char*>(out.data()), static_cast<std::streamsize>(out.size() * 4));
  file.write(reinterpret_cast<const char*>(index.data()), static_cast<std::streamsize>(index.size() * 8));
  return path;
}

Ran against(const std::string& path) { return rlk::test::run({RLK_DISPATCH, "--against", path}); }

}  // namespace

TEST_CASE("--against reproduces a dump, whole or in part, and names the first bit that differs") {
  const Ran good = against(dump("against_good", std::vector<float>(6, 48.f)));
  CHECK(good.err == "");
  CHECK(good.exit == 0);
  CHECK_SAYS(good.out, "sm90/t25k16: all 6 outputs");
  const Ran part = against(dump("against_part", std::vector<float>(2, 48.f), "columns"));
  CHECK(part.exit == 0);
  CHECK_SAYS(part.out, "all 2 outputs");
  std::vector<float> wrong(6, 48.f);
  wrong[4] = 48.000004f;
  const Ran bad = against(dump("against_bad", wrong));
  CHECK(bad.exit == 1);
  CHECK_SAYS(bad.out, "1 of 6 outputs");
  CHECK_SAYS(bad.out, "the first is row 1, column 1: file 0x42400001, replay 0x42400000");
}

TEST_CASE("--against refuses a file that is no dump") {
  CHECK(against("/dev/null").exit == 2);
  const std::string path = dump("against_short", std::vector<float>(6, 48.f));
  std::ofstream(path, std::ios::binary | std::ios::in).write("\xff\xff\xff\xff", 4);
  const Ran broken = against(path);
  CHECK(broken.exit == 2);
  CHECK_SAYS(broken.err, "is not a safetensors file");
}

TEST_CASE("--against says no to a dump without outputs") {
  const Ran empty = against(dump("against_empty", {}));
  CHECK(empty.exit == 2);
  CHECK(empty.out == "");
}
