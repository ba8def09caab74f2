// trace-diff: the first call at which two traces part, in the order in which the first one computed, and why. Rows are
// joined by tag, result, sequence and position, so that one packed step of a trainer meets many steps of a sampler.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "commands.hpp"
#include "library.hpp"
#include "rlk/binding.h"
#include "trace_file.hpp"

namespace rlk::cli {
namespace {

// ---- joining --------------------------------------------------------------------------------------------

struct Place {
  std::size_t record = 0, tensor = 0, row = 0;
  const TraceTensor& in(const Trace& trace) const { return trace.records[record].tensors[tensor]; }
};

// Where results are: by tag and result (without a tag by op and result), then by row, in the order in which they were
// computed. A row that is computed again is met again.
class Index {
 public:
  static constexpr int64_t kNoSequence = INT64_MIN;

  explicit Index(const Trace& trace) {
    for (std::size_t r = 0; r < trace.records.size(); ++r)
      each_row(trace, r, [&](const std::string& what, RowKey key, const Place& place) {
        rows_[what][key].push_back(place);
      });
  }

  // The next place with this row that was not given yet.
  const Place* next(const std::string& what, RowKey key) {
    const auto list = rows_.find(what);
    if (list == rows_.end()) return nullptr;
    const auto found = list->second.find(key);
    if (found == list->second.end()) return nullptr;
    std::size_t& given = given_[what][key];
    return given < found->second.size() ? &found->second[given++] : nullptr;
  }

  // Calls body(what, key, place) for every row of a record's results; a result without rows is one.
  template <class Body>
  static void each_row(const Trace& trace, std::size_t record, const Body& body) {
    const TraceRecord& r = trace.records[record];
    const std::vector<RowKey> keys = trace.keys_of(r);
    for (std::size_t i = 0; i < r.tensors.size(); ++i) {
      const TraceTensor& t = r.tensors[i];
      if (t.role != "output" || t.digest.empty()) continue;
      const std::string what = (r.tag.empty() ? "op " + r.op : "tag " + r.tag) + "\n" + t.name;
      if (!t.by_rows) body(what, RowKey{kNoSequence, -1}, Place{record, i, 0});
      for (std::size_t row = 0; row < t.rows.size(); ++row)
        body(what, keys.empty() ? RowKey{kNoSequence, static_cast<int64_t>(row)} : keys[row],
             Place{record, i, row});
    }
  }

