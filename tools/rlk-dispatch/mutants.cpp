#include "mutants.hpp"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>

#include "library.hpp"
#include "rlk/harness.hpp"

namespace rlk::cli {
namespace {

std::set<std::string> known() {
  std::set<std::string> ids;
  const Json all = listed("impls");
  for (const Json& i : all["impls"]) ids.insert(i["id"].get<std::string>());
  return ids;
}

void load(const std::string& file) {
  const std::unique_ptr<char, decltype(&std::free)> path(realpath(file.c_str(), nullptr), &std::free);
  if (rlk_load_plugin(path ? path.get() : file.c_str()) != RLK_OK)
    throw Failure(kPluginFailed, rlk_last_error());
}

}  // namespace

Mutants try_mutants(const Options& o) {
  Mutants out;
  if (o.mutants.empty()) return out;
  const std::set<std::string> before = known();
  load(o.mutants);
  std::set<std::string> mutants, controls, failed;
  std::map<std::string, std::string> patterns;  // by op
  const Json all = listed("impls");
  for (const Json& i : all["impls"]) {
    const auto id = i["id"].get<std::string>();
    if (before.count(id)) continue;
    (i["doc"] == "a control" ? controls : mutants).insert(id);
    patterns[i["op"].get<std::string>()] += "|" + id;
  }
  harness::Plan plan;
  plan.seed = o.seed;
  plan.passes =
      4;  // as in a normal run, and no clock: what is caught must not depend on how busy a machine is
  plan.child = {"/proc/self/exe"};
  plan.progress = show_progress;
  plan.stop = &stop;
  for (const auto& [op, ids] : patterns) {
    plan.op = op;
    plan.implementation = "@(native.golden" + ids + ")";  // a false arithmetic shows beside the true one
    for (const harness::Failure& f : harness::verify(plan).failures) failed.insert(f.implementation);
  }
  for (const std::string& id : mutants)
    if (failed.count(id) || !stop) (failed.count(id) ? out.caught : out.missed).push_back(id);
  for (const std::string& id : controls)
    if (failed.count(id)) out.blamed.push_back(id);
  return out;
}

}  // namespace rlk::cli
