// labels: unit
// Tables and folders agree: an op is one folder in registry/ and one line in ops.def, an implementation one
// file in its backend and one line in implementations.def, and nothing else knows either by name.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "registry/op.hpp"
#include "rlk/harness.hpp"
#include "rlk/plugin.h"
#include "src/host.hpp"

namespace rlk {
extern const rlk_backend native_backend;
}

namespace {

namespace fs = std::filesystem;
const fs::path kRoot = fs::path(RLK_TEST_DATA).parent_path().parent_path();

std::string text_of(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

bool is_source(const fs::path& file) {
  static const std::set<std::string> kinds{".cpp", ".hpp", ".h", ".c", ".cu", ".cuh", ".hip", ".inl"};
  return kinds.count(file.extension()) != 0;
}

// First group of every match in the sources below a folder, with the file it is in.
std::multimap<std::string, fs::path> find(const fs::path& folder, const std::string& pattern) {
  std::multimap<std::string, fs::path> found;
  const std::regex regex(pattern);
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file() || !is_source(entry.path())) continue;
    const std::string text = text_of(entry.path());
    for (std::sregex_iterator m(text.begin(), text.end(), regex), end; m != end; ++m)
      found.emplace((*m)[1], entry.path());
  }
  return found;
}

std::set<std::string> lines_of(const fs::path& table, const std::string& macro) {
  std::set<std::string> names;
  const std::string text = text_of(table);
  const std::regex regex("(?:^|\n| )" + macro + R"(\((\w+)\))");
  for (std::sregex_iterator m(text.begin(), text.end(), regex), end; m != end; ++m) {
    INFO(table.string() << " lists " << (*m)[1].str() << " twice");
    CHECK(names.insert((*m)[1]).second);
  }
  return names;
}

}  // namespace

TEST_CASE(
    "every op of ops.def has its schema, reference, cases and bound in one folder, and no folder has "
    "another") {
  const std::set<std::string> table = lines_of(kRoot / "registry/ops.def", "RLK_OP");
  REQUIRE(!table.empty());
  const auto schemas = find(kRoot / "registry", R"(const rlk_op_schema (\w+)_schema\b(?!;))");
  std::set<std::string> defined;
  for (const auto& [op, file] : schemas) {
    if (file.parent_path() == kRoot / "registry") continue;
    INFO(op << " is defined in " << file.string() << " but is not in registry/ops.def");
    CHECK(table.count(op) == 1);
    defined.insert(op);
    for (const char* part : {"_reference", "_cases", "_bound"}) {
      const auto where = find(file.parent_path(), "\\b(" + op + part + ")\\b");
      INFO("registry/" << file.parent_path().filename().string() << " says nothing of " << op << part);
      CHECK(!where.empty());
    }
  }
  CHECK(defined == table);
}

TEST_CASE("every written rule of an op has a line of rules.def, and every line has its rule") {
  const std::set<std::string> table = lines_of(kRoot / "registry/rules.def", "RLK_RULE");
  const std::set<std::string> ops = lines_of(kRoot / "registry/ops.def", "RLK_OP");
  std::set<std::string> defined;
  for (const auto& [op, file] : find(kRoot / "registry", R"(\nbool (\w+)_rule\(const RuleQuery& \w+\) \{)")) {
    if (ops.count(op) == 0) continue;  // a helper of another name
    CHECK_MESSAGE(table.count(op) == 1, file.string() << " has the rule of " << op << ", rules.def does not");
    defined.insert(op);
  }
  for (const auto& op : table)
    CHECK_MESSAGE(defined.count(op) == 1, "rules.def lists " << op << ", whose folder has no rule");
}

