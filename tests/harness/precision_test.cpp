// Precision: scopes, what they must survive, and that each hostile knob does change what is not protected
// from it.
#include <doctest/doctest.h>

#include <fstream>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "rlk/evidence.hpp"
#include "rlk/harness.hpp"
#include "rlk/rlk.hpp"

#if defined(__x86_64__)
#  include <xmmintrin.h>
#endif

namespace {

using rlk::Precision;
using rlk::PrecisionScope;

struct Call {
  std::vector<float> hidden, weight, out;
  rlk::Tensor h, w, y;
  explicit Call(int64_t m = 3, int64_t k = 700, int64_t v = 5)
      : hidden(static_cast<std::size_t>(m * k)),
        weight(static_cast<std::size_t>(v * k)),
        out(static_cast<std::size_t>(m * v)) {
    for (std::size_t i = 0; i < hidden.size(); ++i)
      hidden[i] = static_cast<float>(i * 7919 % 1009) / 977.0f - 0.5f;
    for (std::size_t i = 0; i < weight.size(); ++i)
      weight[i] = static_cast<float>(i * 104729 % 1013) / 983.0f - 0.5f;
    h = rlk::Tensor(hidden.data(), {m, k}, rlk::DType::f32);
    w = rlk::Tensor(weight.data(), {v, k}, rlk::DType::f32);
    y = rlk::Tensor(out.data(), {m, v}, rlk::DType::f32);
  }
  rlk::LmHead args() const { return {.hidden = h, .weight = w, .out = y}; }
};

std::string chosen(const rlk::Options& options = {}) {
  const Call call;
  return std::string(rlk::resolve(call.args(), options).id());
}

std::vector<float> run(const char* id, unsigned mxcsr) {
  Call call;
  const rlk::LmHead args = call.args();
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  if (mxcsr) _mm_setcsr(mxcsr);
#endif
  const rlk::Status status = rlk::lm_head(args, {.backend = id});
#if defined(__x86_64__)
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  if (mxcsr) CHECK((after & ~0x3fu) == (mxcsr & ~0x3fu));  // the caller gets its own register back
#endif
  INFO(status.message());
  REQUIRE(static_cast<bool>(status));
  return call.out;
}

// On whichever instruction set it runs.
bool is_golden(const std::string& id) { return id.rfind("native.golden.", 0) == 0; }

}  // namespace

TEST_CASE("scopes nest, only ever raise, and are restored on any exit") {
  CHECK(PrecisionScope::current() == Precision::standard);
  {
    PrecisionScope strict(Precision::strict);
    CHECK(PrecisionScope::current() == Precision::strict);
    {
      PrecisionScope golden(Precision::golden);
      CHECK(PrecisionScope::current() == Precision::golden);
      CHECK(is_golden(chosen()));
      PrecisionScope lower(Precision::standard);
      CHECK(PrecisionScope::current() == Precision::golden);
    }
    CHECK(PrecisionScope::current() == Precision::strict);
  }
  try {
    PrecisionScope golden(Precision::golden);
    throw std::runtime_error("inside");
  } catch (const std::runtime_error&) {
  }
  CHECK(PrecisionScope::current() == Precision::standard);
  CHECK_FALSE(is_golden(chosen()));
}

TEST_CASE("eight threads with different scopes do not see each other's") {
  std::vector<std::string> ids(8);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ids.size(); ++i)
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 200; ++turn) {
        PrecisionScope scope(i % 2 ? Precision::golden : Precision::standard);
        const std::string id = chosen();
        if (turn && id != ids[i]) ids[i] = "changed";
        if (!turn) ids[i] = id;
      }
    });
  for (auto& t : threads) t.join();
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK(is_golden(ids[i]) == (i % 2 == 1));
}

TEST_CASE("the scope of a forward is enforced at its backward, on another thread too") {
  Call call;
  std::vector<float> d_out(15, 0.37f), golden(2100), plain(2100), under_save(2100);
  const rlk::Tensor g(d_out.data(), {3, 5}, rlk::DType::f32);
  const auto backward = [&](std::vector<float>& to, rlk::Options options = {}) {
    const rlk::Tensor d(to.data(), {3, 700}, rlk::DType::f32);
    const rlk::Status s =
        rlk::lm_head_bwd({.d_out = g, .hidden = call.h, .weight = call.w, .d_hidden = d}, options);
    INFO(s.message());
    REQUIRE(static_cast<bool>(s));
  };
  for (std::size_t i = 0; i < d_out.size(); ++i) d_out[i] = static_cast<float>(i * 31 % 17) / 13.0f - 0.6f;
  backward(golden, {.precision = Precision::golden});
  backward(plain);
  CHECK(golden != plain);  // the control: the two arithmetics differ on this data
  rlk::Saved saved;
  {
    PrecisionScope scope(Precision::golden);
    REQUIRE(static_cast<bool>(rlk::lm_head(call.args())));
    saved = rlk::Saved(call.h, "hidden");
  }
  std::thread([&] { backward(under_save); }).join();
  CHECK(under_save == golden);
  saved = rlk::Saved();
  backward(under_save);
  CHECK(under_save == plain);
}

