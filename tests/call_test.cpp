// labels: unit
// links: registry
// What a caller sees: good calls run, bad calls get a status that names the argument and both values.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "rlk/rlk.hpp"

using rlk::DType;
using rlk::Tensor;

namespace {

// hidden [3, 5] * weight [4, 5]^T, all small integers so that every arithmetic gives the same exact answer.
struct Small {
  std::vector<float> hidden = std::vector<float>(15), weight = std::vector<float>(20),
                     out = std::vector<float>(12, std::nanf(""));
  Tensor h{hidden.data(), {3, 5}, DType::f32}, w{weight.data(), {4, 5}, DType::f32},
      y{out.data(), {3, 4}, DType::f32};
  Small() {
    std::iota(hidden.begin(), hidden.end(), -7.f);
    std::iota(weight.begin(), weight.end(), -3.f);
  }
  rlk::LmHead args() const { return {.hidden = h, .weight = w, .out = y}; }
  bool right() const {
    for (int m = 0; m < 3; ++m)
      for (int v = 0; v < 4; ++v) {
        float sum = 0;
        for (int k = 0; k < 5; ++k)
          sum += hidden[static_cast<size_t>(m * 5 + k)] * weight[static_cast<size_t>(v * 5 + k)];
        if (out[static_cast<size_t>(m * 4 + v)] != sum) return false;
      }
    return true;
  }
};

std::string message(const rlk::Status& s) {
  CHECK_FALSE(static_cast<bool>(s));
  return std::string(s.message());
}

}  // namespace

TEST_CASE("a typed call runs and leaves its inputs alone") {
  Small s;
  const auto hidden = s.hidden, weight = s.weight;
  const rlk::Status status = rlk::lm_head(s.args());
  INFO(status.message());
  REQUIRE(status);
  CHECK(s.right());
  CHECK(s.hidden == hidden);
  CHECK(s.weight == weight);
}

// A tensor that is gone before the call cannot be left in arguments; one that lives to the call's end may be written there.
template <class Role>
constexpr bool keeps_only_what_lives =
    std::is_assignable_v<Role&, Tensor&> && std::is_assignable_v<Role&, const Tensor&> &&
    !std::is_assignable_v<Role&, Tensor> && std::is_constructible_v<Role, Tensor>;
static_assert(keeps_only_what_lives<rlk::In> && keeps_only_what_lives<rlk::Out> &&
              keeps_only_what_lives<rlk::InOut>);

TEST_CASE("a call by name takes the same path and gives the same bits") {
  Small typed, named;
  REQUIRE(rlk::lm_head(typed.args()));
  rlk_args* args = rlk_args_new("lm_head");
  REQUIRE(args != nullptr);
  CHECK(rlk_args_tensor(args, "hidden", &named.h.dl()) == RLK_OK);
  CHECK(rlk_args_tensor(args, "weight", &named.w.dl()) == RLK_OK);
  CHECK(rlk_args_tensor(args, "out", &named.y.dl()) == RLK_OK);
  CHECK(rlk_run(args, nullptr) == RLK_OK);
  CHECK(named.out == typed.out);
  int32_t ndim = 0;
  int64_t shape[8];
  DLDataType dtype;
  CHECK(rlk_infer(args, "out", &ndim, shape, &dtype) == RLK_OK);
  CHECK(ndim == 2);
  CHECK(shape[0] == 3);
  CHECK(shape[1] == 4);
  CHECK(rlk::dtype_of(dtype) == DType::f32);
  rlk_args_free(args);
}

TEST_CASE("unknown names are answered with the nearest one") {
  CHECK(rlk_args_new("lm_hed") == nullptr);
  CHECK(std::string(rlk_last_error()) == "unknown op 'lm_hed', did you mean 'lm_head'?");
  CHECK(rlk_args_new("nothing_like_it") == nullptr);
  CHECK(std::string(rlk_last_error()) ==
        "unknown op 'nothing_like_it'.  rlk-dispatch --list shows the ops there are");
  rlk_args* args = rlk_args_new("lm_head");
  REQUIRE(args != nullptr);
  CHECK(rlk_args_tensor(args, "wieght", nullptr) == RLK_UNKNOWN_NAME);
  CHECK(std::string(rlk_last_error()) == "lm_head: no argument is called 'wieght', did you mean 'weight'?");
  CHECK(rlk_args_int(args, "nothing_like_it", 1) == RLK_UNKNOWN_NAME);
  rlk_args_free(args);
  CHECK(rlk::resolve_slots("no such op", nullptr, {}).status().code() == RLK_UNKNOWN_NAME);
}

