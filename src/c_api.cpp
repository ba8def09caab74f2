// The C face: by-name arguments become slots, then go the same way as typed calls.
#include "src/c_api.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "rlk/binding.h"
#include "rlk/evidence.hpp"
#include "rlk/introspect.h"
#include "src/check.hpp"
#include "src/failure.hpp"
#include "src/introspect.hpp"
#include "src/plugin.hpp"
#include "src/resolve.hpp"
#include "src/saved.hpp"
#include "src/struct_size.hpp"
#include "src/text.hpp"

namespace rlk {

rlk_code caught() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return static_cast<rlk_code>(set_failure(RLK_OUT_OF_MEMORY, "out of memory"));
  } catch (const Error& e) {
    return static_cast<rlk_code>(set_failure(e.code(), e.what()));
  } catch (const std::exception& e) {
    return static_cast<rlk_code>(set_failure(RLK_INTERNAL, e.what()));
  } catch (...) {
    return static_cast<rlk_code>(
        set_failure(RLK_INTERNAL, "something was thrown that is not a std::exception"));
  }
}

rlk_code fail(rlk_code code, const std::string& text) {
  return static_cast<rlk_code>(set_failure(code, text.c_str()));
}

rlk_code null_argument(const char* name) noexcept {
  char text[64];
  std::snprintf(text, sizeof text, "%s is null", name);
  return static_cast<rlk_code>(set_failure(RLK_INVALID_ARGUMENT, text));
}

Result<Options> read_options(const rlk_options* given) {
  Options out;
  if (!given) return out;
  rlk_options whole;
  const rlk_options* o = given;
  if (given->struct_size != sizeof whole) {
    if (Status s = read_struct("options", *given, kSmallestOptions, whole); !s) return s;
    o = &whole;
  }
  out.stream = o->stream;
  out.backend = o->backend ? o->backend : "";
  out.arithmetic = o->arithmetic ? o->arithmetic : "";
  out.gradients = o->gradients ? o->gradients : "";
  const Result<Precision> precision = precision_named(o->precision ? o->precision : "standard");
  if (!precision) return precision.status();
  out.precision = *precision;
  out.needs_backward = o->needs_backward;
  out.deterministic = o->deterministic;
  out.evidence = o->evidence;
  if (o->reserved != 0)
    return Status(RLK_INVALID_ARGUMENT, fmt::format("options: reserved is {}, it must be 0", o->reserved));
  out.workspace = o->workspace;
  out.workspace_bytes = o->workspace_bytes;
  out.allocate = o->allocate;
  out.allocate_context = o->allocate_context;
  if (o->threads < 0)
    return Status(RLK_INVALID_ARGUMENT,
                  fmt::format("options: threads is {}, it must be 0 or more", o->threads));
  out.threads = o->threads;
  return out;
}

char* copy_text(const std::string& text) {
  char* out = static_cast<char*>(std::malloc(text.size() + 1));
  if (!out) return fail(RLK_OUT_OF_MEMORY, "out of memory"), nullptr;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return out;
}

}  // namespace rlk

using namespace rlk;

struct rlk_args {
  int32_t op;
  const rlk_op_schema* schema;
  rlk_slot slots[RLK_MAX_SLOTS];
};

namespace {

const char* slot_name(const rlk_op_schema& op, bool argument, uint32_t i) noexcept {
  return argument ? op.arguments[i].name : op.attributes[i].name;
}

// Index of a name, or -1 with the failure set.
int32_t find_slot(const rlk_op_schema& op, const char* name, bool argument) {
  const uint32_t count = argument ? op.num_arguments : op.num_attributes;
  for (uint32_t i = 0; name && i < count; ++i)
    if (std::strcmp(slot_name(op, argument, i), name) == 0) return static_cast<int32_t>(i);
  std::vector<std::string_view> names;
  names.reserve(count);
  for (uint32_t i = 0; i < count; ++i) names.emplace_back(slot_name(op, argument, i));
  const std::string_view near = nearest_name(name ? name : "", names);
  fail(RLK_UNKNOWN_NAME, fmt::format("{}: no {} is called {}{}", op.name, argument ? "argument" : "attribute",
                                     name ? quoted(name) : "(null)",
                                     near.empty() ? "" : fmt::format(", did you mean '{}'?", near)));
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
    for (const std::string_view choice : split(a.choices, '|')) {
      if (choice == word) return set_attribute(args, name, RLK_INT, slot);
      ++slot.i;
    }
    return fail(RLK_INVALID_ARGUMENT, fmt::format("{}: {} is {}, it is one of {}", args->schema->name, name,
                                                  quoted(word), a.choices));
  }
  if (word == "true" || word == "false") word = word == "true" ? "1" : "0";
  if (a.type == RLK_FLOAT ? read_number(word, slot.f) : read_number(word, slot.i))
    return set_attribute(args, name, a.type, slot);
  return fail(RLK_INVALID_ARGUMENT,
              fmt::format("{}: {} is {}, which is not a number", args->schema->name, name, quoted(word)));
}

