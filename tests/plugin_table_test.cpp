// labels: unit
// What a backend says about itself is checked when it is registered, and what its functions answer when they
// are called: nothing of it can make the host read where nothing is, or pass on what is no code.
#include "src/plugin_table.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "rlk/printable.hpp"
#include "rlk/rlk.hpp"
#include "src/failure.hpp"

using namespace rlk;

namespace {

#define CHECK_SAYS(text, part) CHECK_MESSAGE(std::string(text).find(part) != std::string::npos, text)

// What infer, supports and run of the op "odd" answer.
int32_t run_code = RLK_OK, verdict_code = RLK_OK, infer_code = RLK_OK, infer_rank = 1;

int32_t infer(const rlk_slot*, rlk_shape* shapes, const rlk_host* host) {
  shapes[1] = {infer_rank, RLK_F32, RLK_F32, {2}};
  return infer_code == RLK_INVALID_ARGUMENT ? host->fail(infer_code, nullptr) : infer_code;
}

// A backend with an op of its own in which everything is right.
struct Tables {
  rlk_argument arguments[2] = {{"in", "what is read", RLK_READ, RLK_F32, 1, 1, 0, 0},
                               {"out", "what is written", RLK_WRITE, RLK_F32, 1, 1, 0, 0}};
  rlk_attribute attributes[2] = {{"mode", "how", RLK_CHOICE, 0, 0, "plain|fancy"},
                                 {"sure", "whether", RLK_FLAG, 1, 0, nullptr}};
  rlk_op_schema op{};
  rlk_implementation implementation{};
  rlk_device_services services{};
  const rlk_op_schema* ops[1] = {&op};
  const rlk_implementation* implementations[1] = {&implementation};
  rlk_backend backend{};

  Tables() {
    op.struct_size = sizeof op, op.version = 1, op.name = "odd", op.aliases = "", op.doc = "an op";
    op.arguments = arguments, op.num_arguments = 2, op.attributes = attributes, op.num_attributes = 2;
    op.may_alias = "", op.infer = infer;
    implementation.struct_size = sizeof implementation, implementation.op = "odd";
    implementation.id = "test.one", implementation.doc = "one", implementation.arithmetic = "none";
    implementation.dtypes = RLK_F32, implementation.device_type = kDLCPU;
    implementation.supports = [](const rlk_slot*, const rlk_request*) {
      return rlk_verdict{verdict_code, -1, nullptr, nullptr, {}};
    };
    implementation.run = [](const rlk_slot*, const rlk_call*) -> int32_t { return run_code; };
    services.struct_size = sizeof services;
    backend.struct_size = sizeof backend, backend.abi_major = RLK_ABI_MAJOR, backend.name = "test";
    backend.version = "1", backend.doc = "a test", backend.ops = ops, backend.num_ops = 1;
    backend.implementations = implementations, backend.num_implementations = 1;
  }
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;
};

// What is said about tables with one thing wrong.
std::string said(const std::function<void(Tables&)>& spoil, rlk_code code = RLK_PLUGIN) {
  Tables tables;
  REQUIRE(check_backend_table(&tables.backend, "test"));
  spoil(tables);
  const Status status = check_backend_table(&tables.backend, "test");
  CHECK(status.code() == code);
  CHECK(is_printable(status.message()));
  return std::string(status.message());
}

Status call_odd() {
  float in[2] = {}, out[2] = {};
  int64_t shape[1] = {2};
  DLTensor a{in, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, shape, nullptr, 0}, b = a;
  b.data = out;
  rlk_args* args = rlk_args_new("odd");
  REQUIRE(args);
  rlk_args_tensor(args, "in", &a);
  rlk_args_tensor(args, "out", &b);
  const rlk_code code = rlk_run(args, nullptr);
  rlk_args_free(args);
  return code == RLK_OK ? Status() : Status(code, rlk_last_error());
}

}  // namespace

