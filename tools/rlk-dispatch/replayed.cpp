// --verify OP --against FILE of any op but lm_head: FILE has the tensors of one call by the names of its arguments, read ones
// and results (those that are there are compared; of an argument that is updated in place, NAME is what it was and NAME.after
// what became of it), and as metadata "arithmetic" and the attributes that are not at their defaults.
#include "replayed.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <vector>

#include "library.hpp"

namespace rlk::cli {
namespace {

using Entry = Dump::Entry;

// Memory of a tensor of the file's, aligned; results begin as nobody's numbers.
struct Copy {
  std::vector<std::int64_t> shape;
  std::vector<std::uint64_t> memory;
  DLTensor view{};
  Copy(const Entry& e, bool filled) : shape(e.shape), memory(e.bytes / 8 + 1, ~std::uint64_t{0}) {
    if (filled) std::memcpy(memory.data(), e.data, e.bytes);
    view = {memory.data(),
            {kDLCPU, 0},
            static_cast<int32_t>(shape.size()),
            dl_type(e.dtype),
            shape.data(),
            nullptr,
            0};
  }
};

struct Compared {
  std::string name;
  const Entry* theirs;
  const Copy* ours;
};

class Replay {
 public:
  Replay(const std::string& op, const Dump& dump)
      : dump_(dump), args_(rlk_args_new(op.c_str()), rlk_args_free) {
    if (!args_) throw Failure(kUsage, rlk_last_error());
    arithmetic = dump.said("arithmetic", "");
    if (arithmetic.empty())
      throw Failure(kUsage,
                    dump.path() + " does not say by what arithmetic: metadata \"arithmetic\" is missing");
    for (const auto& [name, value] : dump.metadata())
      if (name != "arithmetic" && name != "op" && name != "format")
        check(rlk_args_string(args_.get(), name.c_str(), value.c_str()));
    const Json all = listed("ops")["ops"];
    const auto known = std::find_if(all.begin(), all.end(), [&](const Json& o) { return o["name"] == op; });
    if (known == all.end())
      throw Failure(kUsage, "--against takes ops by their own names, and '" + op + "' is an alias");
    give((*known)["arguments"]);
    for (const auto& [name, entry] : dump.entries())
      if (!given_.contains(name))
        check(rlk_args_tensor(args_.get(), name.c_str(), nullptr)), throw unused(name);
    if (results.empty())
      throw Failure(kUsage, dump.path() + " holds no results of " + op + ": there is nothing to replay");
  }

  void run() {
    rlk_options options{};
    options.struct_size = sizeof options;
    options.backend = "native", options.arithmetic = arithmetic.c_str();
    implementation = parse(rlk_resolve_json(args_.get(), &options))["chosen"];
    if (const rlk_code code = rlk_run(args_.get(), &options); code != RLK_OK)
      throw Failure(exit_for(code), rlk_last_error());
  }

  std::string arithmetic, implementation;
  std::vector<Compared> results;

 private:
  Failure unused(const std::string& name) const {
    return {kUsage, dump_.path() + ": nothing is done with tensor '" + name + "'"};
  }
  void give(const Json& arguments) {
    for (const Json& a : arguments) {
      const std::string name = a["name"], role = a["role"], after = name + ".after";
      const Entry* e = dump_.find(name);
      if (!e) {
        if (role != "write" && !a["optional"])
          throw Failure(kUsage, dump_.path() + " has no tensor '" + name + "'");
        continue;
      }
      copies_.emplace_back(*e, role != "write");
      given_.insert(name);
      check(rlk_args_tensor(args_.get(), name.c_str(), &copies_.back().view));
      if (role == "write") results.push_back({name, e, &copies_.back()});
      const Entry* changed = role == "readwrite" ? dump_.find(after) : nullptr;
      if (!changed) continue;
      if (changed->dtype != e->dtype || changed->shape != e->shape)
        throw Failure(kUsage,
                      dump_.path() + ": " + after + " and " + name + " have different shapes or dtypes");
      given_.insert(after);
      results.push_back({after, changed, &copies_.back()});
    }
  }

  const Dump& dump_;
  std::unique_ptr<rlk_args, void (*)(rlk_args*)> args_;
  std::deque<Copy> copies_;  // addresses stay
  std::set<std::string> given_;
};

struct Finding {
  std::int64_t outputs = 0, mismatches = 0, element = -1;
  std::string result;  // in which the first mismatch is
  std::uint64_t file_bits = 0, replay_bits = 0;
};

Finding compare(const std::vector<Compared>& results) {
  Finding f;
  for (const Compared& r : results) {
    const auto size = static_cast<std::size_t>(size_of(r.theirs->dtype));
    const auto* ours = reinterpret_cast<const std::uint8_t*>(r.ours->memory.data());
    f.outputs += static_cast<std::int64_t>(r.theirs->bytes / size);
    for (std::size_t at = 0; at < r.theirs->bytes; at += size) {
      if (std::memcmp(r.theirs->data + at, ours + at, size) == 0 || f.mismatches++ > 0) continue;
      f.result = r.name, f.element = static_cast<std::int64_t>(at / size);
      std::memcpy(&f.file_bits, r.theirs->data + at, size), std::memcpy(&f.replay_bits, ours + at, size);
    }
  }
  return f;
}

}  // namespace

int against_call(const std::string& op, const Dump& dump, bool json) {
  Replay replay(op, dump);
  replay.run();
  const Finding f = compare(replay.results);
  const std::string file = printable(dump.path());
  if (json) {
    Json j{{"schema", 1},
           {"op", op},
           {"file", file},
           {"arithmetic", replay.arithmetic},
           {"implementation", replay.implementation},
           {"outputs", f.outputs},
           {"mismatches", f.mismatches}};
    if (f.mismatches)
      j["first"] = {{"result", f.result},
                    {"element", f.element},
                    {"file_bits", f.file_bits},
                    {"replay_bits", f.replay_bits}};
    print(printable_strings(j));
  } else if (f.mismatches == 0) {
    std::printf("%s  %s  %s: all %" PRId64 " outputs of %s reproduced, 0 bits differ\n", op.c_str(),
                replay.implementation.c_str(), printable(replay.arithmetic).c_str(), f.outputs, file.c_str());
  } else {
    std::printf("%s  %s  %s: %" PRId64 " of %" PRId64 " outputs of %s differ; the first is %s[%" PRId64
                "]: file 0x%" PRIx64 ", replay 0x%" PRIx64 "\n",
                op.c_str(), replay.implementation.c_str(), printable(replay.arithmetic).c_str(), f.mismatches,
                f.outputs, file.c_str(), f.result.c_str(), f.element, f.file_bits, f.replay_bits);
  }
  return f.mismatches == 0 ? kGood : kVerificationFailed;
}

}  // namespace rlk::cli
