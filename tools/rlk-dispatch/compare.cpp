// --compare: what two certificates disagree on, in words; a trainer's and a sampler's, say. On each side it is
// the implementation that dispatch would choose that counts.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "commands.hpp"
#include "library.hpp"
#include "rlk/harness.hpp"

namespace rlk::cli {
namespace {

using Call = std::pair<std::string, std::string>;  // op, dtype

std::string text(const Json& e, const char* member) { return e.at(member).get<std::string>(); }

std::string base_name(const std::string& path) {
  const auto slash = path.rfind('/');
  std::string name = slash == path.npos ? path : path.substr(slash + 1);
  const auto dot = name.rfind('.');
  return dot == name.npos || dot == 0 ? name : name.substr(0, dot);
}

// One certificate, and who would run in each case of each call.
struct Side {
  std::string name;
  Json all;
  std::map<Call, std::vector<const Json*>> entries;
  std::map<Call, std::map<std::string, const Json*>> chosen;  // by case

  Side(std::string as, const std::string& path) : name(std::move(as)) {
    std::ifstream in(path, std::ios::binary);
    const std::string content(std::istreambuf_iterator<char>(in), {});
    if (!in || content.empty()) throw Failure(kUsage, path + " cannot be read, or is empty");
    if (const Status s = harness::check_certificate(content); !s)
      throw Failure(kUsage, path + " proves nothing that could be compared: " + std::string(s.message()));
    all = Json::parse(content);
    for (const Json& e : all.at("entries")) {
      const Call call{text(e, "op"), text(e, "dtype")};
      entries[call].push_back(&e);
      if (!text(e, "level").empty() && text(e, "level") != text(all.at("host"), "level")) continue;
      for (const Json& name_of_case : e.at("default_for")) chosen[call][name_of_case.get<std::string>()] = &e;
    }
  }
  Side(const Side&) = delete;
  const Json* with_arithmetic(const Call& call, const std::string& arithmetic) const {
    for (const Json* e : entries.at(call))
      if (text(*e, "arithmetic") == arithmetic) return e;
    return nullptr;
  }
};

struct Difference {
  Call call;
  std::string words;
};
struct Findings {
  std::vector<Difference> differences;
  std::vector<std::string> notes;
  int calls = 0, cases = 0;
};

// What may make machines differ, said whether or not it did.
void compare_surroundings(const Side& a, const Side& b, Findings& out) {
  const auto note = [&](const std::string& what, const Json& x, const Json& y) {
    const auto plain = [](const Json& j) {
      return j.is_null() ? "unset" : j.is_string() ? j.get<std::string>() : j.dump();
    };
    if (x != y)
      out.notes.push_back(what + ": " + plain(x) + " on " + a.name + ", " + plain(y) + " on " + b.name);
  };
  for (const char* member : {"rlk", "build"}) note(member, a.all.at(member), b.all.at(member));
  const Json &x = a.all.at("host"), &y = b.all.at("host");
  for (const char* member : {"cpu", "level", "system", "threads"}) note(member, x.at(member), y.at(member));
  std::set<std::string> variables;
  for (const Json* host : {&x, &y})
    for (const auto& [name, value] : host->at("environment").items()) variables.insert(name);
  for (const std::string& v : variables)
    note(v, x.at("environment").value(v, Json()), y.at("environment").value(v, Json()));
}

std::string remedy(const Side& a, const Side& b, const Call& call, const Json& x, const Json& y) {
  if (const Json* same = b.with_arithmetic(call, text(x, "arithmetic")))
    return "Set RLK_BACKEND='" + call.first + "=" + text(*same, "implementation") + "' on " + b.name + ".";
  if (const Json* same = a.with_arithmetic(call, text(y, "arithmetic")))
    return "Set RLK_BACKEND='" + call.first + "=" + text(*same, "implementation") + "' on " + a.name + ".";
  return "No implementation of one machine promises the other's arithmetic; require the op's golden "
         "arithmetic "
         "on both.";
}

// The implementations that would run, case by case; one difference for each pair of them.
void compare_choices(const Call& call, const Side& a, const Side& b, Findings& out) {
  struct Count {
    int cases = 0, differ = 0;
    std::string first;
  };
  std::map<std::pair<const Json*, const Json*>, Count> pairs;
  const auto left = a.chosen.find(call), right = b.chosen.find(call);
  if (left == a.chosen.end() || right == b.chosen.end()) {
    const Side& without = left == a.chosen.end() ? a : b;
    out.differences.push_back(
        {call,
         without.name + " does not hold the implementation that would run there; verify without --impl."});
    return;
  }
  for (const auto& [name, x] : left->second) {
    const auto at = right->second.find(name);
    if (at == right->second.end()) continue;
    Count& c = pairs[{x, at->second}];
    ++c.cases;
    if (x->at("corpus").at(name) == at->second->at("corpus").at(name)) continue;
    if (c.differ++ == 0) c.first = name;
  }
  if (!pairs.empty()) ++out.calls;
  for (const auto& [pair, c] : pairs) {
    const Json &x = *pair.first, &y = *pair.second;
    out.cases += c.cases;
    const std::string count = std::to_string(c.differ) + " of " + std::to_string(c.cases) + " cases";
    if (text(x, "arithmetic") != text(y, "arithmetic"))
      out.differences.push_back({call, a.name + " would run " + text(x, "implementation") + " (" +
                                           text(x, "arithmetic") + "), " + b.name + " " +
                                           text(y, "implementation") + " (" + text(y, "arithmetic") +
                                           "): these promise different bits, and gave them in " + count +
                                           ". " + remedy(a, b, call, x, y)});
    else if (c.differ)
      out.differences.push_back({call, "both would run " + text(x, "arithmetic") + ", yet " +
                                           text(x, "implementation") + " on " + a.name + " and " +
                                           text(y, "implementation") + " on " + b.name +
                                           " gave different bits in " + count + ", first in '" + c.first +
                                           "'. One of them breaks its promise: run rlk-dispatch --verify " +
                                           call.first + " on both."});
  }
}

// Whoever declares one arithmetic must have given one answer, chosen or not.
void compare_declared(const Call& call, const Side& a, const Side& b, Findings& out) {
  for (const Json* x : a.entries.at(call))
    for (const Json* y : b.entries.at(call)) {
      if (text(*x, "arithmetic") != text(*y, "arithmetic")) continue;
      for (const auto& [name, hash] : x->at("corpus").items()) {
        const Json& there = y->at("corpus");
        if (!there.contains(name) || there.at(name) == hash) continue;
        out.differences.push_back({call, "both declare " + text(*x, "arithmetic") + ", yet " +
                                             text(*x, "implementation") + " on " + a.name + " and " +
                                             text(*y, "implementation") + " on " + b.name +
                                             " gave different bits in case '" + name + "'."});
        break;
      }
    }
}

Findings findings_of(const Side& a, const Side& b) {
  Findings out;
  compare_surroundings(a, b, out);
  for (const auto& [call, entries] : a.entries) {
    if (!b.entries.count(call)) {
      out.differences.push_back({call, a.name + " has evidence for it, " + b.name + " has none."});
      continue;
    }
    compare_choices(call, a, b, out);
    compare_declared(call, a, b, out);
  }
  for (const auto& [call, entries] : b.entries)
    if (!a.entries.count(call))
      out.differences.push_back({call, b.name + " has evidence for it, " + a.name + " has none."});
  return out;
}

void print_json(const Findings& f) {
  Json out{{"schema", 1},
           {"compared", f.calls},
           {"cases", f.cases},
           {"differences", Json::array()},
           {"notes", f.notes}};
  for (const Difference& d : f.differences)
    out["differences"].push_back({{"op", d.call.first}, {"dtype", d.call.second}, {"text", d.words}});
  print(out);
}

}  // namespace

int compare(const Options& o) {
  if (o.files.size() != 2) throw Failure(kUsage, "--compare takes two certificates");
  std::string names[] = {base_name(o.files[0]), base_name(o.files[1])};
  if (names[0] == names[1]) names[0] = o.files[0], names[1] = o.files[1];
  const Side a(names[0], o.files[0]), b(names[1], o.files[1]);
  if (a.all.at("seed") != b.all.at("seed"))
    throw Failure(kUsage,
                  "the certificates were made with different seeds, so nothing in them can be compared; "
                  "use one --seed");
  const Findings f = findings_of(a, b);
  const bool equal = f.differences.empty() && f.cases > 0;
  if (o.json) {
    print_json(f);
    return equal ? kGood : kVerificationFailed;
  }
  for (const Difference& d : f.differences)
    std::printf("%s\n", printable(d.call.first + " " + d.call.second + ": " + d.words).c_str());
  for (const std::string& note : f.notes) std::printf("note: %s\n", printable(note).c_str());
  std::printf("%s: %d cases of %d calls (op and dtype) were compared\n",
              f.cases == 0 ? "nothing in common"
              : equal      ? "no difference"
                           : "different",
              f.cases, f.calls);
  return equal ? kGood : kVerificationFailed;
}

}  // namespace rlk::cli
