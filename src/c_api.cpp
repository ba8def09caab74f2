// The C face: by-name arguments become slots, then go the same way as typed calls.
#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <new>

#include "rlk/evidence.hpp"
#include "rlk/introspect.h"
#include "src/check.hpp"
#include "src/failure.hpp"
#include "src/introspect.hpp"
#include "src/plugin.hpp"
#include "src/resolve.hpp"
#include "src/saved.hpp"

using namespace rlk;

struct rlk_args {
  int32_t op;
  const rlk_op_schema* schema;
  rlk_slot slots[RLK_MAX_SLOTS];
};

namespace {

// No exception leaves: whatever is thrown becomes a code and a text.
template <class Body>
auto guarded(Body&& body, decltype(body()) on_error) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    set_failure(RLK_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    set_failure(RLK_INTERNAL, e.what());
  }
  return on_error;
}

rlk_code fail(rlk_code code, const std::string& text) {
  return static_cast<rlk_code>(set_failure(code, text.c_str()));
}

Result<Options> read_options(const rlk_options* o) {
  Options out;
  if (!o) return out;
  if (o->struct_size != sizeof(rlk_options))
    return Status(RLK_INVALID_ARGUMENT,
                  fmt::format("options: struct_size is {}, this version's rlk_options has {} bytes",
                              o->struct_size, sizeof(rlk_options)));
  out.stream = o->stream;
  out.backend = o->backend ? o->backend : "";
  out.arithmetic = o->arithmetic ? o->arithmetic : "";
  out.gradients = o->gradients ? o->gradients : "";
  const std::string_view precision = o->precision ? o->precision : "standard";
  if (precision == "golden")
    out.precision = Precision::golden;
  else if (precision == "strict")
    out.precision = Precision::strict;
  else if (precision != "standard")
    return Status(RLK_INVALID_ARGUMENT,
                  fmt::format("options: precision is '{}', it is standard, strict or golden", precision));
  out.needs_backward = o->needs_backward;
  out.deterministic = o->deterministic;
  out.evidence = o->evidence;
  if (o->reserved != 0)
    return Status(RLK_INVALID_ARGUMENT, fmt::format("options: reserved is {}, it must be 0", o->reserved));
  out.workspace = o->workspace;
  out.workspace_bytes = o->workspace_bytes;
  if (o->threads < 0)
    return Status(RLK_INVALID_ARGUMENT,
                  fmt::format("options: threads is {}, it must be 0 or more", o->threads));
  out.threads = o->threads;
  return out;
}

std::vector<std::string_view> slot_names(const rlk_op_schema& op, bool arguments) {
  std::vector<std::string_view> names;
  if (arguments)
    for (uint32_t i = 0; i < op.num_arguments; ++i) names.push_back(op.arguments[i].name);
  else
    for (uint32_t i = 0; i < op.num_attributes; ++i) names.push_back(op.attributes[i].name);
  return names;
}

// Index of a name, or -1 with the failure set.
int32_t find_slot(const rlk_op_schema& op, const char* name, bool argument) {
  const auto names = slot_names(op, argument);
  for (std::size_t i = 0; name && i < names.size(); ++i)
    if (names[i] == name) return static_cast<int32_t>(i);
  const std::string_view near = nearest_name(name ? name : "", names);
  fail(RLK_UNKNOWN_NAME,
       fmt::format("{}: no {} is called '{}'{}", op.name, argument ? "argument" : "attribute",
                   name ? name : "(null)", near.empty() ? "" : fmt::format(", did you mean '{}'?", near)));
  return -1;
}

rlk_code set_attribute(rlk_args* args, const char* name, int type, rlk_slot value) {
  const int32_t i = find_slot(*args->schema, name, false);
  if (i < 0) return RLK_UNKNOWN_NAME;
  const rlk_attribute& a = args->schema->attributes[i];
  const bool integral = a.type == RLK_INT || a.type == RLK_FLAG || a.type == RLK_CHOICE;
  if (type == RLK_FLOAT && integral)
    return fail(RLK_INVALID_ARGUMENT, fmt::format("{}: {} takes an integer or word, it was given {}",
                                                  args->schema->name, name, value.f));
  if (type == RLK_INT && a.type == RLK_FLOAT) value.f = static_cast<double>(value.i);
  args->slots[args->schema->num_arguments + static_cast<uint32_t>(i)] = value;
  return RLK_OK;
}

