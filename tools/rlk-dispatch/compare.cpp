// --compare: the first thing two certificates disagree on, in words; a trainer's and a sampler's, say.
#include <cstdio>
#include <fstream>
#include <map>

#include "commands.hpp"
#include "library.hpp"

namespace rlk::cli {
namespace {

std::string base_name(const std::string& path) {
  const auto slash = path.rfind('/');
  std::string name = slash == path.npos ? path : path.substr(slash + 1);
  const auto dot = name.rfind('.');
  return dot == name.npos || dot == 0 ? name : name.substr(0, dot);
}

Json read(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw Failure(kUsage, "cannot read " + path);
  const Json json = Json::parse(in, nullptr, false);
  if (json.is_discarded() || !json.contains("entries") || !json.contains("schema"))
    throw Failure(kUsage, path + " is not a certificate");
  if (json["schema"] != 1) throw Failure(kUsage, path + " has a schema this program does not know");
  return json;
}

using Key = std::pair<std::string, std::string>;  // op, dtype
std::map<Key, std::vector<const Json*>> by_call(const Json& certificate) {
  std::map<Key, std::vector<const Json*>> out;
  for (const Json& e : certificate["entries"])
    out[{e["op"].get<std::string>(), e["dtype"].get<std::string>()}].push_back(&e);
  return out;
}

std::string text(const Json& e, const char* member) { return e.value(member, std::string()); }

const Json* with_id(const std::vector<const Json*>& entries, const std::string& member,
                    const std::string& value) {
  for (const Json* e : entries)
    if (text(*e, member.c_str()) == value) return e;
  return nullptr;
}

// The first corpus case whose bits differ; empty: all equal. common counts those both have.
std::string first_difference(const Json& a, const Json& b, int& common) {
  for (const auto& [name, hash] : a["corpus"].items()) {
    if (!b["corpus"].contains(name)) continue;
    ++common;
    if (b["corpus"][name] != hash) return name;
  }
  return "";
}

struct Difference {
  Key key;
  std::string words;
};

// What a dispatcher would take first: the entry that comes first in each certificate.
std::vector<Difference> compare_call(const Key& key, const std::vector<const Json*>& left,
                                     const std::vector<const Json*>& right, const std::string& a,
                                     const std::string& b) {
  std::vector<Difference> out;
  const Json &x = *left[0], &y = *right[0];
  if (text(x, "arithmetic") != text(y, "arithmetic")) {
    std::string words = a + " ran " + text(x, "implementation") + " (" + text(x, "arithmetic") + "), " + b +
                        " ran " + text(y, "implementation") + " (" + text(y, "arithmetic") +
                        "): these promise different bits. ";
    if (const Json* same = with_id(right, "arithmetic", text(x, "arithmetic")))
      words += "Set RLK_BACKEND='" + key.first + "=" + text(*same, "implementation") + "' on " + b;
    else if (const Json* same_left = with_id(left, "arithmetic", text(y, "arithmetic")))
      words += "Set RLK_BACKEND='" + key.first + "=" + text(*same_left, "implementation") + "' on " + a;
    else
      words +=
          "No implementation of one machine promises the other's arithmetic; require arithmetic 'fma64' "
          "(golden) "
          "on both";
    out.push_back({key, words + "."});
  }
  for (const Json* e : left)
    for (const Json* f : right) {
      if (text(*e, "arithmetic") != text(*f, "arithmetic")) continue;
      int common = 0;
      const std::string name = first_difference(*e, *f, common);
      if (!name.empty())
        out.push_back({key, "both claim " + text(*e, "arithmetic") + ", yet " + text(*e, "implementation") +
                                " on " + a + " and " + text(*f, "implementation") + " on " + b +
                                " gave different bits in case '" + name +
                                "'. One of them breaks its promise: run rlk-dispatch --verify " + key.first +
                                " on both."});
    }
  return out;
}

}  // namespace

int compare(const Options& o) {
  if (o.files.size() != 2) throw Failure(kUsage, "--compare takes two certificates");
  const Json left = read(o.files[0]), right = read(o.files[1]);
  std::string a = base_name(o.files[0]), b = base_name(o.files[1]);
  if (a == b) a = o.files[0], b = o.files[1];
  std::vector<Difference> differences;
  const auto x = by_call(left), y = by_call(right);
  int compared = 0;
  for (const auto& [key, entries] : x) {
    const auto at = y.find(key);
    if (at == y.end()) {
      differences.push_back({key, a + " has evidence for it, " + b + " has none."});
      continue;
    }
    ++compared;
    for (Difference& d : compare_call(key, entries, at->second, a, b)) differences.push_back(std::move(d));
  }
  for (const auto& [key, entries] : y)
    if (!x.count(key)) differences.push_back({key, b + " has evidence for it, " + a + " has none."});
  if (left["seed"] != right["seed"])
    differences.insert(differences.begin(),
                       {{"all ops", ""}, "the certificates were made with different seeds; use one --seed."});
  if (o.json) {
    Json out{{"schema", 1}, {"compared", compared}, {"differences", Json::array()}};
    for (const Difference& d : differences)
      out["differences"].push_back({{"op", d.key.first}, {"dtype", d.key.second}, {"text", d.words}});
    print(out);
  } else {
    for (const Difference& d : differences)
      std::printf("%s%s%s: %s\n", d.key.first.c_str(), d.key.second.empty() ? "" : " ", d.key.second.c_str(),
                  d.words.c_str());
    if (differences.empty())
      std::printf("no difference: %d calls promise and gave the same bits\n", compared);
  }
  return differences.empty() ? kGood : kVerificationFailed;
}

}  // namespace rlk::cli
