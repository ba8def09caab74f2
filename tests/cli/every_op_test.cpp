// Every op of the registry, without a word about any of them here: chosen by RLK_BACKEND, explained, called by name from C,
// verified, and its certificate compared. Python's side of the list is in tests/python/test_ops.py.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "child_process.hpp"
#include "rlk/introspect.h"
#include "rlk/rlk.h"

using Json = nlohmann::json;
using rlk::test::Ran;

namespace {

Json parsed(char* text) {
  REQUIRE_MESSAGE(text, std::string(rlk_last_error()));
  Json json = Json::parse(text, nullptr, false);
  rlk_free(text);
  REQUIRE_FALSE(json.is_discarded());
  return json;
}

// Those that a plugin added have no examples.
std::vector<std::string> every_op() {
  const Json all = parsed(rlk_list_json("impls")).at("impls");
  std::vector<std::string> names;
  for (size_t i = 0; i < rlk_op_count(); ++i)
    if (std::any_of(all.begin(), all.end(), [&](const Json& e) {
          return e.at("op") == rlk_op_name(i) && e.at("backend") == "native";
        }))
      names.emplace_back(rlk_op_name(i));
  CHECK(names.size() >= 48);
  return names;
}

constexpr uint8_t kBool = 6;  // kDLBool, which early headers of DLPack lack
const std::map<std::string, DLDataType> kTypes{{"fp32", {kDLFloat, 32, 1}},  {"fp16", {kDLFloat, 16, 1}},
                                               {"bf16", {kDLBfloat, 16, 1}}, {"int32", {kDLInt, 32, 1}},
                                               {"int64", {kDLInt, 64, 1}},   {"uint8", {kDLUInt, 8, 1}},
                                               {"bool", {kBool, 8, 1}}};

// A dense tensor of its own memory. Numbers are small and from the place alone, negative or positive as `sign` says; integers
// are those that the example calls right.
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<unsigned char> bytes;
  DLTensor view{};

  Tensor(std::vector<int64_t> dims, DLDataType type) : shape(std::move(dims)) {
    view = {nullptr, {kDLCPU, 0}, static_cast<int32_t>(shape.size()), type, shape.data(), nullptr, 0};
    bytes.assign(count() * type.bits / 8 + 1, 0xff);  // NaN, where nobody writes
    view.data = bytes.data();
  }
  Tensor(const Tensor&) = delete;
  size_t count() const {
    size_t n = 1;
    for (int64_t d : shape) n *= static_cast<size_t>(d);
    return n;
  }
  void integer(size_t i, int64_t x) {
    if (view.dtype.bits == 64)
      std::memcpy(&bytes[8 * i], &x, 8);
    else if (const auto narrow = static_cast<int32_t>(x); view.dtype.bits == 32)
      std::memcpy(&bytes[4 * i], &narrow, 4);
    else
      bytes[i] = static_cast<unsigned char>(x);
  }
  void real(size_t i, float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    const auto exponent = static_cast<int32_t>(word >> 23 & 0xff) - 127 + 15;
    const uint32_t half =
        exponent <= 0 ? 0
                      : (word >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (word >> 13 & 0x3ff);
    const auto narrow = static_cast<uint16_t>(view.dtype.code == kDLBfloat ? word >> 16 : half);
    view.dtype.bits == 32 ? std::memcpy(&bytes[4 * i], &x, 4) : std::memcpy(&bytes[2 * i], &narrow, 2);
  }
  // Of what the example says of it.
  void fill(const Json& given) {
    const std::string name = given.at("name");
    const bool floating = view.dtype.code == kDLFloat || view.dtype.code == kDLBfloat;
    const float sign = name == "g" ? -1.0f : name == "beta" ? 1.0f : 0.0f;
    for (size_t i = 0; i < count(); ++i) {
      if (given.contains("values") && !given.at("values").empty()) {
        const Json& list = given.at("values");
        const double x = list.at(i % list.size()).is_null() ? 0 : list.at(i % list.size()).get<double>();
        floating ? real(i, static_cast<float>(x)) : integer(i, static_cast<int64_t>(x));
      } else if (floating) {
        const float x = static_cast<float>((i * 37 + 11) % 101) / 101 * 2 - 1;
        real(i, sign == 0 ? x : sign * std::fabs(x));
      } else if (given.contains("range")) {
        const auto from = given.at("range").at(0).get<int64_t>(), to = given.at("range").at(1).get<int64_t>();
        integer(i, from + static_cast<int64_t>(i) % std::max<int64_t>(1, to - from));
      } else {
        integer(i, static_cast<int64_t>(i));
      }
    }
  }
  bool finite_fp32() const {
    for (size_t i = 0; i < count(); ++i) {
      float x;
      std::memcpy(&x, &bytes[4 * i], 4);
      if (!std::isfinite(x)) return false;
    }
    return true;
  }
};

// An example as a call by name.
class Call {
 public:
  Call(const std::string& op, const Json& example) : args_(rlk_args_new(op.c_str())) {
    REQUIRE_MESSAGE(args_, std::string(rlk_last_error()));
    for (const Json& t : example.at("tensors")) {
      Tensor& tensor = add(t.at("name"), t.at("shape").get<std::vector<int64_t>>(), kTypes.at(t.at("dtype")));
      tensor.fill(t);
    }
    for (const auto& [name, value] : example.at("attributes").items()) {
      const char* n = name.c_str();
      const rlk_code code = value.is_string() ? rlk_args_string(args_, n, value.get<std::string>().c_str())
                            : value.is_number_float() ? rlk_args_float(args_, n, value.get<double>())
                            : value.is_boolean()      ? rlk_args_int(args_, n, value.get<bool>())
                                                      : rlk_args_int(args_, n, value.get<int64_t>());
      REQUIRE_MESSAGE(code == RLK_OK, std::string(rlk_last_error()));
    }
    for (const Json& r : example.at("results")) {
      const std::string name = r.at("name");
      int32_t rank = 0;
      int64_t shape[8];
      DLDataType type{};
      REQUIRE_MESSAGE(rlk_infer(args_, name.c_str(), &rank, shape, &type) == RLK_OK,
                      std::string(rlk_last_error()));
      results_.push_back(&add(name, {shape, shape + rank}, kTypes.at(r.at("dtype"))));
    }
  }
  ~Call() { rlk_args_free(args_); }
  Call(const Call&) = delete;
  operator const rlk_args*() const { return args_; }
  const std::vector<Tensor*>& results() const { return results_; }
  const std::map<std::string, Tensor*>& tensors() const { return names_; }

