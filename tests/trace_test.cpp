// labels: unit
// links: registry
// What a trace records: one line a call, digests in which every place counts, and nothing once it has ended.
#include "rlk/trace.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "rlk/rlk.hpp"
#include "src/digest.hpp"

using Json = nlohmann::json;

namespace {

std::string scratch() {
  return (std::filesystem::temp_directory_path() / ("rlk_trace_" + std::to_string(getpid()))).string();
}

// Traces what `body` calls; the file's lines.
template <class Body>
std::vector<Json> traced(Body body, const rlk::TraceOptions& options = {}) {
  const std::string file = scratch();
  rlk::check(rlk::trace(file, options));
  body();
  rlk::check(rlk::end_trace());
  std::vector<Json> lines;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  std::filesystem::remove(file);
  REQUIRE(lines.size() >= 2);
  CHECK(lines.front().at("rlk_trace") == 1);
  CHECK(lines.back().size() == 1);
  std::size_t records = 0;
  for (const Json& line : lines) records += line.contains("n");
  CHECK(lines.back().at("end") == records);
  return lines;
}

std::vector<Json> records(const std::vector<Json>& lines) {
  std::vector<Json> found;
  for (const Json& line : lines)
    if (line.contains("n")) found.push_back(line);
  return found;
}

Json tensor(const Json& record, const std::string& name) {
  for (const Json& t : record.at("tensors"))
    if (t.at("name") == name) return t;
  return {};
}

// One digest of a tensor's rows.
std::string row(const Json& t, std::size_t i) { return t.at("rows").get<std::string>().substr(16 * i, 16); }

struct Call {
  std::array<float, 12> x{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  std::array<float, 4> weight{1, 2, 1, 3};
  std::array<float, 12> y{};
  rlk::Tensor tx{x.data(), {3, 4}, rlk::DType::f32}, tw{weight.data(), {4}, rlk::DType::f32},
      ty{y.data(), {3, 4}, rlk::DType::f32};
  rlk::RmsNorm args() const { return {.x = tx, .weight = tw, .y = ty}; }
  void run() {
    y.fill(NAN);
    rlk::check(rlk::rms_norm(args()));
  }
};

}  // namespace

TEST_CASE("a call is one record: op, implementation, arithmetic, attributes, and digests of every tensor") {
  Call call;
  call.run();
  const auto plain = call.y;
  const Json r = records(traced([&] {
    const rlk::TraceTag tag("layer 0 norm");
    call.run();
  }))[0];
  CHECK(call.y == plain);
  const rlk::Resolution how = rlk::resolve(call.args());
  CHECK(r.at("n") == 1);
  CHECK(r.at("op") == "rms_norm");
  CHECK(r.at("tag") == "layer 0 norm");
  CHECK(r.at("keys") == 0);
  CHECK(r.at("implementation") == std::string(how.id()));
  CHECK(r.at("arithmetic") == std::string(how.arithmetic()));
  CHECK(r.at("attributes").at("eps").get<double>() == call.args().eps);
  REQUIRE(r.at("tensors").size() == 3);
  const Json x = tensor(r, "x"), weight = tensor(r, "weight"), y = tensor(r, "y");
  CHECK(x.at("role") == "input");
  CHECK(x.at("dtype") == "fp32");
  CHECK(x.at("shape") == Json({3, 4}));
  CHECK(weight.at("role") == "weight");
  CHECK_FALSE(weight.contains("rows"));
  CHECK(y.at("role") == "output");
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(row(x, i) == row(records(traced([&] { call.run(); }))[0].at("tensors")[0], i));
    CHECK(std::stoull(row(y, i), nullptr, 16) == rlk::digest(plain.data() + 4 * i, 16));
  }
}

TEST_CASE("cached, bound and moved calls are recorded, and none before or after the trace") {
  Call call, other;
  call.run();
  rlk::BoundOp bound = rlk::check(rlk::bind(call.args()));
  rlk::check(bound.run());
  const auto lines = traced([&] {
    call.run(), call.run(), other.run();
    rlk::check(bound.run());
    rlk::check(bound.run(other.args()));
  });
  CHECK(records(lines).size() == 5);
  CHECK_FALSE(rlk::tracing());
  call.run();
  rlk::check(bound.run());
  CHECK(records(traced([] {})).empty());
}