template <class T>
bool read_number(std::string_view text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

rlk_code set_word(rlk_args* args, const char* name, std::string_view word) {
  const int32_t i = find_slot(*args->schema, name, false);
  if (i < 0) return RLK_UNKNOWN_NAME;
  const rlk_attribute& a = args->schema->attributes[i];
  rlk_slot slot{};
  if (a.type == RLK_CHOICE) {
    for (std::string_view rest = a.choices;; ++slot.i) {
      const auto bar = rest.find('|');
      if (rest.substr(0, bar) == word) return set_attribute(args, name, RLK_INT, slot);
      if (bar == rest.npos) break;
      rest = rest.substr(bar + 1);
    }
    return fail(RLK_INVALID_ARGUMENT,
                fmt::format("{}: {} is '{}', it is one of {}", args->schema->name, name, word, a.choices));
  }
  if (word == "true" || word == "false") word = word == "true" ? "1" : "0";
  if (a.type == RLK_FLOAT ? read_number(word, slot.f) : read_number(word, slot.i))
    return set_attribute(args, name, a.type, slot);
  return fail(RLK_INVALID_ARGUMENT,
              fmt::format("{}: {} is '{}', which is not a number", args->schema->name, name, word));
}

// The attributes an alias stands for: "rope_i:pairing=adjacent" in the schema's list.
rlk_code apply_alias(rlk_args* args, std::string_view name) {
  for (std::string_view rest = args->schema->aliases ? args->schema->aliases : ""; !rest.empty();) {
    const auto comma = rest.find(',');
    std::string_view alias = rest.substr(0, comma);
    rest = comma == rest.npos ? "" : rest.substr(comma + 1);
    if (alias.substr(0, alias.find(':')) != name) continue;
    for (auto colon = alias.find(':'); colon != alias.npos; colon = alias.find(':')) {
      alias = alias.substr(colon + 1);
      const std::string_view set = alias.substr(0, alias.find(':'));
      const auto equal = set.find('=');
      const std::string attribute(set.substr(0, equal));
      if (rlk_code code = set_word(args, attribute.c_str(), set.substr(equal + 1))) return code;
    }
  }
  return RLK_OK;
}

const rlk_op_schema* schema_of(const char* op) {
  const Result<int32_t> index = find_op(op ? op : "");
  if (!index) return set_failure(index.status()), nullptr;
  return snapshot().ops[static_cast<std::size_t>(*index)].schema;
}

char* copy_text(const std::string& text) {
  char* out = static_cast<char*>(std::malloc(text.size() + 1));
  if (!out) return fail(RLK_OUT_OF_MEMORY, "out of memory"), nullptr;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return out;
}

rlk_code no_args() { return fail(RLK_INVALID_ARGUMENT, "args is null"); }

}  // namespace

