// Random calls of every op against the op's reference and against each other.
//
// A case is a function of (seed, number): op, shapes, strides, dtypes, attributes, which optional arguments
// are there; half are valid, half have something broken. Every tensor lies in pages of its own between
// unmapped ones, what is only read is read-only, results are NaN before. Held against every case:
//   - what is asked is answered as what is run, and a question about imaginary tensors reads nothing;
//   - a refusal has a text that names the op, and nothing was written;
//   - every implementation that accepts the call is within its bound of the reference, in fp64;
//   - implementations of one arithmetic give the same bits, also for inputs of any bits;
//   - no byte outside the elements changes.
// The number of cases is fixed, so a verdict never depends on the machine's speed:
//   FUZZ_CASES=100000 FUZZ_SEED=7 build/release/bin/differential_test
//   FUZZ_FIRST=421 FUZZ_CASES=1 ...        case 421 again; a failure prints this line
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "allowance.hpp"
#include "judge.hpp"
#include "registry/reference.hpp"
#include "rlk/resolve.hpp"
#include "src/host.hpp"
#include "src/registry.hpp"

#if defined(__SANITIZE_ADDRESS__)
#  include <sanitizer/common_interface_defs.h>
#endif

using namespace differential;
using rlk::registry::Op;

namespace {

#if defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
constexpr int64_t kCases = 600;
#else
constexpr int64_t kCases = 4500;
#endif

int64_t number_from(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoll(text, nullptr, 10) : otherwise;
}

// ---- what a crash says

char last_words[4096];

void say_last_words() {
  [[maybe_unused]] const auto written =
      write(STDERR_FILENO, last_words, std::char_traits<char>::length(last_words));
}
void on_signal(int signal) {
  say_last_words();
  ::signal(signal, SIG_DFL);
  raise(signal);
}
constexpr unsigned kHang = 300;  // seconds that no case comes near

void watch() {
  for (const int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM}) signal(s, on_signal);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(say_last_words);
#endif
}

// ---- one case

struct Case {
  Call call;
  std::vector<Array> inputs;  // by argument; empty shape arrays where absent
  std::vector<std::optional<Operand>> operands;
  std::vector<rlk_slot> slots;
  bool any_bits = false;
};

Array drawn(const Argument& a, Random& r, bool any_bits) {
  Array out(a.shape, a.dtype);
  const bool floating =
      a.dtype == DType::f16 || a.dtype == DType::bf16 || a.dtype == DType::f32 || a.dtype == DType::f8_e4m3;
  for (int64_t i = 0, n = out.count(); i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (any_bits && floating) {
      const uint64_t bits = r.bits();
      const auto size = static_cast<std::size_t>(rlk::size_of(a.dtype));
      std::memcpy(out.bytes.data() + at * size, &bits, size);
      continue;
    }
    const Values& v = a.values;
    if (v.kind == Values::list && v.numbers.empty()) break;  // a broken call's shape has more elements
    if (v.kind == Values::list && a.dtype == DType::i64) {
      std::memcpy(out.bytes.data() + at * 8, &v.numbers[at % v.numbers.size()], 8);
      continue;
    }
    const double x = v.kind == Values::normal    ? v.a + v.b * r.normal()
                     : v.kind == Values::uniform ? v.a + (v.b - v.a) * r.uniform()
                     : v.kind == Values::integers
                         ? std::floor(v.a + (v.b - v.a) * r.uniform())
                         : static_cast<double>(static_cast<int32_t>(v.numbers[at % v.numbers.size()]));
    rlk::registry::store(a.dtype, out.bytes.data(), i, x);
  }
  return out;
}

// Shapes of the results as the op infers them, or, for a broken call, as of the valid one it was made from.
void infer_results(Call& call, const Call* valid) {
  std::vector<std::optional<Operand>> operands(call.arguments.size());
  std::vector<rlk_slot> slots(call.arguments.size());
  Random layout(1);
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const rlk_argument& a = call.schema().arguments[i];
    if (a.role == RLK_WRITE || !call.arguments[i].present) continue;
    operands[i].emplace(a, call.arguments[i].shape, call.arguments[i].dtype, layout);
    slots[i].tensor = operands[i]->view();
  }
  slots.insert(slots.end(), call.attributes.begin(), call.attributes.end());
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const rlk_argument& a = call.schema().arguments[i];
    if (a.role != RLK_WRITE || !call.arguments[i].present) continue;
    const auto inferred = rlk::infer_slots(call.schema().name, slots.data(), a.name);
    Shape shape = inferred ? inferred->shape : valid ? valid->arguments[i].shape : Shape{};
    int64_t n = 1;
    for (const int64_t d : shape)
      if (d < 0 || __builtin_mul_overflow(n, std::max<int64_t>(d, 1), &n) || n > 1 << 20) shape = {1};
    call.arguments[i].shape = shape;
  }
}