TEST_CASE("every op is named on the page of its folder, and the README lists all pages and no other") {
  const std::string readme = text_of(kRoot / "README.md");
  std::set<std::string> listed, folders;
  const std::regex link(R"re(\[(\w+)\]\(registry/(\w+)/README\.md\))re");
  for (std::sregex_iterator m(readme.begin(), readme.end(), link), end; m != end; ++m) {
    CHECK((*m)[1] == (*m)[2]);
    listed.insert((*m)[2]);
  }
  for (const auto& [op, file] : find(kRoot / "registry", R"(const rlk_op_schema (\w+)_schema\b(?!;))")) {
    if (file.parent_path() == kRoot / "registry") continue;
    const fs::path page = file.parent_path() / "README.md";
    CHECK_MESSAGE(std::regex_search(text_of(page), std::regex("`" + op + "\\b")),
                  page.string() << " does not name " << op);
    folders.insert(file.parent_path().filename().string());
  }
  CHECK(listed == folders);
}

TEST_CASE("a page names every argument and attribute of its ops by the schema's own words") {
  std::map<std::string, fs::path> folders;
  for (const auto& [op, file] : find(kRoot / "registry", R"(const rlk_op_schema (\w+)_schema\b(?!;))"))
    folders[op] = file.parent_path();
  const std::regex word("\\w+");
  for (const rlk::registry::Op& op : rlk::registry::ops()) {
    const fs::path page = folders[op.schema->name] / "README.md";
    const std::string text = text_of(page);
    const std::set<std::string> words(std::sregex_token_iterator(text.begin(), text.end(), word), {});
    const auto check = [&](const std::string& name) {
      CHECK_MESSAGE(words.count(name) == 1,
                    page.string() << " does not name " << name << " of " << std::string(op.schema->name));
    };
    for (std::uint32_t i = 0; i < op.schema->num_arguments; ++i) check(op.schema->arguments[i].name);
    for (std::uint32_t i = 0; i < op.schema->num_attributes; ++i) check(op.schema->attributes[i].name);
  }
}

TEST_CASE("every implementation is defined in one file of its backend and listed once in its table") {
  for (const auto& folder : fs::directory_iterator(kRoot / "backends")) {
    const fs::path table = folder.path() / "implementations.def";
    if (!fs::exists(table)) continue;
    std::set<std::string> listed = lines_of(table, "RLK_IMPLEMENTATION");
    listed.merge(
        lines_of(table, "RLK_LEVELS"));  // native's: one source, an implementation per instruction set
    std::set<std::string> defined;
    for (const auto& [name, file] :
         find(folder, R"((?:^|\n)(?:extern |constinit )?const (?:rlk_implementation|Levels) (\w+)\s*[={])")) {
      INFO(name << " is defined in " << file.string() << " and elsewhere");
      CHECK(defined.insert(name).second);
    }
    for (const auto& name : defined) {
      INFO(name << " is defined but not in " << table.string());
      CHECK(listed.count(name) == 1);
    }
    for (const auto& name : listed) {
      INFO(table.string() << " lists " << name << ", which no file of that folder defines");
      CHECK(defined.count(name) == 1);
    }
  }
}

TEST_CASE("every op of ops.def has a native implementation") {
  for (const rlk::registry::Op& op : rlk::registry::ops()) {
    const std::string name = op.schema->name;
    const auto* first = rlk::native_backend.implementations;
    CHECK_MESSAGE(std::any_of(first, first + rlk::native_backend.num_implementations,
                              [&](const rlk_implementation* i) { return name == i->op; }),
                  name << " has no native implementation");
  }
}

namespace {

// A plugin of this build, or null.
const rlk_backend* plugin(const std::string& name) {
  const fs::path file = fs::path(RLK_TEST_BUILD) / "lib/rlk" / ("librlk_backend_" + name + ".so");
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: the table lives in it
  if (library == nullptr) return nullptr;
  const auto query = reinterpret_cast<rlk_backend_query_fn>(dlsym(library, "rlk_backend_query"));
  return query == nullptr ? nullptr : query(RLK_ABI_MAJOR, &rlk::host());
}

}  // namespace

