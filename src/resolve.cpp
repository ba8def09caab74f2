#include "src/resolve.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "src/check.hpp"
#include "src/evidence.hpp"
#include "src/failure.hpp"
#include "src/gate.hpp"
#include "src/machine.hpp"
#include "src/messages.hpp"
#include "src/scope.hpp"
#include "src/text.hpp"

namespace rlk {

namespace {

// A refusal by the dispatcher itself, before the implementation is asked.
constexpr rlk_verdict no(const char* why, const char* nearest = nullptr, int64_t a = 0, int64_t b = 0) {
  return {RLK_UNSUPPORTED, -1, why, nearest, {a, b, 0, 0}};
}

}  // namespace

Result<int32_t> find_op(std::string_view name) {
  const Snapshot& s = snapshot();
  if (auto it = s.op_index.find(name); it != s.op_index.end()) return it->second;
  return Status(RLK_UNKNOWN_NAME, unknown_name("op", name, s.names().ops));
}

// One resolution in progress.
struct Resolver::Search {
  const Snapshot& s;
  const OpEntry& op;
  const rlk_slot* slots;
  Policy policy;
  DLDevice device;
  DType dtype;
  rlk_request request{};
  std::vector<std::string> problems;  // with what the rule names
  bool checked_requests = true;       // false: shapes are incomplete, supports() must not be asked

  rlk_verdict judge(const ImplementationEntry& e) {
    const rlk_implementation& i = *e.implementation;
    if (i.device_type != device.device_type)
      return no(i.device_type == kDLCPU    ? "runs on cpu, the tensors are elsewhere"
                : i.device_type == kDLCUDA ? "runs on cuda, the tensors are elsewhere"
                                           : "runs on hip, the tensors are elsewhere",
                kNearestDevice);
    const Backend::State state = e.backend->state();
    if (state == Backend::no_device) {
      const Outage& outage = outage_of(*e.backend);
      rlk_verdict out = no(outage.problem.c_str(), outage.remedy.c_str());
      out.code = RLK_PLUGIN;  // not a refusal of this request: the backend cannot run any
      return out;
    }
    const auto& devices = e.backend->devices();
    const auto found = std::find_if(devices.begin(), devices.end(), [&](const rlk_device& d) {
      return d.type == static_cast<int32_t>(device.device_type) && d.id == device.device_id;
    });
    if (found == devices.end())
      return no("its backend has no device number {0}", "use a device that --list shows", device.device_id);
    request.device = Backend::current(*found);
    if (const rlk_verdict machine = machine_verdict(i, request.device); machine.code != RLK_OK)
      return machine;
    if (dtype != DType::none && !(i.dtypes & static_cast<uint32_t>(dtype)))
      return no("does not take this dtype", kNearestDtype);
    if (!policy.arithmetic.empty() && policy.arithmetic != i.arithmetic)
      return no("promises another arithmetic than the one required", kNearestArithmetic);
    if (policy.deterministic && !(i.traits & RLK_DETERMINISTIC))
      return no("does not promise equal bits from run to run", "drop the determinism requirement");
    if (policy.precision == Precision::golden && !(i.traits & RLK_GOLDEN))
      return no("is not golden arithmetic, which the policy demands", "leave the golden precision scope");
    if (policy.precision == Precision::strict && !(i.traits & (RLK_STRICT | RLK_GOLDEN)))
      return no("is not immune to ambient switches, which the policy demands",
                "leave the strict precision scope");
    if (policy.evidence)
      if (const rlk_verdict v = evidence_verdict(*op.schema, slots, i, *e.backend, *found, dtype);
          v.code != RLK_OK)
        return v;
    if (!checked_requests || !i.supports) return {RLK_OK, -1, nullptr, nullptr, {}};
    return i.supports(slots, &request);
  }

