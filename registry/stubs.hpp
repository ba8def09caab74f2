// Writes rlk/_ops.pyi, the ops as type checkers and editors of Python see them.
#pragma once

#include <charconv>
#include <sstream>
#include <string>

#include "rlk/plugin.h"

namespace rlk::registry {

// `alias` is empty or "rope_i:pairing=adjacent", which sets defaults of its own.
inline void write_stub_attribute(const rlk_attribute& a, const std::string& alias, std::ostringstream& out) {
  out << ", " << a.name << ": ";
  switch (a.type) {
    case RLK_INT:
      out << "int = " << a.default_int;
      break;
    case RLK_FLOAT: {
      char text[64];  // the shortest that reads back as the same number
      *std::to_chars(text, text + sizeof text - 1, a.default_float).ptr = '\0';
      out << "float = " << text;
      break;
    }
    case RLK_FLAG:
      out << "bool = " << (a.default_int ? "True" : "False");
      break;
    default: {
      std::istringstream list(a.choices);
      const std::string set = std::string(":") + a.name + "=";
      std::string all, chosen;
      int64_t i = 0;
      for (std::string word; std::getline(list, word, '|'); ++i) {
        all += (all.empty() ? "\"" : ", \"") + word + "\"";
        const bool aliased = alias.find(set) != std::string::npos;
        if (aliased ? (alias + ":").find(set + word + ":") != std::string::npos : i == a.default_int)
          chosen = word;
      }
      out << "Literal[" << all << "] = \"" << chosen << "\"";
    }
  }
}

inline void write_stub(const rlk_op_schema& op, const std::string& alias, std::ostringstream& out) {
  bool defaults = false;  // Python knows no argument without one behind one that has it
  int results = 0;
  out << "def " << (alias.empty() ? op.name : alias.substr(0, alias.find(':'))) << "(";
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    const rlk_argument& a = op.arguments[i];
    if (a.role != RLK_READ) ++results;
    if (a.role == RLK_WRITE) continue;
    defaults |= (a.flags & RLK_OPTIONAL) != 0;
    out << a.name << (defaults ? ": T | None = None, " : ": T, ");
  }
  out << "*";
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (op.arguments[i].role == RLK_WRITE)
      out << ", " << op.arguments[i].name << ": T | bool | Dtype | None = None";
  for (uint32_t i = 0; i < op.num_attributes; ++i) write_stub_attribute(op.attributes[i], alias, out);
  out << ", backend: str | None = None, arithmetic: str | None = None, precision: Precision | None = None, "
         "gradients: str | None = None, deterministic: bool = False, threads: int = 0, evidence: bool = "
         "False) -> "
      << (results == 0   ? "None"
          : results == 1 ? "T"
                         : "Any")
      << ":\n    \"\"\"" << op.doc << "\"\"\"\n";
}

inline std::string stubs_head() {
  return "# Generated from the op schemas.\nfrom typing import Any, Literal, TypeVar\n\nT = TypeVar(\"T\")\n"
         "Dtype = Literal[\"fp16\", \"bf16\", \"fp32\", \"fp64\"]\n"
         "Precision = Literal[\"standard\", \"strict\", \"golden\"]\n\n";
}

inline void write_stubs(const rlk_op_schema& op, std::ostringstream& out) {
  write_stub(op, "", out);
  std::istringstream aliases(op.aliases);
  for (std::string alias; std::getline(aliases, alias, ',');) write_stub(op, alias, out);
}

}  // namespace rlk::registry