TEST_CASE("texts and names that are missing are named") {
  CHECK(said([](Tables& t) { t.backend.version = nullptr; }) == "its description has no version (NULL)");
  CHECK(said([](Tables& t) { t.backend.doc = nullptr; }) == "its description has no doc (NULL)");
  CHECK(said([](Tables& t) { t.backend.name = ""; }) == "its description has no name");
  CHECK(said([](Tables& t) { t.op.doc = nullptr; }) == "op 'odd' has no doc (NULL)");
  CHECK(said([](Tables& t) { t.arguments[1].doc = nullptr; }) ==
        "argument 'out' of op 'odd' has no doc (NULL)");
  CHECK(said([](Tables& t) { t.arguments[1].name = nullptr; }) == "argument 1 of op 'odd' has no name");
  CHECK(said([](Tables& t) { t.attributes[0].doc = nullptr; }) ==
        "attribute 'mode' of op 'odd' has no doc (NULL)");
  CHECK(said([](Tables& t) { t.attributes[0].choices = nullptr; }) ==
        "attribute 'mode' of op 'odd' has no choices");
  CHECK(said([](Tables& t) { t.implementation.doc = nullptr; }) ==
        "implementation 'test.one' has no doc (NULL)");
  CHECK(said([](Tables& t) { t.implementation.arithmetic = nullptr; }) ==
        "implementation 'test.one' has no arithmetic");
  CHECK(said([](Tables& t) { t.implementation.run = nullptr; }) ==
        "implementation 'test.one' has no run function");
}

TEST_CASE("texts and names that a terminal would obey are refused") {
  CHECK(said([](Tables& t) { t.backend.version = "1\x1b]0;x\x07"; }) ==
        "the version of its description is not one line of printable UTF-8: '1\\x1b]0;x\\x07'");
  CHECK_SAYS(said([](Tables& t) { t.op.doc = "two\nlines"; }), "the doc of op 'odd'");
  CHECK_SAYS(said([](Tables& t) { t.op.name = "o\xff"; }),
             "an op has the name 'o\\xff', which is not one word");
  CHECK_SAYS(said([](Tables& t) { t.implementation.id = "test.o ne"; }), "which is not one word");
  CHECK_SAYS(said([](Tables& t) { t.implementation.arithmetic = "\x1b[2J"; }),
             "has the arithmetic '\\x1b[2J'");
  CHECK_SAYS(said([](Tables& t) { t.arguments[0].name = "i\tn"; }),
             "argument 0 of op 'odd' has the name 'i\\x09n'");
}

TEST_CASE("numbers out of range are refused with the range") {
  CHECK(said([](Tables& t) { t.attributes[0].type = 77; }) ==
        "attribute 'mode' of op 'odd' has type 77, there are 0 to 3");
  CHECK(said([](Tables& t) { t.attributes[0].default_int = 2; }) ==
        "attribute 'mode' of op 'odd' has choice 2 as its default, there are 2: plain|fancy");
  CHECK(said([](Tables& t) { t.attributes[1].default_int = 5; }) ==
        "attribute 'sure' of op 'odd' has the default 5, a flag is 0 or 1");
  CHECK(said([](Tables& t) { t.arguments[0].role = 3; }) ==
        "argument 'in' of op 'odd' has role 3, there are 0 to 2");
  CHECK(said([](Tables& t) { t.arguments[0].dtypes = 0; }) ==
        "argument 'in' of op 'odd' takes the dtype set 0x0, which must be some of 0x1ff");
  CHECK(said([](Tables& t) { t.implementation.dtypes = 0x200; }) ==
        "implementation 'test.one' takes the dtype set 0x200, which must be some of 0x1ff");
  CHECK(said([](Tables& t) { t.arguments[0].max_rank = 9; }) ==
        "argument 'in' of op 'odd' has ranks 1 to 9, 0 to 8 are possible");
  CHECK(said([](Tables& t) { t.arguments[0].batch_axis = 8; }) ==
        "argument 'in' of op 'odd' has batch axis 8, -2 to 7 are possible");
  CHECK_SAYS(said([](Tables& t) { t.backend.num_ops = 5000; }), "5000 ops, up to 4096 of each are read");
  CHECK(said([](Tables& t) { t.arguments[1].name = "mode"; }) == "op 'odd' has 'mode' twice");
}