TEST_CASE("a wrong tensor is named with both values") {
  Small s;
  auto with_weight = [&](const Tensor& w) { return rlk::lm_head({.hidden = s.h, .weight = w, .out = s.y}); };
  auto with_out = [&](const Tensor& y) { return rlk::lm_head({.hidden = s.h, .weight = s.w, .out = y}); };
  auto with_hidden = [&](const Tensor& h) { return rlk::lm_head({.hidden = h, .weight = s.w, .out = s.y}); };

  CHECK(message(with_weight(Tensor(s.weight.data(), {4, 4}, DType::f32))) ==
        "lm_head: hidden has K=5, weight has K=4");
  CHECK(message(with_weight(Tensor(s.weight.data(), {5, 4}, DType::f32))) ==
        "lm_head: hidden has K=5, weight has K=4: weight [5, 4] fits only as [K, V], this op takes [V, K]");
  CHECK(message(with_weight(Tensor(s.weight.data(), {20}, DType::f32))) ==
        "lm_head: weight has rank 1, it takes rank 2");
  CHECK(message(with_weight(Tensor(s.weight.data(), {4, 5}, DType::bf16))) ==
        "lm_head: weight is bf16, hidden is fp32");
  CHECK(message(with_weight(Tensor(s.weight.data(), {4, 5}, DType::i32))) ==
        "lm_head: weight is int32, it takes fp16, bf16, fp32");
  CHECK(message(with_weight(Tensor(nullptr, {4, 5}, DType::f32))) == "lm_head: weight [4, 5] has null data");
  CHECK(message(with_weight(Tensor(s.weight.data(), {4, 5}, DType::f32, {kDLCUDA, 1}))) ==
        "lm_head: weight is on cuda:1, hidden is on cpu:0");
  CHECK(message(with_weight(Tensor(s.weight.data(), {4, 5}, DType::f32, {kDLCPU, 0}, {1, 4}))) ==
        "lm_head: weight has stride 4 in its last dimension, which must be 1");
  CHECK(message(with_weight(Tensor(reinterpret_cast<char*>(s.weight.data()) + 2, {4, 5}, DType::f32))) ==
        "lm_head: weight starts at an address that is 2 past a multiple of its 4-byte elements");
  CHECK(message(with_out(Tensor(s.out.data(), {3, 5}, DType::f32))) ==
        "lm_head: out is [3, 5], expected [3, 4]");
  CHECK(message(with_out(Tensor(s.out.data(), {3, 4}, DType::bf16))) ==
        "lm_head: out is bf16, expected fp32");
  CHECK(message(with_out(Tensor(s.out.data(), {3, 4}, DType::f32, {kDLCPU, 0}, {2, 1}))) ==
        "lm_head: out has stride 2 in dimension 0, less than the 4 elements inside: written elements would "
        "overlap");
  CHECK(message(with_hidden(Tensor(s.hidden.data(), {-3, 5}, DType::f32))) ==
        "lm_head: hidden has size -3 in dimension 0");
  CHECK(message(with_hidden(Tensor(s.hidden.data(), {int64_t{1} << 62, 5}, DType::f32))) ==
        "lm_head: hidden is [4611686018427387904, 5], more bytes than an address space has (2^63)");
  CHECK(message(rlk::lm_head({.hidden = s.h, .out = s.y})) == "lm_head: weight is missing");
  CHECK(message(rlk::lm_head({.hidden = s.h, .weight = s.w})) == "lm_head: out is missing");
  DLTensor lanes = s.w.dl();
  lanes.dtype.lanes = 4;
  CHECK(message(rlk::lm_head({.hidden = s.h, .weight = lanes, .out = s.y})) ==
        "lm_head: weight has DLPack dtype code 2, 32 bits, 4 lanes, it takes fp16, bf16, fp32");
  DLTensor deep = s.w.dl();
  deep.ndim = 9;
  CHECK(message(rlk::lm_head({.hidden = s.h, .weight = deep, .out = s.y})) ==
        "lm_head: weight has rank 9, rlk takes up to 8");
  CHECK(std::isnan(s.out[0]));  // none of them ran
}