 private:
  struct Hash {
    std::size_t operator()(const RowKey& k) const noexcept {
      return static_cast<std::size_t>(k.first) * 0x9e3779b97f4a7c15u ^ static_cast<std::size_t>(k.second);
    }
  };
  template <class Value>
  using ByRow = std::unordered_map<std::string, std::unordered_map<RowKey, Value, Hash>>;
  ByRow<std::vector<Place>> rows_;
  ByRow<std::size_t> given_;
};

// ---- causes ---------------------------------------------------------------------------------------------

struct Verdict {
  const char* name;
  Exit exit;
};
constexpr Verdict kSame{"same", kGood}, kBroken{"promise broken", kVerificationFailed},
    kArithmetic{"different arithmetic", kDifferentArithmetic},
    kSemantics{"different semantics", kDifferentSemantics},
    kWeights{"stale or re-quantised weights", kDifferentWeights}, kUpstream{"upstream", kUpstreamDiffers},
    kNothing{"nothing in common", kNothingInCommon};

// Inputs that say how to compute, not on what.
constexpr std::array kParameters{"temperature", "temperatures", "top_k", "top_p",
                                 "min_p",       "keep",         "seed",  "stream"};
// Those that ops of one purpose share, and what their absence means.
constexpr std::pair<const char*, const char*> kPresets[] = {
    {"temperature", "1"}, {"top_k", "0"}, {"top_p", "1"}, {"min_p", "0"}, {"softcap", "0"}};
bool is_parameter(const std::string& name) {
  return std::find(kParameters.begin(), kParameters.end(), name) != kParameters.end();
}

// Whether an op reads what another op left for it, whose gradient it is. Without that it computes the same again.
bool left_by_forward(const std::string& gradient, const std::string& name) {
  for (size_t at = 0; at < rlk_op_count(); ++at) {
    const rlk_op_schema* const op = rlk_op_schema_at(static_cast<int32_t>(at));
    if (!op->backward || op->backward != gradient) continue;
    for (uint32_t i = 0; i < op->num_arguments; ++i)
      if (op->arguments[i].role == RLK_WRITE && op->arguments[i].name == name) return true;
  }
  return false;
}

std::string shape_text(const TraceTensor& t) {
  std::string out;
  for (const int64_t size : t.shape) out += (out.empty() ? "" : "x") + std::to_string(size);
  return t.dtype + " [" + out + "]";
}

// One joined pair of records, and what is known of why a row of theirs differs.
class Pair {
 public:
  Pair(const Trace& a, const Trace& b, Place at_a, Place at_b)
      : names_{a.name, b.name},
        places_{at_a, at_b},
        records_{&a.records[at_a.record], &b.records[at_b.record]},
        results_{&at_a.in(a), &at_b.in(b)} {
    if (same_op()) {
      compare_attributes();
      compare_tensors();
    } else {
      compare_parameters();
    }
    if (results_[0]->dtype != results_[1]->dtype)
      semantics_.push_back(output() + " is " + results_[0]->dtype + in(0) + ", " + results_[1]->dtype +
                           in(1));
  }

  Verdict verdict() const {
    if (!semantics_.empty()) return kSemantics;
    if (!weights_.empty()) return kWeights;
    if (!inputs_.empty()) return kUpstream;
    return same_op() && left().arithmetic == right().arithmetic ? kBroken : kArithmetic;
  }

  const TraceRecord& left() const { return *records_[0]; }
  const TraceRecord& right() const { return *records_[1]; }
  const std::string& output() const { return results_[0]->name; }
  std::size_t number(int side) const { return places_[side].record + 1; }
  const std::vector<std::string>& weights() const { return weights_; }
  bool other_arithmetic() const { return same_op() && left().arithmetic != right().arithmetic; }

  // Everything that differs, most telling first.
  std::vector<std::string> facts() const {
    std::vector<std::string> out = own();
    out.insert(out.end(), inputs_.begin(), inputs_.end());
    out.insert(out.end(), again_.begin(), again_.end());
    if (!same_op() || left().arithmetic != right().arithmetic)
      out.push_back(described(0) + in(0) + ", " + described(1) + in(1));
    return out;
  }

  // What differs here, and not because of what came before: semantics and weights.
  std::vector<std::string> own() const {
    std::vector<std::string> out = semantics_;
    out.insert(out.end(), weights_.begin(), weights_.end());
    return out;
  }
  bool foreign() const { return left().op.empty() && right().op.empty(); }

  // Commands that show it again.
  std::vector<std::string> show() const {
    std::set<std::string> lines;
    for (const TraceRecord* r : records_)
      if (!r->op.empty()) lines.insert("rlk-dispatch --verify " + r->op + " --impl " + r->implementation);
    return {lines.begin(), lines.end()};
  }

  // How far two arithmetics may lie apart, by the type of the result.
  std::string expected() const {
    const std::string& dtype = results_[0]->dtype;
    if (dtype == "bf16") return "a unit in the last place of bf16 here and there, 2^-8 of a value";
    if (dtype == "fp16") return "a unit in the last place of fp16 here and there, 2^-11 of a value";
    if (dtype == "fp32") return "some 1e-6 of the row's largest value";
    return "nothing where the values are clear, another choice where two are close";
  }

