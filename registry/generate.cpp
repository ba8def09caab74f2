// Writes rlk/ops.hpp, the typed face of every op, and rlk/_ops.pyi, that of Python, from the schemas: one source of
// truth for names, roles and defaults.
#include <charconv>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "registry/stubs.hpp"
#include "rlk/plugin.h"

namespace rlk::registry {
#define RLK_OP(name) extern const rlk_op_schema name##_schema;
#include "registry/ops.def"
#undef RLK_OP
}  // namespace rlk::registry

namespace {

// lm_head -> LmHead, rope_ -> RopeInPlace
std::string camel(const std::string& snake) {
  std::string out;
  bool up = true;
  for (char c : snake) {
    if (c == '_') {
      up = true;
      continue;
    }
    out += up ? static_cast<char>(std::toupper(c)) : c;
    up = false;
  }
  return snake.back() == '_' ? out + "InPlace" : out;
}

std::vector<std::string> words_of(const rlk_attribute& a) {
  std::istringstream list(a.choices);
  std::vector<std::string> words;
  for (std::string word; std::getline(list, word, '|');) words.push_back(word);
  return words;
}

// One enumeration for each choice attribute, whatever ops have it. The same name with another list is an
// error: callers would have two types of one name.
bool write_choices(const rlk_op_schema& op, std::map<std::string, std::string>& known,
                   std::ostringstream& out) {
  for (uint32_t i = 0; i < op.num_attributes; ++i) {
    const rlk_attribute& a = op.attributes[i];
    if (a.type != RLK_CHOICE) continue;
    const auto [seen, fresh] = known.try_emplace(a.name, a.choices);
    if (!fresh && seen->second != a.choices) {
      std::fprintf(stderr, "%s: %s is one of %s, in an op before it one of %s\n", op.name, a.name, a.choices,
                   seen->second.c_str());
      return false;
    }
    if (!fresh) continue;
    std::string words;
    for (const std::string& word : words_of(a)) words += (words.empty() ? "" : ", ") + word;
    out << "enum class " << camel(a.name) << " : int64_t { " << words << " };\n";
  }
  return true;
}

// Where each member lies among the slots of a call.
void write_slots(const rlk_op_schema& op, std::ostringstream& out) {
  out << "  struct Slot {\n    enum : uint32_t {";
  for (uint32_t i = 0; i < op.num_arguments; ++i) out << (i ? ", " : " ") << op.arguments[i].name;
  for (uint32_t i = 0; i < op.num_attributes; ++i) out << ", " << op.attributes[i].name;
  out << " };\n  };\n";
}

void write_attribute(const rlk_attribute& a, std::ostringstream& out) {
  out << "  ";
  switch (a.type) {
    case RLK_INT:
      out << "int64_t " << a.name << " = " << a.default_int;
      break;
    case RLK_FLOAT: {
      char text[64];  // the shortest that reads back as the same number
      *std::to_chars(text, text + sizeof text - 1, a.default_float).ptr = '\0';
      out << "double " << a.name << " = " << text;
      break;
    }
    case RLK_FLAG:
      out << "Flag " << a.name << " = " << (a.default_int ? "true" : "false");
      break;
    default: {
      const std::string type = camel(a.name);
      out << "using " << type << " = choice::" << type << ";\n  " << type << " " << a.name << " = " << type
          << "::" << words_of(a)[static_cast<std::size_t>(a.default_int)];
    }
  }
  out << ";  // " << a.doc << "\n";
}

// "rope_i:pairing=adjacent": a function of that name which sets the attributes first.
void write_alias(const rlk_op_schema& op, const std::string& type, const std::string& alias,
                 std::ostringstream& out) {
  std::istringstream parts(alias);
  std::string name, set, body;
  std::getline(parts, name, ':');
  while (std::getline(parts, set, ':')) {
    const auto equal = set.find('=');
    const std::string attribute = set.substr(0, equal), value = set.substr(equal + 1);
    bool choice = false;
    for (uint32_t i = 0; i < op.num_attributes; ++i)
      if (attribute == op.attributes[i].name) choice = op.attributes[i].type == RLK_CHOICE;
    body +=
        "  args." + attribute + " = " + (choice ? type + "::" + camel(attribute) + "::" : "") + value + ";\n";
  }
  if (body.empty())
    out << "inline Status " << name << "(const " << type << "& args, const Options& options = {}) { return "
        << op.name << "(args, options); }\n";
  else
    out << "inline Status " << name << "(" << type << " args, const Options& options = {}) {\n"
        << body << "  return " << op.name << "(args, options);\n}\n";
}

void write_op(const rlk_op_schema& op, std::ostringstream& out) {
  const std::string type = camel(op.name);
  out << "// " << op.doc << ".\nstruct [[gnu::may_alias]] " << type
      << " {\n  static constexpr const char* kName = \"" << op.name << "\";\n";
  write_slots(op, out);
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    const rlk_argument& a = op.arguments[i];
    out << "  "
        << (a.role == RLK_READ    ? "In"
            : a.role == RLK_WRITE ? "Out"
                                  : "InOut")
        << " " << a.name << "{};  // " << a.doc << (a.flags & RLK_OPTIONAL ? " (optional)" : "") << "\n";
  }
  for (uint32_t i = 0; i < op.num_attributes; ++i) write_attribute(op.attributes[i], out);
  out << "};\nstatic_assert(sizeof(" << type << ") == " << op.num_arguments + op.num_attributes
      << " * sizeof(rlk_slot));\n"
      << "inline Status " << op.name << "(const " << type << "& args, const Options& options = {}) {\n"
      << "  static const int32_t op = op_index(" << type << "::kName);\n"
      << "  return run_cached(op, reinterpret_cast<const rlk_slot*>(&args), options);\n}\n";
  std::istringstream aliases(op.aliases);
  for (std::string alias; std::getline(aliases, alias, ',');) write_alias(op, type, alias, out);
  out << "\n";
}

