// labels: conformance
// links: registry
// oneDNN's lm_head against native's of the same arithmetic id, at every instruction set that this processor
// has, each in a process of its own: the library keeps to one for as long as it lives.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <random>

#include "child_process.hpp"
#include "rlk/half.hpp"
#include "rlk/plugin.h"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

struct Matrix {
  std::int64_t rows, columns;
  DType type;
  std::vector<std::byte> data;

  Matrix(std::int64_t r, std::int64_t c, DType t)
      : rows(r), columns(c), type(t), data(static_cast<std::size_t>(r * c * rlk::size_of(t))) {}
  Matrix& fill(unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows * columns); ++i) {
      const float x = normal(engine);
      const std::uint16_t half = rlk::float_to_bf16(x);
      if (type == DType::f32)
        std::memcpy(&data[4 * i], &x, 4);
      else
        std::memcpy(&data[2 * i], &half, 2);
    }
    return *this;
  }
  Tensor view() const { return top(rows); }
  // The first m rows.
  Tensor top(std::int64_t m) const { return Tensor(const_cast<std::byte*>(data.data()), {m, columns}, type); }
};

// Of the first m rows of hidden.
Matrix product(const Matrix& hidden, std::int64_t m, const Matrix& weight, const char* id) {
  Matrix out(m, weight.rows, DType::f32);
  const Tensor h = hidden.top(m), w = weight.view(), y = out.view();
  const rlk::Status status = rlk::lm_head({.hidden = h, .weight = w, .out = y}, {.backend = id});
  INFO(std::string(id), ": ", status.message());
  REQUIRE(status);
  return out;
}

rlk::Status keep(const Matrix& weight, const char* action) {
  rlk_args* args = rlk_args_new("lm_head_weight");
  REQUIRE(args);
  const Tensor w = weight.view();
  rlk_args_tensor(args, "weight", &w.dl());
  rlk_args_string(args, "action", action);
  const rlk_code code = rlk_run(args, nullptr);
  rlk_args_free(args);
  return code == RLK_OK ? rlk::Status() : rlk::Status(code, rlk_last_error());
}

// Around every height of a product, for one K and panels that are whole, cut short, and several at a time.
// A row's bits depend on no other row: native computes all of them once.
void compare(const char* id, const char* native, DType type, std::int64_t k, unsigned seed) {
  constexpr int kRows = 200;
  const Matrix weight = Matrix(k % 2 ? 150 : 300, k, type).fill(seed);
  const Matrix hidden = Matrix(kRows, k, type).fill(seed + 1000);
  const Matrix expected = product(hidden, kRows, weight, native);
  for (const std::int64_t m : {1,  2,  4,  5,  8,  9,  10, 12, 13, 16,  17,  24,  31,
                               32, 33, 36, 37, 48, 63, 65, 96, 97, 127, 128, 129, kRows}) {
    INFO(std::string(id), " ", rlk::name_of(type), " K=", k, " M=", m, " seed=", seed);
    const auto is_expected = [&] {
      const Matrix theirs = product(hidden, m, weight, id);
      return std::equal(theirs.data.begin(), theirs.data.end(), expected.data.begin());
    };
    REQUIRE(is_expected());
    if (m % 4 != 1) continue;
    REQUIRE(keep(weight, "keep"));
    REQUIRE(is_expected());
    REQUIRE(keep(weight, "drop"));
  }
}

bool installed() {
  rlk_args* args = rlk_args_new("lm_head_weight");
  if (args) rlk_args_free(args);
  return args != nullptr;
}

// Below it oneDNN has no fused multiply-adds, and nothing is served.
bool has_avx2() { return rlk_cpu_level() >= RLK_CPU_AVX2; }
constexpr const char* kTooLow = "needs AVX2";

// This program again, under variables; its output.
std::string again(const char* test, std::vector<std::string> variables) {
  variables.push_back("RLK_LOG=off");
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const rlk::test::Ran r = rlk::test::run({self, std::string("--test-case=") + test}, variables);
  INFO(r.out, r.err);
  CHECK(r.exit == 0);
  return r.out;
}

std::string refusal(DType type, std::int64_t k, const char* id,
                    rlk::Precision precision = rlk::Precision::standard) {
  const Matrix hidden(1, k, type), weight(4, k, type), out(1, 4, DType::f32);
  const Tensor h = hidden.view(), w = weight.view(), y = out.view();
  const auto r =
      rlk::resolve(rlk::LmHead{.hidden = h, .weight = w, .out = y}, {.backend = id, .precision = precision});
  return r ? "serves" : std::string(r.status().message());
}
bool serves(DType type, std::int64_t k, const char* id) { return refusal(type, k, id) == "serves"; }

}  // namespace

