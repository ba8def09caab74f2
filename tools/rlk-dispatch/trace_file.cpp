#include "trace_file.hpp"

#include <algorithm>

#include "library.hpp"

namespace rlk::cli {
namespace {

constexpr std::size_t kMostText = 4096;  // of a name or a tag
constexpr int kMostDepth = 8;            // of objects in objects

// One line, with the words for what is wrong in it.
class Line {
 public:
  Line(std::string_view text, const std::string& file, std::size_t number) : file_(file), number_(number) {
    const auto depth = [&](int at, Json::parse_event_t, Json&) {
      if (at > kMostDepth) fail("it is nested too deeply");
      return true;
    };
    all_ = Json::parse(text, depth, false);
    if (all_.is_discarded() || !all_.is_object()) fail("it is no JSON object");
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Failure(kUsage, file_ + ", line " + std::to_string(number_) + ": " + what);
  }

  const Json& all() const { return all_; }
  bool has(const char* member) const { return all_.contains(member); }

  const Json& at(const Json& object, const char* member) const {
    if (!object.is_object() || !object.contains(member))
      fail(std::string("member '") + member + "' is missing");
    return object.at(member);
  }
  std::string text(const Json& object, const char* member) const {
    const Json& value = at(object, member);
    if (!value.is_string()) fail(std::string("member '") + member + "' is no text");
    const auto& found = value.get_ref<const std::string&>();
    if (found.size() > kMostText) fail(std::string("member '") + member + "' is longer than a name may be");
    return found;
  }
  int64_t integer(const Json& value, const char* member, int64_t least) const {
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX))
      fail(std::string("member '") + member + "' is no integer");
    const auto found = value.get<int64_t>();
    if (found < least)
      fail(std::string("member '") + member + "' is " + std::to_string(found) + ", it must be at least " +
           std::to_string(least));
    return found;
  }
  const Json& list(const Json& object, const char* member) const {
    const Json& value = at(object, member);
    if (!value.is_array()) fail(std::string("member '") + member + "' is no list");
    return value;
  }

 private:
  const std::string& file_;
  const std::size_t number_;
  Json all_;
};

int hex_digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

std::vector<uint64_t> digests(const Line& line, const std::string& text) {
  if (text.size() % 16 != 0)
    line.fail("member 'rows' has " + std::to_string(text.size()) + " digits, 16 are a digest");
  std::vector<uint64_t> out(text.size() / 16);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const int digit = hex_digit(text[i]);
    if (digit < 0) line.fail("member 'rows' holds what is no hexadecimal digit");
    out[i / 16] = out[i / 16] << 4 | static_cast<uint64_t>(digit);
  }
  return out;
}

TraceTensor tensor_of(const Line& line, const Json& from, const Trace& trace, uint64_t keys) {
  TraceTensor t{
      line.text(from, "name"), line.text(from, "role"), line.text(from, "dtype"), {}, "", false, {}, ""};
  constexpr const char* kRoles[] = {"input", "index", "weight", "state", "output"};
  if (std::find(std::begin(kRoles), std::end(kRoles), t.role) == std::end(kRoles))
    line.fail("role '" + t.role + "' is unknown");
  for (const Json& size : line.list(from, "shape")) {
    if (t.shape.size() == 8) line.fail("a shape has more than 8 dimensions");
    t.shape.push_back(line.integer(size, "shape", 0));
  }
  if (from.contains("value")) {
    if (!from.at("value").is_number()) line.fail("member 'value' is no number");
    t.value = from.at("value").dump();
  }
  if (from.contains("digest")) t.digest = line.text(from, "digest");
  if (!from.contains("rows")) return t;
  const Json& rows = line.at(from, "rows");
  if (!rows.is_string()) line.fail("member 'rows' is no text");
  t.by_rows = true;
  t.rows = digests(line, rows.get_ref<const std::string&>());
  if (keys && t.rows.size() != trace.keys[keys - 1].size())
    line.fail("tensor '" + t.name + "' has " + std::to_string(t.rows.size()) + " digests, its keys are " +
              std::to_string(trace.keys[keys - 1].size()));
  return t;
}

void read_keys(const Line& line, Trace& trace) {
  if (line.integer(line.all().at("keys"), "keys", 1) != static_cast<int64_t>(trace.keys.size() + 1))
    line.fail("these keys are not number " + std::to_string(trace.keys.size() + 1));
  std::vector<RowKey> chosen;
  for (const Json& row : line.list(line.all(), "rows")) {
    if (!row.is_array() || row.size() != 2) line.fail("a row's key is no pair of integers");
    const RowKey key{line.integer(row[0], "rows", INT64_MIN), line.integer(row[1], "rows", INT64_MIN)};
    if (trace.every <= 1 || key.second % trace.every == 0) chosen.push_back(key);
  }
  trace.keys.push_back(std::move(chosen));
}

void read_record(const Line& line, Trace& trace) {
  const Json& all = line.all();
  if (line.integer(all.at("n"), "n", 1) != static_cast<int64_t>(trace.records.size() + 1))
    line.fail("this record is not number " + std::to_string(trace.records.size() + 1));
  TraceRecord r;
  r.op = line.text(all, "op");
  r.tag = line.text(all, "tag");
  if (!r.op.empty()) {
    r.implementation = line.text(all, "implementation");
    r.version = line.text(all, "version");
    r.arithmetic = line.text(all, "arithmetic");
    const Json& attributes = line.at(all, "attributes");
    if (!attributes.is_object()) line.fail("member 'attributes' is no object");
    for (const auto& [name, value] : attributes.items()) r.attributes[name] = value.dump();
  }
  r.keys = static_cast<uint64_t>(line.integer(line.at(all, "keys"), "keys", 0));
  if (r.keys > trace.keys.size())
    line.fail("keys are number " + std::to_string(r.keys) + ", there are " +
              std::to_string(trace.keys.size()));
  for (const Json& tensor : line.list(all, "tensors"))
    r.tensors.push_back(tensor_of(line, tensor, trace, r.keys));
  trace.records.push_back(std::move(r));
}

}  // namespace

const TraceTensor* TraceRecord::find(std::string_view wanted, bool output) const {
  for (const TraceTensor& t : tensors)
    if (t.name == wanted && (t.role == "output") == output) return &t;
  return nullptr;
}

Trace parse_trace(std::string_view text, const std::string& name) {
  Trace trace;
  trace.name = name;
  std::size_t number = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const Line line(text.substr(0, end), name, ++number);
    if (trace.whole) line.fail("it follows the end of the trace");
    if (number == 1) {
      if (!line.has("rlk_trace") || line.all().at("rlk_trace") != 1)
        line.fail("it does not begin a trace of version 1");
      trace.version = line.text(line.all(), "version");
      trace.build = line.text(line.all(), "build");
      trace.cpu = line.text(line.all(), "cpu");
      trace.every = line.integer(line.at(line.all(), "every"), "every", 1);
    } else if (line.has("n")) {
      read_record(line, trace);
    } else if (line.has("keys")) {
      read_keys(line, trace);
    } else if (line.has("end")) {
      if (line.integer(line.all().at("end"), "end", 0) != static_cast<int64_t>(trace.records.size()))
        line.fail("there are " + std::to_string(trace.records.size()) + " records before it");
      trace.whole = true;
    } else {
      line.fail("it is neither a record, nor keys, nor the end");
    }
    text = end == text.npos ? std::string_view() : text.substr(end + 1);
  }
  if (number == 0) throw Failure(kUsage, name + " is empty");
  return trace;
}

}  // namespace rlk::cli