TEST_CASE("a digest shows which row differs, and where an entry stands counts") {
  Call call;
  const auto rows = [&] { return tensor(records(traced([&] { call.run(); }))[0], "x"); };
  const Json before = rows();
  std::swap(call.x[4], call.x[5]);
  const Json swapped = rows();
  CHECK(row(swapped, 0) == row(before, 0));
  CHECK(row(swapped, 1) != row(before, 1));
  CHECK(row(swapped, 2) == row(before, 2));
  CHECK(swapped.at("digest") != before.at("digest"));
  // Strided rows have the digests of dense ones.
  std::swap(call.x[4], call.x[5]);
  std::array<float, 24> wide{};
  for (std::size_t i = 0; i < 12; ++i) wide[i / 4 * 8 + i % 4] = call.x[i];
  const std::array<int64_t, 2> strides{8, 1};
  call.tx = {wide.data(), std::array<int64_t, 2>{3, 4}, rlk::DType::f32, {kDLCPU, 0}, strides};
  CHECK(rows().at("rows") == before.at("rows"));
}

TEST_CASE("no one or two words that differ in any bit, or change places, leave a digest as it was") {
  std::array<uint64_t, 24> words{};
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = i * 0x123456789abcdef;
  const auto of = [&] { return rlk::digest(words.data(), sizeof words); };
  const uint64_t plain = of();
  for (std::size_t i = 0; i < words.size(); ++i) {
    for (int bit = 0; bit < 64; ++bit) {
      words[i] ^= uint64_t{1} << bit;
      CHECK(of() != plain);
      for (std::size_t j = 0; j < words.size(); ++j) {  // the sign bits of numbers beside it, too
        if (j == i) continue;
        words[j] ^= uint64_t{1} << 63;
        CHECK(of() != plain);
        words[j] ^= uint64_t{1} << 63;
      }
      words[i] ^= uint64_t{1} << bit;
    }
    for (std::size_t j = i + 1; j < words.size(); ++j) {
      std::swap(words[i], words[j]);
      CHECK(of() != plain);
      std::swap(words[i], words[j]);
    }
  }
  CHECK(of() == plain);
  // Length counts, zeros at the end among it.
  const std::array<unsigned char, 40> zeros{};
  for (std::size_t a = 0; a < zeros.size(); ++a)
    for (std::size_t b = a + 1; b <= zeros.size(); ++b)
      CHECK(rlk::digest(zeros.data(), a) != rlk::digest(zeros.data(), b));
}

TEST_CASE("rows go by the keys of the thread, and are written once for all calls that share them") {
  Call call;
  const std::array<int64_t, 3> sequences{7, 7, 9}, positions{0, 1, 40};
  const auto lines = traced([&] {
    rlk::check(rlk::trace_rows(sequences, positions));
    call.run(), call.run();
    rlk::check(rlk::trace_rows({}, {}));
    call.run();
  });
  REQUIRE(lines.size() == 6);
  CHECK(lines[1] == Json{{"keys", 1}, {"rows", {{7, 0}, {7, 1}, {9, 40}}}});
  const auto found = records(lines);
  CHECK(found[0].at("keys") == 1);
  CHECK(found[1].at("keys") == 1);
  CHECK(found[2].at("keys") == 0);
}

TEST_CASE("rows of several leading dimensions are found by their number, other tensors have none") {
  std::array<float, 24> x{}, y{};
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i + 1);
  const rlk::Tensor tx(x.data(), {2, 3, 4}, rlk::DType::f32), ty(y.data(), {2, 3, 4}, rlk::DType::f32);
  const std::array<int64_t, 6> zeros{}, six{0, 1, 2, 3, 4, 5};
  const auto rows_with = [&](std::size_t keys) {
    return tensor(records(traced([&] {
                    rlk::check(rlk::trace_rows(std::span(zeros).first(keys), std::span(six).first(keys)));
                    rlk::check(rlk::rms_norm({.x = tx, .y = ty}));
                    rlk::check(rlk::trace_rows({}, {}));
                  }))[0],
                  "y");
  };
  CHECK(rows_with(6).at("rows").get<std::string>().size() == 6 * 16);
  CHECK(rows_with(2).at("rows").get<std::string>().size() == 2 * 16);
  CHECK_FALSE(rows_with(5).contains("rows"));
}

