#include "src/plugin_table.hpp"

#include <fmt/format.h>

#include <cstddef>

namespace rlk {
namespace {

// Sizes in version 1.0, by its last members: a later minor version may add members behind them, and then
// still reads plugins that lack those.
constexpr uint32_t kBackendSize = offsetof(rlk_backend, activate) + sizeof(rlk_backend::activate);
constexpr uint32_t kImplementationSize = offsetof(rlk_implementation, run) + sizeof(rlk_implementation::run);
constexpr uint32_t kSchemaSize = offsetof(rlk_op_schema, may_alias) + sizeof(rlk_op_schema::may_alias);

std::string too_short(std::string_view what, uint32_t size, uint32_t needed) {
  return fmt::format(
      "its {} says it has {} bytes, version {}.{} has {}: rebuild it against this rlk/plugin.h", what, size,
      RLK_ABI_MAJOR, RLK_ABI_MINOR, needed);
}

bool empty(const char* text) { return !text || !*text; }

std::string check_implementation(const rlk_implementation* i, std::string_view backend, bool& refusal) {
  if (!i) return "its table of implementations has a null entry";
  if (i->struct_size < kImplementationSize)
    return refusal = true, too_short("implementation", i->struct_size, kImplementationSize);
  if (empty(i->id) || empty(i->op) || empty(i->arithmetic))
    return "an implementation lacks its op, id or arithmetic";
  const std::string_view id = i->id;
  if (id.size() < backend.size() + 2 || id.substr(0, backend.size()) != backend || id[backend.size()] != '.')
    return fmt::format("implementation '{}' must be called '{}.<variant>'", id, backend);
  if (!i->run) return fmt::format("implementation '{}' has no run function", id);
  return {};
}

std::string check_schema(const rlk_op_schema* op, bool& refusal) {
  if (!op) return "its table of ops has a null entry";
  if (op->struct_size < kSchemaSize)
    return refusal = true, too_short("op schema", op->struct_size, kSchemaSize);
  if (empty(op->name)) return "an op has no name";
  if (!op->infer) return fmt::format("op '{}' has no infer function", op->name);
  if (!op->num_arguments || !op->arguments) return fmt::format("op '{}' has no arguments", op->name);
  if (op->num_attributes && !op->attributes)
    return fmt::format("op '{}' has no table of attributes", op->name);
  if (op->num_arguments > RLK_MAX_SLOTS || op->num_attributes > RLK_MAX_SLOTS - op->num_arguments)
    return fmt::format("op '{}' has {} arguments and {} attributes, {} are possible together", op->name,
                       op->num_arguments, op->num_attributes, RLK_MAX_SLOTS);
  for (uint32_t i = 0; i < op->num_arguments; ++i) {
    const rlk_argument& a = op->arguments[i];
    if (empty(a.name)) return fmt::format("argument {} of op '{}' has no name", i, op->name);
    if (a.min_rank < 0 || a.max_rank > RLK_MAX_RANK || a.min_rank > a.max_rank)
      return fmt::format("argument '{}' of op '{}' has ranks {} to {}, 0 to {} are possible", a.name,
                         op->name, a.min_rank, a.max_rank, RLK_MAX_RANK);
    if (a.role < RLK_READ || a.role > RLK_READWRITE)
      return fmt::format("argument '{}' of op '{}' has no valid role", a.name, op->name);
  }
  for (uint32_t i = 0; i < op->num_attributes; ++i) {
    const rlk_attribute& a = op->attributes[i];
    if (empty(a.name)) return fmt::format("attribute {} of op '{}' has no name", i, op->name);
    if (a.type == RLK_CHOICE && empty(a.choices))
      return fmt::format("attribute '{}' of op '{}' lists no choices", a.name, op->name);
  }
  return {};
}

}  // namespace

std::string check_backend_table(const rlk_backend* table, std::string_view expected_name, bool& refusal) {
  refusal = false;
  if (!table) {
    refusal = true;
    return fmt::format(
        "it gave no description to a host of plugin version {}: it is probably made for another one",
        RLK_ABI_MAJOR);
  }
  // The version comes first: what a struct of another major version holds is anybody's guess, its size
  // included.
  constexpr uint32_t kVersionEnd = offsetof(rlk_backend, abi_minor) + sizeof(uint32_t);
  if (table->struct_size < kVersionEnd)
    return refusal = true, too_short("description", table->struct_size, kBackendSize);
  if (table->abi_major != RLK_ABI_MAJOR) {
    refusal = true;
    return fmt::format("it speaks plugin version {}.{}, this library speaks {}.{}", table->abi_major,
                       table->abi_minor, RLK_ABI_MAJOR, RLK_ABI_MINOR);
  }
  if (table->struct_size < kBackendSize)
    return refusal = true, too_short("description", table->struct_size, kBackendSize);
  if (empty(table->name)) return "its description has no name";
  if (!expected_name.empty() && table->name != expected_name)
    return fmt::format("it calls itself '{}', its file name says '{}'", table->name, expected_name);
  if ((table->num_implementations && !table->implementations) || (table->num_ops && !table->ops))
    return "its description has a count without a table";
  for (uint32_t i = 0; i < table->num_ops; ++i)
    if (std::string wrong = check_schema(table->ops[i], refusal); !wrong.empty()) return wrong;
  for (uint32_t i = 0; i < table->num_implementations; ++i)
    if (std::string wrong = check_implementation(table->implementations[i], table->name, refusal);
        !wrong.empty())
      return wrong;
  return {};
}

}  // namespace rlk
