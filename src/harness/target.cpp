#include "src/harness/target.hpp"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "registry/op.hpp"
#include "rlk/machine.hpp"
#include "src/check.hpp"
#include "src/harness/derived.hpp"
#include "src/harness/elsewhere.hpp"
#include "src/harness/transforms.hpp"
#include "src/identity.hpp"
#include "src/machine.hpp"
#include "src/resolve.hpp"
#include "src/text.hpp"

namespace rlk::harness {
namespace {

bool matches(const Plan& plan, const rlk_implementation& i, const Backend& b) {
  if (fnmatch(plan.op.c_str(), i.op, 0) != 0 || plan.device != device_name(i.device_type)) return false;
  return plan.implementation.empty() || plan.implementation == b.name ||
         names_implementation(plan.implementation, i.id) ||
         fnmatch(plan.implementation.c_str(), i.id, FNM_EXTMATCH) == 0;
}

const rlk_device_services* usable_services(const Backend& b) {
  const rlk_device_services* s = b.services();
  const bool whole = s && s->allocate && s->copy_in && s->copy_out && s->synchronize && s->release;
  return whole ? s : nullptr;
}

void set_promises(Tallies& promises, uint32_t traits) {
  const auto needs = [&](Promise p, uint32_t any, const char* why) {
    promises[p].promised = traits & any;
    if (!promises[p].promised) promises[p].why = why;
  };
  needs(Promise::repeats, RLK_DETERMINISTIC, "it does not promise equal bits from run to run");
  needs(Promise::batch_invariance, RLK_BATCH_INVARIANT, "it does not promise batch invariance");
  needs(Promise::strict, RLK_STRICT | RLK_GOLDEN, "it does not promise to be immune to its surroundings");
}

Target make_target(const ImplementationEntry& e, const rlk_op_schema& schema, DType dtype) {
  const rlk_implementation& i = *e.implementation;
  Target t{{&schema, &i, e.backend, Backend::current(e.backend->devices().front()), nullptr}, dtype, {}};
  if (i.device_type != kDLCPU) t.subject.services = e.backend->services();
  t.entry.op = i.op;
  t.entry.implementation = i.id;
  t.entry.backend = e.backend->name;
  t.entry.arithmetic = i.arithmetic;
  t.entry.dtype = name_of(dtype);
  t.entry.backend_build = build_of(*e.backend);
  t.entry.device_name = device_text(t.subject.device);
  t.entry.level = level_text(t.subject.device);
  t.entry.versions = versions_text(*e.backend, t.subject.device);
  set_promises(t.entry.promises, i.traits);
  return t;
}

// One target for each dtype, or the reason why there is none.
void add_targets(const ImplementationEntry& e, const rlk_op_schema& schema, Chosen& out) {
  const rlk_implementation& i = *e.implementation;
  if (e.backend->devices().empty()) {
    out.cannot_run.push_back(fmt::format("{} {}: {}", i.op, i.id, e.backend->reason()));
    return;
  }
  if (const rlk_verdict v = machine_verdict(i, Backend::current(e.backend->devices().front()));
      v.code != RLK_OK) {
    out.cannot_run.push_back(fmt::format("{} {}: {}", i.op, i.id, verdict_text(v.why, v.v)));
    return;
  }
  if (i.device_type != kDLCPU && !usable_services(*e.backend)) {
    out.not_covered.push_back(fmt::format("{} {}: its backend offers no memory services", i.op, i.id));
    return;
  }
  for (uint32_t bit = 1; bit < RLK_ALL_DTYPES; bit <<= 1)
    if (i.dtypes & bit) out.targets.push_back(make_target(e, schema, static_cast<DType>(bit)));
}

// From this priority on an implementation is more than a reference: calls get it unasked.
constexpr int32_t kUnasked = 100;

// Of the library's own alone: what a plugin says of itself must not spare it a trial. Lesser is code whose arithmetic
// other code has for more of this processor, and what no call gets unasked, golden and replays, beside what calls get.
void mark_lesser(std::vector<Target>& targets) {
  std::map<std::tuple<std::string, std::string, std::string>, int32_t> best;
  std::set<std::pair<std::string, std::string>> served;
  const auto level = [&](const Target& t) -> int32_t& {
    return best[{t.entry.op, t.entry.dtype, t.entry.arithmetic}];
  };
  const auto native = [](const Target& t) { return t.entry.backend == "native"; };
  const auto unasked = [](const Target& t) { return t.subject.implementation->priority >= kUnasked; };
  for (const Target& t : targets) {
    if (!native(t)) continue;
    level(t) = std::max(level(t), t.subject.implementation->min_arch);
    if (unasked(t)) served.emplace(t.entry.op, t.entry.dtype);
  }
  for (Target& t : targets) {
    if (!native(t)) continue;
    const bool beside = !unasked(t) && served.contains({t.entry.op, t.entry.dtype});
    t.lesser = beside || t.subject.implementation->min_arch < level(t);
  }
}

// Ops that a plan names and nobody implements, or whose gradient nobody gives.
void add_missing(const Plan& plan, const OpEntry& op, Chosen& out) {
  if (fnmatch(plan.op.c_str(), op.schema->name, 0) != 0) return;
  if (op.implementations.empty())
    out.missing.push_back(fmt::format("{}: no implementation is registered", op.schema->name));
  if (!op.schema->backward) return;
  const Snapshot& s = snapshot();
  const auto at = s.op_index.find(op.schema->backward);
  if (at == s.op_index.end() || s.ops[static_cast<std::size_t>(at->second)].implementations.empty())
    out.missing.push_back(
        fmt::format("{}: its backward {} has no implementation", op.schema->name, op.schema->backward));
}

std::string check_case(const Plan& plan, const std::vector<const registry::Op*>& ops) {
  if (plan.case_name.empty()) return {};
  std::set<std::string> names;
  const auto take = [&](const registry::Case& c) { names.insert(c.name); };
  for (const registry::Op* op : ops) op->cases({take, plan.seed});
  if (is_derived(plan.case_name))
    for (const registry::Op* op : ops)
      for (uint32_t dtype = 1; dtype < RLK_ALL_DTYPES; dtype <<= 1)
        derived_cases(
            *op, static_cast<DType>(dtype), plan.seed, [&](const Derived& d) { take(d.given); },
            plain_name(plan.case_name));
  if (names.count(plain_name(plan.case_name))) return {};
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string_view near = nearest_name(plan.case_name, views);
  return fmt::format("{} has no case {}{}", plan.op, quoted(plan.case_name),
                     near.empty() ? "" : fmt::format(", did you mean '{}'?", near));
}

// Of a transform that no call will have: before the first one, whatever the time they would take.
class TransformCheck {
 public:
  TransformCheck(const Plan& plan, const std::vector<Target>& targets) : plan_(plan), targets_(targets) {}

