// labels: unit
// Every allocation of a call fails once, and then all from it on: the call says RLK_OUT_OF_MEMORY, nothing
// aborts, and the next call with memory gives the right results. out_of_memory_ops_test.cpp does so with every op.
#include <doctest/doctest.h>

#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "failing_memory.hpp"
#include "rlk/plugin.h"
#include "rlk/rlk.hpp"

#if !defined(RLK_OWN_MALLOC)
TEST_CASE("running out of memory") { MESSAGE("[skip] the sanitizer has its own malloc"); }
#else

namespace {

// lm_head of [1, 2] by [3, 2], by name.
struct Call {
  float hidden_data[2] = {1, 2}, weight_data[6] = {1, 2, 3, 4, 5, 6}, out_data[3] = {};
  int64_t hidden_shape[2] = {1, 2}, weight_shape[2] = {3, 2}, out_shape[2] = {1, 3};
  DLTensor hidden = tensor(hidden_data, hidden_shape), weight = tensor(weight_data, weight_shape),
           out = tensor(out_data, out_shape);
  rlk_args* args = nullptr;
  rlk_options options{};

  Call() {
    options.struct_size = sizeof options;
    options.threads = 1;
  }
  ~Call() { rlk_args_free(args); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  static DLTensor tensor(float* data, int64_t* shape) {
    return {data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
  }
  rlk_code build(const char* op = "lm_head") {
    rlk_args_free(args);
    args = rlk_args_new(op);
    if (!args) return std::strstr(rlk_last_error(), "memory") ? RLK_OUT_OF_MEMORY : RLK_INTERNAL;
    if (rlk_code code = rlk_args_tensor(args, "hidden", &hidden)) return code;
    if (rlk_code code = rlk_args_tensor(args, "weight", &weight)) return code;
    return rlk_args_tensor(args, "out", &out);
  }
  rlk_code run() {
    std::fill(out_data, out_data + 3, 0.0f);
    return rlk_run(args, &options);
  }
  bool right() { return run() == RLK_OK && out_data[0] == 5 && out_data[1] == 11 && out_data[2] == 17; }
};

}  // namespace

TEST_CASE("a list of arguments is built or it is not") {
  Call call;
  survive(
      "args", RLK_OK, [&] { return call.build(); }, [&] { return call.build() == RLK_OK && call.right(); });
  survive(
      "an unknown argument", RLK_UNKNOWN_NAME,
      [&] { return rlk_args_tensor(call.args, "hiden", &call.hidden); }, [&] { return call.right(); });
}

TEST_CASE("a call that is resolved, one that is remembered, and one that is refused") {
  Call call;
  REQUIRE(call.build() == RLK_OK);
  const auto forget = [] { REQUIRE(rlk_reload_environment() == RLK_OK); };
  survive("cold", RLK_OK, [&] { return call.run(); }, [&] { return call.right(); }, forget);
  survive("remembered", RLK_OK, [&] { return call.run(); }, [&] { return call.right(); });
  call.options.backend = "native.golden:auto";
  survive("cold, with a backend", RLK_OK, [&] { return call.run(); }, [&] { return call.right(); }, forget);
  call.options.backend = nullptr;
  uint64_t bytes = 0;
  survive(
      "workspace", RLK_OK, [&] { return rlk_workspace(call.args, &call.options, &bytes); },
      [&] { return call.right(); });
  call.hidden_shape[1] = 1;
  survive(
      "refused", RLK_INVALID_ARGUMENT, [&] { return call.run(); },
      [&] { return call.run() == RLK_INVALID_ARGUMENT; }, forget);
}

TEST_CASE("a bound call") {
  float hidden[2] = {1, 2}, weight[6] = {1, 2, 3, 4, 5, 6}, out[3] = {};
  const rlk::Tensor h(hidden, {1, 2}, rlk::DType::f32), w(weight, {3, 2}, rlk::DType::f32),
      o(out, {1, 3}, rlk::DType::f32);
  rlk::LmHead args{};
  args.hidden = h, args.weight = w, args.out = o;
  // The C++ face says it by a Status or by throwing; either way it says what there is none of.
  const auto said = [](const rlk::Status& s) {
    if (s.code() == RLK_OUT_OF_MEMORY && s.message().find("memory") != s.message().npos)
      throw std::bad_alloc();
    return s.code();
  };
  const auto run_bound = [&] {
    auto op = rlk::bind(args, {.threads = 1});
    return op ? op->run(args) : op.status();
  };
  const auto bind_and_run = [&] { return said(run_bound()); };
  survive("bind", RLK_OK, bind_and_run, [&] { return bind_and_run() == RLK_OK && out[2] == 17; });
  auto bound = rlk::bind(args, {.threads = 1});
  REQUIRE(bound);
  survive(
      "a bound op after a reload", RLK_OK, [&] { return said(bound->run(args)); },
      [&] { return bound->run(args) && out[2] == 17; }, [] { REQUIRE(rlk_reload_environment() == RLK_OK); });
}

TEST_CASE("a reload that fails leaves the library as it was") {
  Call call;
  REQUIRE(call.build() == RLK_OK);
  REQUIRE(setenv("RLK_BACKEND", "lm_head=native.golden:auto;rope*@cpu=native", 1) == 0);
  survive("reload", RLK_OK, [] { return rlk_reload_environment(); }, [&] { return call.right(); });
  unsetenv("RLK_BACKEND");
  REQUIRE(rlk_reload_environment() == RLK_OK);
}

TEST_CASE("names, lists and resolutions") {
  Call call;
  REQUIRE(call.build() == RLK_OK);
  const auto text = [](char* made) {
    const rlk_code code = code_of(made);
    rlk_free(made);
    return code;
  };
  for (const char* what : {"ops", "impls", "backends", "plugins", "env"})
    survive(
        what, RLK_OK, [&] { return text(rlk_list_json(what)); },
        [&] { return rlk_argument_count("lm_head") == 4; }, [] {}, Failing::fewer);
  survive(
      "resolve", RLK_OK, [&] { return text(rlk_resolve_json(call.args, &call.options)); },
      [&] { return call.right(); });
  survive(
      "names", RLK_OK,
      [] {
        if (!rlk_argument_name("lm_head", 0) || !rlk_attribute_count("rope") ||
            !rlk_attribute_name("rope", 0) || !rlk_op_name(0))
          return code_of(nullptr);
        return RLK_OK;
      },
      [] { return rlk_argument_count("lm_head") == 4; });
}

TEST_CASE("a saved range protects when it was saved, and not when it was not") {
  Call call;
  REQUIRE(call.build() == RLK_OK);
  uint64_t saved = 0;
  const auto release = [&] { rlk_release(std::exchange(saved, 0)); };
  survive(
      "save", RLK_OK,
      [&] {
        saved = rlk_save(&call.out, "the logits of the step before, kept for the backward");
        return saved ? RLK_OK : code_of(nullptr);
      },
      [&] {
        const bool as_said = call.run() == (saved ? RLK_OVERLAP : RLK_OK);
        release();
        return as_said && call.right();
      },
      release);
  release();
  CHECK(call.right());
}

TEST_CASE("a backend is registered whole or not at all") {
  Call call;
  REQUIRE(call.build() == RLK_OK);
  struct Tables {
    std::string name, id;
    rlk_implementation one{};
    const rlk_implementation* list[1] = {&one};
    rlk_backend backend{};
  };
  static std::deque<Tables> all;  // what is registered lives for ever
  const auto another = [&] {
    Tables& t = all.emplace_back();
    t.name = "short" + std::to_string(all.size());
    t.id = t.name + ".one";
    t.one.struct_size = sizeof t.one, t.one.priority = -1, t.one.op = "lm_head", t.one.id = t.id.c_str();
    t.one.doc = "", t.one.arithmetic = "none", t.one.dtypes = RLK_F32, t.one.device_type = kDLCPU;
    t.one.run = [](const rlk_slot*, const rlk_call*) -> int32_t { return RLK_OK; };
    t.backend.struct_size = sizeof t.backend, t.backend.abi_major = RLK_ABI_MAJOR;
    t.backend.name = t.name.c_str(), t.backend.version = "1", t.backend.doc = "";
    t.backend.implementations = t.list, t.backend.num_implementations = 1;
  };
  rlk_code said = RLK_OK;
  survive(
      "register", RLK_OK, [&] { return said = rlk_register_backend(&all.back().backend, "this test"); },
      [&] {
        call.options.backend = all.back().name.c_str();
        const bool as_said = (call.run() == RLK_OK) == (said == RLK_OK);
        call.options.backend = nullptr;
        return as_said && call.right();
      },
      another);
}

#endif
