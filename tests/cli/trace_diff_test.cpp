// Two traces held against each other: every verdict, produced by what it is the verdict of.
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "child_process.hpp"
#include "rlk/binding.h"
#include "rlk/rlk.hpp"
#include "rlk/trace.hpp"

using Json = nlohmann::json;
using rlk::test::Ran;

namespace {

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rlk_traces_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()));
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(file(name), std::ios::binary) << text;
    return file(name);
  }

 private:
  std::string path_;
};

Ran diff(const std::string& a, const std::string& b, std::vector<std::string> more = {}) {
  std::vector<std::string> words{RLK_DISPATCH, "trace-diff", a, b};
  words.insert(words.end(), more.begin(), more.end());
  return rlk::test::run(words);
}

Json difference(const std::string& a, const std::string& b) {
  const Ran r = diff(a, b, {"--json"});
  INFO(r.err);
  const Json parsed = Json::parse(r.out, nullptr, false);
  REQUIRE_FALSE(parsed.is_discarded());
  Json found = parsed;
  found["exit"] = r.exit;
  return found;
}

// A few layers of one small model, as a trainer (all rows at once) and a sampler (some rows a step) run them.
struct Model {
  static constexpr int64_t kWidth = 16, kVocab = 24;
  std::vector<float> weight = draw(kWidth * kWidth, 1), norm = draw(kWidth, 2),
                     head = draw(kVocab * kWidth, 3);
  std::string linear_backend{};
  double temperature = 1;
  bool other_input = false, foreign = false;

  static std::vector<float> draw(int64_t n, unsigned seed) {
    std::mt19937 engine(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> out(static_cast<std::size_t>(n));
    for (float& v : out) v = uniform(engine);
    return out;
  }

  // Rows [begin, end) of sequence 5.
  void step(int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    const auto rows = static_cast<std::size_t>(n);
    std::vector<int64_t> sequences(rows, 5), positions(rows);
    for (std::size_t i = 0; i < rows; ++i) positions[i] = begin + static_cast<int64_t>(i);
    rlk::check(rlk::trace_rows(sequences, positions));
    std::vector<float> all = draw(20 * kWidth, 4), y(rows * kWidth, NAN), z = y, logp(rows, NAN);
    if (other_input) all[7 * kWidth] += 1;
    std::vector<int32_t> target(rows);
    for (std::size_t i = 0; i < rows; ++i) target[i] = static_cast<int32_t>(positions[i] % kVocab);
    using rlk::DType;
    const rlk::Tensor tx(all.data() + begin * kWidth, {n, kWidth}, DType::f32),
        tw(weight.data(), {kWidth, kWidth}, DType::f32), tn(norm.data(), {kWidth}, DType::f32),
        th(head.data(), {kVocab, kWidth}, DType::f32), ty(y.data(), {n, kWidth}, DType::f32),
        tz(z.data(), {n, kWidth}, DType::f32), tt(target.data(), {n}, DType::i32),
        tl(logp.data(), {n}, DType::f32);
    {
      const rlk::TraceTag tag("layer 0 linear");
      rlk::check(rlk::linear({.x = tx, .weight = tw, .y = ty}, {.backend = linear_backend}));
    }
    {
      const rlk::TraceTag tag("layer 0 norm");
      rlk::check(rlk::rms_norm({.x = ty, .weight = tn, .y = tz}));
    }
    if (foreign) {
      CHECK(rlk_trace_tensor("score", "logp", &tl.dl(), nullptr) == RLK_OK);
    } else {
      const rlk::TraceTag tag("score");
      rlk::check(rlk::linear_logp(
          {.hidden = tz, .weight = th, .target = tt, .logp = tl, .temperature = temperature}));
    }
    rlk::check(rlk::trace_rows({}, {}));
  }

  std::string trainer(const std::string& file) {
    rlk::check(rlk::trace(file));
    step(0, 20);
    rlk::check(rlk::end_trace());
    return file;
  }
  std::string sampler(const std::string& file) {
    rlk::check(rlk::trace(file));
    step(0, 9);
    for (int64_t i = 9; i < 20; ++i) step(i, i + 1);
    rlk::check(rlk::end_trace());
    return file;
  }
};

// A backend with a variant of linear for few rows that declares the arithmetic of the one for many, and has other
// bits in one row.
int32_t run_broken(const rlk_slot* slots, const rlk_call* call) {
  const rlk_host* host = call->host;
  const DLTensor *x = slots[0].tensor, *w = slots[1].tensor;
  const DLTensor* y = nullptr;
  const rlk_op_schema* schema = rlk_op_schema_at(rlk_op_index("linear"));
  for (uint32_t i = 0; i < schema->num_arguments; ++i)
    if (std::string(schema->arguments[i].name) == "y") y = slots[i].tensor;
  const rlk::BackendScope honest("linear=native");
  if (const rlk::Status s = rlk::linear({.x = *x, .weight = *w, .y = *y}); !s)
    return host->fail(RLK_BACKEND_ERROR, std::string(s.message()).c_str());
  float* out = static_cast<float*>(y->data);
  if (x->shape[0] == 1) out[3] = std::nextafter(out[3], 2.0F);
  return RLK_OK;
}

void register_broken() {
  static const std::string arithmetic = [] {
    float one[16] = {};
    const rlk::Tensor t(one, {4, 4}, rlk::DType::f32);
    float result[16];
    const rlk::Tensor y(result, {4, 4}, rlk::DType::f32);
    return std::string(
        rlk::resolve(rlk::Linear{.x = t, .weight = t, .y = y}, {.backend = "native"}).arithmetic());
  }();
  static const rlk_implementation broken = {.struct_size = sizeof broken,
                                            .priority = 1,
                                            .op = "linear",
                                            .id = "shaky.few",
                                            .doc = "a variant for few rows",
                                            .arithmetic = arithmetic.c_str(),
                                            .dtypes = RLK_F32,
                                            .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT,
                                            .device_type = kDLCPU,
                                            .run = run_broken};
  static const rlk_implementation* const list[] = {&broken};
  static const rlk_backend backend = {.struct_size = sizeof backend,
                                      .abi_major = RLK_ABI_MAJOR,
                                      .abi_minor = RLK_ABI_MINOR,
                                      .name = "shaky",
                                      .version = "3.1",
                                      .doc = "a test's",
                                      .implementations = list,
                                      .num_implementations = 1,
                                      .devices = [](rlk_device* out, int32_t, char*, size_t) {
                                        out[0] = {kDLCPU, 0, 0, "cpu"};
                                        return 1;
                                      }};
  static const rlk_code once = rlk_register_backend(&backend, "test");
  REQUIRE(once == RLK_OK);
}

}  // namespace

