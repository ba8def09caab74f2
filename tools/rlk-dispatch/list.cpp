// --list [ops|impls|backends|plugins|env]: what there is, as aligned tables. Without a word: implementations,
// and the backends that could have had some.
#include <algorithm>
#include <cstdio>

#include "commands.hpp"
#include "library.hpp"
#include "table.hpp"
#include "words.hpp"

namespace rlk::cli {
namespace {

std::string joined(const Json& words, const char* separator = " ") {
  std::string text;
  for (const Json& word : words) text += (text.empty() ? "" : separator) + word.get<std::string>();
  return text;
}

std::string yes_no(const Json& flag) { return flag ? "yes" : "no"; }

// What follows "yes" or "no" and many rows share (a reason, a GPU's name) stands once below their table; the
// rows carry its number: "no (1)".
class Notes {
 public:
  std::string mark(const std::string& usable) {
    const std::size_t colon = usable.find(": ");
    if (colon == std::string::npos) return usable;
    const std::string reason = usable.substr(colon + 2);
    auto at = std::find(reasons_.begin(), reasons_.end(), reason);
    if (at == reasons_.end()) at = reasons_.insert(at, reason);
    return usable.substr(0, colon) + " (" + std::to_string(at - reasons_.begin() + 1) + ")";
  }
  void print() const {
    for (std::size_t i = 0; i < reasons_.size(); ++i)
      std::printf("%s(%zu) %s\n", i == 0 ? "\n" : "", i + 1, reasons_[i].c_str());
  }

 private:
  std::vector<std::string> reasons_;
};

// An op stands above its implementations, whose ids mostly begin with their backend: so a row fits a screen.
void print_impls(const Json& impls, const Json& backends) {
  Notes notes;
  Table table({"implementation", "built", "loaded", "usable", "dtypes", "arithmetic", "priority"});
  std::string last;
  for (const Json& i : impls) {
    const std::string op = i["op"];
    if (op != last) table.row({op});
    const std::string id = i["id"], backend = i["backend"];
    const bool of_it = id.compare(0, backend.size() + 1, backend + ".") == 0;
    table.row({" " + id + (of_it ? "" : " of " + backend), yes_no(i["built"]), yes_no(i["loaded"]),
               notes.mark(i["usable"]), joined(i["dtypes"]), i["arithmetic"],
               std::to_string(i["priority"].get<int>())});
    last = op;
  }
  table.print();
  notes.print();
  Table missing({"backend", "built", "loaded", "usable", "to change that"});
  bool any = false;
  for (const Json& b : backends) {
    if (b["loaded"]) continue;
    any = true;
    missing.row({b["name"], yes_no(b["built"]), "no", b["usable"], b["remedy"]});
  }
  if (any) std::puts(""), missing.print();
}

// A block per op: an op has too many names for a row.
void print_ops(const Json& ops) {
  const auto line = [](const char* head, const std::string& text) {
    if (!text.empty()) std::printf("  %-10s  %s\n", head, text.c_str());
  };
  for (const Json& op : ops) {
    std::string reads, writes, attributes;
    for (const Json& a : op["arguments"]) {
      std::string& list = a["role"] == "write" ? writes : reads;
      list += (list.empty() ? "" : " ") + a["name"].get<std::string>() + (a["optional"] ? "?" : "") +
              (a["role"] == "readwrite" ? "!" : "");
    }
    for (const Json& a : op["attributes"])
      attributes += (attributes.empty() ? "" : " ") + a["name"].get<std::string>();
    std::printf("%s  %s\n", painted(op["name"], Paint::head).c_str(), op["doc"].get<std::string>().c_str());
    line("arguments", reads + (writes.empty() ? "" : " -> " + writes));
    line("attributes", attributes);
    line("gradient", op["backward"]);
    line("aliases", op["aliases"]);
  }
  std::puts("\n?: optional   !: changed in place   ->: results");
}

void print_backends(const Json& backends) {
  Table table({"backend", "state", "built", "loaded", "usable", "version", "origin", "what it uses"});
  for (const Json& b : backends)
    table.row({b["name"], b["state"], yes_no(b["built"]), yes_no(b["loaded"]), b["usable"], b["version"],
               b["origin"], b["doc"]});
  table.print();
}

void print_plugins(const Json& all) {
  Table table({"plugin", "state", "path", "reason"});
  for (const Json& p : all["plugins"]) table.row({p["name"], p["state"], p["path"], p["reason"]});
  table.print();
  std::printf("\nfolder of the library: %s\n", all["folder"].get<std::string>().c_str());
  for (const Json& note : all["notes"]) std::printf("passed over: %s\n", note.get<std::string>().c_str());
}

}  // namespace

int list(const Options& options) {
  if (options.what == "env") return env(options);
  check_configuration();
  const std::string what = options.what.empty() ? "impls" : options.what;
  const std::vector<std::string> known = {"ops", "impls", "backends", "plugins", "env"};
  if (std::find(known.begin(), known.end(), what) == known.end())
    throw Failure(kUsage, unknown_word("list", what, known));
  Json all = listed(what.c_str());
  if (what == "impls") all["backends"] = listed("backends")["backends"];
  if (options.json)
    print(all);
  else if (what == "impls")
    print_impls(all["impls"], all["backends"]);
  else if (what == "ops")
    print_ops(all["ops"]);
  else if (what == "backends")
    print_backends(all["backends"]);
  else
    print_plugins(all);
  return kGood;
}

}  // namespace rlk::cli