  std::string error() {
    if (plan_.transform.empty() || targets_.empty() || !all_elsewhere(plan_).empty()) return {};
    // Streams are the device's to make; what is not there is found when it was not tried.
    if (plan_.transform.starts_with("streams ") || plan_.transform.starts_with("graphs ")) return {};
    for (const char* name : {kAnotherOrder, kOrderOfAddition}) offer(name);
    all_cases(false);
    // The many others have other numbers in their transforms, and no other kinds of them.
    if (!found_ && (tried_ == 0 || of_a_known_kind())) all_cases(true);
    if (found_) return {};
    const std::string_view near = nearest_name(plan_.transform, {offered_.begin(), offered_.end()});
    return fmt::format("{} has no transform {}{}", plan_.op, quoted(plan_.transform),
                       near.empty() ? "" : fmt::format(", did you mean '{}'?", near));
  }

 private:
  bool offer(const std::string& name) {
    offered_.insert(name);
    found_ = found_ || name == plan_.transform;
    return false;  // none is made
  }
  bool of_a_known_kind() const {
    const auto kind = [](std::string_view name) { return name.substr(0, name.find(' ')); };
    return std::any_of(offered_.begin(), offered_.end(),
                       [&](const std::string& name) { return kind(name) == kind(plan_.transform); });
  }
  void all_cases(bool others) {
    std::set<std::pair<std::string, DType>> seen;
    for (const Target& t : targets_)
      if (!found_ && seen.emplace(t.entry.op, t.dtype).second) cases_of(t, others);
  }
  // The op's own of common sizes, or all the others.
  void cases_of(const Target& first, bool others) {
    const registry::Op& op = *registry::find(first.entry.op);
    const std::string only = plain_name(plan_.case_name);
    const auto take = [&](const registry::Case& c) {
      if (found_ || !c.order_probe.empty() || dtype_of_case(c, *op.schema) != first.dtype) return;
      if (others != (c.large || is_derived(c.name)) || (!only.empty() && c.name != only)) return;
      const auto p = materialise(op, c, plan_.seed);
      if (!p) return;
      ++tried_;
      variants_of(first, *p);
      if (const auto wide = with_fp32_results(*p)) variants_of(first, *wide);
    };
    if (!is_derived(only)) op.cases({take, plan_.seed});
    if (others && (only.empty() || is_derived(only)))
      derived_cases(op, first.dtype, plan_.seed, [&](const Derived& d) { take(d.given); }, only);
  }
  // By every implementation of the op and dtype: they promise different things.
  void variants_of(const Target& first, const Problem& p) {
    for (const Target& t : targets_) {
      if (found_ || t.entry.op != first.entry.op || t.dtype != first.dtype) continue;
      Subject subject = t.subject;
      subject.services = nullptr;  // nothing of a device is touched
      for_variants(
          p, subject, true,
          {[&](const std::string& name) { return offer(name); }, [](const Variant&) { return true; }});
    }
  }