// The call with tensors and values.
Case filled(Call call, bool any_bits, Random& r) {
  Case c{std::move(call), {}, {}, {}, any_bits};
  const std::size_t n = c.call.arguments.size();
  c.inputs.resize(n), c.operands.resize(n), c.slots.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    const Argument& a = c.call.arguments[i];
    if (!a.present) continue;
    const rlk_argument& schema = c.call.schema().arguments[i];
    c.operands[i].emplace(schema, a.shape, a.dtype, r);
    if (schema.role != RLK_WRITE) {
      c.inputs[i] = drawn(a, r, c.any_bits);
      c.operands[i]->put(c.inputs[i]);
      c.inputs[i] = c.operands[i]->get();  // where rows repeat, one of them was kept
    }
    c.slots[i].tensor = c.operands[i]->view();
  }
  c.slots.insert(c.slots.end(), c.call.attributes.begin(), c.call.attributes.end());
  return c;
}

Case make(const Op& op, Random& r) {
  Call call = valid_call(op, r);
  infer_results(call, nullptr);
  if (r.chance(50)) {
    Call broken = call;
    corrupt(broken, r);
    infer_results(broken, &call);
    call = std::move(broken);
  }
  const bool any_bits = r.chance(12);
  return filled(std::move(call), any_bits, r);
}

// "element 12 of 99: 0.5 (0x3f000000), here nan (0x7fffffff)"
std::string first_difference(const Array& expected, const Array& got) {
  const std::size_t size = expected.bytes.size() / static_cast<std::size_t>(expected.count());
  const auto bits = [&](const Array& a, int64_t i) {
    uint64_t word = 0;
    std::memcpy(&word, a.bytes.data() + static_cast<std::size_t>(i) * size, size);
    return word;
  };
  for (int64_t i = 0; i < expected.count(); ++i)
    if (bits(expected, i) != bits(got, i))
      return fmt::format("element {} of {}: {} (0x{:x}), here {} (0x{:x})", i, expected.count(), expected[i],
                         bits(expected, i), got[i], bits(got, i));
  return "nowhere";
}

// What only the data show, so that a question about shapes cannot.
bool depends_on_data(const Case& c) {
  static const std::set<std::string_view> kNames = {
      "positions", "starts", "cu_seqlens",  "axis_map", "factors", "group_offsets", "cu_q",
      "cu_k",      "kv_len", "block_table", "segments", "rows",    "prefix_of"};
  for (std::size_t i = 0; i < c.call.arguments.size(); ++i)
    if (c.call.arguments[i].present && kNames.contains(c.call.schema().arguments[i].name)) return true;
  return false;
}

// A question may leave results out.
bool lacks_a_result(const Case& c) {
  for (std::size_t i = 0; i < c.call.arguments.size(); ++i) {
    const rlk_argument& a = c.call.schema().arguments[i];
    if (a.role == RLK_WRITE && !(a.flags & RLK_OPTIONAL) && !c.call.arguments[i].present) return true;
  }
  return false;
}

struct Run {
  rlk::Status status;
  std::vector<Array> results;
  std::string broken;
};

Run run(Case& c, std::string_view implementation, int32_t threads) {
  const rlk_op_schema& s = c.call.schema();
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    if (!c.operands[i] || s.arguments[i].role == RLK_READ) continue;
    if (s.arguments[i].role == RLK_WRITE)
      c.operands[i]->poison();
    else
      c.operands[i]->put(c.inputs[i]);
  }
  Run out{rlk::run_slots(s.name, c.slots.data(), {.backend = implementation, .threads = threads}),
          std::vector<Array>(s.num_arguments),
          {}};
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    if (!c.operands[i] || s.arguments[i].role == RLK_READ) continue;
    out.results[i] = c.operands[i]->get();
    if (c.operands[i]->strayed())
      out.broken = fmt::format("bytes beside {} were written", s.arguments[i].name);
    if (out.status) continue;
    const auto& bytes = out.results[i].bytes;
    const bool as_before =
        s.arguments[i].role == RLK_WRITE
            ? std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0xff}; })
            : bytes == c.inputs[i].bytes;
    if (!as_before) out.broken = fmt::format("refused, and {} was written", s.arguments[i].name);
  }
  return out;
}