 private:
  std::string in(int side) const { return " in " + names_[side]; }
  bool same_op() const { return left().op == right().op && !left().op.empty(); }
  std::string described(int side) const {
    const TraceRecord& r = *records_[side];
    return r.op.empty() ? "a foreign kernel" : r.op + " by " + r.arithmetic + " (" + r.implementation + ")";
  }

  void compare_attributes() {
    for (const auto& [name, value] : left().attributes) {
      const auto other = right().attributes.find(name);
      const std::string theirs = other == right().attributes.end() ? "unknown" : other->second;
      if (theirs != value) semantics_.push_back(name + " is " + value + in(0) + ", " + theirs + in(1));
    }
    for (const auto& [name, value] : right().attributes)
      if (!left().attributes.count(name))
        semantics_.push_back(name + " is unknown" + in(0) + ", " + value + in(1));
  }

  // What one op takes as an attribute and another as a tensor: a trainer's and a sampler's log-probability.
  void compare_parameters() {
    if (left().op.empty() || right().op.empty()) return;
    for (const auto& [name, preset] : kPresets) {
      const std::string x = parameter(left(), name, preset), y = parameter(right(), name, preset);
      if (std::strtod(x.c_str(), nullptr) != std::strtod(y.c_str(), nullptr))
        semantics_.push_back(std::string(name) + " is " + x + in(0) + ", " + y + in(1));
    }
  }
  static std::string parameter(const TraceRecord& r, const char* name, const char* preset) {
    if (const auto it = r.attributes.find(name); it != r.attributes.end()) return it->second;
    const TraceTensor* t = r.find(name, false);
    return t && !t->value.empty() ? t->value : preset;
  }

  void compare_tensors() {
    for (int side : {0, 1})
      for (const TraceTensor& t : records_[side]->tensors) {
        if (t.role == "output") continue;
        const TraceTensor* other = records_[1 - side]->find(t.name, false);
        if (other && side == 0) compare(t, *other);
        if (other) continue;
        if (left_by_forward(left().op, t.name))
          again_.push_back(t.name + " is given" + in(side) + ", computed again" + in(1 - side));
        // Bounds and tables say where rows lie; other rows may lie elsewhere.
        else if (is_parameter(t.name) || (t.role != "index" && t.role != "state"))
          semantics_.push_back(t.name + " is given" + in(side) + " alone");
      }
  }

  void compare(const TraceTensor& x, const TraceTensor& y) {
    if (x.role == "weight" || y.role == "weight") {
      if (x.digest != y.digest || x.dtype != y.dtype || x.shape != y.shape)
        weights_.push_back(x.name + " is " + shape_text(x) + " " + x.digest + in(0) + ", " + shape_text(y) +
                           " " + y.digest + in(1));
      return;
    }
    if (!x.by_rows || !y.by_rows) return;
    const std::size_t i = places_[0].row, j = places_[1].row;
    if (i >= x.rows.size() || j >= y.rows.size() || (x.dtype == y.dtype && x.rows[i] == y.rows[j])) return;
    // Where the two lie in their caches is nobody's business, and integers may be of two widths.
    if (x.role == "index" && x.dtype != y.dtype) return;
    if (!is_parameter(x.name))
      inputs_.push_back(x.name + " has other bits" + in(0) + " than" + in(1));
    else if (x.value.empty() || y.value.empty())
      semantics_.push_back(x.name + " is another" + in(0) + " than" + in(1));
    else
      semantics_.push_back(x.name + " is " + x.value + in(0) + ", " + y.value + in(1));
  }