  // Candidates in the order of the rule, or the default order.
  std::vector<const ImplementationEntry*> order(const OverrideRule* rule) {
    std::vector<const ImplementationEntry*> out;
    out.reserve(op.implementations.size());
    if (!rule) {
      for (const ImplementationEntry& e : op.implementations) out.push_back(&e);
      return out;
    }
    auto add = [&](auto&& wanted) {
      for (const ImplementationEntry& e : op.implementations)
        if (wanted(e) && std::find(out.begin(), out.end(), &e) == out.end()) out.push_back(&e);
    };
    auto excluded = [&](const ImplementationEntry& e) {
      return std::any_of(rule->chain.begin(), rule->chain.end(), [&](const ChainItem& c) {
        return c.kind == ChainItem::exclude &&
               (e.backend->name == c.name || names_implementation(c.name, e.implementation->id));
      });
    };
    bool only_excludes = true;
    for (const ChainItem& item : rule->chain) {
      if (item.kind != ChainItem::exclude) only_excludes = false;
      if (item.kind == ChainItem::backend) {
        add([&](const ImplementationEntry& e) { return e.backend->name == item.name && !excluded(e); });
        describe_missing(item.name, "");
      } else if (item.kind == ChainItem::implementation) {
        add([&](const ImplementationEntry& e) {
          return names_implementation(item.name, e.implementation->id) && !excluded(e);
        });
        describe_missing(std::string_view(item.name).substr(0, item.name.find('.')), item.name);
      } else if (item.kind == ChainItem::automatic) {
        add([&](const ImplementationEntry& e) { return !excluded(e); });
      }
    }
    if (only_excludes) add([&](const ImplementationEntry& e) { return !excluded(e); });
    return out;
  }

  void describe_missing(std::string_view backend, std::string_view implementation) {
    for (const auto& b : s.backends) {
      if (b->name != backend) continue;
      std::string text = outage_of(*b).problem;
      if (text.empty() && implementation.empty() &&
          std::none_of(op.implementations.begin(), op.implementations.end(),
                       [&](const auto& e) { return e.backend == b.get(); }))
        text = fmt::format("backend '{}' has no implementation of {}", backend, op.schema->name);
      if (text.empty() && !implementation.empty() &&
          std::none_of(op.implementations.begin(), op.implementations.end(), [&](const auto& e) {
            return names_implementation(implementation, e.implementation->id);
          }))
        text = fmt::format("'{}' is not an implementation of {}", implementation, op.schema->name);
      if (!text.empty()) problems.push_back(std::move(text));
      return;
    }
  }

  Status refusal(const Resolution& r) const;

