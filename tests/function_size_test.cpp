// labels: unit
// No function is longer than 120 lines, kernels and Python included: clang-tidy's readability-function-size sees no device
// code and no code behind another machine's macros.
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;
const fs::path kRoot = fs::path(RLK_TEST_DATA).parent_path().parent_path();
constexpr std::size_t kMostLines = 120;

// The text of a literal or comment that begins at `at`, or nothing.
std::size_t end_of_literal(const std::string& text, std::size_t at) {
  const auto find = [&](std::string_view end, std::size_t from) {
    const std::size_t found = text.find(end, from);
    return found == std::string::npos ? text.size() : found + end.size();
  };
  if (text.compare(at, 2, "//") == 0) return find("\n", at) - 1;
  if (text.compare(at, 2, "/*") == 0) return find("*/", at + 2);
  const bool word_before = at > 0 && std::isalnum(static_cast<unsigned char>(text[at - 1]));
  if (text.compare(at, 2, "R\"") == 0 && !word_before) {
    const std::size_t open = text.find('(', at);
    return find(")" + text.substr(at + 2, open - at - 2) + "\"", open);
  }
  const char quote = text[at];
  if (quote != '"' && (quote != '\'' || word_before)) return at;  // 1'000 is no character
  for (std::size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\')
      ++i;
    else if (text[i] == quote)
      return i + 1;
  }
  return text.size();
}

// The text with blanks for comments, literals, preprocessor lines and all branches of an #if but its first.
std::string code_of(std::string text) {
  const auto blank = [&](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < std::min(to, text.size()); ++i)
      if (text[i] != '\n') text[i] = ' ';
  };
  for (std::size_t i = 0; i < text.size(); ++i)
    if (const std::size_t end = end_of_literal(text, i); end > i) blank(i, end), i = end - 1;
  static const std::regex directive(R"(^\s*#\s*(\w+))");
  std::vector<bool> dead;  // per #if that is open: in a later branch
  for (std::size_t line = 0, end = 0; line < text.size(); line = end + 1) {
    end = std::min(text.find('\n', line), text.size());
    std::smatch word;
    const std::string head = text.substr(line, end - line);
    const bool is_directive = std::regex_search(head, word, directive);
    while (is_directive && end > line && end < text.size() && text[end - 1] == '\\')
      end = std::min(text.find('\n', end + 1), text.size());
    const std::string what = is_directive ? word[1].str() : "";
    if (what == "if" || what == "ifdef" || what == "ifndef") dead.push_back(false);
    if ((what == "else" || what == "elif") && !dead.empty()) dead.back() = true;
    if (what == "endif" && !dead.empty()) dead.pop_back();
    if (is_directive || std::find(dead.begin(), dead.end(), true) != dead.end()) blank(line, end);
  }
  return text;
}

struct Function {
  std::string head;
  std::size_t line, lines;
};

// Functions at namespace or class scope; lambdas count as part of theirs.
std::vector<Function> functions_of(const std::string& text) {
  static const std::regex scope(R"(\b(namespace|class|struct|union|extern)\b[^()=]*$)");
  const std::string code = code_of(text);
  enum class Kind { scope, function, other };
  struct Brace {
    Kind kind;
    std::size_t head;
  };
  std::vector<Brace> open;
  std::vector<Function> found;
  const auto line_of = [&](std::size_t at) {
    return static_cast<std::size_t>(
               std::count(code.begin(), code.begin() + static_cast<std::ptrdiff_t>(at), '\n')) +
           1;
  };
  std::size_t head = 0;  // where the declaration began
  for (std::size_t i = 0; i < code.size(); ++i) {
    const bool outside =
        std::all_of(open.begin(), open.end(), [](const Brace& b) { return b.kind == Kind::scope; });
    if (code[i] == '{') {
      const std::string text_before = code.substr(head, i - head);
      Kind kind = Kind::other;
      if (outside && text_before.find(')') != std::string::npos) kind = Kind::function;
      if (outside && std::regex_search(text_before, scope)) kind = Kind::scope;
      open.push_back({kind, code.find_first_not_of(" \n", head)});
      if (outside) head = i + 1;
    } else if (code[i] == '}' && !open.empty()) {
      const Brace closed = open.back();
      open.pop_back();
      if (closed.kind == Kind::function) {
        const std::size_t line = line_of(closed.head);
        found.push_back({code.substr(closed.head, code.find('{', closed.head) - closed.head), line,
                         line_of(i) - line + 1});
      }
      if (closed.kind != Kind::other) head = i + 1;
    } else if (code[i] == ';' && outside) {
      head = i + 1;
    }
  }
  return found;
}