// The attributes an alias stands for: "rope_i:pairing=adjacent" in the schema's list.
rlk_code apply_alias(rlk_args* args, std::string_view name) {
  for (const std::string_view alias : split(args->schema->aliases ? args->schema->aliases : "", ',')) {
    const auto colon = alias.find(':');
    if (alias.substr(0, colon) != name || colon == alias.npos) continue;
    for (const std::string_view set : split(alias.substr(colon + 1), ':')) {
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

size_t count_of(const char* op, uint32_t rlk_op_schema::* count) noexcept {
  return guarded_or<size_t>(0, [&]() -> size_t {
    const rlk_op_schema* schema = schema_of(op);
    return schema ? schema->*count : 0;
  });
}
const char* name_at(const char* op, bool argument, size_t i) noexcept {
  return guarded_or<const char*>(nullptr, [&]() -> const char* {
    const rlk_op_schema* schema = schema_of(op);
    if (!schema || i >= (argument ? schema->num_arguments : schema->num_attributes)) return nullptr;
    return slot_name(*schema, argument, static_cast<uint32_t>(i));
  });
}

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
  return guarded_or<rlk_args*>(nullptr, [&]() -> rlk_args* {
    const Result<int32_t> index = find_op(op ? op : "");
    if (!index) return set_failure(index.status()), nullptr;
    auto args = std::make_unique<rlk_args>(
        rlk_args{*index, snapshot().ops[static_cast<std::size_t>(*index)].schema, {}});
    for (uint32_t i = 0; i < args->schema->num_attributes; ++i) {
      const rlk_attribute& a = args->schema->attributes[i];
      rlk_slot& slot = args->slots[args->schema->num_arguments + i];
      if (a.type == RLK_FLOAT)
        slot.f = a.default_float;
      else
        slot.i = a.default_int;
    }
    return apply_alias(args.get(), op) == RLK_OK ? args.release() : nullptr;
  });
}
void rlk_args_free(rlk_args* args) { delete args; }

rlk_code rlk_default_slots(const char* op, rlk_slot* slots, uint32_t count) {
  if (!slots) return null_argument("slots");
  return guarded([&]() -> rlk_code {
    const std::unique_ptr<rlk_args, decltype(&rlk_args_free)> args(rlk_args_new(op), rlk_args_free);
    if (!args) return RLK_UNKNOWN_NAME;
    const uint32_t want = args->schema->num_arguments + args->schema->num_attributes;
    if (count != want)
      return fail(RLK_INVALID_ARGUMENT,
                  fmt::format("{}: room for {} slots is given, it has {}", args->schema->name, count, want));
    std::copy(args->slots, args->slots + want, slots);
    return RLK_OK;
  });
}

rlk_code rlk_args_tensor(rlk_args* args, const char* name, const DLTensor* tensor) {
  if (!args) return null_argument("args");
  return guarded([&]() -> rlk_code {
    const int32_t i = find_slot(*args->schema, name, true);
    if (i < 0) return RLK_UNKNOWN_NAME;
    args->slots[i].tensor = tensor;
    return RLK_OK;
  });
}
rlk_code rlk_args_int(rlk_args* args, const char* name, int64_t value) {
  if (!args) return null_argument("args");
  return guarded([&] { return set_attribute(args, name, RLK_INT, rlk_slot{.i = value}); });
}
rlk_code rlk_args_float(rlk_args* args, const char* name, double value) {
  if (!args) return null_argument("args");
  return guarded([&] { return set_attribute(args, name, RLK_FLOAT, rlk_slot{.f = value}); });
}
rlk_code rlk_args_string(rlk_args* args, const char* name, const char* value) {
  if (!args) return null_argument("args");
  return guarded([&] { return set_word(args, name, value ? value : ""); });
}

rlk_code rlk_run(const rlk_args* args, const rlk_options* options) {
  if (!args) return null_argument("args");
  return guarded([&]() -> rlk_code {
    const Result<Options> o = read_options(options);
    if (!o) return set_failure(o.status());
    return set_failure(run_cached(args->op, args->slots, *o));
  });
}

rlk_code rlk_workspace(const rlk_args* args, const rlk_options* options, uint64_t* bytes) {
  if (!args) return null_argument("args");
  if (!bytes) return null_argument("bytes");
  return guarded([&]() -> rlk_code {
    const Result<Options> o = read_options(options);
    if (!o) return set_failure(o.status());
    const Result<uint64_t> r = workspace_slots(args->schema->name, args->slots, *o);
    if (!r) return set_failure(r.status());
    *bytes = *r;
    return RLK_OK;
  });
}

rlk_code rlk_infer(const rlk_args* args, const char* result, int32_t* ndim, int64_t* shape,
                   DLDataType* dtype) {
  if (!args) return null_argument("args");
  if (!ndim) return null_argument("ndim");
  if (!shape) return null_argument("shape");
  if (!dtype) return null_argument("dtype");
  return guarded([&]() -> rlk_code {
    const Result<Inferred> r = infer_slots(args->schema->name, args->slots, result ? result : "");
    if (!r) return set_failure(r.status());
    *ndim = static_cast<int32_t>(r->shape.size());
    std::copy(r->shape.begin(), r->shape.end(), shape);
    *dtype = dl_type(r->dtype);
    return RLK_OK;
  });
}

void rlk_free(char* text) { std::free(text); }

char* rlk_list_json(const char* what) {
  return guarded_or<char*>(nullptr, [&]() -> char* {
    const Result<std::string> text = list_json(what ? what : "");
    if (!text) return set_failure(text.status()), nullptr;
    return copy_text(*text);
  });
}
char* rlk_probe_json(const char* path) {
  return guarded_or<char*>(nullptr, [&]() -> char* {
    const Result<std::string> text = probe_json(path ? path : "");
    if (!text) return set_failure(text.status()), nullptr;
    return copy_text(*text);
  });
}
char* rlk_examples_json(const char* op) {
  return guarded_or<char*>(nullptr, [&]() -> char* {
    const Result<std::string> text = examples_json(op ? op : "");
    if (!text) return set_failure(text.status()), nullptr;
    return copy_text(*text);
  });
}
char* rlk_resolve_json(const rlk_args* args, const rlk_options* options) {
  if (!args) return null_argument("args"), nullptr;
  return guarded_or<char*>(nullptr, [&]() -> char* {
    const Result<Options> o = read_options(options);
    if (!o) return set_failure(o.status()), nullptr;
    return copy_text(Resolver::resolve(args->op, args->slots, Policy::of(*o), Ask::everyone).json());
  });
}

size_t rlk_op_count(void) {
  return guarded_or<size_t>(0, [] { return snapshot().ops.size(); });
}
const char* rlk_op_name(size_t op) {
  return guarded_or<const char*>(nullptr, [&]() -> const char* {
    const auto& ops = snapshot().ops;
    return op < ops.size() ? ops[op].schema->name : nullptr;
  });
}
size_t rlk_argument_count(const char* op) { return count_of(op, &rlk_op_schema::num_arguments); }
const char* rlk_argument_name(const char* op, size_t argument) { return name_at(op, true, argument); }
size_t rlk_attribute_count(const char* op) { return count_of(op, &rlk_op_schema::num_attributes); }
const char* rlk_attribute_name(const char* op, size_t attribute) { return name_at(op, false, attribute); }

rlk_code rlk_reload_environment(void) {
  return guarded([] { return set_failure(reload_environment()); });
}

rlk_code rlk_load_plugin(const char* path) {
  return guarded([&]() -> rlk_code {
    if (!path) return null_argument("path");
    const Result<PluginFile> file = plugin_at(path);
    if (!file) return set_failure(file.status());
    const PluginLoad load = load_plugin(*file);
    if (!load.table) return fail(RLK_PLUGIN, load.reason);
    return set_failure(register_backend(load.table, path));
  });
}

rlk_code rlk_load_evidence(const char* path) {
  if (!path) return null_argument("path");
  return guarded([&] { return set_failure(load_evidence(path)); });
}

void rlk_clear_evidence() {
  guarded([] { return clear_evidence(), RLK_OK; });
}

rlk_code rlk_register_backend(const rlk_backend* backend, const char* origin) {
  return guarded([&]() -> rlk_code {
    if (!backend) return null_argument("backend");
    return set_failure(register_backend(backend, origin ? origin : "the program"));
  });
}

uint64_t rlk_save(const DLTensor* tensor, const char* name) {
  return guarded_or<uint64_t>(0, [&]() -> uint64_t {
    if (!tensor) return null_argument("tensor"), 0;
    const Result<uint64_t> ticket = save_range(*tensor, name ? name : "a saved tensor");
    if (!ticket) return set_failure(ticket.status()), 0;
    return *ticket;
  });
}
void rlk_release(uint64_t saved) {
  guarded([&] { return release_range(saved), RLK_OK; });
}

}  // extern "C"