  // For an explanation rather than a call: what the rule left out, and the backends that are not in the running
  // at all.
  void add_others(std::vector<Candidate>& candidates) {
    for (const ImplementationEntry& e : op.implementations) {
      if (std::any_of(candidates.begin(), candidates.end(),
                      [&](const Candidate& c) { return c.implementation == e.implementation; }))
        continue;
      rlk_verdict verdict = judge(e);
      if (verdict.code == RLK_OK) verdict.code = RLK_CONFIGURATION;
      candidates.push_back({e.implementation, e.implementation->id, verdict, {}});
    }
    for (const auto& b : s.backends)
      if (!b->table)
        candidates.push_back({nullptr, b->name, no("", outage_of(*b).remedy.c_str()), outage_of(*b).problem});
  }
};

namespace {

// The rule in force for an op and where it came from: call argument, scopes from the inside, environment.
struct Ruling {
  const OverrideRule* rule = nullptr;
  int level = 3;
  Status error{};
  std::shared_ptr<const Override> owner{};  // of the rule
};
constexpr const char* kLevels[] = {"call argument", "scope", "environment", "default order"};

Ruling ruling_for(const Snapshot& s, const char* op, const char* device, const Policy& policy) {
  // A wrong environment is an error even where nothing would come to ask it: it is never silently ignored.
  if (!s.misconfigured()) return {nullptr, 2, s.misconfigured(), nullptr};
  if (!policy.backend.empty()) {
    const auto o = parsed_override(policy.backend, "call argument");
    if (!o->error()) return {nullptr, 0, o->error(), nullptr};
    if (const OverrideRule* rule = o->find(op, device)) return {rule, 0, {}, o};
  }
  for (const ScopeNode* node = policy.scope; node; node = node->outer) {
    const auto o = parsed_override(node->spec, "scope");
    if (!o->error()) return {nullptr, 1, o->error(), nullptr};
    if (const OverrideRule* rule = o->find(op, device)) return {rule, 1, {}, o};
  }
  if (const OverrideRule* rule = s.environment.find(op, device)) return {rule, 2, {}, nullptr};
  return {};
}

// Whether the device can execute the implementation's code.
bool runs_on(DLDevice device, const ImplementationEntry& e) {
  for (const rlk_device& d : e.backend->devices())
    if (d.type == static_cast<int32_t>(device.device_type) && d.id == device.device_id)
      return machine_verdict(*e.implementation, Backend::current(d)).code == RLK_OK;
  return false;
}

// An arithmetic that nobody here promises is most likely a slip: the word and the known ones, instead of the same
// refusal from every candidate.
Status unknown_arithmetic(const OpEntry& op, std::string_view asked) {
  if (asked.empty()) return {};
  std::vector<std::string_view> known;
  for (const ImplementationEntry& e : op.implementations) {
    const std::string_view arithmetic = e.implementation->arithmetic;
    if (arithmetic == asked) return {};
    if (std::find(known.begin(), known.end(), arithmetic) == known.end()) known.push_back(arithmetic);
  }
  const std::string_view near = nearest_name(asked, known);
  return {RLK_NO_IMPLEMENTATION,
          fmt::format("{}: no implementation here promises arithmetic {}{}  Known here: {}", op.schema->name,
                      quoted(asked), near.empty() ? "." : fmt::format(", did you mean '{}'?", near),
                      fmt::join(known, ", "))};
}

// Gradients that were asked for must exist, and someone must be able to give them on this device.
Status check_gradients(const Snapshot& s, const rlk_op_schema& op, const Policy& policy, DLDevice device,
                       DType dtype) {
  for (const std::string_view name : split(policy.gradients, ',')) {
    const auto* end = op.arguments + op.num_arguments;
    const auto* a = std::find_if(op.arguments, end, [&](const rlk_argument& x) { return name == x.name; });
    if (a == end)
      return {RLK_UNKNOWN_NAME,
              fmt::format("{}: gradient of {} asked for, there is no such argument", op.name, quoted(name))};
    if (a->role == RLK_WRITE || (a->flags & RLK_NO_GRADIENT))
      return {RLK_INVALID_ARGUMENT,
              fmt::format("{}: gradient of '{}' asked for, which is not differentiable", op.name, name)};
  }
  if (!policy.needs_backward) return {};
  if (!op.backward)
    return {RLK_UNSUPPORTED, fmt::format("{}: a gradient is needed, this op is not differentiable", op.name)};
  const auto it = s.op_index.find(op.backward);
  if (it == s.op_index.end())
    return {RLK_NO_IMPLEMENTATION,
            fmt::format("{}: a gradient is needed, its backward {} is not registered", op.name, op.backward)};
  const OpEntry& backward = s.ops[static_cast<std::size_t>(it->second)];
  std::string why;
  for (const ImplementationEntry& e : backward.implementations) {
    const rlk_implementation& i = *e.implementation;
    const char* no = i.device_type != static_cast<int32_t>(device.device_type)           ? "other device"
                     : !(i.dtypes & static_cast<uint32_t>(dtype))                        ? "other dtype"
                     : e.backend->state() == Backend::no_device                          ? "no device"
                     : !runs_on(device, e)                                               ? "other processor"
                     : policy.precision == Precision::golden && !(i.traits & RLK_GOLDEN) ? "not golden"
                     : policy.precision == Precision::strict && !(i.traits & (RLK_STRICT | RLK_GOLDEN))
                         ? "not strict"
                         : nullptr;
    if (!no) return {};
    why += fmt::format("{}{}: {}", why.empty() ? "" : ", ", i.id, no);
  }
  return {RLK_NO_IMPLEMENTATION,
          fmt::format("{}: a gradient is needed and no implementation of {} can give it ({})", op.name,
                      op.backward, why.empty() ? "there is none" : why)};
}

// None where the op's first argument is a result that is not there yet.
DType first_dtype(const rlk_op_schema& op, const rlk_slot* slots) {
  if (!slots[0].tensor && op.arguments[0].role == RLK_WRITE) return DType::none;
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (slots[i].tensor) return dtype_of(slots[i].tensor->dtype);
  return DType::none;
}

}  // namespace

// One line: the op, why each candidate refused, and what is wrong with what was asked for.
Status Resolver::Search::refusal(const Resolution& r) const {
  std::vector<std::string> reasons;
  // Neighbours that refuse for the same reason share a sentence.
  std::string who;
  for (std::size_t i = 0; i < r.candidates_.size(); ++i) {
    const Candidate& c = r.candidates_[i];
    if (c.verdict.code == RLK_PLUGIN) continue;
    who += (who.empty() ? "" : ", ") + std::string(c.id);
    const std::string reason = c.reason();
    if (i + 1 < r.candidates_.size() && r.candidates_[i + 1].reason() == reason) continue;
    reasons.push_back(refused_request(who, reason));
    who.clear();
  }
  const auto add = [&](const std::string& problem) {
    if (std::find(reasons.begin(), reasons.end(), problem) == reasons.end()) reasons.push_back(problem);
  };
  for (const std::string& problem : problems) add(problem);
  for (const Candidate& c : r.candidates_)
    if (c.verdict.code == RLK_PLUGIN) add(c.reason());
  std::string text = fmt::format("{}: no implementation takes this call", r.op_->name);
  if (!r.rule_.empty()) text += fmt::format(" under '{}' ({})", r.rule_, kLevels[r.level_]);
  if (!reasons.empty()) text += fmt::format(": {}", fmt::join(reasons, "; "));
  return {RLK_NO_IMPLEMENTATION, std::move(text)};
}

Resolution Resolver::failed(Status status) {
  Resolution r;
  r.status_ = std::move(status);
  return r;
}

Resolution Resolver::resolve(int32_t index, const rlk_slot* slots, const Policy& policy, Ask ask) {
  const CheckData data = ask == Ask::call ? CheckData::yes : CheckData::no;
  Resolution r;
  r.epoch_ = Gate::now().epoch();
  const Snapshot& s = snapshot();
  const OpEntry& op = s.ops[static_cast<std::size_t>(index)];
  r.op_ = op.schema;
  std::optional<ShapesOnly> shapes;
  if (data == CheckData::no) slots = shapes.emplace(*op.schema, slots).slots();
  DLDevice device;
  if (r.status_ = check_call(*op.schema, slots, data, device); !r.status_) return r;
  if (policy.threads < 0) {
    r.status_ = {RLK_INVALID_ARGUMENT,
                 fmt::format("options: threads is {}, it must be 0 or more", policy.threads)};
    return r;
  }
  const DType dtype = first_dtype(*op.schema, slots);
  Search search{s, op, slots, policy, device, dtype};
  search.request = policy.request({});
  for (uint32_t i = 0; i < op.schema->num_arguments; ++i)
    if (!slots[i].tensor && !(op.schema->arguments[i].flags & RLK_OPTIONAL)) search.checked_requests = false;

  Ruling ruling = ruling_for(s, op.schema->name, device_name(device.device_type), policy);
  r.level_ = ruling.level;
  if (!ruling.error) {
    r.status_ = ruling.error;
    return r;
  }
  if (ruling.rule) r.rule_ = ruling.rule->text;
  if (r.status_ = check_gradients(s, *op.schema, policy, device, dtype); !r.status_) return r;

  r.candidates_.reserve(op.implementations.size());
  for (const ImplementationEntry* e : search.order(ruling.rule)) {
    const rlk_verdict verdict = search.judge(*e);
    if (!is_code(verdict.code)) {
      r.status_ = {RLK_BACKEND_ERROR,
                   fmt::format("{}: {} answered whether it takes this call with {}, which is no "
                               "rlk_code",
                               op.schema->name, e->implementation->id, verdict.code)};
      return r;
    }
    r.candidates_.push_back({e->implementation, e->implementation->id, verdict, {}});
    if (verdict.code != RLK_OK || r.entry_) continue;
    r.entry_ = e;
    r.chosen_ = e->implementation;
    r.device_ = search.request.device;
    r.fingerprint_ = rlk::fingerprint(policy, e->identity);
    if (ask != Ask::everyone) break;
  }
  if (!r.entry_) {
    r.status_ = unknown_arithmetic(op, policy.arithmetic);
    if (r.status_) r.status_ = search.refusal(r);
  }
  if (ask == Ask::everyone) search.add_others(r.candidates_);
  return r;
}

std::string Resolution::decided_by() const {
  return rule_.empty() ? kLevels[level_] : fmt::format("{} '{}'", kLevels[level_], rule_);
}

Resolution resolve_slots(std::string_view op, const rlk_slot* slots, const Options& options) {
  const Result<int32_t> index = find_op(op);
  if (!index) return Resolver::failed(index.status());
  return Resolver::resolve(*index, slots, Policy::of(options), Ask::everyone);
}

Result<Inferred> infer_slots(std::string_view op, const rlk_slot* slots, std::string_view result) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  const rlk_op_schema& schema = *snapshot().ops[static_cast<std::size_t>(*index)].schema;
  uint32_t which = 0;
  while (which < schema.num_arguments && result != schema.arguments[which].name) ++which;
  if (which == schema.num_arguments || schema.arguments[which].role == RLK_READ)
    return Status(RLK_UNKNOWN_NAME, fmt::format("{}: no result is called {}", schema.name, quoted(result)));
  ShapesOnly only(schema, slots);
  only.without_results(schema);
  slots = only.slots();
  DLDevice device;
  if (Status s = check_call(schema, slots, CheckData::no, device); !s) return s;
  rlk_shape shapes[RLK_MAX_SLOTS] = {};
  if (Status s = infer_shapes(schema, slots, shapes); !s) return s;
  const rlk_shape& shape = shapes[which];
  return Inferred{{shape.dim, shape.dim + shape.ndim}, static_cast<DType>(shape.preferred), shape.dtypes};
}

}  // namespace rlk
