// labels: unit
// The edge of the C face: null pointers, sizes of structs, words with any bytes in them.
#include <doctest/doctest.h>

#include <climits>
#include <cstring>
#include <string>
#include <vector>

#include "rlk/introspect.h"
#include "rlk/printable.hpp"
#include "rlk/rlk.h"

namespace {

#define CHECK_SAYS(text, part) CHECK_MESSAGE(std::string(text).find(part) != std::string::npos, text)

struct Args {
  explicit Args(const char* op) : args(rlk_args_new(op)) { REQUIRE(args); }
  ~Args() { rlk_args_free(args); }
  Args(const Args&) = delete;
  Args& operator=(const Args&) = delete;
  operator rlk_args*() const { return args; }
  rlk_args* args;
};

struct LmHead {
  float hidden_data[2] = {1, 2}, weight_data[6] = {1, 2, 3, 4, 5, 6}, out_data[3] = {};
  int64_t hidden_shape[2] = {1, 2}, weight_shape[2] = {3, 2}, out_shape[2] = {1, 3};
  DLTensor hidden{hidden_data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, hidden_shape, nullptr, 0};
  DLTensor weight{weight_data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, weight_shape, nullptr, 0};
  DLTensor out{out_data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, out_shape, nullptr, 0};
  Args args{"lm_head"};
  LmHead() {
    rlk_args_tensor(args, "hidden", &hidden);
    rlk_args_tensor(args, "weight", &weight);
    rlk_args_tensor(args, "out", &out);
  }
};

rlk_options defaults() {
  rlk_options o{};
  o.struct_size = sizeof o;
  return o;
}

// What a program compiled against a later header passes.
struct LaterOptions {
  rlk_options known;
  uint64_t later[2];
};

}  // namespace