std::string check_refusal(const rlk::Status& status, const char* op) {
  static const std::set<rlk_code> kCodes = {RLK_INVALID_ARGUMENT, RLK_UNSUPPORTED, RLK_NO_IMPLEMENTATION,
                                            RLK_OVERLAP};
  if (!kCodes.contains(status.code()))
    return fmt::format("code {}: {}", rlk_code_name(status.code()), status.message());
  if (!status.message().starts_with(op))
    return fmt::format("a refusal that does not name its op: {}", status.message());
  return {};
}

// Whether an open chunk's rows are read from a cache that no call left. Such rows may hold anything where an inverse has
// zeros, which some instruction sets read and others do not: bits and distances are promised for what a call left.
bool reads_strange_rows(const Call& c) {
  if (std::string_view(c.schema().name) != "kda_step") return false;
  const int64_t chunk = c.attribute("chunk_size");
  return std::ranges::any_of(c.argument("rows").values.numbers,
                             [&](int64_t n) { return n > 0 && n < chunk; });
}

// Whether products are rounded to 16 bits as logits: such a one may fall on either side of where the truth is, which is a step
// that no bound of a gradient knows. No valid call that is made here asks for it, a broken one may.
bool rounds_products(const Call& c) {
  return std::string_view(c.schema().name).starts_with("linear_logp") && c.attribute("logits_round") != 0;
}

// A split's m, l and O from another m than the maximum, which it may be 8 below: as they are from the maximum.
Array counted_from_maximum(Array parts, const Array& truth) {
  const int64_t width = parts.shape.back();
  for (int64_t at = 0; at < parts.count(); at += width) {
    const double m = parts[at], most = truth[at];
    if (!(m <= most && m >= most - 8.001) || !std::isfinite(most)) continue;
    auto* numbers = reinterpret_cast<float*>(parts.bytes.data()) + at;
    numbers[0] = static_cast<float>(most);
    for (int64_t i = 1; i < width; ++i)
      numbers[i] = static_cast<float>(double{numbers[i]} * std::exp2(m - most));
  }
  return parts;
}

// The first thing that is wrong about the case, or nothing.
std::string check_case(Case& c, int32_t threads) {
  const rlk_op_schema& s = c.call.schema();
  const rlk::Resolution asked = rlk::resolve_slots(s.name, c.slots.data(), {});
  const Run first = run(c, "", threads);
  if (!first.broken.empty()) return first.broken;
  if (!first.status) {
    if (asked && !(first.status.code() == RLK_INVALID_ARGUMENT && (depends_on_data(c) || lacks_a_result(c))))
      return fmt::format("asked: accepted, run: {}", first.status.message());
    if (c.call.broken.empty() && !c.any_bits && first.status.code() == RLK_INVALID_ARGUMENT)
      return fmt::format("a valid call is refused: {}", first.status.message());
    return check_refusal(first.status, s.name);
  }
  if (!asked) return fmt::format("run: accepted, asked: {}", asked.status().message());
  const Truth truth = reference(c.call, c.inputs);
  if (truth.code != RLK_OK) return "the reference refuses what an implementation accepts";
  std::map<std::string_view, std::pair<std::string_view, Run>> first_of;  // by arithmetic
  for (const rlk::Candidate& candidate : asked.candidates()) {
    if (!candidate.implementation || candidate.verdict.code != RLK_OK) continue;
    const Run result = run(c, candidate.id, threads);
    const auto where = [&](uint32_t i) { return fmt::format("{}, {}: ", candidate.id, s.arguments[i].name); };
    if (!result.status)
      return fmt::format("{} accepted and refused: {}", candidate.id, result.status.message());
    if (!result.broken.empty()) return fmt::format("{}: {}", candidate.id, result.broken);
    const std::string_view arithmetic = candidate.implementation->arithmetic;
    const auto [known, is_first] = first_of.try_emplace(arithmetic, candidate.id, result);
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      if (s.arguments[i].role == RLK_READ || !c.call.arguments[i].present) continue;
      if (reads_strange_rows(c.call)) continue;
      // Inside a chunk of KDA a product with zero stands for what is not there: with an infinite factor it is NaN, and
      // how much of a chunk shares it is the vector's width; nor are NaNs of states canonical. Its id promises bits for finite
      // operands, and for any to the gates.
      if (c.any_bits && arithmetic.starts_with("fma32/kda") &&
          !std::string_view(s.name).starts_with("kda_gate"))
        continue;
      if (!is_first && known->second.second.results[i].bytes != result.results[i].bytes)
        return where(i) + fmt::format("other bits than {}, which has the same arithmetic: {}",
                                      known->second.first,
                                      first_difference(known->second.second.results[i], result.results[i]));
      if (c.any_bits || rounds_products(c.call)) continue;
      // Where the maximum is held, sums are judged as counted from the truth's.
      const bool held =
          std::string_view(s.name) == "attention_part" && arithmetic.find("/h8/") != arithmetic.npos;
      const Array got = held ? counted_from_maximum(result.results[i], truth.results[i]) : result.results[i];
      const auto [bound, scale] = allowance(c.call, c.inputs, i, truth.results[i], got.dtype,
                                            held ? "sm90/t25k16/attn128" : arithmetic);
      const std::string far = judge(got, truth.results[i], scale, bound);
      if (!far.empty()) return where(i) + far;
    }
  }
  return {};
}