TEST_CASE("a packed step and many decode steps of one model are the same, row by row") {
  const Folder folder;
  const std::string a = Model().trainer(folder.file("a")), b = Model().sampler(folder.file("b"));
  const Json found = difference(a, b);
  CHECK(found.at("exit") == 0);
  CHECK(found.at("verdict") == "same");
  CHECK(found.at("rows") == 60);
  CHECK(found.at("differ") == 0);
  CHECK(found.at("alone") == 0);
  CHECK(found.at("first").is_null());
  const Json other_way = difference(b, a);
  CHECK(other_way.at("rows") == 60);
  CHECK(other_way.at("exit") == 0);
  CHECK_SAYS(diff(a, b).out, "same: 60 rows of 3 results were compared, 0 differ, 0 are in ");
}

TEST_CASE("equal inputs, equal arithmetic and other results: a broken promise, by name, with a command") {
  register_broken();
  const Folder folder;
  Model shaky;
  shaky.linear_backend = "shaky";
  const std::string a = Model().trainer(folder.file("a")), b = shaky.sampler(folder.file("b"));
  const Json found = difference(a, b);
  CHECK(found.at("exit") == 1);
  CHECK(found.at("verdict") == "promise broken");
  const Json& first = found.at("first");
  CHECK(first.at("tag") == "layer 0 linear");
  CHECK(first.at("result") == "y");
  CHECK(first.at("sequence") == 5);
  CHECK(first.at("position") == 9);  // the first row that was computed alone
  CHECK(first.at("records") == Json({1, 4}));
  CHECK(first.at("implementations")[1] == "shaky.few");
  CHECK(first.at("versions")[1] == "3.1");
  CHECK(first.at("facts").empty());
  const Ran text = diff(a, b);
  CHECK(text.exit == 1);
  CHECK_SAYS(text.out, "promise broken: layer 0 linear, linear, y of sequence 5, position 9 (record 1 of ");
  CHECK_SAYS(text.out, "show it again: rlk-dispatch --verify linear --impl shaky.few\n");
  CHECK_SAYS(text.out, "layer 0 linear, y: 11 of 20 rows differ\n");
}

TEST_CASE("another backend with another id is different arithmetic, with both ids") {
  const Folder folder;
  Model golden;
  golden.linear_backend = "native.golden";
  const std::string a = Model().trainer(folder.file("a")), b = golden.sampler(folder.file("b"));
  const Json found = difference(a, b);
  CHECK(found.at("exit") == 10);
  CHECK(found.at("verdict") == "different arithmetic");
  CHECK(found.at("first").at("tag") == "layer 0 linear");
  CHECK(found.at("first").at("arithmetic")[1] == "fma64");
  CHECK(found.at("notes")[0].get<std::string>().find("linear: ") == 0);
  CHECK_SAYS(diff(a, b).out, "to be expected: some 1e-6 of the row's largest value");
}