TEST_CASE("a null pointer is named") {
  LmHead call;
  uint64_t bytes = 0;
  int32_t ndim = 0;
  int64_t shape[8];
  DLDataType dtype{};
  CHECK(rlk_workspace(call.args, nullptr, nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "bytes is null");
  CHECK(rlk_workspace(nullptr, nullptr, &bytes) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "args is null");
  CHECK(rlk_infer(call.args, "out", nullptr, shape, &dtype) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "ndim is null");
  CHECK(rlk_infer(call.args, "out", &ndim, nullptr, &dtype) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "shape is null");
  CHECK(rlk_infer(call.args, "out", &ndim, shape, nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "dtype is null");
  CHECK(rlk_load_plugin(nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "path is null");
  CHECK(rlk_load_evidence(nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "path is null");
  CHECK(rlk_args_tensor(call.args, nullptr, nullptr) == RLK_UNKNOWN_NAME);
  CHECK(rlk_args_new(nullptr) == nullptr);
}

TEST_CASE("options of an earlier header are taken, with defaults for what they lack") {
  LmHead call;
  rlk_options o = defaults();
  o.struct_size = offsetof(rlk_options, workspace);
  o.threads = -3;  // behind what the caller says there is
  CHECK(rlk_run(call.args, &o) == RLK_OK);
  CHECK(call.out_data[2] == 17);
  o.backend = "cuda";  // within
  CHECK(rlk_run(call.args, &o) != RLK_OK);
}

TEST_CASE("options of a later header are taken while they ask for nothing new") {
  LmHead call;
  LaterOptions o{};
  o.known = defaults();
  o.known.struct_size = sizeof o;
  CHECK(rlk_run(call.args, &o.known) == RLK_OK);
  o.later[1] = 1;
  CHECK(rlk_run(call.args, &o.known) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) ==
        "options: struct_size is 112, this library's struct has 96 bytes, and something behind them is set: "
        "it asks "
        "for what only a newer library has");
}

TEST_CASE("a size that no header ever had is an error with both sizes") {
  LmHead call;
  rlk_options o = defaults();
  for (const uint32_t size : {0u, 4u, 12u, 90u, 100u, 1u << 20, UINT_MAX}) {
    o.struct_size = size;
    CHECK(rlk_run(call.args, &o) == RLK_INVALID_ARGUMENT);
    CHECK(std::string(rlk_last_error()) ==
          "options: struct_size is " + std::to_string(size) + ", this library's struct has 96 bytes");
  }
}

TEST_CASE("no word of a caller reaches an error text raw") {
  const std::string evil = "x\nrlk: fake log line\x1b[2J\xff";
  const char* word = evil.c_str();
  LmHead call;
  const Args rope("rope");
  std::vector<std::string> texts;
  const auto fails = [&](bool failed) {
    CHECK(failed);
    texts.emplace_back(rlk_last_error());
  };
  fails(!rlk_args_new(word));
  fails(rlk_args_tensor(rope, word, nullptr) != RLK_OK);
  fails(rlk_args_int(rope, word, 1) != RLK_OK);
  fails(rlk_args_string(rope, "pairing", word) != RLK_OK);
  fails(rlk_args_string(rope, "rotary_dim", word) != RLK_OK);
  fails(!rlk_list_json(word));
  fails(!rlk_examples_json(word));
  fails(rlk_load_plugin(word) != RLK_OK);
  fails(rlk_load_plugin(("/" + evil).c_str()) != RLK_OK);
  fails(rlk_load_plugin(("/" + evil + "/librlk_backend_x.so").c_str()) != RLK_OK);
  fails(rlk_load_evidence(word) != RLK_OK);
  int32_t ndim = 0;
  int64_t shape[8];
  DLDataType dtype{};
  fails(rlk_infer(call.args, word, &ndim, shape, &dtype) != RLK_OK);
  rlk_options o = defaults();
  for (const char* rlk_options::* member :
       {&rlk_options::backend, &rlk_options::arithmetic, &rlk_options::precision, &rlk_options::gradients}) {
    o = defaults();
    o.*member = word;
    fails(rlk_run(call.args, &o) != RLK_OK);
  }
  for (const std::string& text : texts) {
    CHECK_MESSAGE(rlk::is_printable(text), text);
    CHECK(!text.empty());
  }
}

TEST_CASE("a long path does not cut the reason off") {
  const std::string path = "/" + std::string(3000, 'a') + "/librlk_backend_x.so";
  CHECK(rlk_load_plugin(path.c_str()) == RLK_PLUGIN);
  CHECK_SAYS(rlk_last_error(), "it cannot be opened: File name too long");
  CHECK_SAYS(rlk_last_error(), "librlk_backend_x.so'");
}

TEST_CASE("what cannot be saved says why") {
  LmHead call;
  const auto save = [](const DLTensor& t) {
    CHECK(rlk_save(&t, "x") == 0);
    return std::string(rlk_last_error());
  };
  CHECK(rlk_save(nullptr, "x") == 0);
  CHECK(std::string(rlk_last_error()) == "tensor is null");
  DLTensor t = call.out;
  t.data = nullptr;
  CHECK(save(t) == "save: tensor has null data");
  t = call.out, t.shape = nullptr;
  CHECK(save(t) == "save: tensor has rank 2 and no shape");
  t = call.out, t.ndim = 100000000;
  CHECK(save(t) == "save: tensor has rank 100000000, rlk takes up to 8");
  t.ndim = -1;
  CHECK(save(t) == "save: tensor has rank -1, rlk takes up to 8");
  int64_t huge[2] = {int64_t{1} << 40, int64_t{1} << 40}, negative[2] = {1, -1}, strides[2] = {INT64_MAX, 1};
  t = call.out, t.shape = huge;
  CHECK(save(t) == "save: tensor has size 1099511627776 in dimension 0: its reach overflows 64 bits");
  t.shape = negative;
  CHECK(save(t) == "save: tensor has size -1 in dimension 1");
  int64_t two[2] = {2, 2};
  t.shape = two, t.strides = strides;
  CHECK(save(t) == "save: tensor has size 2 in dimension 0: its reach overflows 64 bits");
  const uint64_t saved = rlk_save(&call.out, nullptr);
  CHECK(saved != 0);
  CHECK(rlk_run(call.args, nullptr) == RLK_OVERLAP);
  rlk_release(saved);
  CHECK(rlk_run(call.args, nullptr) == RLK_OK);
}
