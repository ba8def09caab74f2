// labels: conformance
// The golden vectors of the dense chain (tests/data/chain/make.py says what they are): every case by the op's name through the C
// interface, by the implementation that a user gets and by the golden one.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "rlk/float.hpp"
#include "rlk/half.hpp"
#include "rlk/rlk.h"
#include "rope_golden.hpp"

namespace {

using nlohmann::json;

// A dense tensor of a named dtype.
class Owned {
 public:
  Owned(const std::string& dtype, const golden::Array& a)
      : dtype_(dtype), shape_(a.shape), bytes_(a.values.size() * bits() / 8) {
    fill(a.values);
    view_ = {bytes_.data(),
             {kDLCPU, 0},
             static_cast<int32_t>(shape_.size()),
             {code(), bits(), 1},
             shape_.data(),
             nullptr,
             0};
  }
  const DLTensor* view() const { return &view_; }
  double get(std::size_t i) const {
    if (dtype_ == "f32") return static_cast<double>(at<float>(i));
    if (dtype_ == "bf16") return static_cast<double>(rlk::bf16_to_float(at<std::uint16_t>(i)));
    if (dtype_ == "f16") return static_cast<double>(rlk::f16_to_float(at<std::uint16_t>(i)));
    return dtype_ == "i32" ? at<std::int32_t>(i) : static_cast<double>(at<std::int64_t>(i));
  }
  void spoil() { std::fill(bytes_.begin(), bytes_.end(), std::uint8_t{0xff}); }

 private:
  std::uint8_t bits() const { return dtype_ == "i64" ? 64 : dtype_ == "f32" || dtype_ == "i32" ? 32 : 16; }
  std::uint8_t code() const {
    return static_cast<std::uint8_t>(dtype_ == "bf16" ? kDLBfloat : dtype_[0] == 'i' ? kDLInt : kDLFloat);
  }
  template <class T>
  T at(std::size_t i) const {
    T x;
    std::memcpy(&x, bytes_.data() + i * sizeof(T), sizeof(T));
    return x;
  }
  template <class T>
  void put(std::size_t i, T x) {
    std::memcpy(bytes_.data() + i * sizeof(T), &x, sizeof(T));
  }
  void fill(const std::vector<double>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double x = values[i];
      if (dtype_ == "f32") put(i, static_cast<float>(x));
      if (dtype_ == "bf16") put(i, rlk::double_to_bf16(x));
      if (dtype_ == "f16") put(i, rlk::double_to_f16(x));
      if (dtype_ == "i32") put(i, static_cast<std::int32_t>(x));
      if (dtype_ == "i64") put(i, static_cast<std::int64_t>(x));
    }
  }

  std::string dtype_;
  std::vector<std::int64_t> shape_;
  std::vector<std::uint8_t> bytes_;
  DLTensor view_{};
};

void set(rlk_args* args, const std::string& name, const json& value) {
  rlk_code code = RLK_OK;
  if (value.is_string())
    code = rlk_args_string(args, name.c_str(), value.get<std::string>().c_str());
  else if (value.is_number_float())
    code = rlk_args_float(args, name.c_str(), value.get<double>());
  else
    code = rlk_args_int(args, name.c_str(), value.get<std::int64_t>());
  REQUIRE_MESSAGE(code == RLK_OK, rlk_last_error());
}

bool within(double found, double truth, double bound) {
  return found == truth || (std::isnan(found) && std::isnan(truth)) || std::fabs(found - truth) <= bound;
}

// How many numbers of the result are not within its bound.
int wrong(const Owned& found, const golden::Array& truth, const json& bound) {
  double peak = 0;
  for (double x : truth.values)
    if (std::isfinite(x)) peak = std::fmax(peak, std::fabs(x));
  const double fixed = bound.value("abs", 0.0) + bound.value("peak", 0.0) * peak,
               rel = bound.value("rel", 0.0);
  int n = 0;
  for (std::size_t i = 0; i < truth.values.size(); ++i)
    if (!within(found.get(i), truth.values[i], fixed + rel * std::fabs(truth.values[i]))) {
      if (++n == 1) MESSAGE("element ", i, ": ", found.get(i), ", the truth is ", truth.values[i]);
    }
  return n;
}

void check(const golden::Case& c, const char* backend) {
  const json& described = c.parameters;
  rlk_args* args = rlk_args_new(described.at("op").get<std::string>().c_str());
  REQUIRE_MESSAGE(args, rlk_last_error());
  std::map<std::string, Owned> tensors;
  const auto bind = [&](const std::string& name, const std::string& dtype) -> Owned& {
    Owned& t = tensors.emplace(name, Owned(dtype, c.at(name))).first->second;
    return t;
  };
  for (const auto& [name, dtype] : described.at("inputs").items()) bind(name, dtype.get<std::string>());
  for (const auto& [name, result] : described.at("results").items())
    bind(name, result.at("dtype").get<std::string>()).spoil();
  for (const auto& [name, tensor] : tensors)
    REQUIRE_MESSAGE(rlk_args_tensor(args, name.c_str(), tensor.view()) == RLK_OK, rlk_last_error());
  for (const auto& [name, value] : described.at("attributes").items()) set(args, name, value);
  rlk_options options{};
  options.struct_size = sizeof options;
  options.backend = backend;
  const rlk_code code = rlk_run(args, &options);
  rlk_args_free(args);
  REQUIRE_MESSAGE(code == RLK_OK, rlk_last_error());
  for (const auto& [name, result] : described.at("results").items()) {
    CAPTURE(name);
    CHECK(wrong(tensors.at(name), c.at(name), result.at("bound")) == 0);
  }
}

void check_file(const char* name) {
  const auto cases = golden::read(std::string(RLK_TEST_DATA "/chain/") + name + ".safetensors");
  CHECK(cases.size() >= 8);
  for (const auto& [label, c] : cases)
    for (const char* backend : {"native", "native.golden"}) {
      CAPTURE(label);
      CAPTURE(backend);
      check(c, backend);
    }
}

}  // namespace

TEST_CASE("golden vectors of linear: six lengths of the sum, parts of it, what is added, gradients") {
  check_file("linear");
}
TEST_CASE("golden vectors of rms_norm: both casts, offset, residual, gates, H from 64 to 8192") {
  check_file("rms_norm");
}
TEST_CASE("golden vectors of swiglu: both roundings, every activation, tails") { check_file("swiglu"); }
TEST_CASE("golden vectors of logp: peaked, flat, far from zero, absent, padded, equal, kept, ignored") {
  check_file("logp");
}
TEST_CASE("golden vectors of sample: tokens, sets and log-probabilities of fixed seeds") {
  check_file("sample");
}
TEST_CASE("golden vectors of ratio_kl: differences from 1e-6 to 10, masked NaN, gradients") {
  check_file("ratio_kl");
}
TEST_CASE("golden vectors of policy_loss: every form, level, aggregation and weight, an empty sequence") {
  check_file("policy_loss");
}