 private:
  Tensor& add(const std::string& name, std::vector<int64_t> shape, DLDataType type) {
    tensors_.push_back(std::make_unique<Tensor>(std::move(shape), type));
    REQUIRE_MESSAGE(rlk_args_tensor(args_, name.c_str(), &tensors_.back()->view) == RLK_OK,
                    std::string(rlk_last_error()));
    return *(names_[name] = tensors_.back().get());
  }
  rlk_args* args_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<Tensor*> results_;
  std::map<std::string, Tensor*> names_;
};

Json examples_of(const std::string& op) { return parsed(rlk_examples_json(op.c_str())).at("examples"); }

// RLK_BACKEND of this process, as if it had been started with it.
struct Variable {
  explicit Variable(const std::string& value) {
    setenv("RLK_BACKEND", value.c_str(), 1);
    code = rlk_reload_environment();
  }
  ~Variable() {
    unsetenv("RLK_BACKEND");
    rlk_reload_environment();
  }
  Variable(const Variable&) = delete;
  rlk_code code;
};

}  // namespace

TEST_CASE("RLK_BACKEND=OP=ID picks each implementation of every op, or says why it cannot serve the call") {
  std::set<std::string> chosen;
  for (const std::string& op : every_op()) {
    CAPTURE(op);
    const Json examples = examples_of(op);
    CHECK_FALSE(examples.empty());
    for (const Json& example : examples) {
      const Call call(op, example);
      const Json plain = parsed(rlk_resolve_json(call, nullptr));
      CHECK(plain.at("code") == RLK_OK);
      for (const Json& candidate : plain.at("candidates")) {
        const std::string id = candidate.at("id");
        if (!id.starts_with("native.")) continue;  // others may be a plugin that is not loaded yet
        CAPTURE(id);
        const Variable only(op + "=" + id);
        CHECK(only.code == RLK_OK);
        const Json forced = parsed(rlk_resolve_json(call, nullptr));
        CHECK(forced.at("code") == (candidate.at("accepted") == true ? RLK_OK : RLK_NO_IMPLEMENTATION));
        CHECK(forced.at("chosen") == (candidate.at("accepted") == true ? id : ""));
        if (candidate.at("accepted") == true) {
          chosen.insert(op + "=" + id);
          CHECK_SAYS(forced.at("decided_by").get<std::string>(), op + "=" + id);
        } else {
          CHECK_SAYS(forced.at("error").get<std::string>(), id);
        }
      }
    }
    const Variable unknown(op + "=native.no_such_thing");
    CHECK(rlk_run(Call(op, examples[0]), nullptr) == RLK_CONFIGURATION);
    CHECK_SAYS(std::string(rlk_last_error()), "unknown implementation 'native.no_such_thing'");
  }
  CHECK(chosen.size() >= 100);
}