#if defined(__x86_64__)
TEST_CASE(
    "flush to zero and rounding modes of the caller change nothing, where they change an unprotected sum") {
  const std::vector<float> unprotected = run("mutant.by_control_register", 0);
  bool control = false;
  for (const unsigned mode : {0x9fc0u, 0x3f80u, 0x5f80u, 0x7f80u}) {
    CAPTURE(mode);
    control |= run("mutant.by_control_register", mode) != unprotected;
    for (const char* id : {"mutant.honest", "native.golden", "native"}) {
      CAPTURE(id);
      CHECK(run(id, mode) == run(id, 0));
    }
  }
  CHECK(control);
}
#endif

TEST_CASE("a policy that requires evidence takes only what a certificate of this build covers") {
  rlk::clear_evidence();
  const Call call;
  const rlk::Resolution none = rlk::resolve(call.args(), {.evidence = true});
  CHECK_FALSE(static_cast<bool>(none));
  CHECK(none.explain().find("no certificate is loaded") != std::string::npos);

  const rlk::harness::Report r =
      rlk::harness::verify({.op = "lm_head", .implementation = "native.golden", .passes = 1});
  REQUIRE(!r.entries.empty());
  const std::string path = std::string(RLK_TEST_BUILD) + "/evidence_test.json";
  std::ofstream(path) << rlk::harness::certificate(r);
  const rlk::Status loaded = rlk::load_evidence(path);
  INFO(loaded.message());
  REQUIRE(static_cast<bool>(loaded));
  CHECK(is_golden(chosen({.evidence = true})));
  CHECK_FALSE(is_golden(chosen()));

  // The same from C.
  rlk_options options{};
  options.struct_size = sizeof options;
  options.evidence = 1;
  const auto run_by_name = [&] {
    const std::unique_ptr<rlk_args, void (*)(rlk_args*)> args(rlk_args_new("lm_head"), rlk_args_free);
    rlk_args_tensor(args.get(), "hidden", &call.h.dl());
    rlk_args_tensor(args.get(), "weight", &call.w.dl());
    rlk_args_tensor(args.get(), "out", &call.y.dl());
    return rlk_run(args.get(), &options);
  };
  CHECK(run_by_name() == RLK_OK);
  rlk_clear_evidence();
  CHECK(run_by_name() == RLK_NO_IMPLEMENTATION);
  CHECK(rlk_load_evidence(path.c_str()) == RLK_OK);
  CHECK(run_by_name() == RLK_OK);
  CHECK(rlk_load_evidence("/nonexistent/certificate.json") == RLK_CONFIGURATION);

  // A larger call than any that was tried is not covered by it.
  const Call wide(3, 70000);
  const rlk::Resolution beyond = rlk::resolve(wide.args(), {.evidence = true});
  CHECK_FALSE(static_cast<bool>(beyond));
  CHECK(beyond.explain().find("where this call has 70000") != std::string::npos);

  // A certificate of another build, device or instruction set proves nothing here, and resolution says which.
  const auto load_as = [&](auto change) {
    rlk::clear_evidence();
    rlk::harness::Report other = r;
    for (auto& e : other.entries) change(e);
    std::ofstream(path) << rlk::harness::certificate(other);
    REQUIRE(static_cast<bool>(rlk::load_evidence(path)));
    const rlk::Resolution refused = rlk::resolve(call.args(), {.evidence = true});
    CHECK_FALSE(static_cast<bool>(refused));
    return refused.explain();
  };
  CHECK(load_as([](auto& e) { e.backend_build = "0"; }).find("of another build") != std::string::npos);
  CHECK(load_as([](auto& e) { e.device_name = "another"; }).find("of another device") != std::string::npos);
  CHECK(load_as([](auto& e) { e.level = "another"; }).find("instruction set") != std::string::npos);
  rlk::clear_evidence();
  CHECK_FALSE(static_cast<bool>(rlk::load_evidence("/nonexistent/certificate.json")));
}
