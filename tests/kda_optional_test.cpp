// labels: conformance fibers
// quick: yes
// Every gradient of KDA may be left out, in any combination: what is left out is not written, what is asked
// for keeps its bits. Native through the public face, the portable GPU kernels on fibers.
#include <doctest/doctest.h>

#include "kda_case.hpp"
#include "simt/kda/kernels.hpp"

namespace {

using namespace kda_test;
namespace kernels = rlk::simt::kda;

const std::vector<std::string> kGradients = {"dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"};
// Two chunks, two value heads to a key head, a gate with both parameters.
const Shape kShape{.tokens = 40,
                   .heads = 1,
                   .value_heads = 2,
                   .k = 16,
                   .v = 9,
                   .gate = rlk::kda::Gate::softplus,
                   .norm = true,
                   .chunk = 32,
                   .type = Float::bf16};

std::set<std::string> subset(unsigned bits) {
  std::set<std::string> out;
  for (std::size_t i = 0; i < kGradients.size(); ++i)
    if (bits >> i & 1) out.insert(kGradients[i]);
  return out;
}

// The gradients left out are as they were before the call, the others equal those of the full call.
void check_without(const Case& full, const Case& some, const std::set<std::string>& without) {
  const Case untouched = random_case(kShape, 41);
  for (const std::string& name : kGradients) {
    CAPTURE(name);
    if (!without.contains(name)) {
      CHECK(some.out.at(name) == full.out.at(name));
    } else if (const auto before = untouched.out.find(name); before != untouched.out.end()) {
      CHECK(some.out.at(name) == before->second);
    } else {
      for (const float x : some.out.at(name).values()) CHECK(x != x);
    }
  }
}

void leave_out(Problem& p, const std::set<std::string>& without) {
  const std::pair<const char*, Tensor*> tensors[] = {
      {"dq", &p.d_q}, {"dk", &p.d_k}, {"dv", &p.d_v}, {"dg", &p.d_g}, {"dbeta", &p.d_beta}};
  for (const auto& [name, tensor] : tensors)
    if (without.contains(name)) *tensor = {};
  if (without.contains("dh0")) p.d_initial = {};
  if (without.contains("dA_log")) p.d_a_log = nullptr;
  if (without.contains("ddt_bias")) p.d_dt_bias = nullptr;
}

Case on_fibers(const std::set<std::string>& without) {
  Case c = random_case(kShape, 41);
  leave_out(c.p, without);
  std::vector<float> scratch(std::size_t(kernels::backward_bytes(c.p)) / 4 + 32, NAN);
  kernels::launch_backward(c.p, scratch.data(), nullptr);
  c.collect();
  return c;
}

}  // namespace

TEST_CASE("kda_bwd: leaving out any of the gradients changes no bit of the others, on every native form") {
  for (const char* implementation : {"native.fma32", "native.golden"}) {
    CAPTURE(implementation);
    const rlk::Options options{.backend = implementation};
    Case full = random_case(kShape, 41);
    REQUIRE(Views(full).backward(options).message() == "");
    for (unsigned bits = 1; bits < 1u << kGradients.size(); ++bits) {
      CAPTURE(bits);
      Case some = random_case(kShape, 41);
      REQUIRE(Views(some).backward(options, subset(bits)).message() == "");
      check_without(full, some, subset(bits));
    }
  }
}

TEST_CASE("kda_bwd: a key head that no value head reads has gradients of zero, whatever the workspace held") {
  std::vector<float> q(40 * 2 * 16, 0.5f), none(1);
  const auto view = [](std::vector<float>& x, std::initializer_list<std::int64_t> shape) {
    return rlk::Tensor(x.data(), shape, rlk::DType::f32);
  };
  const rlk::Tensor rows = view(q, {1, 40, 2, 16}), v = view(none, {1, 40, 0, 8}),
                    g = view(none, {1, 40, 0, 16}), beta = view(none, {1, 40, 0});
  for (const char* implementation : {"native.fma32.scalar", "native.fma32", "native.golden"}) {
    for (const bool norm : {false, true}) {
      CAPTURE(implementation);
      CAPTURE(norm);
      std::vector<float> dq(q.size(), NAN), dk(q.size(), NAN);
      const rlk::Tensor d_q = view(dq, {1, 40, 2, 16}), d_k = view(dk, {1, 40, 2, 16});
      const rlk::KdaBwd a{.q = rows,
                          .k = rows,
                          .v = v,
                          .g = g,
                          .beta = beta,
                          .d_out = v,
                          .d_q = d_q,
                          .d_k = d_k,
                          .qk_l2norm = norm};
      rlk::Options options{.backend = implementation};
      std::vector<float> workspace(*rlk::workspace(a, options) / sizeof(float) + 1, NAN);
      options.workspace = workspace.data();
      options.workspace_bytes = workspace.size() * sizeof(float);
      REQUIRE(rlk::kda_bwd(a, options).message() == "");
      for (const float x : dq) CHECK(x == 0);
      for (const float x : dk) CHECK(x == 0);
    }
  }
}

TEST_CASE("kda_bwd on fibers: leaving out gradients changes no bit of the others") {
  const Case full = on_fibers({});
  const unsigned all = (1u << kGradients.size()) - 1;
  for (std::size_t i = 0; i <= kGradients.size(); ++i) {  // each alone, all but each, all
    const unsigned one = (1u << i) & all;
    for (const unsigned bits : {one, all ^ one}) {
      CAPTURE(bits);
      check_without(full, on_fibers(subset(bits)), subset(bits));
    }
  }
}

TEST_CASE("kda_gate_bwd: leaving out any of the gradients changes no bit of the others") {
  std::mt19937 random(42);
  std::normal_distribution<float> normal;
  const auto values = [&](std::size_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = normal(random);
    return x;
  };
  std::vector<float> g = values(30 * 2 * 5), d_out = values(30 * 2 * 5), a_log = values(2), bias = values(10);
  const auto view = [](std::vector<float>& x, std::initializer_list<std::int64_t> shape) {
    return rlk::Tensor(x.data(), shape, rlk::DType::f32);
  };
  for (const char* implementation : {"native.fma32", "native.golden"}) {
    std::vector<float> full[3];
    for (unsigned bits = 0; bits < 8; ++bits) {
      CAPTURE(implementation);
      CAPTURE(bits);
      std::vector<float> results[3] = {std::vector<float>(300, NAN), std::vector<float>(2, NAN),
                                       std::vector<float>(10, NAN)};
      const rlk::Tensor raw = view(g, {30, 2, 5}), rate = view(a_log, {2}), shift = view(bias, {2, 5}),
                        dy = view(d_out, {30, 2, 5}), dg = view(results[0], {30, 2, 5}),
                        dr = view(results[1], {2}), db = view(results[2], {2, 5});
      rlk::KdaGateBwd a{.g = raw, .a_log = rate, .dt_bias = shift, .d_out = dy};
      if (!(bits & 1)) a.d_g = dg;
      if (!(bits & 2)) a.d_a_log = dr;
      if (!(bits & 4)) a.d_dt_bias = db;
      REQUIRE(rlk::kda_gate_bwd(a, {.backend = implementation}).message() == "");
      for (unsigned i = 0; i < 3; ++i) {
        if (bits == 0) full[i] = results[i];
        if (bits >> i & 1) {
          for (const float x : results[i]) CHECK(x != x);
        } else {
          CHECK(std::memcmp(full[i].data(), results[i].data(), results[i].size() * sizeof(float)) == 0);
        }
      }
    }
  }
}