// Functions and methods of Python; what a function defines inside counts as part of it too.
std::vector<Function> python_functions_of(const std::string& text) {
  static const std::regex def(R"(^( *)(?:async )?def (\w+))");
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  std::vector<Function> found;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::smatch head;
    if (!std::regex_search(lines[i], head, def)) continue;
    const std::size_t indent = head[1].str().size();
    std::size_t last = i;
    for (std::size_t j = i + 1; j < lines.size(); ++j) {
      const std::size_t first = lines[j].find_first_not_of(' ');
      if (first == std::string::npos) continue;
      if (first <= indent && lines[j][first] != ')') break;  // the head may end on a line of its own
      last = j;
    }
    found.push_back({head[2], i + 1, last - i + 1});
  }
  return found;
}

bool is_python(const fs::path& file, const std::string& text) {
  return file.extension() == ".py" || text.starts_with("#!/usr/bin/env python3");
}

std::string function_of(std::size_t lines) {
  std::string text = "namespace a {\nstruct B {\n  template <class T>\n  int f(T x) const {\n";
  for (std::size_t i = 0; i + 3 < lines; ++i) text += "    if (x) { x = '}'; }  // }\n";
  return text + "  }\n};\n}\n";
}

}  // namespace

TEST_CASE("a function's lines are counted from its template's head to its last brace") {
  for (const std::size_t lines : {std::size_t{3}, kMostLines + 1}) {
    const std::vector<Function> found = functions_of(function_of(lines));
    REQUIRE(found.size() == 1);
    CHECK(found[0].lines == lines);
    CHECK(found[0].line == 3);
  }
}

TEST_CASE("a Python function's lines are counted to its last, blank lines between included") {
  for (const std::size_t lines : {std::size_t{4}, kMostLines + 1}) {
    std::string text = "class A:\n    def f(self,\n          x):\n\n";
    for (std::size_t i = 0; i + 3 < lines; ++i) text += "        x += 1\n";
    const std::vector<Function> found = python_functions_of(text + "\n\ndef g(): pass\n");
    REQUIRE(found.size() == 2);
    CHECK(found[0].lines == lines);
    CHECK(found[0].line == 2);
    CHECK(found[1].lines == 1);
  }
}

TEST_CASE("no function of the tree is longer than 120 lines") {
  static const std::set<std::string> kinds{".cpp", ".hpp", ".h", ".c", ".cu", ".cuh", ".hip", ".inl"};
  std::size_t count = 0, python = 0;
  for (const char* folder : {".ci", "backends", "include", "registry", "src", "tests", "tools"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream in(entry.path());
      const std::string text(std::istreambuf_iterator<char>(in), {});
      const bool compiled = kinds.count(entry.path().extension()) != 0;
      if (!compiled && !is_python(entry.path(), text)) continue;
      for (const Function& f : compiled ? functions_of(text) : python_functions_of(text)) {
        INFO(entry.path().string() << ":" << f.line << ": " << f.lines << " lines: " << f.head);
        CHECK(f.lines <= kMostLines);
        ++(compiled ? count : python);
      }
    }
  CHECK(count > 2000);  // it sees them
  CHECK(python > 500);
}
