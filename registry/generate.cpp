// Writes rlk/ops.hpp, the typed face of every op, from the schemas: one source of truth for names, roles and
// defaults.
#include <cstdio>
#include <sstream>
#include <string>

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

void write_attribute(const rlk_attribute& a, std::ostringstream& out) {
  out << "  ";
  switch (a.type) {
    case RLK_INT:
      out << "int64_t " << a.name << " = " << a.default_int;
      break;
    case RLK_FLOAT: {
      char text[64];
      std::snprintf(text, sizeof text, "%.17g", a.default_float);
      out << "double " << a.name << " = " << text;
      break;
    }
    case RLK_FLAG:
      out << "Flag " << a.name << " = " << (a.default_int ? "true" : "false");
      break;
    default: {
      std::string word, words;
      int64_t index = 0;
      std::string chosen;
      for (const char* p = a.choices;; ++p) {
        if (*p && *p != '|') {
          word += *p;
          continue;
        }
        words += (words.empty() ? "" : ", ") + word;
        if (index++ == a.default_int) chosen = word;
        word.clear();
        if (!*p) break;
      }
      const std::string type = camel(a.name);
      out << "enum class " << type << " : int64_t { " << words << " };\n  " << type << " " << a.name << " = "
          << type << "::" << chosen;
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

}  // namespace

int main(int argc, char** argv) {
  std::ostringstream out;
  out << "// Generated from the op schemas. One struct per op, laid out as the slots of plugin.h, and one "
         "function.\n"
         "#pragma once\n\n#include <cstdint>\n\n#include \"rlk/resolve.hpp\"\n#include "
         "\"rlk/tensor.hpp\"\n\nnamespace rlk {\n\n";
#define RLK_OP(name) write_op(rlk::registry::name##_schema, out);
#include "registry/ops.def"
#undef RLK_OP
  out << "}  // namespace rlk\n";
  std::FILE* file = argc > 1 ? std::fopen(argv[1], "w") : stdout;
  if (!file) return std::perror(argv[1]), 1;
  std::fputs(out.str().c_str(), file);
  return file == stdout ? 0 : std::fclose(file);
}
