// The certificate: what was proved, on what, as JSON that two machines can lay side by side.
#include <fmt/format.h>
#include <sys/utsname.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "rlk/harness.hpp"
#include "rlk/machine.hpp"
#include "src/build_id.hpp"
#include "src/json.hpp"
#include "src/machine.hpp"
#include "src/registry.hpp"

namespace rlk::harness {
namespace {

constexpr int kSchema = 1;  // moves when a member changes its meaning or goes away
constexpr const char* kVariables[] = {"RLK_BACKEND",
                                      "RLK_CPU",
                                      "RLK_PLUGIN_PATH",
                                      "NVIDIA_TF32_OVERRIDE",
                                      "CUBLAS_EMULATE_SINGLE_PRECISION",
                                      "CUBLAS_WORKSPACE_CONFIG",
                                      "CUBLAS_EMULATION_STRATEGY",
                                      "ONEDNN_DEFAULT_FPMATH_MODE",
                                      "DNNL_DEFAULT_FPMATH_MODE",
                                      "ONEDNN_MAX_CPU_ISA",
                                      "DNNL_MAX_CPU_ISA",
                                      "OMP_NUM_THREADS"};

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string real(double x) { return fmt::format("{:.6g}", x); }

std::string promises_json(const Entry& e) {
  JsonObject out;
  for (const Promise p : kPromises) {
    const Tally& t = e.promises[p];
    out.raw(name_of(p), JsonObject()
                            .number("tried", t.tried)
                            .number("failed", t.failed)
                            .number("refused", t.refused)
                            .flag("promised", t.promised)
                            .str());
  }
  return out.str();
}

std::string accuracy_json(const Accuracy& a) {
  JsonArray ulps, lengths;
  for (int64_t n : a.ulps) ulps.raw(std::to_string(n));
  for (const auto& [length, error] : a.over_length)
    lengths.raw(JsonArray().raw(std::to_string(length)).raw(real(error)).str());
  return JsonObject()
      .text("result", a.result)
      .text("dtype", a.dtype)
      .text("metric", a.metric)
      .raw("bound", real(a.bound))
      .raw("worst", real(a.worst))
      .raw("p99_9", real(a.p999))
      .raw("share_at_0_ulp", real(a.share_exact))
      .raw("worst_ulps", real(a.worst_ulps))
      .number("elements", a.elements)
      .raw("ulp_histogram", ulps.str())
      .raw("error_over_length", lengths.str())
      .str();
}

std::string order_json(const Order& o) {
  JsonArray rows;
  for (const auto& [m, hash] : o.by_rows)
    rows.raw(JsonObject().number("rows", m).text("tree", fmt::format("{:016x}", hash)).str());
  return JsonObject()
      .text("sum_over", o.argument)
      .text("result", o.result)
      .text("shape", o.shape)
      .flag("equal_for_all_rows", o.equal)
      .raw("by_rows", rows.str())
      .str();
}

std::string entry_json(const Entry& e) {
  JsonArray accuracy, orders, over_refused;
  JsonObject covered, corpus;
  for (const Accuracy& a : e.accuracy) accuracy.raw(accuracy_json(a));
  for (const Order& o : e.orders) orders.raw(order_json(o));
  for (const std::string& name : e.over_refused) over_refused.text(name);
  for (const auto& [dimension, n] : e.covered) covered.number(dimension, n);
  for (const auto& [name, hash] : e.corpus) corpus.text(name, hash);
  return JsonObject()
      .text("op", e.op)
      .text("implementation", e.implementation)
      .text("dtype", e.dtype)
      .text("arithmetic", e.arithmetic)
      .flag("good", e.good())
      .text("backend", e.backend)
      .text("build", e.backend_build)
      .text("device", e.device_name)
      .text("versions", e.versions)
      .raw("promises", promises_json(e))
      .raw("covered", covered.str())
      .raw("accuracy", accuracy.str())
      .raw("order", orders.str())
      .raw("corpus", corpus.str())
      .raw("refused_though_right", over_refused.str())
      .str();
}

std::string host_json() {
  utsname system{};
  uname(&system);
  JsonObject variables;
  for (const char* name : kVariables)
    if (const char* value = secure_getenv(name)) variables.text(name, value);
  return JsonObject()
      .text("cpu", cpu_name())
      .text("isa", cpu_word(cpu_level()))
      .text("system", fmt::format("{} {}", system.sysname, system.release))
      .number("threads", processors())
      .raw("environment", variables.str())
      .str();
}

}  // namespace

std::string certificate(const Report& r, const std::vector<std::string>& mutants) {
  JsonArray entries, failures, not_covered, caught;
  std::string lines;
  // One entry a line: certificates are diffed.
  for (const Entry& e : r.entries) lines += (lines.empty() ? "\n    " : ",\n    ") + entry_json(e);
  for (const Failure& f : r.failures) failures.text(f.line());
  for (const std::string& text : r.not_covered) not_covered.text(text);
  for (const std::string& name : mutants) caught.text(name);
  static const int anchor = 0;
  const std::pair<const char*, std::string> members[] = {
      {"schema", std::to_string(kSchema)},
      {"rlk", json_string(RLK_VERSION)},
      {"build", json_string(fmt::format("{:016x}", build_id_of(&anchor)))},
      {"complete", r.complete ? "true" : "false"},
      {"good", r ? "true" : "false"},
      {"seed", std::to_string(r.seed)},
      {"budget", real(r.budget)},
      {"seconds", real(r.seconds)},
      {"host", host_json()},
      {"mutants_caught", caught.str()},
      {"entries", "[" + lines + "\n  ]"},
      {"failures", failures.str()},
      {"not_covered", not_covered.str()}};
  std::string out = "{";
  for (const auto& [name, value] : members)
    out += fmt::format("{}\n  {}: {}", out.size() == 1 ? "" : ",", json_string(name), value);
  return out + "\n}\n";
}

}  // namespace rlk::harness