TEST_CASE("every op is a C call by name: its examples run, and what they give is written and finite") {
  for (const std::string& op : every_op()) {
    CAPTURE(op);
    int written = 0;
    for (const Json& example : examples_of(op)) {
      const std::string name = example.at("name");
      CAPTURE(name);
      const Call call(op, example);
      uint64_t bytes = 0;
      CHECK(rlk_workspace(call, nullptr, &bytes) == RLK_OK);
      CHECK_MESSAGE(rlk_run(call, nullptr) == RLK_OK, std::string(rlk_last_error()));
      for (const Tensor* result : call.results()) {
        if (result->view.dtype.code != kDLFloat || result->view.dtype.bits != 32) continue;
        CHECK(result->finite_fp32());
        ++written;
      }
    }
    // An op in place, or of integers alone, has none.
    CHECK((written > 0 || examples_of(op)[0].at("results").empty() || op.starts_with("sample_")));
  }
}

TEST_CASE("--explain of every op names the choice and each implementation, and an unknown one by its name") {
  const Json all = parsed(rlk_list_json("impls")).at("impls");
  for (const std::string& op : every_op()) {
    CAPTURE(op);
    const Ran said = rlk::test::run({RLK_DISPATCH, "--explain", op});
    CHECK(said.exit == 0);
    CHECK_SAYS(said.out, "chosen");
    for (const Json& i : all)
      if (i.at("op") == op && i.at("backend") == "native")
        CHECK_SAYS(said.out, i.at("id").get<std::string>());
  }
  const Ran wrong =
      rlk::test::run({RLK_DISPATCH, "--explain", "rope"}, {"RLK_BACKEND=rope=native.no_such_thing"});
  CHECK(wrong.exit == 2);
  CHECK_SAYS(wrong.err, "unknown implementation 'native.no_such_thing'");
}

namespace {

// A safetensors file, piece by piece.
class File {
 public:
  void metadata(const std::string& name, const std::string& value) { table_["__metadata__"][name] = value; }
  void tensor(const std::string& name, const Tensor& t, const std::vector<unsigned char>& bytes) {
    const std::string words[] = {"I", "U", "F", "", "BF"};
    const std::string type =
        t.view.dtype.code == kBool ? "BOOL" : words[t.view.dtype.code] + std::to_string(t.view.dtype.bits);
    const size_t from = data_.size(), size = t.count() * t.view.dtype.bits / 8;
    data_.append(reinterpret_cast<const char*>(bytes.data()), size);
    table_[name] = {{"dtype", type}, {"shape", t.shape}, {"data_offsets", {from, data_.size()}}};
    if (size > 0) last_ = from;
  }
  void write(const std::string& path, bool wrong) const {
    std::string data = data_;
    if (wrong) data[last_] = static_cast<char>(data[last_] ^ 1);
    const std::string header = table_.dump();
    const uint64_t size = header.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), 8);
    file << header << data;
  }

 private:
  Json table_;
  std::string data_;
  size_t last_ = 0;  // where the last tensor begins
};

}  // namespace

