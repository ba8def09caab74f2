#include "src/introspect.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "registry/op.hpp"
#include "rlk/introspect.h"
#include "rlk/resolve.hpp"
#include "src/check.hpp"
#include "src/environment.hpp"
#include "src/json.hpp"
#include "src/machine.hpp"
#include "src/messages.hpp"
#include "src/plugin.hpp"
#include "src/registry.hpp"
#include "src/resolve.hpp"
#include "src/saved.hpp"

namespace rlk {
namespace {

std::string names(uint32_t set) {
  JsonArray out;
  for (uint32_t bit = 1; bit < RLK_ALL_DTYPES; bit <<= 1)
    if (set & bit) out.text(name_of(static_cast<DType>(bit)));
  return out.str();
}

const char* state_name(Backend::State s) {
  constexpr const char* kNames[] = {"absent", "refused", "load_failed", "no_device", "ready", "active"};
  return kNames[s];
}

std::string argument_json(const rlk_argument& a) {
  constexpr const char* kRoles[] = {"read", "write", "readwrite"};
  return JsonObject()
      .text("name", a.name)
      .text("doc", a.doc)
      .text("role", kRoles[a.role])
      .raw("dtypes", names(a.dtypes))
      .number("min_rank", a.min_rank)
      .number("max_rank", a.max_rank)
      .flag("optional", a.flags & RLK_OPTIONAL)
      .flag("differentiable", a.role != RLK_WRITE && !(a.flags & RLK_NO_GRADIENT))
      .flag("host", a.flags & RLK_HOST)
      .flag("saved", a.flags & RLK_SAVED)
      .str();
}

std::string attribute_json(const rlk_attribute& a) {
  constexpr const char* kTypes[] = {"int", "float", "flag", "choice"};
  JsonObject o;
  o.text("name", a.name).text("doc", a.doc).text("type", kTypes[a.type]);
  if (a.type == RLK_FLOAT)
    o.number("default", a.default_float);
  else
    o.number("default", a.default_int);
  if (a.type == RLK_CHOICE) o.text("choices", a.choices);
  return o.str();
}

std::string ops_json(const Snapshot& s) {
  JsonArray ops;
  for (const OpEntry& e : s.ops) {
    const rlk_op_schema& op = *e.schema;
    JsonArray arguments, attributes;
    std::string saves;
    for (uint32_t i = 0; i < op.num_arguments; ++i) {
      const rlk_argument& a = op.arguments[i];
      arguments.raw(argument_json(a));
      if (op.backward && (a.flags & RLK_SAVED)) saves += (saves.empty() ? "" : ",") + std::string(a.name);
    }
    for (uint32_t i = 0; i < op.num_attributes; ++i) attributes.raw(attribute_json(op.attributes[i]));
    ops.raw(JsonObject()
                .text("name", op.name)
                .text("aliases", op.aliases ? op.aliases : "")
                .number("version", op.version)
                .text("doc", op.doc)
                .raw("arguments", arguments.str())
                .raw("attributes", attributes.str())
                .text("backward", op.backward ? op.backward : "")
                .text("saves", saves)
                .str());
  }
  return ops.str();
}

std::string usable(Backend& b, const rlk_implementation* impl = nullptr) {
  switch (b.state()) {
    case Backend::ready:
    case Backend::active: {
      const auto& d = b.devices();
      if (impl)
        if (const rlk_verdict v = machine_verdict(*impl, Backend::current(d[0])); v.code != RLK_OK)
          return "no: " + verdict_text(v.why, v.v);
      if (d[0].type == kDLCPU) return "yes";
      return fmt::format("yes: {}, {} device{}", d[0].name, d.size(), d.size() == 1 ? "" : "s");
    }
    case Backend::absent:
      return "no: not built";
    default:
      return "no: " + b.reason();
  }
}

std::string impls_json(const Snapshot& s) {
  JsonArray out;
  for (const OpEntry& e : s.ops)
    for (const ImplementationEntry& i : e.implementations) {
      const rlk_implementation& impl = *i.implementation;
      out.raw(JsonObject()
                  .text("op", e.schema->name)
                  .text("id", impl.id)
                  .text("backend", i.backend->name)
                  .text("doc", impl.doc ? impl.doc : "")
                  .number("priority", impl.priority)
                  .text("arithmetic", impl.arithmetic)
                  .raw("dtypes", names(impl.dtypes))
                  .text("device", device_name(impl.device_type))
                  .flag("built", true)
                  .flag("loaded", true)
                  .text("usable", usable(*i.backend, &impl))
                  .flag("deterministic", impl.traits & RLK_DETERMINISTIC)
                  .flag("batch_invariant", impl.traits & RLK_BATCH_INVARIANT)
                  .flag("capture_safe", impl.traits & RLK_CAPTURE_SAFE)
                  .flag("strict", impl.traits & RLK_STRICT)
                  .flag("golden", impl.traits & RLK_GOLDEN)
                  .flag("workspace_optional", impl.traits & RLK_WORKSPACE_OPTIONAL)
                  .str());
    }
  return out.str();
}

std::string backends_json(const Snapshot& s) {
  JsonArray out;
  for (const auto& b : s.backends) {
    JsonArray devices;
    for (const rlk_device& d : b->devices())
      devices.raw(JsonObject()
                      .text("type", device_name(d.type))
                      .number("id", d.id)
                      .number("arch", Backend::current(d).arch)
                      .text("name", d.name)
                      .str());
    out.raw(JsonObject()
                .text("name", b->name)
                .text("state", state_name(b->state()))
                .text("reason", b->reason())
                .text("origin", b->origin)
                .flag("built", b->built)
                .flag("loaded", b->table != nullptr)
                .text("usable", usable(*b))
                .text("remedy", outage_of(*b).remedy)
                .text("version", b->table ? b->table->version : "")
                .text("doc", b->table && b->table->doc ? b->table->doc : "")
                .text("build_id", fmt::format("{:016x}", b->build_id))
                .raw("devices", devices.str())
                .str());
  }
  return out.str();
}

std::string plugins_json(const Snapshot& s) {
  JsonArray out;
  for (const auto& b : s.backends)
    if (b->origin != "built in")
      out.raw(JsonObject()
                  .text("name", b->name)
                  .text("path", b->origin)
                  .text("state", state_name(b->state()))
                  .text("reason", b->reason())
                  .text("remedy", outage_of(*b).remedy)
                  .str());
  return out.str();
}

std::string saved_json() {
  constexpr const char* kPrecisions[] = {"standard", "strict", "golden"};
  JsonArray out;
  for (const SavedRange& r : saved_ranges())
    out.raw(JsonObject()
                .text("name", r.name)
                .text("device", fmt::format("{}:{}", device_name(r.device.device_type), r.device.device_id))
                .text("address", fmt::format("{:#x}", r.address))
                .number("bytes", r.bytes)
                .text("precision", kPrecisions[static_cast<int32_t>(r.precision)])
                .str());
  return out.str();
}

std::string notes_json(const Snapshot& s) {
  JsonArray out;
  for (const std::string& note : s.plugin_notes) out.text(note);
  return out.str();
}

std::string case_json(const registry::Case& c) {
  using registry::Fill;
  JsonArray tensors;
  for (const registry::CaseTensor& t : c.inputs) {
    JsonObject one;
    one.text("name", t.argument)
        .raw("shape", fmt::format("[{}]", fmt::join(t.shape, ", ")))
        .text("dtype", name_of(t.dtype));
    // Some calls are right with some numbers only: offsets ascend, positions are rows of a table, sums are positive.
    const std::vector<double>& list = t.fill.list;
    if (t.fill.kind == Fill::values &&
        std::all_of(list.begin(), list.end(), [](double x) { return std::isfinite(x); }))
      one.raw("values", fmt::format("[{}]", fmt::join(list, ", ")));
    if (t.fill.kind == Fill::integers && (t.dtype == DType::i32 || t.dtype == DType::i64))
      one.raw("range",
              fmt::format("[{}, {}]", static_cast<int64_t>(t.fill.a), static_cast<int64_t>(t.fill.b)));
    tensors.raw(one.str());
  }
  JsonArray results;
  for (const auto& [name, dtype] : c.results)
    results.raw(JsonObject().text("name", name).text("dtype", name_of(dtype)).str());
  JsonObject attributes;
  for (const auto& [name, value] : c.attributes) {
    if (const auto* word = std::get_if<std::string>(&value))
      attributes.text(name, *word);
    else if (const auto* number = std::get_if<double>(&value))
      attributes.number(name, *number);
    else
      attributes.number(name, std::get<int64_t>(value));
  }
  return JsonObject()
      .text("name", c.name)
      .raw("tensors", tensors.str())
      .raw("results", results.str())
      .raw("attributes", attributes.str())
      .str();
}

std::string env_json(const Snapshot& s) {
  const Environment& e = environment();
  struct Variable {
    const char *name, *meaning;
    const std::string& value;
  };
  const Variable variables[] = {
      {"RLK_BACKEND", "which implementations may run, e.g. lm_head=cuda:auto;*=native", e.backend},
      {"RLK_PLUGIN_PATH", "absolute folders with plugins, separated by ':'", e.plugin_path},
      {"RLK_PLUGIN_TRUST", "folders whose plugins load without a child process, or 'all'", e.plugin_trust},
      {"RLK_LOG", "trace, debug, info, warn (default), error or off", e.log},
      {"RLK_CPU", "the most of the processor that may be used: baseline, avx2, avx512 or amx", e.cpu},
      {"RLK_TRACE",
       "a file that every call is recorded in; %p becomes the process id; "
       "FILE;weights_once;every=N;tags=GLOBS",
       e.trace}};
  JsonArray out;
  for (const Variable& v : variables)
    out.raw(JsonObject()
                .text("name", v.name)
                .text("value", v.value)
                .flag("set", !v.value.empty())
                .text("meaning", v.meaning)
                .str());
  return JsonObject()
      .flag("ignored", e.secure)
      .raw("variables", out.str())
      .text("cpu", cpu_word(cpu_level()))
      .text("error", s.misconfigured().message())
      .str();
}

}  // namespace

Result<std::string> list_json(std::string_view what) {
  const Snapshot& s = snapshot();
  std::string body;
  if (what == "ops")
    body = ops_json(s);
  else if (what == "impls")
    body = impls_json(s);
  else if (what == "backends")
    body = backends_json(s);
  else if (what == "plugins")
    body = plugins_json(s);
  else if (what == "saved")
    body = saved_json();
  else if (what == "env")
    body = env_json(s);
  else
    return Status(RLK_UNKNOWN_NAME,
                  fmt::format("nothing to list is called {}: ops, impls, backends, plugins, saved or env",
                              quoted(what)));
  JsonObject out;
  out.number("schema", kJsonSchema).text("version", RLK_VERSION).raw(what, body);
  if (what == "plugins") out.text("folder", plugin_folder()).raw("notes", notes_json(s));
  return out.str();
}

Result<std::string> probe_json(std::string_view path) {
  const Result<PluginFile> file = plugin_at(path);
  if (!file) return file.status();
  JsonArray checks;
  bool ok = true;
  const auto check = [&](const char* what, auto&& run) {
    if (!ok) return;
    const std::string wrong(run());
    ok = wrong.empty();
    checks.raw(JsonObject().text("check", what).flag("ok", ok).text("reason", wrong).str());
  };
  const Result<PlacedFile> placed = place_file(file->path);
  check("place", [&] { return placed.status().message(); });
  check("elf", [&] { return std::string(check_plugin_elf(*placed).message()); });
  check("child process", [&] { return probe_plugin(file->name, *placed).reason; });
  return JsonObject()
      .number("schema", kJsonSchema)
      .text("path", file->path)
      .text("name", file->name)
      .flag("trusted", file->trusted)
      .flag("ok", ok)
      .raw("checks", checks.str())
      .str();
}

namespace {

// Whether a case sets what an alias sets: an example of "rope_thd" must have its data in that layout.
bool fits_alias(const registry::Case& c, const char* aliases, std::string_view name) {
  for (const std::string_view alias : split(aliases ? aliases : "", ',')) {
    const auto colon = alias.find(':');
    if (colon == alias.npos || alias.substr(0, colon) != name) continue;
    for (const std::string_view set : split(alias.substr(colon + 1), ':')) {
      const auto equal = set.find('=');
      const auto same = [&](const auto& attribute) {
        const auto* word = std::get_if<std::string>(&attribute.second);
        return attribute.first == set.substr(0, equal) && word && *word == set.substr(equal + 1);
      };
      if (std::none_of(c.attributes.begin(), c.attributes.end(), same)) return false;
    }
  }
  return true;
}

}  // namespace

Result<std::string> examples_json(std::string_view op) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  JsonArray examples;
  const rlk_op_schema& schema = *snapshot().ops[static_cast<std::size_t>(*index)].schema;
  if (const registry::Op* known = registry::find(schema.name)) {
    // One for each dtype of the first input, and for each that numbers of another may have.
    std::set<DType> seen;
    known->cases([&](const registry::Case& c) {
      if (!fits_alias(c, schema.aliases, op)) return;
      bool news = false;
      for (const registry::CaseTensor& t : c.inputs)
        if (&t == c.inputs.data() || (static_cast<uint32_t>(t.dtype) & (RLK_F16 | RLK_BF16 | RLK_F32)))
          news |= seen.insert(t.dtype).second;
      if (news) examples.raw(case_json(c));
    });
  }
  return JsonObject()
      .number("schema", kJsonSchema)
      .text("op", schema.name)
      .raw("examples", examples.str())
      .str();
}

}  // namespace rlk
