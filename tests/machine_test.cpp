// labels: unit
// run: whole
// What this machine can execute is asked in one place: with and without results, at every level that RLK_CPU
// allows, nothing is named, sized, listed or forced whose instructions may not run. The cases share one
// implementation for a processor that does not exist, so they run in one process.
#include "src/machine.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "registry/op.hpp"
#include "rlk/harness.hpp"
#include "rlk/rlk.hpp"
#include "src/harness/execute.hpp"
#include "src/harness/target.hpp"
#include "src/introspect.hpp"

namespace {

using namespace rlk;

struct Level {
  const char* word;
  std::int32_t level;
};
constexpr Level kLevels[] = {{"baseline", RLK_CPU_BASELINE},
                             {"avx2", RLK_CPU_AVX2},
                             {"avx512", RLK_CPU_AVX512},
                             {"avx512bf16", RLK_CPU_AVX512BF16},
                             {"amx", RLK_CPU_AMX}};

// RLK_CPU for as long as it lives, then what it was.
class Cap {
 public:
  explicit Cap(const char* word) {
    if (const char* value = std::getenv("RLK_CPU")) before_ = value;
    set(word);
  }
  ~Cap() { set(before_.c_str()); }

 private:
  static void set(const char* word) {
    setenv("RLK_CPU", word, 1);
    rlk_reload_environment();
  }
  std::string before_;
};

// The processor's, whatever level this run is held to.
std::int32_t own_level() {
  const Cap none("amx");
  return rlk_cpu_level();
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

// The first problem of every op and dtype, without results: what --explain and a caller who sizes memory ask.
template <class Body>
void for_calls(Body body) {
  for (const registry::Op& op : registry::ops()) {
    std::vector<DType> seen;
    op.cases([&](const registry::Case& c) {
      if (c.large || c.inputs.empty() || std::find(seen.begin(), seen.end(), c.inputs[0].dtype) != seen.end())
        return;
      seen.push_back(c.inputs[0].dtype);
      Result<harness::Problem> p = harness::materialise(op, c, 1);
      REQUIRE(p);
      std::vector<DLTensor> tensors(p->inputs.size());
      std::vector<rlk_slot> slots(p->inputs.size() + p->attributes.size());
      for (std::size_t i = 0; i < p->inputs.size(); ++i) {
        if (!p->inputs[i]) continue;
        harness::Array& a = *p->inputs[i];
        tensors[i] = Tensor(a.bytes.data(), a.shape, a.dtype).dl();
        tensors[i].shape = a.shape.data(), tensors[i].strides = nullptr;
        slots[i].tensor = &tensors[i];
      }
      std::copy(p->attributes.begin(), p->attributes.end(),
                slots.begin() + static_cast<std::ptrdiff_t>(p->inputs.size()));
      body(*op.schema, c, slots.data());
    });
  }
}

// Code for a processor of the year 2100. Entering any of it is seen.
constexpr std::int32_t kFuture = 9000;
int entered = 0;
const rlk_implementation kFutureCode = [] {
  rlk_implementation i{};
  i.struct_size = sizeof i, i.priority = 1000, i.op = "lm_head", i.id = "future.code", i.doc = "";
  i.arithmetic = "fma64", i.dtypes = RLK_F32 | RLK_BF16 | RLK_F16, i.traits = RLK_DETERMINISTIC | RLK_GOLDEN;
  i.device_type = kDLCPU, i.min_arch = kFuture;
  i.supports = [](const rlk_slot*, const rlk_request*) {
    ++entered;
    return rlk_verdict{};
  };
  i.workspace = [](const rlk_slot*, const rlk_request*) -> std::uint64_t { return ++entered, 0; };
  i.run = [](const rlk_slot*, const rlk_call*) -> std::int32_t { return ++entered, 0; };
  return i;
}();
const rlk_implementation* const kFutureTable[] = {&kFutureCode};
const rlk_backend kFutureBackend = {sizeof(rlk_backend),
                                    RLK_ABI_MAJOR,
                                    RLK_ABI_MINOR,
                                    "future",
                                    "1",
                                    "",
                                    kFutureTable,
                                    1,
                                    nullptr,
                                    0,
                                    nullptr,
                                    nullptr,
                                    nullptr};

struct Small {
  float hidden[6] = {1, 2, 3, 4, 5, 6}, weight[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, out[6] = {};
  Tensor h{hidden, {2, 3}, DType::f32}, w{weight, {3, 3}, DType::f32}, y{out, {2, 3}, DType::f32};
};

}  // namespace

TEST_CASE("a cap lowers the level and never raises it, and every CPU's device carries it") {
  const std::int32_t before = rlk_cpu_level(), own = own_level();
  for (const Level& l : kLevels) {
    const Cap cap(l.word);
    CAPTURE(l.word);
    CHECK(rlk_cpu_level() <= l.level);
    if (l.level <= own) {
      CHECK(rlk_cpu_level() == l.level);
      CHECK(std::string(cpu_word(rlk_cpu_level())) == l.word);
    }
    for (const auto& b : snapshot().backends)
      for (const rlk_device& d : b->devices())
        if (d.type == kDLCPU) CHECK(rlk::Backend::current(d).arch == rlk_cpu_level());
  }
  CHECK(rlk_cpu_level() == before);
}

TEST_CASE("a word that is no level fails every call and names the one that was meant") {
  Small s;
  const Cap cap("avx521");
  const Status status = lm_head({.hidden = s.h, .weight = s.w, .out = s.y});
  CHECK(status.code() == RLK_CONFIGURATION);
  CHECK(
      status.message() ==
      "RLK_CPU: unknown level 'avx521', did you mean 'avx512'?  Known levels: amx, avx2, avx512, avx512bf16, "
      "baseline");
  CHECK(rlk_reload_environment() == RLK_CONFIGURATION);
}

TEST_CASE(
    "at every level a resolution without results names code of that level, and its workspace is known") {
  for (const Level& l : kLevels) {
    const Cap cap(l.word);
    for_calls([&](const rlk_op_schema& op, const registry::Case& c, const rlk_slot* slots) {
      CAPTURE(op.name);
      CAPTURE(c.name);
      CAPTURE(l.word);
      const Resolution r = resolve_slots(op.name, slots, {});
      INFO(r.status().message());
      REQUIRE(r);
      CHECK(r.implementation()->min_arch <= l.level);
      for (const Candidate& other : r.candidates())
        if (other.implementation && other.implementation->device_type == kDLCPU &&
            other.implementation->min_arch > l.level)
          CHECK(has(other.reason(), "needs A"));
      const Result<std::uint64_t> bytes = workspace_slots(op.name, slots, {});
      INFO(bytes.status().message());
      CHECK(bytes);
      // A family is whichever of its levels may run.
      const std::string id(r.id());
      if (const auto dot = id.rfind('.'); dot != id.find('.'))
        CHECK(resolve_slots(op.name, slots, {.backend = id.substr(0, dot)}).id() == id);
    });
  }
}

TEST_CASE("a level that the cap withholds is said to be withheld, by resolve, list and a forced call") {
  Small s;
  const bool has_avx2 = own_level() >= RLK_CPU_AVX2;
  const Cap cap("baseline");
  const char* why = has_avx2 ? "needs AVX2, which RLK_CPU withholds" : "needs AVX2 with FMA and F16C";
  const Status forced = lm_head({.hidden = s.h, .weight = s.w, .out = s.y}, {.backend = "native.avx2"});
  CHECK(forced.code() == RLK_NO_IMPLEMENTATION);
  CHECK_MESSAGE(has(forced.message(), why), forced.message());
  const Result<std::string> list = list_json("impls");
  REQUIRE(list);
  CHECK_MESSAGE(has(*list, "\"usable\": \"no: " + std::string(why) + "\""), *list);
  CHECK(resolve(LmHead{.hidden = s.h, .weight = s.w}).id() == "native.scalar");
  const Status backward = lm_head({.hidden = s.h, .weight = s.w, .out = s.y}, {.needs_backward = true});
  CHECK_MESSAGE(backward, backward.message());
}

TEST_CASE("code for a processor that does not exist is never entered, whoever asks") {
  REQUIRE(rlk_register_backend(&kFutureBackend, "a test") == RLK_OK);
  Small s;
  const auto never = [](std::string_view text) {
    CHECK_MESSAGE(has(text, "needs architecture 9000"), text);
    CHECK(entered == 0);
  };
  const Options forced{.backend = "future"};
  never(lm_head({.hidden = s.h, .weight = s.w, .out = s.y}, forced).message());
  never(resolve(LmHead{.hidden = s.h, .weight = s.w}, forced).status().message());
  never(workspace(LmHead{.hidden = s.h, .weight = s.w}, forced).status().message());
  CHECK(resolve(LmHead{.hidden = s.h, .weight = s.w}).id() != "future.code");
  CHECK(workspace(LmHead{.hidden = s.h, .weight = s.w}));
  never(*list_json("impls"));

  const harness::Report r = harness::verify({.op = "lm_head", .implementation = "future.code", .budget = 20});
  CHECK(r.entries.empty());
  CHECK(std::any_of(r.cannot_run.begin(), r.cannot_run.end(),
                    [](const std::string& line) { return has(line, "needs architecture 9000"); }));
  for_calls([&](const rlk_op_schema& op, const registry::Case& c, const rlk_slot*) {
    if (std::string_view(op.name) != "lm_head") return;
    const Result<harness::Problem> p = harness::materialise(*registry::find("lm_head"), c, 1);
    harness::Subject subject;
    subject.op = &op, subject.implementation = &kFutureCode;
    never(harness::execute_forced(*p, subject).text);
  });
}

TEST_CASE("lesser code and what calls get by name alone are tried less beside others, and in full alone") {
  for (const Level& level : kLevels) {
    if (level.level > own_level()) continue;
    const Cap cap(level.word);
    harness::Plan plan{.op = "kda_fwd", .implementation = "native"};
    int best = 0;
    for (const harness::Target& t : harness::choose(plan).targets) {
      const int32_t needs = t.subject.implementation->min_arch;
      const bool best_code =
          needs >= std::min<int32_t>(level.level, RLK_CPU_AVX512) || level.level == RLK_CPU_BASELINE;
      CHECK(t.lesser == (t.entry.arithmetic != "fma32/kda" || !best_code));
      CHECK(harness::plan_for(plan, t).passes == (t.lesser ? harness::Plan::kNormal : 0));
      for (const harness::Plan& named : {harness::Plan{.passes = 1}, harness::Plan{.case_name = "one token"},
                                         harness::Plan{.transform = "rows 0..1"}, harness::Plan{.budget = 1}})
        CHECK(harness::plan_for(named, t).passes == named.passes);
      plan.implementation = t.entry.implementation;
      for (const harness::Target& alone : harness::choose(plan).targets) CHECK(!alone.lesser);
      plan.implementation = "native";
      best += !t.lesser;
    }
    CHECK(best == 3);  // of three dtypes
  }
}