TEST_CASE("another temperature is different semantics, with both values") {
  const Folder folder;
  Model warm;
  warm.temperature = 0.75;
  const Json found = difference(Model().trainer(folder.file("a")), warm.sampler(folder.file("b")));
  CHECK(found.at("exit") == 11);
  CHECK(found.at("verdict") == "different semantics");
  CHECK(found.at("first").at("tag") == "score");
  const std::string fact = found.at("first").at("facts")[0];
  CHECK_SAYS(fact, "temperature is 1 in ");
  CHECK_SAYS(fact, ", 0.75 in ");
}

TEST_CASE("re-quantised weights are named, at the first op that they change") {
  const Folder folder;
  Model quantised;
  for (float& v : quantised.norm) v = std::round(v * 128) / 128;
  const Json found = difference(Model().trainer(folder.file("a")), quantised.sampler(folder.file("b")));
  CHECK(found.at("exit") == 12);
  CHECK(found.at("verdict") == "stale or re-quantised weights");
  CHECK(found.at("first").at("tag") == "layer 0 norm");
  CHECK_SAYS(found.at("first").at("facts")[0].get<std::string>(), "weight is fp32 [16] ");
}

TEST_CASE("inputs that differ where all before is equal came from upstream") {
  const Folder folder;
  Model other;
  other.other_input = true;
  const std::string a = Model().trainer(folder.file("a")), b = other.sampler(folder.file("b"));
  const Json found = difference(a, b);
  CHECK(found.at("exit") == 13);
  CHECK(found.at("verdict") == "upstream");
  CHECK(found.at("first").at("position") == 7);
  CHECK_SAYS(found.at("first").at("facts")[0].get<std::string>(), "x has other bits in ");
  CHECK(found.at("where")[0].at("differ") == 1);
}

TEST_CASE("what a forward leaves to its gradient may be computed again, and is no difference") {
  const Folder folder;
  using rlk::DType;
  std::vector<float> z = Model::draw(3 * 24, 7), d_logp{1, -2, 0.5F}, wrong = d_logp;
  wrong[1] = 2;
  std::vector<int32_t> ids{4, 0, 23};
  const rlk::Tensor tz(z.data(), {3, 24}, DType::f32), tt(ids.data(), {3}, DType::i32);
  const auto step = [&](const std::string& name, bool keeps, std::vector<float>& gradient) {
    std::vector<float> logp(3, NAN), stats(3 * 4, NAN), d_logits(3 * 24, NAN);
    const rlk::Tensor tl(logp.data(), {3}, DType::f32), ts(stats.data(), {3, 4}, DType::f32),
        tg(gradient.data(), {3}, DType::f32), td(d_logits.data(), {3, 24}, DType::f32);
    rlk::Logp forward{.logits = tz, .target = tt, .logp = tl};
    rlk::LogpBwd backward{.logits = tz, .target = tt, .d_logp = tg, .d_logits = td};
    if (keeps) forward.stats = ts, backward.stats = ts;
    rlk::check(rlk::trace(folder.file(name)));
    rlk::check(rlk::logp(forward));
    rlk::check(rlk::logp_bwd(backward));
    rlk::check(rlk::end_trace());
    return folder.file(name);
  };
  const std::string keeps = step("keeps", true, d_logp), again = step("again", false, d_logp);
  for (const auto& [a, b] : {std::pair(keeps, again), std::pair(again, keeps)}) {
    const Json found = difference(a, b);
    CHECK(found.at("exit") == 0);
    CHECK(found.at("verdict") == "same");
    CHECK(found.at("notes").empty());
  }
  const Json found = difference(keeps, step("other", false, wrong));
  CHECK(found.at("verdict") == "upstream");
  CHECK_SAYS(found.at("first").at("facts")[0].get<std::string>(), "d_logp has other bits in ");
  CHECK_SAYS(found.at("first").at("facts")[1].get<std::string>(), "stats is given in ");
}

TEST_CASE("a foreign kernel's result is joined by its tag, and nothing is promised of it") {
  const Folder folder;
  Model foreign;
  foreign.foreign = true;
  const Json found = difference(Model().trainer(folder.file("a")), foreign.sampler(folder.file("b")));
  CHECK(found.at("exit") == 10);
  CHECK(found.at("first").at("tag") == "score");
  CHECK_SAYS(found.at("first").at("facts")[0].get<std::string>(), "a foreign kernel in ");
}

