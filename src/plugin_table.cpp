#include "src/plugin_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

#include "rlk/printable.hpp"
#include "src/struct_size.hpp"
#include "src/text.hpp"

namespace rlk {
namespace {

constexpr uint32_t kMostEntries = 4096;  // more are no table but a damaged count

template <class... T>
Status wrong(fmt::format_string<T...> format, T&&... values) {
  return {RLK_PLUGIN, fmt::format(format, std::forward<T>(values)...)};
}

// Another version's struct, which is nobody's mistake.
template <class T>
Status check_size(std::string_view what, const T& given, uint32_t smallest) {
  const Status s = check_struct(what, given, smallest);
  return s ? Status()
           : Status(RLK_UNSUPPORTED,
                    fmt::format("its {} (version {}.{}): rebuild it against this rlk/plugin.h", s.message(),
                                RLK_ABI_MAJOR, RLK_ABI_MINOR));
}

// A name is one word; a text is one line, which may be empty.
Status check_name(const char* text, const std::string& owner, const char* what) {
  if (!text || !*text) return wrong("{} has no {}", owner, what);
  const std::string_view word = text;
  if (!is_printable(word) || word.find(' ') != word.npos)
    return wrong("{} has the {} {}, which is not one word of printable characters", owner, what,
                 quoted(word));
  return {};
}
Status check_text(const char* text, const std::string& owner, const char* what) {
  if (!text) return wrong("{} has no {} (NULL)", owner, what);
  if (!is_printable(text))
    return wrong("the {} of {} is not one line of printable UTF-8: {}", what, owner, quoted(text));
  return {};
}

Status check_dtypes(uint32_t set, const std::string& owner) {
  if (set == 0 || (set & ~uint32_t{RLK_ALL_DTYPES}))
    return wrong("{} takes the dtype set {:#x}, which must be some of {:#x}", owner, set,
                 uint32_t{RLK_ALL_DTYPES});
  return {};
}

// The first failure of several checks; all of them are run.
Status first(std::initializer_list<Status> checks) {
  for (const Status& s : checks)
    if (!s) return s;
  return {};
}

Status check_implementation(const rlk_implementation* i, std::string_view backend) {
  if (!i) return wrong("its table of implementations has a null entry");
  if (Status s = check_size("implementation", *i, kSmallestImplementation); !s) return s;
  if (Status s = check_name(i->id, "an implementation", "id"); !s) return s;
  const std::string owner = fmt::format("implementation '{}'", i->id);
  if (Status s = first({check_name(i->op, owner, "op"), check_name(i->arithmetic, owner, "arithmetic"),
                        check_text(i->doc, owner, "doc"), check_dtypes(i->dtypes, owner)});
      !s)
    return s;
  const std::string_view id = i->id;
  if (id.size() < backend.size() + 2 || id.substr(0, backend.size()) != backend || id[backend.size()] != '.')
    return wrong("{} must be called '{}.<variant>'", owner, backend);
  if (!i->run) return wrong("{} has no run function", owner);
  return {};
}

Status check_argument(const rlk_argument& a, uint32_t index, const std::string& op) {
  if (Status s = check_name(a.name, fmt::format("argument {} of {}", index, op), "name"); !s) return s;
  const std::string owner = fmt::format("argument '{}' of {}", a.name, op);
  if (Status s = first({check_text(a.doc, owner, "doc"), check_dtypes(a.dtypes, owner)}); !s) return s;
  if (a.min_rank < 0 || a.max_rank > RLK_MAX_RANK || a.min_rank > a.max_rank)
    return wrong("{} has ranks {} to {}, 0 to {} are possible", owner, a.min_rank, a.max_rank, RLK_MAX_RANK);
  if (a.role < RLK_READ || a.role > RLK_READWRITE)
    return wrong("{} has role {}, there are {} to {}", owner, a.role, int{RLK_READ}, int{RLK_READWRITE});
  if (a.batch_axis < -2 || a.batch_axis >= RLK_MAX_RANK)
    return wrong("{} has batch axis {}, -2 to {} are possible", owner, a.batch_axis, RLK_MAX_RANK - 1);
  return {};
}

Status check_attribute(const rlk_attribute& a, uint32_t index, const std::string& op) {
  if (Status s = check_name(a.name, fmt::format("attribute {} of {}", index, op), "name"); !s) return s;
  const std::string owner = fmt::format("attribute '{}' of {}", a.name, op);
  if (Status s = check_text(a.doc, owner, "doc"); !s) return s;
  if (a.type < RLK_INT || a.type > RLK_CHOICE)
    return wrong("{} has type {}, there are {} to {}", owner, a.type, int{RLK_INT}, int{RLK_CHOICE});
  if (a.type == RLK_FLAG && a.default_int != 0 && a.default_int != 1)
    return wrong("{} has the default {}, a flag is 0 or 1", owner, a.default_int);
  if (a.type != RLK_CHOICE) return {};
  if (Status s = check_name(a.choices, owner, "choices"); !s) return s;
  const std::string_view choices = a.choices;
  const auto count = std::count(choices.begin(), choices.end(), '|') + 1;
  if (a.default_int < 0 || a.default_int >= count)
    return wrong("{} has choice {} as its default, there are {}: {}", owner, a.default_int, count, choices);
  return {};
}

// Arguments and attributes share one set of names: a call by name could not tell them apart.
Status check_unique_names(const rlk_op_schema& op, const std::string& owner) {
  std::vector<std::string_view> names;
  names.reserve(op.num_arguments + op.num_attributes);
  for (uint32_t i = 0; i < op.num_arguments; ++i) names.emplace_back(op.arguments[i].name);
  for (uint32_t i = 0; i < op.num_attributes; ++i) names.emplace_back(op.attributes[i].name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  return twice == names.end() ? Status() : wrong("{} has '{}' twice", owner, *twice);
}

Status check_schema(const rlk_op_schema* op) {
  if (!op) return wrong("its table of ops has a null entry");
  if (Status s = check_size("op schema", *op, kSmallestSchema); !s) return s;
  if (Status s = check_name(op->name, "an op", "name"); !s) return s;
  const std::string owner = fmt::format("op '{}'", op->name);
  const auto optional = [](const char* text) { return text ? text : ""; };
  if (Status s = first({check_text(op->doc, owner, "doc"),
                        check_text(optional(op->aliases), owner, "list of aliases"),
                        check_text(optional(op->backward), owner, "backward"),
                        check_text(optional(op->may_alias), owner, "list of what may alias")});
      !s)
    return s;
  if (!op->infer) return wrong("{} has no infer function", owner);
  if (!op->num_arguments || !op->arguments) return wrong("{} has no arguments", owner);
  if (op->num_attributes && !op->attributes) return wrong("{} has no table of attributes", owner);
  if (op->num_arguments > RLK_MAX_SLOTS || op->num_attributes > RLK_MAX_SLOTS - op->num_arguments)
    return wrong("{} has {} arguments and {} attributes, {} are possible together", owner, op->num_arguments,
                 op->num_attributes, RLK_MAX_SLOTS);
  for (uint32_t i = 0; i < op->num_arguments; ++i)
    if (Status s = check_argument(op->arguments[i], i, owner); !s) return s;
  for (uint32_t i = 0; i < op->num_attributes; ++i)
    if (Status s = check_attribute(op->attributes[i], i, owner); !s) return s;
  return check_unique_names(*op, owner);
}

// Size and version come first: what a struct of another major version holds is anybody's guess.
Status check_version(const rlk_backend* table) {
  if (!table)
    return {RLK_UNSUPPORTED,
            fmt::format(
                "it gave no description to a host of plugin version {}: it is probably made for another one",
                RLK_ABI_MAJOR)};
  constexpr uint32_t kVersionEnd = offsetof(rlk_backend, abi_minor) + sizeof(uint32_t);
  if (table->struct_size >= kVersionEnd && table->abi_major != RLK_ABI_MAJOR)
    return {RLK_UNSUPPORTED, fmt::format("it speaks plugin version {}.{}, this library speaks {}.{}",
                                         table->abi_major, table->abi_minor, RLK_ABI_MAJOR, RLK_ABI_MINOR)};
  return check_size("description", *table, kSmallestBackend);
}

}  // namespace

Status check_backend_table(const rlk_backend* table, std::string_view expected_name) {
  if (Status s = check_version(table); !s) return s;
  if (Status s = check_name(table->name, "its description", "name"); !s) return s;
  if (!expected_name.empty() && table->name != expected_name)
    return wrong("it calls itself {}, its file name says {}", quoted(table->name), quoted(expected_name));
  if (Status s = first({check_text(table->version, "its description", "version"),
                        check_text(table->doc, "its description", "doc")});
      !s)
    return s;
  if ((table->num_implementations && !table->implementations) || (table->num_ops && !table->ops))
    return wrong("its description has a count without a table");
  if (table->num_implementations > kMostEntries || table->num_ops > kMostEntries)
    return wrong("its description has {} implementations and {} ops, up to {} of each are read",
                 table->num_implementations, table->num_ops, kMostEntries);
  if (has_member(*table, &rlk_backend::services) && table->services)
    if (Status s = check_size("device services", *table->services, kSmallestServices); !s) return s;
  for (uint32_t i = 0; i < table->num_ops; ++i)
    if (Status s = check_schema(table->ops[i]); !s) return s;
  for (uint32_t i = 0; i < table->num_implementations; ++i)
    if (Status s = check_implementation(table->implementations[i], table->name); !s) return s;
  return {};
}

}  // namespace rlk