  const std::string names_[2];
  const Place places_[2];
  const TraceRecord* records_[2];
  const TraceTensor* results_[2];
  std::vector<std::string> semantics_, weights_, inputs_;
  std::vector<std::string> again_;  // left by the forward on one side alone, which is no difference
};

// ---- findings -------------------------------------------------------------------------------------------

struct Where {
  std::string tag, op, output;
  std::size_t rows = 0, differ = 0;
};

struct Findings {
  std::size_t rows = 0, differ = 0, alone = 0;
  std::optional<Pair> first;
  RowKey key;
  std::vector<Where> where;  // in the order of the first trace
  std::set<std::string> notes;
  Verdict verdict() const { return rows == 0 ? kNothing : first ? first->verdict() : kSame; }
};

bool same_bits(const TraceTensor& x, std::size_t i, const TraceTensor& y, std::size_t j) {
  return x.dtype == y.dtype && (x.by_rows ? x.rows[i] == y.rows[j] : x.digest == y.digest);
}

std::string place_of(const Pair& pair, const std::string& fact) {
  return (pair.left().tag.empty() ? pair.left().op : pair.left().tag) + ": " + fact;
}

// What differs at a result whatever its inputs are, so that it does not follow from the first difference.
void note(const Pair& pair, const Trace& a, const Trace& b, std::set<std::string>& notes) {
  for (const std::string& fact : pair.own()) notes.insert(place_of(pair, fact));
  if (pair.other_arithmetic())
    notes.insert(pair.left().op + ": " + pair.left().arithmetic + " in " + a.name + ", " +
                 pair.right().arithmetic + " in " + b.name);
}

Findings findings_of(const Trace& a, const Trace& b) {
  Findings f;
  Index index(b);
  std::unordered_map<std::string, std::size_t> places;  // in `where`
  std::size_t noted = 0;  // the number of the record whose first pair was looked at
  for (std::size_t r = 0; r < a.records.size(); ++r)
    Index::each_row(a, r, [&](const std::string& what, RowKey key, const Place& mine) {
      const Place* const other = index.next(what, key);
      if (!other) return void(++f.alone);
      const TraceRecord& record = a.records[r];
      const TraceTensor &x = mine.in(a), &y = other->in(b);
      if (x.by_rows != y.by_rows) return void(++f.alone);
      const auto [at, fresh] = places.try_emplace(what, f.where.size());
      if (fresh) f.where.push_back({record.tag, record.op, x.name});
      if (std::exchange(noted, r + 1) != r + 1) note(Pair(a, b, mine, *other), a, b, f.notes);
      ++f.rows, ++f.where[at->second].rows;
      if (same_bits(x, mine.row, y, other->row)) return;
      ++f.differ, ++f.where[at->second].differ;
      if (f.first) return;
      f.first.emplace(a, b, mine, *other);
      f.key = key;
    });
  if (f.first)  // whose facts are printed with it
    for (const std::string& fact : f.first->own()) f.notes.erase(place_of(*f.first, fact));
  if (!a.whole) f.notes.insert(a.name + " was not ended: calls may be missing");
  if (!b.whole) f.notes.insert(b.name + " was not ended: calls may be missing");
  if (a.build != b.build)
    f.notes.insert("builds of the library: " + a.build + " in " + a.name + ", " + b.build + " in " + b.name);
  if (a.every != b.every)
    f.notes.insert("rows are sampled by " + std::to_string(a.every) + " in " + a.name + ", by " +
                   std::to_string(b.every) + " in " + b.name);
  return f;
}

Json as_json(const Findings& f, const Trace& a, const Trace& b) {
  Json out{{"schema", 1},
           {"verdict", f.verdict().name},
           {"traces", {a.name, b.name}},
           {"versions", {a.version, b.version}},
           {"builds", {a.build, b.build}},
           {"cpus", {a.cpu, b.cpu}},
           {"rows", f.rows},
           {"differ", f.differ},
           {"alone", f.alone},
           {"first", nullptr},
           {"where", Json::array()},
           {"notes", f.notes}};
  for (const Where& w : f.where)
    out["where"].push_back(
        {{"tag", w.tag}, {"op", w.op}, {"result", w.output}, {"rows", w.rows}, {"differ", w.differ}});
  if (!f.first) return out;
  const Pair& p = *f.first;
  const bool keyed = f.key.first != Index::kNoSequence;
  out["first"] = {{"tag", p.left().tag},
                  {"result", p.output()},
                  {"sequence", keyed ? Json(f.key.first) : Json()},
                  {keyed ? "position" : "row", f.key.second},
                  {"records", {p.number(0), p.number(1)}},
                  {"ops", {p.left().op, p.right().op}},
                  {"implementations", {p.left().implementation, p.right().implementation}},
                  {"versions", {p.left().version, p.right().version}},
                  {"arithmetic", {p.left().arithmetic, p.right().arithmetic}},
                  {"facts", p.facts()},
                  {"show", p.show()}};
  return out;
}

std::string row_text(const RowKey& key) {
  if (key.first != Index::kNoSequence)
    return "sequence " + std::to_string(key.first) + ", position " + std::to_string(key.second);
  return key.second < 0 ? "the whole of it" : "row " + std::to_string(key.second);
}

void print_line(const std::string& line) { std::printf("%s\n", printable(line).c_str()); }

void print_text(const Findings& f, const Trace& a, const Trace& b) {
  if (f.first) {
    const Pair& p = *f.first;
    print_line(std::string(f.verdict().name) + ": " + (p.left().tag.empty() ? "" : p.left().tag + ", ") +
               (p.left().op.empty() ? "foreign" : p.left().op) + ", " + p.output() + " of " +
               row_text(f.key) + " (record " + std::to_string(p.number(0)) + " of " + a.name + ", " +
               std::to_string(p.number(1)) + " of " + b.name + ")");
    for (const std::string& fact : p.facts()) print_line("  " + fact);
    const Exit exit = f.verdict().exit;
    if (exit == kVerificationFailed) {
      print_line("  inputs, weights, attributes and arithmetic (" + p.left().arithmetic +
                 ") are equal, the result is not");
      print_line("  " + p.left().implementation + " " + p.left().version + " in " + a.name + ", " +
                 p.right().implementation + " " + p.right().version + " in " + b.name);
      for (const std::string& line : p.show()) print_line("  show it again: " + line);
    }
    if (p.foreign())
      print_line(
          "  what a foreign kernel reads is not in the traces; all that was recorded before it is equal");
    if (exit == kDifferentArithmetic) print_line("  to be expected: " + p.expected());
    if (exit == kUpstreamDiffers)
      print_line("  all that was recorded before it is equal: what made this input is not in the traces");
    std::size_t shown = 0;
    for (const Where& w : f.where)
      if (w.differ && shown++ < 12)
        print_line("  " + (w.tag.empty() ? w.op : w.tag) + ", " + w.output + ": " + std::to_string(w.differ) +
                   " of " + std::to_string(w.rows) + " rows differ");
  }
  std::size_t notes = 0;
  for (const std::string& note : f.notes)
    if (notes++ < 12) print_line("note: " + note);
  if (notes > 12) print_line("note: " + std::to_string(notes - 12) + " more, which --json has");
  print_line(std::string(f.rows == 0 ? "nothing in common"
                         : f.first   ? "different"
                                     : "same") +
             ": " + std::to_string(f.rows) + " rows of " + std::to_string(f.where.size()) +
             " results were compared, " + std::to_string(f.differ) + " differ, " + std::to_string(f.alone) +
             " are in " + a.name + " alone");
}

Trace read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(in), {});
  if (!in && text.empty()) throw Failure(kUsage, path + " cannot be read, or is empty");
  return parse_trace(text, path);
}

}  // namespace

int trace_diff(const Options& o) {
  if (o.files.size() != 2) throw Failure(kUsage, "trace-diff takes two traces");
  const Trace a = read(o.files[0]), b = read(o.files[1]);
  const Findings f = findings_of(a, b);
  const Json json = printable_strings(as_json(f, a, b));
  if (!o.certificate.empty()) write_file(o.certificate, json.dump(1) + "\n");
  if (o.json)
    print(json);
  else
    print_text(f, a, b);
  return f.verdict().exit;
}

}  // namespace rlk::cli
