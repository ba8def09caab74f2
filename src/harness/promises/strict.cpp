#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "src/harness/promises/promises.hpp"
#include "src/harness/variables.hpp"

namespace rlk::harness {
namespace {

// What libraries under a backend read from the environment, with values that change what they compute.
constexpr std::pair<const char*, const char*> kHostile[] = {{"NVIDIA_TF32_OVERRIDE", "1"},
                                                            {"CUBLAS_EMULATE_SINGLE_PRECISION", "1"},
                                                            {"CUBLAS_EMULATION_STRATEGY", "eager"},
                                                            {"CUBLAS_WORKSPACE_CONFIG", ":16:8"},
                                                            {"ONEDNN_DEFAULT_FPMATH_MODE", "BF16"},
                                                            {"DNNL_DEFAULT_FPMATH_MODE", "BF16"},
                                                            {"ONEDNN_MAX_CPU_ISA", "AVX2"},
                                                            {"DNNL_MAX_CPU_ISA", "AVX2"},
                                                            {"OMP_NUM_THREADS", "3"}};
constexpr const char* kAllHostile = "all hostile variables";

}  // namespace

std::vector<Elsewhere> each_hostile() {
  std::vector<Elsewhere> out;
  for (const auto& [name, value] : kHostile)
    out.push_back({fmt::format("{}={}", name, value), {{name, value}}, Promise::strict});
  return out;
}

// All variables at once tell as much when nothing changes; one by one in thorough runs, to name the one.
std::vector<Elsewhere> hostile_processes(const Plan& plan) {
  const Variables all(std::begin(kHostile), std::end(kHostile));
  std::vector<Elsewhere> out{{kAllHostile, all, Promise::strict}};
  if ((plan.passes == 0 && plan.budget == 0) || !plan.transform.empty())
    for (Elsewhere& e : each_hostile()) out.push_back(std::move(e));
  return out;
}

Elsewhere with_own_variables(Elsewhere where, const Backend& backend) {
  if (where.transform != kAllHostile || !backend.origin.starts_with('/')) return where;
  for (const std::string& name : variables_in(backend.origin))
    if (std::none_of(where.variables.begin(), where.variables.end(),
                     [&](const auto& v) { return v.first == name; }))
      where.variables.emplace_back(name, "1");
  return where;
}

bool refused_all_hostile(const Target& t) {
  return t.entry.promises[Promise::strict].promised && !t.entry.covered.contains("hostile variables");
}

}  // namespace rlk::harness