// The same call with sizes and data that nobody has: it is answered, whatever the answer.
void ask_about_imaginary(const Call& call, Random& r) {
  std::vector<rlk::Tensor> views(call.arguments.size());
  std::vector<rlk_slot> slots(call.arguments.size());
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const Argument& a = call.arguments[i];
    if (!a.present) continue;
    Shape shape = a.shape;
    for (int64_t& size : shape)
      if (r.chance(15)) size = extreme(r);
    views[i] = rlk::Tensor(reinterpret_cast<void*>(uintptr_t{64} << 32), std::span(shape), a.dtype);
    if (r.chance(90) || call.schema().arguments[i].role == RLK_READ) slots[i].tensor = &views[i].dl();
  }
  slots.insert(slots.end(), call.attributes.begin(), call.attributes.end());
  (void)rlk::resolve_slots(call.schema().name, slots.data(), {});
  for (uint32_t i = 0; i < call.schema().num_arguments; ++i)
    if (call.schema().arguments[i].role == RLK_WRITE)
      (void)rlk::infer_slots(call.schema().name, slots.data(), call.schema().arguments[i].name);
}

}  // namespace

TEST_CASE("differential: random calls, valid and broken, do what the reference does or are refused") {
  watch();
  const auto seed = static_cast<uint64_t>(number_from("FUZZ_SEED", 20261122));
  const int64_t first = number_from("FUZZ_FIRST", 0), cases = number_from("FUZZ_CASES", kCases);
  std::vector<const Op*> ops;
  for (const Op& op : rlk::registry::ops()) {
    if (known(op))
      ops.push_back(&op);
    else
      MESSAGE(op.schema->name << " has no generator in calls.cpp: not covered");
  }
  REQUIRE(ops.size() >= 15);
  std::map<std::string_view, int64_t> accepted, refused;
  int failures = 0;
  for (int64_t i = first; i < first + cases && failures < 20; ++i) {
    Random r(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(i));
    const Op& op = *ops[static_cast<std::size_t>(i) % ops.size()];
    const std::string again = fmt::format("FUZZ_SEED={} FUZZ_FIRST={} FUZZ_CASES=1", seed, i);
    std::snprintf(last_words, sizeof last_words, "\n%s: died before its call was made\n", again.c_str());
    alarm(kHang);
    Case c = make(op, r);
    std::snprintf(last_words, sizeof last_words, "\n%s: died in %s\n", again.c_str(), c.call.text().c_str());
    const std::string wrong = check_case(c, static_cast<int32_t>(r.between(1, 3)));
    ask_about_imaginary(c.call, r);
    if (!wrong.empty()) {
      ++failures;
      FAIL_CHECK(again << ": " << wrong << "\n  " << c.call.text());
    }
    const bool ran = static_cast<bool>(rlk::resolve_slots(op.schema->name, c.slots.data(), {}));
    ++(ran ? accepted : refused)[op.schema->name];
  }
  alarm(0);
  std::snprintf(last_words, sizeof last_words, "\ndied after the last case\n");
  // A generator that makes nothing that is served, or nothing that is refused, tests nothing; of few cases this says little.
  if (cases / static_cast<int64_t>(ops.size()) >= 40)
    for (const Op* op : ops) {
      INFO(op->schema->name);
      CHECK(accepted[op->schema->name] * 3 >= cases / static_cast<int64_t>(ops.size()));
      CHECK(refused[op->schema->name] * 10 >= cases / static_cast<int64_t>(ops.size()));
    }
}

TEST_CASE(
    "differential: results that are little beside their terms are as far from the reference as these allow") {
  watch();
  uint64_t seed = 1;
  for (Call& call : hard_calls()) {
    infer_results(call, nullptr);
    for (int round = 0; round < 8; ++round) {
      Random r(seed++);
      Case c = filled(call, false, r);
      std::snprintf(last_words, sizeof last_words, "\ndied in %s\n", c.call.text().c_str());
      REQUIRE_MESSAGE(rlk::resolve_slots(call.schema().name, c.slots.data(), {}), c.call.text());
      const std::string wrong = check_case(c, 2);
      CHECK_MESSAGE(wrong.empty(), "round " << round << ": " << wrong << "\n  " << c.call.text());
    }
  }
}