extern "C" {

const char* rlk_code_name(int32_t code) {
  static constexpr const char* kNames[] = {"RLK_OK",
                                           "RLK_INVALID_ARGUMENT",
                                           "RLK_UNKNOWN_NAME",
                                           "RLK_CONFIGURATION",
                                           "RLK_NO_IMPLEMENTATION",
                                           "RLK_UNSUPPORTED",
                                           "RLK_OVERLAP",
                                           "RLK_PLUGIN",
                                           "RLK_BACKEND_ERROR",
                                           "RLK_OUT_OF_MEMORY",
                                           "RLK_INTERNAL"};
  return code >= 0 && code < static_cast<int32_t>(std::size(kNames)) ? kNames[code] : "unknown code";
}
const char* rlk_last_error(void) { return failure_text(); }
const char* rlk_version(void) { return RLK_VERSION; }

rlk_args* rlk_args_new(const char* op) {
  return guarded(
      [&]() -> rlk_args* {
        const Result<int32_t> index = find_op(op ? op : "");
        if (!index) return set_failure(index.status()), nullptr;
        auto* args = new rlk_args{*index, snapshot().ops[static_cast<std::size_t>(*index)].schema, {}};
        for (uint32_t i = 0; i < args->schema->num_attributes; ++i) {
          const rlk_attribute& a = args->schema->attributes[i];
          rlk_slot& slot = args->slots[args->schema->num_arguments + i];
          if (a.type == RLK_FLOAT)
            slot.f = a.default_float;
          else
            slot.i = a.default_int;
        }
        if (apply_alias(args, op) != RLK_OK) return delete args, nullptr;
        return args;
      },
      nullptr);
}
void rlk_args_free(rlk_args* args) { delete args; }

rlk_code rlk_args_tensor(rlk_args* args, const char* name, const DLTensor* tensor) {
  if (!args) return no_args();
  return guarded(
      [&] {
        const int32_t i = find_slot(*args->schema, name, true);
        if (i < 0) return RLK_UNKNOWN_NAME;
        args->slots[i].tensor = tensor;
        return RLK_OK;
      },
      RLK_INTERNAL);
}
rlk_code rlk_args_int(rlk_args* args, const char* name, int64_t value) {
  if (!args) return no_args();
  return guarded([&] { return set_attribute(args, name, RLK_INT, rlk_slot{.i = value}); }, RLK_INTERNAL);
}
rlk_code rlk_args_float(rlk_args* args, const char* name, double value) {
  if (!args) return no_args();
  return guarded([&] { return set_attribute(args, name, RLK_FLOAT, rlk_slot{.f = value}); }, RLK_INTERNAL);
}
rlk_code rlk_args_string(rlk_args* args, const char* name, const char* value) {
  if (!args) return no_args();
  return guarded([&] { return set_word(args, name, value ? value : ""); }, RLK_INTERNAL);
}

rlk_code rlk_run(const rlk_args* args, const rlk_options* options) {
  if (!args) return no_args();
  return guarded(
      [&] {
        const Result<Options> o = read_options(options);
        if (!o) return set_failure(o.status());
        return set_failure(run_cached(args->op, args->slots, *o));
      },
      RLK_INTERNAL);
}

rlk_code rlk_workspace(const rlk_args* args, const rlk_options* options, uint64_t* bytes) {
  if (!args || !bytes) return no_args();
  return guarded(
      [&] {
        const Result<Options> o = read_options(options);
        if (!o) return set_failure(o.status());
        const Result<uint64_t> r = workspace_slots(args->schema->name, args->slots, *o);
        if (!r) return set_failure(r.status());
        *bytes = *r;
        return RLK_OK;
      },
      RLK_INTERNAL);
}

rlk_code rlk_infer(const rlk_args* args, const char* result, int32_t* ndim, int64_t* shape,
                   DLDataType* dtype) {
  if (!args || !ndim || !shape || !dtype) return no_args();
  return guarded(
      [&] {
        const Result<Inferred> r = infer_slots(args->schema->name, args->slots, result ? result : "");
        if (!r) return set_failure(r.status());
        *ndim = static_cast<int32_t>(r->shape.size());
        std::copy(r->shape.begin(), r->shape.end(), shape);
        *dtype = dl_type(r->dtype);
        return RLK_OK;
      },
      RLK_INTERNAL);
}

void rlk_free(char* text) { std::free(text); }

char* rlk_list_json(const char* what) {
  return guarded(
      [&]() -> char* {
        const Result<std::string> text = list_json(what ? what : "");
        if (!text) return set_failure(text.status()), nullptr;
        return copy_text(*text);
      },
      nullptr);
}
char* rlk_probe_json(const char* path) {
  return guarded(
      [&]() -> char* {
        const Result<std::string> text = probe_json(path ? path : "");
        if (!text) return set_failure(text.status()), nullptr;
        return copy_text(*text);
      },
      nullptr);
}
char* rlk_examples_json(const char* op) {
  return guarded(
      [&]() -> char* {
        const Result<std::string> text = examples_json(op ? op : "");
        if (!text) return set_failure(text.status()), nullptr;
        return copy_text(*text);
      },
      nullptr);
}
char* rlk_resolve_json(const rlk_args* args, const rlk_options* options) {
  if (!args) return no_args(), nullptr;
  return guarded(
      [&]() -> char* {
        const Result<Options> o = read_options(options);
        if (!o) return set_failure(o.status()), nullptr;
        return copy_text(Resolver::resolve(args->op, args->slots, *o, false).json());
      },
      nullptr);
}

size_t rlk_op_count(void) {
  return guarded([] { return snapshot().ops.size(); }, size_t{0});
}
const char* rlk_op_name(size_t op) {
  const auto& ops = snapshot().ops;
  return op < ops.size() ? ops[op].schema->name : nullptr;
}
size_t rlk_argument_count(const char* op) {
  const rlk_op_schema* schema = schema_of(op);
  return schema ? schema->num_arguments : 0;
}
const char* rlk_argument_name(const char* op, size_t argument) {
  const rlk_op_schema* schema = schema_of(op);
  return schema && argument < schema->num_arguments ? schema->arguments[argument].name : nullptr;
}
size_t rlk_attribute_count(const char* op) {
  const rlk_op_schema* schema = schema_of(op);
  return schema ? schema->num_attributes : 0;
}
const char* rlk_attribute_name(const char* op, size_t attribute) {
  const rlk_op_schema* schema = schema_of(op);
  return schema && attribute < schema->num_attributes ? schema->attributes[attribute].name : nullptr;
}

rlk_code rlk_reload_environment(void) {
  return guarded([] { return set_failure(reload_environment()); }, RLK_INTERNAL);
}

rlk_code rlk_load_plugin(const char* path) {
  return guarded(
      [&] {
        if (!path) return fail(RLK_INVALID_ARGUMENT, "path is null");
        const Result<PluginFile> file = plugin_at(path);
        if (!file) return set_failure(file.status());
        const PluginLoad load = load_plugin(*file);
        if (!load.table) return fail(RLK_PLUGIN, load.reason);
        return set_failure(register_backend(load.table, path));
      },
      RLK_INTERNAL);
}

rlk_code rlk_load_evidence(const char* path) {
  return guarded([&] { return set_failure(load_evidence(path ? path : "")); }, RLK_INTERNAL);
}

void rlk_clear_evidence() { clear_evidence(); }

rlk_code rlk_register_backend(const rlk_backend* backend, const char* origin) {
  return guarded(
      [&] {
        if (!backend) return fail(RLK_INVALID_ARGUMENT, "backend is null");
        return set_failure(register_backend(backend, origin ? origin : "the program"));
      },
      RLK_INTERNAL);
}

uint64_t rlk_save(const DLTensor* tensor, const char* name) {
  if (!tensor || !tensor->data) return fail(RLK_INVALID_ARGUMENT, "save: tensor is null or has null data"), 0;
  return guarded([&] { return save_range(range_of(*tensor), name ? name : "a saved tensor"); }, uint64_t{0});
}
void rlk_release(uint64_t saved) {
  guarded([&] { return release_range(saved), 0; }, 0);
}

}  // extern "C"