// An unchanged header keeps its time, and what includes it is not built again.
bool write_file(const char* path, const std::string& text) {
  std::ifstream before(path);
  if (before && std::string(std::istreambuf_iterator<char>(before), {}) == text) return true;
  std::FILE* file = std::fopen(path, "w");
  if (!file) return std::perror(path), false;
  const bool written = std::fputs(text.c_str(), file) >= 0;
  return std::fclose(file) == 0 && written;
}

}  // namespace

int main(int argc, char** argv) {
  std::ostringstream out;
  out << "// Generated from the op schemas. One struct per op, laid out as the slots of plugin.h, and one "
         "function.\n"
         "#pragma once\n\n#include <cstdint>\n\n#include \"rlk/resolve.hpp\"\n#include "
         "\"rlk/tensor.hpp\"\n\nnamespace rlk {\n\n";
  std::map<std::string, std::string> choices;
  out << "// The words of choice attributes, shared by all ops that have them.\nnamespace choice {\n";
#define RLK_OP(name) \
  if (!write_choices(rlk::registry::name##_schema, choices, out)) return 1;
#include "registry/ops.def"
#undef RLK_OP
  out << "}  // namespace choice\n\n";
#define RLK_OP(name) write_op(rlk::registry::name##_schema, out);
#include "registry/ops.def"
#undef RLK_OP
  out << "}  // namespace rlk\n";
  if (argc < 2) return std::fputs(out.str().c_str(), stdout) < 0;
  if (!write_file(argv[1], out.str())) return 1;
  if (argc < 3) return 0;
  std::ostringstream stubs(rlk::registry::stubs_head(), std::ios::ate);
#define RLK_OP(name) rlk::registry::write_stubs(rlk::registry::name##_schema, stubs);
#include "registry/ops.def"
#undef RLK_OP
  return write_file(argv[2], stubs.str()) ? 0 : 1;
}