TEST_CASE("numbers that no tensor can have are refused, not computed with") {
  Small s;
  DLTensor odd = s.h.dl();
  const int32_t type = 99;
  std::memcpy(&odd.device.device_type, &type, sizeof type);
  CHECK(message(rlk::lm_head({.hidden = odd, .weight = s.w, .out = s.y})) ==
        "lm_head: hidden is on DLPack device type 99, rlk knows cpu, cuda and hip");
  // Eight bytes times this stride is the one number whose negative does not exist.
  int64_t shape[] = {2, 5}, strides[] = {-(int64_t{1} << 60), 1};
  odd = s.h.dl();
  odd.shape = shape, odd.strides = strides;
  CHECK(
      message(rlk::lm_head({.hidden = odd, .weight = s.w, .out = s.y})).find("its reach overflows 64 bits") !=
      std::string::npos);
}

TEST_CASE("a bad call is also refused when a good one is cached") {
  Small s;
  REQUIRE(rlk::lm_head(s.args()));
  Tensor null = s.w;
  null.dl().data = nullptr;
  CHECK(message(rlk::lm_head({.hidden = s.h, .weight = null, .out = s.y})) ==
        "lm_head: weight [4, 5] has null data");
  Small big;
  std::vector<float> shared(64);
  const Tensor h(shared.data(), {3, 5}, DType::f32), y(shared.data() + 8, {3, 4}, DType::f32);
  CHECK(message(rlk::lm_head({.hidden = h, .weight = s.w, .out = y})) ==
        "lm_head: out is written and overlaps hidden");
  CHECK(message(rlk::lm_head({.hidden = h, .weight = s.w, .out = Tensor(shared.data(), {3, 4}, DType::f32)}))
            .find("overlaps hidden") != std::string::npos);
}

TEST_CASE("no rows give an empty result, no K gives zeros") {
  Small s;
  CHECK(rlk::lm_head({.hidden = Tensor(s.hidden.data(), {0, 5}, DType::f32),
                      .weight = s.w,
                      .out = Tensor(s.out.data(), {0, 4}, DType::f32)}));
  CHECK(rlk::lm_head({.hidden = Tensor(nullptr, {0, 5}, DType::f32),
                      .weight = s.w,
                      .out = Tensor(nullptr, {0, 4}, DType::f32)}));
  CHECK(std::isnan(s.out[0]));
  CHECK(rlk::lm_head({.hidden = Tensor(nullptr, {3, 0}, DType::f32),
                      .weight = Tensor(nullptr, {4, 0}, DType::f32),
                      .out = s.y}));
  CHECK(s.out == std::vector<float>(12, 0.f));
}

TEST_CASE("infer tells shape and dtypes before anything is allocated") {
  Small s;
  const auto r = rlk::infer(rlk::LmHead{.hidden = s.h, .weight = s.w}, "out");
  REQUIRE(r);
  CHECK(r->shape == std::vector<int64_t>{3, 4});
  CHECK(r->dtype == DType::f32);
  CHECK(rlk::infer(rlk::LmHead{.hidden = s.h, .weight = s.w}, "logits").status().message() ==
        "lm_head: no result is called 'logits'");
}

TEST_CASE("a bound call runs again on changed data, checks other arguments, and survives a moved registry") {
  Small s;
  auto op = rlk::bind(s.args());
  REQUIRE(op);
  REQUIRE(op->run());
  CHECK(s.right());
  s.hidden[3] = 100;
  REQUIRE(op->run());
  CHECK(s.right());
  Small other;
  REQUIRE(op->run(other.args()));
  CHECK(other.right());
  CHECK(message(op->run(
            rlk::LmHead{.hidden = s.h, .weight = Tensor(s.weight.data(), {4, 4}, DType::f32), .out = s.y})) ==
        "lm_head: hidden has K=5, weight has K=4");
  CHECK(message(op->run(rlk::LmHeadBwd{})) == "a bound lm_head was given the arguments of lm_head_bwd");
  REQUIRE(rlk_reload_environment() == RLK_OK);
  s.hidden[3] = 5;
  REQUIRE(op->run());
  CHECK(s.right());
}

