// --explain OP: every candidate for a call, in order, with its verdict and the smallest change that would
// select it.
#include <algorithm>
#include <cstdio>

#include "call.hpp"
#include "commands.hpp"
#include "table.hpp"
#include "words.hpp"

namespace rlk::cli {
namespace {

// --policy as the library takes it. The texts must live as long as the options.
struct Policy {
  std::string precision = "standard", arithmetic, backend;
  rlk_options options{};

  explicit Policy(const std::vector<std::string>& words) {
    options.struct_size = sizeof options;
    for (const std::string& word : words) add(word);
    options.precision = precision.c_str();
    if (!arithmetic.empty()) options.arithmetic = arithmetic.c_str();
    if (!backend.empty()) options.backend = backend.c_str();
  }

 private:
  void add(const std::string& word) {
    if (word == "standard" || word == "strict" || word == "golden")
      precision = word;
    else if (word == "deterministic")
      options.deterministic = 1;
    else if (word == "backward")
      options.needs_backward = 1;
    else if (word.substr(0, 11) == "arithmetic=")
      arithmetic = word.substr(11);
    else if (word.substr(0, 8) == "backend=")
      backend = word.substr(8);
    else
      throw Failure(kUsage, unknown_word("policy", word,
                                         {"standard", "strict", "golden", "deterministic", "backward",
                                          "arithmetic=ID", "backend=CHAIN"}));
  }
};

Paint paint_of(const std::string& standing) {
  return standing == "chosen"     ? Paint::good
         : standing == "accepted" ? Paint::plain
         : standing == "refused"  ? Paint::bad
                                  : Paint::quiet;
}

void print_candidates(const Json& r) {
  std::size_t id_width = 7, reason_width = 0;
  const auto about = [&](const Json& c) -> std::string {
    if (c["standing"] == "chosen")
      return "arithmetic " + c["arithmetic"].get<std::string>() +
             "   decided by: " + r["decided_by"].get<std::string>();
    return c["reason"];
  };
  for (const Json& c : r["candidates"]) {
    id_width = std::max(id_width, c["id"].get<std::string>().size());
    if (!c["nearest"].get<std::string>().empty()) reason_width = std::max(reason_width, about(c).size());
  }
  // One very long reason must not push all the others' changes off the screen.
  reason_width = std::min<std::size_t>(reason_width, 72);
  const auto print_one = [&](const Json& c) {
    const std::string standing = c["standing"], id = c["id"], reason = about(c), nearest = c["nearest"];
    std::string line = painted(standing, paint_of(standing)) + std::string(10 - standing.size(), ' ') + id +
                       std::string(id_width - id.size() + 2, ' ') + reason;
    if (!nearest.empty())
      line += std::string(reason.size() < reason_width ? reason_width - reason.size() : 0, ' ') +
              "   nearest: " + nearest;
    std::puts(line.c_str());
  };
  for (const Json& c : r["candidates"])
    if (c["chosen"]) print_one(c);
  for (const Json& c : r["candidates"])
    if (!c["chosen"]) print_one(c);
}

}  // namespace

int explain(const Options& options) {
  check_configuration();
  const ImaginedCall call(options);
  const Policy policy(options.policy);
  Json r = parse(rlk_resolve_json(call.args(), &policy.options));
  r["call"] = call.text();
  r["device"] = options.device;
  const std::string error = r["error"];
  if (options.json) {
    print(r);
  } else {
    std::printf("call      %s on %s%s%s\n", call.text().c_str(), options.device.c_str(),
                call.example().empty() ? "" : "   shapes of the example ", call.example().c_str());
    print_candidates(r);
    if (error.empty()) std::printf("fingerprint %s\n", r["fingerprint"].get<std::string>().c_str());
  }
  if (error.empty()) return kGood;
  throw Failure(exit_for(r["code"].get<int>()), error);
}

}  // namespace rlk::cli