  const Plan& plan_;
  const std::vector<Target>& targets_;
  std::set<std::string> offered_;
  int64_t tried_ = 0;
  bool found_ = false;
};

}  // namespace

std::string plain_name(const std::string& name) {
  return name.ends_with(kWide) ? name.substr(0, name.size() - kWide.size()) : name;
}

Chosen choose(const Plan& plan) {
  Chosen out;
  std::vector<const registry::Op*> ops;
  for (const OpEntry& op : snapshot().ops) {
    if (plan.implementation.empty()) add_missing(plan, op, out);
    const registry::Op* known = registry::find(op.schema->name);
    bool any = false;
    for (const ImplementationEntry& e : op.implementations) {
      if (!matches(plan, *e.implementation, *e.backend)) continue;
      if (known)
        add_targets(e, *op.schema, out);
      else if (!any)
        out.not_covered.push_back(
            fmt::format("{}: an op from a plugin has no reference or cases here", op.schema->name));
      any = true;
    }
    if (known && any) ops.push_back(known);
  }
  mark_lesser(out.targets);
  out.error = check_case(plan, ops);
  if (out.error.empty()) out.error = TransformCheck(plan, out.targets).error();
  return out;
}

Plan plan_for(const Plan& plan, const Target& target) {
  Plan out = plan;
  const bool everything = plan.passes == 0 && plan.budget == 0;
  if (target.lesser && everything && plan.case_name.empty() && plan.transform.empty())
    out.passes = Plan::kNormal;
  return out;
}

std::vector<Target> find(const Identity& wanted) {
  std::vector<Target> out;
  const Chosen all =
      choose({.op = wanted.op, .implementation = wanted.implementation, .device = wanted.device});
  for (const Target& t : all.targets)
    if (t.entry.op == wanted.op && t.entry.implementation == wanted.implementation &&
        t.entry.dtype == wanted.dtype)
      out.push_back(t);
  return out;
}

}  // namespace rlk::harness