TEST_CASE("a K that no product is tried at is refused, whatever else is empty") {
  if (!installed() || !has_avx2()) {
    MESSAGE("[skip] no oneDNN, or no AVX2");
    return;
  }
  for (const std::int64_t k : {(std::int64_t{1} << 22) + 1, std::int64_t{1} << 62, INT64_MAX}) {
    const std::string wanted = "K is " + std::to_string(k) + ", at most 4194304 is taken";
    const Tensor weight(nullptr, {0, k}, DType::f32), hidden(nullptr, {0, k}, DType::f32),
        out(nullptr, {0, 0}, DType::f32);
    for (const char* id : {"onednn.f32", "onednn.kb256"}) {
      const rlk::Resolution r =
          rlk::resolve(rlk::LmHead{.hidden = hidden, .weight = weight, .out = out}, {.backend = id});
      CHECK(std::string(r.status().message()).find(wanted) != std::string::npos);
    }
    rlk_args* args = rlk_args_new("lm_head_weight");
    rlk_args_tensor(args, "weight", &weight.dl());
    CHECK(rlk_run(args, nullptr) == RLK_NO_IMPLEMENTATION);
    CHECK(std::string(rlk_last_error()).find(wanted) != std::string::npos);
    rlk_args_free(args);
  }
}

TEST_CASE("oneDNN gives the bits of its arithmetic id, at every depth around a block and every height") {
  if (!installed()) {
    MESSAGE("[skip] no oneDNN");
    return;
  }
  constexpr std::array kDepths{1,   33,  96,  255,  256,  257,  300,  511,
                               512, 513, 640, 1024, 1025, 2048, 2100, 4097};
  std::size_t compared = 0;
  for (const std::int64_t k : kDepths)
    for (const DType type : {DType::f32, DType::bf16}) {
      const auto seed = static_cast<unsigned>(k);
      if (serves(type, k, "onednn.kb256")) {
        compare("onednn.kb256", "native.kb256", type, k, seed);
        ++compared;
      }
      if (type == DType::bf16 && serves(type, k, "onednn.avx512bf16"))
        compare("onednn.avx512bf16", "native.replay_avx512bf16", type, k, seed);
      if (type == DType::f32 && serves(type, k, "onednn.f32"))
        compare("onednn.f32", "native.scalar", type, k, seed);
    }
  CHECK(compared == (has_avx2() ? 2 * kDepths.size() : 0));
}

TEST_CASE("lm_head in fp32 and bf16 is served at every K with AVX2, and refused for the lack of it") {
  if (!installed()) {
    MESSAGE("[skip] no oneDNN");
    return;
  }
  for (const std::int64_t k : {1, 96, 256, 700, 4096})
    for (const DType type : {DType::f32, DType::bf16}) {
      INFO("K=", k);
      const rlk::Status kept = keep(Matrix(130, k, type).fill(1), "keep");
      if (has_avx2()) {
        CHECK(refusal(type, k, "onednn") == "serves");
        CHECK_MESSAGE(kept, kept.message());
      } else {
        CHECK_SAYS(refusal(type, k, "onednn"), kTooLow);
        CHECK_SAYS(kept.message(), kTooLow);
      }
    }
}

TEST_CASE("where oneDNN has AVX512-BF16 without AMX it serves bf16 by the instruction's id at every K") {
  if (!installed() || !serves(DType::bf16, 64, "onednn.avx512bf16")) {
    MESSAGE("[skip] ", installed() ? refusal(DType::bf16, 64, "onednn.avx512bf16") : "no oneDNN");
    return;
  }
  for (const std::int64_t k : {1, 2, 30, 31, 33, 72, 511, 513, 1000, 1024, 1025, 2047, 4096, 5000}) {
    INFO("K=", k);
    CHECK(refusal(DType::bf16, k, "onednn.avx512bf16") == "serves");
  }
}

TEST_CASE("the same under oneDNN's own limit of AVX2") {
  if (!installed()) {
    MESSAGE("[skip] no oneDNN");
    return;
  }
  again("*around a block*", {"ONEDNN_MAX_CPU_ISA=AVX2"});
  again("*served at every K*", {"ONEDNN_MAX_CPU_ISA=AVX2"});
}

TEST_CASE("as a child: what oneDNN says under a limit") {
  const char* limit = std::getenv("DNNL_MAX_CPU_ISA");
  if (!limit) return;
  if (std::string(limit) == "SSE41") {
    CHECK_SAYS(refusal(DType::f32, 96, "onednn"), "needs AVX2 (fused multiply-adds)");
    return;
  }
  if (!has_avx2()) {
    for (const char* id : {"onednn.f32", "onednn.kb256"}) CHECK_SAYS(refusal(DType::f32, 96, id), kTooLow);
    return;
  }
  CHECK_SAYS(refusal(DType::bf16, 96, "onednn.bf16"), "needs AMX");
  CHECK_SAYS(refusal(DType::f32, 4096, "onednn.f32"),
             "with AVX2 oneDNN adds 4096 products in another order than fma32/kb1024");
  CHECK_SAYS(refusal(DType::f32, 4096, "onednn.f32"), "under DNNL_MAX_CPU_ISA=AVX2");
  CHECK(refusal(DType::f32, 4096, "onednn.kb256") == "serves");
  CHECK_SAYS(refusal(DType::f32, 4096, "onednn.kb256", rlk::Precision::strict),
             "DNNL_MAX_CPU_ISA=AVX2 is set");
}

TEST_CASE("a refusal says what is missing, and which variable took it away") {
  if (!installed()) {
    MESSAGE("[skip] no oneDNN");
    return;
  }
  again("as a child: what oneDNN says*", {"DNNL_MAX_CPU_ISA=AVX2"});
  again("as a child: what oneDNN says*", {"DNNL_MAX_CPU_ISA=SSE41"});
}