TEST_CASE("implementations of an op are listed in the order in which they are tried") {
  std::vector<const rlk_backend*> backends{&rlk::native_backend};
  for (const char* name : {"onednn", "cuda", "hip"})
    if (const rlk_backend* backend = plugin(name)) backends.push_back(backend);
  for (const rlk_backend* backend : backends) {
    std::map<std::string, const rlk_implementation*> last;
    for (std::uint32_t i = 0; i < backend->num_implementations; ++i) {
      const rlk_implementation* here = backend->implementations[i];
      const rlk_implementation*& before = last[here->op];
      if (before != nullptr)
        CHECK_MESSAGE((before->priority > here->priority ||
                       (before->priority == here->priority && std::string(before->id) < here->id)),
                      backend->name << " lists " << here->id << " of " << here->op << ", priority "
                                    << here->priority << ", behind " << before->id << ", priority "
                                    << before->priority);
      before = here;
    }
    CHECK(last.size() > 0);
  }
}

TEST_CASE(
    "every portable op is a folder of backends/simt with a line of portable.def, and no kernels lie idle") {
  const fs::path simt = kRoot / "backends/simt";
  std::set<std::string> folders;
  for (const auto& folder : fs::directory_iterator(simt)) {
    const bool host = fs::exists(folder.path() / "ops.cpp"), device = fs::exists(folder.path() / "device.cu");
    CHECK_MESSAGE((host || !device), folder.path().string() << " has a device.cu and no ops.cpp");
    if (host) folders.insert(folder.path().filename());
  }
  const std::set<std::string> listed = lines_of(simt / "portable.def", "RLK_PORTABLE");
  for (const auto& name : folders) CHECK_MESSAGE(listed.count(name) == 1, name << " is not in portable.def");
  for (const auto& name : listed)
    CHECK_MESSAGE(folders.count(name) == 1, "portable.def lists " << name << ", which has no such folder");
}

