// Each ambient variable against its positive control: the library called directly changes, the strict call
// through rlk does not (or is refused with a reason). A variable that changes nothing proves nothing, and is
// said to.
#include <sstream>

#include "child_process.hpp"
#include "rlk/plugin.h"

namespace {

// Beside this program, wherever both were put.
std::string beside(const char* name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}
const std::string kOneDnn = beside("ambient_onednn"), kCuda = beside("ambient_cuda");

struct Said {
  std::vector<std::string> direct, rlk;
};

Said ask(const std::string& child, const char* variable = nullptr) {
  const rlk::test::Ran r = variable ? rlk::test::run({child}, {variable, "RLK_LOG=off"})
                                    : rlk::test::run({child}, {"RLK_LOG=off"});
  INFO(r.err);
  REQUIRE(r.exit == 0);
  Said out;
  std::istringstream lines(r.out);
  for (std::string line; std::getline(lines, line);)
    (line.rfind("rlk ", 0) == 0 ? out.rlk : out.direct).push_back(line);
  return out;
}

// True when the control changed.
bool holds(const std::string& child, const char* variable) {
  const Said plain = ask(child), under = ask(child, variable);
  CAPTURE(variable);
  REQUIRE(plain.rlk.size() == under.rlk.size());
  for (std::size_t i = 0; i < plain.rlk.size(); ++i)
    if (under.rlk[i].find("refused: ") == std::string::npos) CHECK(under.rlk[i] == plain.rlk[i]);
  return plain.direct != under.direct;
}

}  // namespace

#ifdef RLK_AMBIENT_ONEDNN
TEST_CASE("oneDNN obeys the number of OpenMP threads and its instruction-set limit; a strict call does not") {
  REQUIRE_FALSE(ask(kOneDnn).direct.empty());
  CHECK(holds(kOneDnn, "OMP_NUM_THREADS=7"));
#  if defined(__x86_64__)
  const bool wide = __builtin_cpu_supports("avx512bw");
#  else
  const bool wide = false;
#  endif
  bool changed = false;
  for (const char* variable : {"DNNL_MAX_CPU_ISA=AVX2", "ONEDNN_MAX_CPU_ISA=AVX2"})
    changed |= holds(kOneDnn, variable);
  if (wide) CHECK(changed);
  const char* why = rlk_cpu_level() >= RLK_CPU_AVX2 ? "DNNL_MAX_CPU_ISA=AVX2" : "needs AVX2";
  for (const std::string& line : ask(kOneDnn, "DNNL_MAX_CPU_ISA=AVX2").rlk)
    if (line.find("refused") != line.npos) CHECK_SAYS(line, why);
  if (!wide) MESSAGE("[skip] this processor has nothing above AVX2 to take away");
}

TEST_CASE("oneDNN's fpmath mode changes no strict call") {
  bool changed = false;
  for (const char* variable : {"DNNL_DEFAULT_FPMATH_MODE=BF16", "ONEDNN_DEFAULT_FPMATH_MODE=BF16"})
    changed |= holds(kOneDnn, variable);
  if (!changed)
    MESSAGE("[skip] this oneDNN ignores the mode for products in fp32: the test proves nothing here");
}
#endif

TEST_CASE("cuBLAS obeys NVIDIA_TF32_OVERRIDE; a strict call does not") {
  if (ask(kCuda).direct == std::vector<std::string>{"no device"}) {
    MESSAGE("[skip] no GPU, or no cuBLAS");
    return;
  }
  CHECK(holds(kCuda, "NVIDIA_TF32_OVERRIDE=1"));
  for (const char* variable : {"CUBLAS_WORKSPACE_CONFIG=:16:8", "CUBLAS_EMULATE_SINGLE_PRECISION=1",
                               "CUBLAS_EMULATION_STRATEGY=eager"})
    if (!holds(kCuda, variable))
      MESSAGE(std::string(variable), " changed no product of cuBLAS here: no control");
}