TEST_CASE("a saved range is protected until it is released, from cached and bound calls too") {
  Small s;
  auto op = rlk::bind(s.args());
  REQUIRE(op);
  REQUIRE(rlk::lm_head(s.args()));
  {
    const rlk::Saved saved(s.y, "attention output");
    const std::string words =
        "lm_head: out is written and overlaps 'attention output', which is saved for a backward";
    CHECK(message(rlk::lm_head(s.args())) == words);
    CHECK(message(op->run()) == words);
    CHECK(message(op->run(s.args())) == words);
    Small free;
    CHECK(rlk::lm_head(free.args()));
  }
  CHECK(rlk::lm_head(s.args()));
  CHECK(op->run());
}

TEST_CASE("options are held to what they say") {
  Small s;
  CHECK(message(rlk::lm_head(s.args(), {.gradients = "wieght"})) ==
        "lm_head: gradient of 'wieght' asked for, there is no such argument");
  CHECK(message(rlk::lm_head(s.args(), {.gradients = "out"})) ==
        "lm_head: gradient of 'out' asked for, which is not differentiable");
  const rlk::Status none = rlk::lm_head(s.args(), {.arithmetic = "no/such"});
  CHECK(none.code() == RLK_NO_IMPLEMENTATION);
  CHECK(std::string(none.message()).find("no implementation here promises arithmetic") != std::string::npos);
  rlk_args* args = rlk_args_new("lm_head");
  rlk_options options{};
  CHECK(rlk_run(args, &options) == RLK_INVALID_ARGUMENT);  // struct_size 0
  CHECK(std::string(rlk_last_error()).find("struct_size is 0") != std::string::npos);
  options.struct_size = sizeof options;
  options.precision = "sloppy";
  CHECK(rlk_run(args, &options) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "options: precision is 'sloppy', it is standard, strict or golden");
  rlk_args_free(args);
  CHECK_THROWS_AS(rlk::check(rlk::lm_head({.hidden = s.h})), rlk::Error);
}

TEST_CASE("a golden scope lets only golden arithmetic run, on its own thread, and ends with the block") {
  Small s;
  {
    const rlk::PrecisionScope golden(rlk::Precision::golden);
    const rlk::PrecisionScope lower(rlk::Precision::standard);  // raises only
    CHECK(rlk::PrecisionScope::current() == rlk::Precision::golden);
    CHECK(rlk::resolve(s.args()).arithmetic() == "fma64");
    rlk::Precision elsewhere{};
    std::thread([&] { elsewhere = rlk::PrecisionScope::current(); }).join();
    CHECK(elsewhere == rlk::Precision::standard);
    try {
      const rlk::PrecisionScope strict(rlk::Precision::strict);
      throw 1;
    } catch (int) {
    }
    CHECK(rlk::PrecisionScope::current() == rlk::Precision::golden);
  }
  CHECK(rlk::PrecisionScope::current() == rlk::Precision::standard);
}

TEST_CASE("a resolution explains itself and its fingerprint follows the choice") {
  Small s;
  const rlk::Resolution r = rlk::resolve(rlk::LmHead{.hidden = s.h, .weight = s.w});
  REQUIRE(r);
  CHECK(r.explain().find("chosen") == 0);
  CHECK(r.explain().find(r.id()) < r.explain().find('\n'));
  CHECK(r.decided_by() == "default order");
  CHECK(r.fingerprint() == rlk::resolve(s.args()).fingerprint());
  const rlk::Resolution golden = rlk::resolve(s.args(), {.backend = "native.golden"});
  REQUIRE(golden);
  CHECK(golden.id().substr(0, 14) == "native.golden.");
  CHECK(golden.decided_by() == "call argument 'native.golden'");
  CHECK(golden.fingerprint() != r.fingerprint());
  {
    const rlk::BackendScope outer("lm_head=native.golden");
    const rlk::BackendScope inner("lm_head_bwd=native");
    CHECK(rlk::resolve(s.args()).id() == golden.id());  // the outer scope still speaks for lm_head
    CHECK(rlk::resolve(s.args()).decided_by() == "scope 'lm_head=native.golden'");
  }
  CHECK(rlk::resolve(s.args()).decided_by() == "default order");
  const rlk::BackendScope wrong("lm_hed=native");
  CHECK(rlk::lm_head(s.args()).code() == RLK_CONFIGURATION);
}

TEST_CASE("every code has a name") {
  for (int32_t code = RLK_OK; code <= RLK_INTERNAL; ++code)
    CHECK(std::string(rlk_code_name(code)).find("RLK_") == 0);
  CHECK(std::string(rlk_code_name(99)) == "unknown code");
}