namespace {

// The file of this tree that a quoted include means; empty for what the build generates and for other
// libraries. One's own tree has one spelling: from the root, from include/, or, in a backend, from backends/.
fs::path included(const std::string& name) {
  for (const fs::path& base : {kRoot, kRoot / "include", kRoot / "backends"})
    if (fs::exists(base / name)) return fs::weakly_canonical(base / name).lexically_relative(kRoot);
  return {};
}

// "backends/cuda" of a backend's file, else the top-level folder. The Python package's sums over GPUs are kernels in a
// library of their own, which may use what a backend's may.
std::string room_of(const fs::path& file) {
  const std::string kernels = "src/python/peers";
  if (file.string().starts_with(kernels + "/")) return kernels;
  auto part = file.begin();
  const std::string top = (part++)->string();
  return top == "backends" && part != file.end() ? top + "/" + part->string() : top;
}

// One arrow for each include of this tree below a folder.
void for_includes(const fs::path& folder,
                  const std::function<void(const fs::path&, const fs::path&)>& arrow) {
  for (const auto& [name, file] : find(folder, R"re((?:^|\n)\s*#\s*include "([^"]+)")re"))
    if (const fs::path to = included(name); !to.empty()) arrow(file.lexically_relative(kRoot), to);
}

using Graph = std::map<std::string, std::set<std::string>>;

// A way round in a graph, "a > b > a"; empty when there is none.
std::string circle_in(const Graph& graph) {
  std::set<std::string> done;
  std::vector<std::string> way;
  const std::function<std::string(const std::string&)> visit = [&](const std::string& node) -> std::string {
    if (const auto met = std::find(way.begin(), way.end(), node); met != way.end()) {
      std::string text;
      for (auto step = met; step != way.end(); ++step) text += *step + " > ";
      return text + node;
    }
    const auto next = graph.find(node);
    if (next == graph.end() || !done.insert(node).second) return {};
    way.push_back(node);
    for (const std::string& to : next->second)
      if (std::string text = visit(to); !text.empty()) return text;
    way.pop_back();
    return {};
  };
  for (const auto& [node, to] : graph)
    if (std::string text = visit(node); !text.empty()) return text;
  return {};
}

bool lies_in(const fs::path& inner, const fs::path& outer) {
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

}  // namespace

TEST_CASE("includes point down only: tests and tools, src, registry, backends, the public headers") {
  const std::string arithmetic = "backends/arithmetic", simt = "backends/simt";
  const std::map<std::string, std::set<std::string>> allowed{{"include", {"include"}},
                                                             {"registry", {"include", "registry"}},
                                                             {"src", {"include", "registry", "src"}},
                                                             {arithmetic, {"include", arithmetic}},
                                                             {simt, {"include", arithmetic, simt}}};
  const std::set<std::string> shared{"include", arithmetic, simt};
  // What an op's arguments mean has one reading, for its schema and for every backend; so has what was read off a GPU.
  const std::regex one_reading("registry/(\\w+/geometry|ex2_sm90)[.]hpp");
  std::size_t arrows = 0;
  for (const char* folder : {"include", "registry", "src", "backends"}) {
    for (const auto& [name, file] : find(kRoot / folder, R"re((?:^|\n)\s*#\s*include "([^"]+)")re"))
      CHECK_MESSAGE(!fs::exists(file.parent_path() / name),
                    file.string() << " includes \"" << name << "\" from its own folder: spell out the path");
    for_includes(kRoot / folder, [&](const fs::path& file, const fs::path& to) {
      ++arrows;
      const std::string from = room_of(file), into = room_of(to);
      const auto rule = allowed.find(from);
      const bool down =
          (rule != allowed.end() ? rule->second.count(into) != 0 : into == from || shared.count(into) != 0) ||
          (from.starts_with("backends/") && std::regex_match(to.string(), one_reading));
      CHECK_MESSAGE(down, file.string() << " includes " << to.string());
    });
  }
  CHECK(arrows > 300);
}

TEST_CASE(
    "no includes go round: not between headers, not between folders, nor in src between a file and what it "
    "uses") {
  CHECK(circle_in({{"a", {"b"}}, {"b", {"c", "d"}}, {"d", {"b"}}}) == "b > d > b");
  Graph headers, folders, files;
  for (const char* folder : {"include", "registry", "src", "backends", "tests", "tools"})
    for_includes(kRoot / folder, [&](const fs::path& from, const fs::path& to) {
      headers[from].insert(to);
      // A folder and those in it are one.
      const fs::path room = from.parent_path(), into = to.parent_path();
      if (!lies_in(room, into) && !lies_in(into, room)) folders[room].insert(into);
      // A source and its header are one.
      const fs::path file = fs::path(from).replace_extension(), used = fs::path(to).replace_extension();
      if (room == "src" && into == "src" && file != used) files[file].insert(used);
    });
  CHECK(circle_in(headers) == "");
  CHECK(circle_in(folders) == "");
  CHECK(circle_in(files) == "");
  CHECK(files.size() > 30);
}

TEST_CASE("a word that the whole tree shares names one type") {
  for (const std::string word : {"Arena", "Call", "DeviceGuard", "Float", "Options", "Plan"}) {
    std::string homes;
    int count = 0;
    // src/python/ and tools/ are programs beside the library, with words of their own.
    for (const char* folder : {"include", "registry", "src", "backends"})
      for (const auto& [name, file] :
           find(kRoot / folder, R"(\n\s*(?:struct|class|enum class) ()" + word + R"()\b[^;(]*\{)"))
        if (!lies_in(file, kRoot / "src/python")) ++count, homes += file.string() + " ";
    CHECK_MESSAGE(count == 1, word << " is defined in " << homes);
  }
}

namespace {

// A folder of a backend or of an op, with the file that opens the namespace.
bool is_namespace_of(const std::string& name, const fs::path& file) {
  auto part = file.begin();
  const std::string backend = (++part)->string(), op = (++part)->string();
  const bool in_folder = std::next(part) != file.end();
  const std::string own = "rlk::" + backend;
  if (name == own || (in_folder && (name == own + "::" + op || name.starts_with(own + "::" + op + "::"))))
    return true;
  // A GPU thread's part of arithmetic/rows.hpp: more overloads of its load and store.
  return name == "rlk::rows" && file == "backends/simt/rows.hpp";
}

}  // namespace

TEST_CASE("a backend's namespaces are its folders: rlk::<backend>, rlk::<backend>::<op>") {
  std::size_t count = 0;
  for (const auto& folder : fs::directory_iterator(kRoot / "backends"))
    for (const auto& [name, file] : find(folder, R"((?:^|\n)namespace (rlk::\w[\w:]*) \{)")) {
      const fs::path from_root = file.lexically_relative(kRoot);
      if (folder.path().filename() == "arithmetic") {
        // Shared by every backend, so named by the arithmetic id or the op: rlk::loss32, rlk::kda. What host and device
        // compute element by element is rlk::simt wherever it is included: what a thread has, or a lane.
        const bool lanes = name == "rlk::simt" && from_root.parent_path() == "backends/arithmetic";
        for (const char* backend : {"native", "simt", "cuda", "hip", "onednn"})
          CHECK_MESSAGE((lanes || !name.starts_with(std::string("rlk::") + backend)),
                        from_root.string() << " is in " << name);
      } else {
        CHECK_MESSAGE(is_namespace_of(name, from_root), from_root.string() << " is in " << name);
      }
      ++count;
    }
  CHECK(count > 300);
}

TEST_CASE("a page of measured figures has a plot of them") {
  for (const auto& folder : fs::directory_iterator(kRoot / "registry"))
    if (const std::string page = text_of(folder.path() / "README.md");
        page.find("bench") != std::string::npos) {
      const bool shown = page.find("](figures.svg)") != std::string::npos;
      CHECK_MESSAGE((shown && fs::exists(folder.path() / "figures.json")), folder.path().string());
    }
}

// Of an op that no other is made of; what a new one takes is no more.
TEST_CASE("an op with code for every backend is folders of its name, and a line in each table") {
  const std::string op = "group_advantage";
  std::map<std::string, int> lines;
  const auto count = [&](const fs::path& file) {
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);)
      if (line.find(op) != std::string::npos) ++lines[file.lexically_relative(kRoot).string()];
  };
  for (const char* folder : {"include", "registry", "src", "backends", "tools/cmake", "tools/rlk-dispatch"})
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder))
      if (entry.is_regular_file() && entry.path().parent_path().filename() != op &&
          !lies_in(entry.path(), kRoot / "src/python/rlk"))
        count(entry.path());
  count(kRoot / "README.md"), count(kRoot / "CMakeLists.txt");
  CHECK(lines ==
        std::map<std::string, int>{{"README.md", 1},
                                   {"backends/native/implementations.def", 1},
                                   {"backends/simt/portable.def", 1},
                                   {"registry/ops.def", 1},
                                   {"registry/rules.def", 1}});  // its rule in plain loops, which it may lack
}

TEST_CASE("every promise has its file") {
  std::set<std::string> expected{"promises.hpp"}, files;
  for (const rlk::harness::Promise p : rlk::harness::kPromises) {
    std::string name = rlk::harness::name_of(p);
    std::replace(name.begin(), name.end(), ' ', '_');
    expected.insert(name + ".cpp");
  }
  for (const auto& file : fs::directory_iterator(kRoot / "src/harness/promises"))
    files.insert(file.path().filename().string());
  CHECK(files == expected);
}

TEST_CASE("the machinery names no op and no implementation") {
  std::string ops;
  for (const std::string& op : lines_of(kRoot / "registry/ops.def", "RLK_OP"))
    ops += (ops.empty() ? "" : "|") + op;
  for (const char* folder : {"src"})
    for (const auto& [op, file] : find(kRoot / folder, "\"(" + ops + ")\"")) {
      INFO(file.string() << " knows " << op << " by name");
      CHECK(false);
    }
}
