// The certificate: what was proved, on what, as JSON that two machines can lay side by side.
#include "src/harness/certificate.hpp"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "rlk/harness.hpp"
#include "rlk/machine.hpp"
#include "src/identity.hpp"
#include "src/json.hpp"

namespace rlk::harness {
namespace {

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

// JSON has no infinities: they and NaN are written as words.
std::string real(double x) {
  if (std::isfinite(x)) return fmt::format("{:.6g}", x);
  return std::isnan(x) ? "\"nan\"" : x > 0 ? "\"inf\"" : "\"-inf\"";
}

std::string numbers(const std::vector<int64_t>& list) {
  JsonArray out;
  for (const int64_t n : list) out.raw(std::to_string(n));
  return out.str();
}

std::string texts(const std::vector<std::string>& list) {
  JsonArray out;
  for (const std::string& text : list) out.text(text);
  return out.str();
}

std::string promises_json(const Entry& e) {
  JsonObject out;
  for (const Promise p : kPromises) {
    const Tally& t = e.promises[p];
    out.raw(name_of(p), JsonObject()
                            .number("tried", t.tried)
                            .number("failed", t.failed)
                            .number("refused", t.refused)
                            .flag("promised", t.promised)
                            .text("why", t.why)
                            .str());
  }
  return out.str();
}

std::string accuracy_json(const Accuracy& a) {
  JsonArray lengths;
  for (const auto& [length, error] : a.over_length)
    lengths.raw(JsonArray().raw(std::to_string(length)).raw(real(error)).str());
  return JsonObject()
      .text("result", a.result)
      .text("dtype", a.dtype)
      .text("metric", a.metric)
      .raw("bound", real(a.bound))
      .raw("bound_ulps", real(a.bound_ulps))
      .raw("bound_absolute", real(a.bound_absolute))
      .raw("worst", real(a.worst))
      .raw("p99_9", real(a.p999))
      .raw("share_at_0_ulp", real(a.share_exact))
      .raw("worst_ulps", real(a.worst_ulps))
      .number("elements", a.elements)
      .raw("ulp_histogram", numbers({a.ulps.begin(), a.ulps.end()}))
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
  JsonArray accuracy, orders;
  JsonObject covered, corpus, sizes;
  for (const Accuracy& a : e.accuracy) accuracy.raw(accuracy_json(a));
  for (const Order& o : e.orders) orders.raw(order_json(o));
  for (const auto& [dimension, n] : e.covered) covered.number(dimension, n);
  for (const auto& [name, hash] : e.corpus) corpus.text(name, hash);
  for (const auto& [dimension, extent] : e.sizes) sizes.raw(dimension, numbers(extent));
  return JsonObject()
      .text("op", e.op)
      .text("implementation", e.implementation)
      .text("dtype", e.dtype)
      .text("arithmetic", e.arithmetic)
      .text("level", e.level)
      .flag("good", e.good())
      .flag("complete", e.complete)
      .text("backend", e.backend)
      .text("build", e.backend_build)
      .text("device", e.device_name)
      .text("versions", e.versions)
      .raw("promises", promises_json(e))
      .raw("covered", covered.str())
      .raw("sizes", sizes.str())
      .raw("accuracy", accuracy.str())
      .raw("order", orders.str())
      .raw("corpus", corpus.str())
      .raw("default_for", texts(e.default_for))
      .raw("refused_though_right", texts(e.over_refused))
      .str();
}

std::string host_json() {
  utsname system{};
  uname(&system);
  const rlk_device cpu{kDLCPU, 0, 0, {}};
  JsonObject variables;
  for (const char* name : kVariables)
    if (const char* value = secure_getenv(name)) variables.text(name, value);
  return JsonObject()
      .text("cpu", device_text(cpu))
      .text("level", level_text(cpu))
      .text("system", fmt::format("{} {}", system.sysname, system.release))
      .number("threads", processors())
      .raw("environment", variables.str())
      .str();
}

}  // namespace

std::string certificate(const Report& r, const std::vector<std::string>& mutants) {
  JsonArray failures;
  std::string lines;
  // One entry a line: certificates are diffed.
  for (const Entry& e : r.entries) lines += (lines.empty() ? "\n    " : ",\n    ") + entry_json(e);
  for (const Failure& f : r.failures) failures.text(f.line());
  const auto flag = [](bool b) { return b ? "true" : "false"; };
  const std::pair<const char*, std::string> members[] = {{"schema", std::to_string(kCertificateSchema)},
                                                         {"rlk", json_string(RLK_VERSION)},
                                                         {"build", json_string(library_build())},
                                                         {"good", flag(r.good())},
                                                         {"complete", flag(r.complete)},
                                                         {"restricted", flag(r.restricted)},
                                                         {"seed", std::to_string(r.seed)},
                                                         {"passes", std::to_string(r.passes)},
                                                         {"budget", real(r.budget)},
                                                         {"seconds", real(r.seconds)},
                                                         {"host", host_json()},
                                                         {"mutants_caught", texts(mutants)},
                                                         {"entries", "[" + lines + "\n  ]"},
                                                         {"failures", failures.str()},
                                                         {"not_covered", texts(r.not_covered)},
                                                         {"cannot_run", texts(r.cannot_run)},
                                                         {"missing", texts(r.missing)}};
  std::string out = "{";
  for (const auto& [name, value] : members)
    out += fmt::format("{}\n  {}: {}", out.size() == 1 ? "" : ",", json_string(name), value);
  out += ",\n  ";
  return fmt::format("{}\"digest\": \"{}\"\n}}\n", out, certificate_digest(out));
}

}  // namespace rlk::harness