TEST_CASE("layers and rows can be sampled") {
  Call call;
  const std::array<int64_t, 3> sequences{1, 1, 1}, positions{3, 4, 5};
  const auto lines = traced(
      [&] {
        rlk::check(rlk::trace_rows(sequences, positions));
        for (const char* tag : {"layer 1 mlp", "layer 1 norm", "layer 2 norm"}) {
          const rlk::TraceTag here(tag);
          call.run();
        }
        rlk::check(rlk::trace_rows({}, {}));
      },
      {.tags = "layer 1 n*, layer 2*", .every = 2});
  const auto found = records(lines);
  REQUIRE(found.size() == 2);
  CHECK(found[0].at("tag") == "layer 1 norm");
  CHECK(found[1].at("tag") == "layer 2 norm");
  CHECK(lines[0].at("every") == 2);
  CHECK(std::stoull(tensor(found[0], "y").at("rows").get<std::string>(), nullptr, 16) ==
        rlk::digest(call.y.data() + 4, 16));
}

TEST_CASE("weights are digested at every call, or once until they are said to have changed") {
  Call call;
  const auto digests = [&](bool once) {
    std::vector<std::string> found;
    for (const Json& r : records(traced(
             [&] {
               call.run();
               call.weight[0] += 1;
               call.run();
               CHECK(rlk_trace_weights_changed() == RLK_OK);
               call.run();
             },
             {.weights_once = once})))
      found.push_back(tensor(r, "weight").at("digest"));
    return found;
  };
  const auto always = digests(false), once = digests(true);
  CHECK(always[0] != always[1]);
  CHECK(always[1] == always[2]);
  CHECK(once[0] == once[1]);
  CHECK(once[1] != once[2]);
}

TEST_CASE("a tensor of another program takes its place in the trace") {
  const std::array<float, 4> values{1, 2, 3, 4};
  std::array<float, 4> copy = values;
  std::array<int64_t, 2> shape{2, 2};
  const DLTensor tensor_of_theirs{copy.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape.data(), nullptr, 0};
  const DLTensor* const dl = &tensor_of_theirs;
  const auto found = records(traced([&] {
    const rlk::TraceTag tag("mine");
    CHECK(rlk_trace_tensor(nullptr, "a", dl, nullptr) == RLK_OK);
    CHECK(rlk_trace_tensor("theirs", "b", dl, nullptr) == RLK_OK);
    CHECK(rlk_trace_tensor(nullptr, "c", dl, nullptr) == RLK_OK);
  }));
  REQUIRE(found.size() == 3);
  CHECK(found[0].at("op") == "");
  CHECK(found[0].at("tag") == "mine");
  CHECK(found[1].at("tag") == "theirs");
  CHECK(found[2].at("tag") == "mine");
  CHECK(std::stoull(row(tensor(found[1], "b"), 1), nullptr, 16) == rlk::digest(values.data() + 2, 8));
  CHECK(copy == values);
  CHECK(rlk_trace_tensor(nullptr, "a", dl, nullptr) == RLK_OK);  // without a trace
}