TEST_CASE("traces with no row in common say so, and what is in one alone is counted") {
  const Folder folder;
  Model model;
  const std::string a = model.trainer(folder.file("a"));
  rlk::check(rlk::trace(folder.file("b")));
  rlk::check(rlk::end_trace());
  const Json found = difference(a, folder.file("b"));
  CHECK(found.at("exit") == 14);
  CHECK(found.at("verdict") == "nothing in common");
  CHECK(found.at("alone") == 60);
}

TEST_CASE("what was found goes into a certificate too") {
  const Folder folder;
  const std::string a = Model().trainer(folder.file("a"));
  CHECK(diff(a, a, {"--certificate", folder.file("c")}).exit == 0);
  CHECK(Json::parse(rlk::test::read_and_remove(folder.file("c"))).at("verdict") == "same");
}

TEST_CASE("a trace that was cut off between two lines is read, and that is said") {
  const Folder folder;
  const std::string a = Model().trainer(folder.file("a"));
  std::string text = rlk::test::read_and_remove(a);
  text.erase(text.rfind("{\"end\""));
  const std::string cut = folder.write("cut", text);
  const Ran r = diff(cut, cut);
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "cut was not ended: calls may be missing");
}

TEST_CASE("files that are no traces are refused, with the line and what is wrong in it") {
  const Folder folder;
  const std::string head = R"({"rlk_trace": 1, "version": "0", "build": "b", "cpu": "c", "every": 1})"
                           "\n";
  const std::string record =
      R"({"n": 1, "op": "o", "implementation": "i", "version": "v", "arithmetic": "a", "attributes": {}, "tag": "t", "keys": 0, "tensors": [{"name": "y", "role": "output", "dtype": "fp32", "shape": [1], "digest": "d", "rows": "0123456789abcdef"}]})"
      "\n";
  const auto with = [&](std::string_view from, std::string_view to) {
    std::string changed = record;
    const auto at = changed.find(from);
    REQUIRE(at != changed.npos);
    return head + changed.replace(at, from.size(), to);
  };
  CHECK(diff(folder.write("good", head + record), folder.file("good")).exit == 0);
  const std::pair<std::string, const char*> wrong[] = {
      {"\n", "line 1: it is no JSON object"},
      {"[1]\n", "line 1: it is no JSON object"},
      {"{}\n", "line 1: it does not begin a trace of version 1"},
      {R"({"rlk_trace": 2})", "line 1: it does not begin a trace of version 1"},
      {head + head, "line 2: it is neither a record, nor keys, nor the end"},
      {head + R"({"end": 1})", "line 2: there are 0 records before it"},
      {head + "{\"end\": 0}\n{\"end\": 0}", "line 3: it follows the end of the trace"},
      {head + std::string(100, '[') + std::string(100, ']'), "line 2: it is nested too deeply"},
      {head + R"({"keys": 2, "rows": []})", "line 2: these keys are not number 1"},
      {head + R"({"keys": 1, "rows": [[1]]})", "line 2: a row's key is no pair of integers"},
      {head + R"({"keys": 1, "rows": [[1, 1e3]]})", "line 2: member 'rows' is no integer"},
      {head + R"({"keys": 18446744073709551615, "rows": []})", "line 2: member 'keys' is no integer"},
      {with("\"n\": 1", "\"n\": 2"), "line 2: this record is not number 1"},
      {with("\"keys\": 0", "\"keys\": 1"), "line 2: keys are number 1, there are 0"},
      {with("\"keys\": 0", "\"keys\": -1"), "line 2: member 'keys' is -1, it must be at least 0"},
      {with("\"op\": \"o\", ", ""), "line 2: member 'op' is missing"},
      {with("\"output\"", "\"result\""), "line 2: role 'result' is unknown"},
      {with("0123456789abcdef", "0123456789abcde"), "line 2: member 'rows' has 15 digits, 16 are a digest"},
      {with("0123456789abcdef", "0123456789ABCDEF"),
       "line 2: member 'rows' holds what is no hexadecimal digit"},
      {with("[1]", "[1, 1, 1, 1, 1, 1, 1, 1, 1]"), "line 2: a shape has more than 8 dimensions"},
      {with("[1]", "[-1]"), "line 2: member 'shape' is -1, it must be at least 0"},
      {with("\"d\"", "3"), "line 2: member 'digest' is no text"},
  };
  for (const auto& [text, words] : wrong) {
    const Ran r = diff(folder.write("wrong", text), folder.file("good"));
    INFO(text);
    CHECK(r.exit == 2);
    CHECK(r.out == "");
    CHECK_SAYS(r.err, words);
  }
  CHECK(diff(folder.file("none"), folder.file("good")).exit == 2);
  CHECK_SAYS(diff(folder.write("empty", ""), folder.file("good")).err, "empty is empty");
}