TEST_CASE("--against reproduces a call of every op, and names the bit that differs") {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("rlk_every_call_" + std::to_string(getpid()))).string();
  for (const std::string& op : every_op()) {
    CAPTURE(op);
    const Json example = examples_of(op)[0];
    const Call call(op, example);
    std::map<std::string, std::vector<unsigned char>> before;
    for (const auto& [name, t] : call.tensors()) before[name] = t->bytes;
    REQUIRE(rlk_run(call, nullptr) == RLK_OK);
    File file;
    file.metadata("arithmetic", parsed(rlk_resolve_json(call, nullptr)).at("arithmetic"));
    for (const auto& [name, value] : example.at("attributes").items())
      file.metadata(name, value.is_string() ? value.get<std::string>() : value.dump());
    const auto is_result = [&](const Tensor* t) {
      return std::find(call.results().begin(), call.results().end(), t) != call.results().end();
    };
    for (const auto& [name, t] : call.tensors())
      if (!is_result(t)) file.tensor(name, *t, before[name]);
    for (const auto& [name, t] : call.tensors()) {
      if (!is_result(t) && t->bytes != before[name]) file.tensor(name + ".after", *t, t->bytes);
      if (is_result(t)) file.tensor(name, *t, t->bytes);
    }
    file.write(path, false);
    const Ran good = rlk::test::run({RLK_DISPATCH, "--verify", op, "--against", path});
    CHECK_MESSAGE(good.exit == 0, good.out, good.err);
    CHECK_SAYS(good.out, "reproduced, 0 bits differ");
    file.write(path, true);
    const Ran bad = rlk::test::run({RLK_DISPATCH, "--verify", op, "--against", path});
    CHECK(bad.exit == 1);
    CHECK_SAYS(bad.out, ": 1 of ");
    std::filesystem::remove(path);
  }
}

TEST_CASE("--against says what a dump of a call lacks, or has too much") {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("rlk_a_call_" + std::to_string(getpid()))).string();
  const Tensor two({2, 4}, kTypes.at("fp32"));
  const std::vector<unsigned char> zeros(two.bytes.size());
  const auto said = [&](const char* op, const std::vector<std::string>& tensors,
                        const std::string& arithmetic) {
    File file;
    if (!arithmetic.empty()) file.metadata("arithmetic", arithmetic);
    for (const std::string& name : tensors) file.tensor(name, two, zeros);
    file.write(path, false);
    const Ran ran = rlk::test::run({RLK_DISPATCH, "--verify", op, "--against", path});
    CHECK(ran.out == "");
    std::filesystem::remove(path);
    return std::to_string(ran.exit) + " " + ran.err;
  };
  CHECK_SAYS(said("swiglu", {"gate", "up", "out"}, ""), "2 error: ");
  CHECK_SAYS(said("swiglu", {"gate", "up", "out"}, ""), "\"arithmetic\" is missing");
  CHECK_SAYS(said("swiglu", {"gate", "up"}, "act32"), "holds no results of swiglu");
  CHECK_SAYS(said("swiglu", {"up", "out"}, "act32"), "has no tensor 'gate'");
  CHECK_SAYS(said("swiglu", {"gate", "up", "out", "gates"}, "act32"), "gates");
  CHECK_SAYS(said("swiglu", {"gate", "up", "out"}, "act31"), "act31");
  CHECK_SAYS(said("rope_i", {"x", "out"}, "rope32"), "'rope_i' is an alias");
  CHECK_SAYS(said("swigly", {"gate", "out"}, "act32"), "swigly");
}

TEST_CASE("every op's implementation of choice gets a certificate that is good and equal to itself") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(NDEBUG)
  MESSAGE("[skip] slow when instrumented or with assertions");
  return;
#endif
  const std::string file =
      (std::filesystem::temp_directory_path() / ("rlk_every_op_" + std::to_string(getpid()))).string();
  for (const std::string& op : every_op()) {
    CAPTURE(op);
    const std::string id = parsed(rlk_resolve_json(Call(op, examples_of(op)[0]), nullptr)).at("chosen");
    // So that it is what every dtype would get: another may have another of choice.
    const std::string forced = "RLK_BACKEND=" + op + "=" + id;
    const Ran made = rlk::test::run({"/usr/bin/env", forced, RLK_DISPATCH, "--verify", op, "--impl", id,
                                     "--budget", "short", "--certificate", file});
    CHECK_MESSAGE(made.exit == 0, made.out);
    const Ran same = rlk::test::run({"/usr/bin/env", forced, RLK_DISPATCH, "--compare", file, file});
    CHECK_MESSAGE(same.exit == 0, same.out, same.err);
    CHECK_SAYS(same.out, "no difference");
    std::filesystem::remove(file);
  }
}