TEST_CASE("each struct may be shorter or longer by the one rule for struct sizes") {
  struct Later {
    rlk_backend known;
    void* later;
  };
  Tables tables;
  Later later{tables.backend, nullptr};
  later.known.struct_size = sizeof later;
  CHECK(check_backend_table(&later.known, "test"));
  later.later = &later;
  CHECK(check_backend_table(&later.known, "test").code() == RLK_UNSUPPORTED);
  CHECK_SAYS(check_backend_table(&later.known, "test").message(), "something behind them is set");
  later.known.struct_size = RLK_BACKEND_MIN_SIZE;
  CHECK(check_backend_table(&later.known, "test"));
  const auto size = [](uint32_t s) {
    return "struct_size is " + std::to_string(s) + ", this library's struct has ";
  };
  CHECK_SAYS(said([](Tables& t) { t.backend.struct_size = 24; }, RLK_UNSUPPORTED), size(24));
  CHECK_SAYS(said([](Tables& t) { t.op.struct_size = 0; }, RLK_UNSUPPORTED), size(0));
  CHECK_SAYS(
      said([](Tables& t) { t.implementation.struct_size = sizeof(rlk_implementation) - 8; }, RLK_UNSUPPORTED),
      size(sizeof(rlk_implementation) - 8));
  CHECK_SAYS(said([](Tables& t) { t.implementation.struct_size = 1 << 20; }, RLK_UNSUPPORTED), size(1 << 20));
  CHECK_SAYS(
      said([](Tables& t) { t.backend.services = &t.services, t.services.struct_size = 16; }, RLK_UNSUPPORTED),
      size(16));
}

TEST_CASE("what functions of a backend answer is checked too, and the text names who answered") {
  static Tables tables;
  REQUIRE(rlk_register_backend(&tables.backend, "this test") == RLK_OK);
  REQUIRE(call_odd());
  for (const int32_t code : {4711, -1, 99}) {
    const std::string number = std::to_string(code);
    run_code = code;
    Status s = call_odd();
    run_code = RLK_OK;
    CHECK(s.code() == RLK_BACKEND_ERROR);
    CHECK(s.message() == "odd: test.one returned " + number + " from its run, which is no rlk_code");
    verdict_code = code;
    // Another alignment or shape would ask again; so does a reload.
    REQUIRE(rlk_reload_environment() == RLK_OK);
    s = call_odd();
    verdict_code = RLK_OK;
    CHECK(s.code() == RLK_BACKEND_ERROR);
    CHECK(s.message() ==
          "odd: test.one answered whether it takes this call with " + number + ", which is no rlk_code");
    infer_code = code;
    REQUIRE(rlk_reload_environment() == RLK_OK);
    s = call_odd();
    infer_code = RLK_OK;
    CHECK(s.code() == RLK_BACKEND_ERROR);
    CHECK(s.message() == "odd: its infer returned " + number + ", which is no rlk_code");
  }
  for (const int32_t rank : {1000, -5, 9}) {
    infer_rank = rank;
    REQUIRE(rlk_reload_environment() == RLK_OK);
    const Status s = call_odd();
    infer_rank = 1;
    CHECK(s.code() == RLK_BACKEND_ERROR);
    CHECK(s.message() == "odd: its infer gave out rank " + std::to_string(rank) + ", 0 to 8 are possible");
  }
  verdict_code = RLK_UNSUPPORTED;
  REQUIRE(rlk_reload_environment() == RLK_OK);
  CHECK_SAYS(call_odd().message(), "test.one refused this call: it gives no reason");
  verdict_code = RLK_OK, infer_code = RLK_INVALID_ARGUMENT;
  CHECK(call_odd().message() == "the implementation gave no reason");
  infer_code = RLK_OK;
  CHECK(call_odd());
  // What a bound call, which knows no more than the number, makes of it.
  CHECK(failure(99).code() == RLK_BACKEND_ERROR);
}

TEST_CASE("a device's name ends where it must, and a log line may be missing") {
  static Tables tables;
  tables.op.name = "odd2", tables.implementation.op = "odd2", tables.implementation.id = "test2.one";
  tables.backend.name = "test2";
  tables.backend.activate = [](const rlk_host* host) -> int32_t {
    host->log(3, nullptr);
    return RLK_OK;
  };
  tables.backend.devices = [](rlk_device* out, int32_t capacity, char*, size_t) -> int32_t {
    out[0].type = kDLCPU;
    std::memset(out[0].name, 'x', sizeof out[0].name);
    std::memcpy(out[0].name, "\x1b[2J", 4);
    return capacity + 1000000;  // more than there is room for
  };
  REQUIRE(rlk_register_backend(&tables.backend, "this test") == RLK_OK);
  char* list = rlk_list_json("backends");
  REQUIRE(list);
  const std::string text = list;
  rlk_free(list);
  CHECK_SAYS(text, "\"name\": \"\\\\x1b[2Jxxxxxxxxx");
  CHECK(text.find(std::string(64, 'x')) == std::string::npos);
  CHECK(is_printable(text));
}