TEST_CASE("what cannot be traced is said, with the name and the values") {
  const auto says = [](rlk_code code, rlk_code expected, const std::string& words) {
    CHECK(code == expected);
    CHECK_MESSAGE(std::string(rlk_last_error()).find(words) != std::string::npos, rlk_last_error());
  };
  says(rlk_trace_end(), RLK_INVALID_ARGUMENT, "trace: none has begun");
  says(rlk_trace_begin(nullptr, nullptr), RLK_INVALID_ARGUMENT, "the file's name is empty");
  says(rlk_trace_begin("/nowhere/x", nullptr), RLK_INVALID_ARGUMENT,
       "trace: '/nowhere/x' cannot be written: No such file or directory");
  const rlk_trace_options negative{sizeof negative, 0, nullptr, -1};
  says(rlk_trace_begin("/tmp/x", &negative), RLK_INVALID_ARGUMENT, "every is -1, it must be 0 or more");
  says(rlk_trace_rows(nullptr, nullptr, 1), RLK_INVALID_ARGUMENT, "sequences is null");
  CHECK(rlk::trace_rows(std::array<int64_t, 1>{0}, {}).message() ==
        "trace: 1 sequences and 0 positions are given");
  traced([&] {
    says(rlk_trace_begin("/tmp/x", nullptr), RLK_INVALID_ARGUMENT, "is not ended");
    float one = 1;
    std::array<int64_t, 2> shape{int64_t{1} << 40, int64_t{1} << 40};
    DLTensor bad{&one, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape.data(), nullptr, 0};
    says(rlk_trace_tensor("t", "big", &bad, nullptr), RLK_INVALID_ARGUMENT, "'big' is larger than memory");
    bad.ndim = 9;
    says(rlk_trace_tensor("t", "deep", &bad, nullptr), RLK_INVALID_ARGUMENT, "'deep' has rank 9, at most 8");
    bad.ndim = 0, bad.dtype.bits = 7;
    says(rlk_trace_tensor("t", "odd", &bad, nullptr), RLK_INVALID_ARGUMENT, "'odd' has a dtype of code 2");
    bad.dtype.bits = 32, bad.data = nullptr;
    says(rlk_trace_tensor("t", "none", &bad, nullptr), RLK_INVALID_ARGUMENT, "'none' has no data");
    bad.device = {kDLCUDA, 77}, bad.data = &one;
    says(rlk_trace_tensor("t", "far", &bad, nullptr), RLK_INVALID_ARGUMENT,
         "'far' is on device type 2, number 77, which no backend reads");
  });
}

TEST_CASE("a full disk fails the trace, never a call") {
  rlk::check(rlk::trace("/dev/full"));
  Call call;
  call.run();
  CHECK(call.y[0] > 0);
  const rlk::Status s = rlk::end_trace();
  CHECK(s.code() == RLK_CONFIGURATION);
  CHECK(s.message() == "trace: '/dev/full' is not whole: No space left on device");
  CHECK_FALSE(rlk::tracing());
}

TEST_CASE("a failed call leaves no record") {
  Call call;
  const rlk::Tensor narrow(call.weight.data(), {3}, rlk::DType::f32);
  CHECK(records(traced([&] {
          CHECK_FALSE(rlk::rms_norm({.x = call.tx, .weight = narrow, .y = call.ty}));
          call.run();
        })).size() == 1);
}

TEST_CASE("a forked child does not write on its parent's trace, and may begin its own") {
  Call call;
  const std::string own = scratch() + "_child";
  const auto lines = traced([&] {
    call.run();
    const pid_t child = fork();
    if (child == 0) {
      call.run();
      const bool silent = !rlk::tracing();
      const bool began = static_cast<bool>(rlk::trace(own));
      call.run();
      const bool ended = static_cast<bool>(rlk::end_trace());
      _exit(silent && began && ended ? 0 : 1);
    }
    int status = 1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    call.run();
  });
  CHECK(records(lines).size() == 2);
  std::ifstream in(own);
  std::vector<Json> theirs;
  for (std::string line; std::getline(in, line);) theirs.push_back(Json::parse(line));
  CHECK(records(theirs).size() == 1);
  std::filesystem::remove(own);
}

TEST_CASE("no two processes write on one file") {
  Call call;
  const std::string file = scratch() + "_shared";
  REQUIRE(rlk::trace(file));
  call.run();
  const pid_t child = fork();
  if (child == 0) {
    const rlk::Status refused = rlk::trace(file);
    const std::string parent = fmt::format("is being written by process {}; %p", getppid());
    _exit(!refused && refused.code() == RLK_INVALID_ARGUMENT &&
                  refused.message().find(parent) != std::string::npos
              ? 0
              : 1);
  }
  int status = 1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  REQUIRE(rlk::end_trace());
  std::ifstream in(file);
  std::vector<Json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  CHECK(records(lines).size() == 1);
  // Once it is ended the file may be written anew, by anybody.
  CHECK(rlk::trace(file));
  CHECK(rlk::end_trace());
  std::filesystem::remove(file);
}
