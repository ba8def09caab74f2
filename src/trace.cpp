#include "src/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <new>
#include <optional>

#include "rlk/tensor.hpp"
#include "rlk/trace.h"
#include "src/c_api.hpp"
#include "src/digest.hpp"
#include "src/environment.hpp"
#include "src/gate.hpp"
#include "src/json.hpp"
#include "src/log.hpp"
#include "src/registry.hpp"
#include "src/struct_size.hpp"
#include "src/text.hpp"
#include "src/thread_state.hpp"
#include "src/trace_file.hpp"

namespace rlk {
namespace {

// ---- bytes ----------------------------------------------------------------------------------------------

// Tensors of one device as the CPU can read them.
class Reader {
 public:
  Reader(const rlk_device_services* services, const rlk_device* device, void* stream) noexcept
      : services_(services), device_(device), stream_(stream) {}

  // Waits for what was given to the stream before.
  bool wait() const {
    if (!device_ || device_->type == kDLCPU) return true;
    return services_ && services_->synchronize && services_->copy_out &&
           services_->synchronize(device_, stream_) == RLK_OK;
  }

  // The address of the first element, null when the tensor cannot be read.
  const std::byte* read(const DLTensor& t) {
    const Footprint all(t);
    const auto* here = static_cast<const std::byte*>(t.data) + t.byte_offset;
    if (all.device().device_type == kDLCPU || all.empty()) return here;
    if (!services_ || !services_->copy_out) return nullptr;
    bytes_.resize(all.high() - all.low());
    if (services_->copy_out(device_, bytes_.data(), reinterpret_cast<const void*>(all.low()),
                            bytes_.size()) != RLK_OK)
      return nullptr;
    return bytes_.data() + (reinterpret_cast<uintptr_t>(here) - all.low());
  }

 private:
  const rlk_device_services* services_;
  const rlk_device* device_;
  void* stream_;
  std::vector<std::byte> bytes_;
};

// The rows of a tensor: its leading dimensions, walked in order, each with all of its elements.
class Walk {
 public:
  Walk(const DLTensor& t, int32_t lead) : t_(t), lead_(lead), size_((t.dtype.bits * t.dtype.lanes + 7) / 8) {
    int64_t step = 1;
    for (int32_t d = t.ndim; d-- > 0;) {
      strides_[d] = t.strides ? t.strides[d] : step;
      step *= t.shape[d];
    }
    dense_ = true;
    step = 1;
    for (int32_t d = t.ndim; d-- > lead;) {
      if (t.shape[d] != 1 && strides_[d] != step) dense_ = false;
      step *= t.shape[d];
    }
    row_ = static_cast<std::size_t>(step) * size_;
  }

  uint64_t row(const std::byte* base, int64_t index) {
    int64_t offset = 0;
    for (int32_t d = lead_; d-- > 0;) {
      offset += index % t_.shape[d] * strides_[d];
      index /= t_.shape[d];
    }
    const std::byte* at = base + offset * static_cast<int64_t>(size_);
    if (dense_) return digest(at, row_);
    packed_.clear();
    pack(at, lead_);
    return digest(packed_.data(), packed_.size());
  }

 private:
  void pack(const std::byte* at, int32_t d) {
    if (d == t_.ndim) {
      packed_.insert(packed_.end(), at, at + size_);
      return;
    }
    const int64_t step = strides_[d] * static_cast<int64_t>(size_);
    for (int64_t i = 0; i < t_.shape[d]; ++i) pack(at + i * step, d + 1);
  }

  const DLTensor& t_;
  const int32_t lead_;
  const std::size_t size_;
  int64_t strides_[RLK_MAX_RANK] = {};
  std::size_t row_ = 0;
  bool dense_ = false;
  std::vector<std::byte> packed_;
};

// ---- rows -----------------------------------------------------------------------------------------------

// Leading dimensions that are this many rows, -1: none are. Without keys the first dimension is.
int32_t leading(const DLTensor& t, std::size_t keys) {
  if (t.ndim == 0) return -1;
  if (keys == 0) return 1;
  uint64_t rows = 1;
  for (int32_t d = 0; d < t.ndim; ++d) {
    rows *= static_cast<uint64_t>(t.shape[d]);
    if (rows == keys) return d + 1;
    if (rows > keys) return -1;
  }
  return -1;
}

int64_t rows_of(const DLTensor& t, int32_t lead) {
  int64_t rows = 1;
  for (int32_t d = 0; d < lead; ++d) rows *= t.shape[d];
  return rows;
}

// ---- records --------------------------------------------------------------------------------------------

class Record {
 public:
  Record(TraceFile& file, TraceMarks& marks, Reader& reader)
      : file_(file), marks_(marks), reader_(reader), keys_(file.keys_of(marks)) {}

  // A tensor with its digests; lead -1: it has no rows.
  void add(const char* name, const char* role, const DLTensor& t, int32_t lead) {
    JsonObject out = begin(name, role, t);
    if (const std::byte* base = reader_.read(t)) {
      Walk walk(t, std::max(lead, 0));
      const int64_t rows = rows_of(t, lead);
      std::vector<uint64_t> all(static_cast<std::size_t>(rows));
      for (int64_t i = 0; i < rows; ++i) all[static_cast<std::size_t>(i)] = walk.row(base, i);
      out.text("digest", hex(digest(all.data(), all.size() * sizeof(uint64_t))));
      if (lead >= 0) out.text("rows", chosen(all));
      const bool alike = std::all_of(all.begin(), all.end(), [&](uint64_t row) { return row == all[0]; });
      if (lead == t.ndim && rows > 0 && alike) add_value(out, t, base);
    }
    tensors_.raw(out.str());
  }

  // A weight, which may have been digested before.
  void add_weight(const char* name, const DLTensor& t) {
    const Footprint all(t);
    const TraceFile::Place place{all.device().device_type, all.device().device_id, all.low(),
                                 all.high() - all.low(), t.dtype.bits};
    uint64_t found = 0;
    const bool once = file_.plan().weights_once;
    if (!once || !file_.find_weight(place, found)) {
      const std::byte* base = reader_.read(t);
      if (!base) return mention(name, "weight", t);
      found = Walk(t, 0).row(base, 0);
      found = digest(&found, sizeof found);
      if (once) file_.keep_weight(place, found);
    }
    tensors_.raw(begin(name, "weight", t).text("digest", hex(found)).str());
  }

  // A tensor that is not looked at.
  void mention(const char* name, const char* role, const DLTensor& t) {
    tensors_.raw(begin(name, role, t).str());
  }

  void write(JsonObject head) {
    head.text("tag", marks_.tag).number("keys", keys_).raw("tensors", tensors_.str());
    const std::string text = head.str();
    file_.record(std::string_view(text).substr(1, text.size() - 2));
  }

 private:
  // What a column holds that has one value: a temperature, a filter.
  static void add_value(JsonObject& out, const DLTensor& t, const std::byte* base) {
    const auto as = [&]<class T>(T value) {
      std::memcpy(&value, base, sizeof value);
      return value;
    };
    const DType type = dtype_of(t.dtype);
    if (type == DType::f32 && std::isfinite(as(0.0F))) out.number("value", as(0.0F));
    if (type == DType::i32) out.number("value", as(int32_t{}));
    if (type == DType::i64) out.number("value", as(int64_t{}));
  }

  static std::string hex(uint64_t value) { return fmt::format("{:016x}", value); }

  static JsonObject begin(const char* name, const char* role, const DLTensor& t) {
    JsonArray shape;
    for (int32_t d = 0; d < t.ndim; ++d) shape.raw(std::to_string(t.shape[d]));
    JsonObject out;
    out.text("name", name)
        .text("role", role)
        .text("dtype", name_of(dtype_of(t.dtype)))
        .raw("shape", shape.str());
    return out;
  }

  // Digests of the rows that were asked for, one after another.
  std::string chosen(const std::vector<uint64_t>& all) const {
    std::string out;
    const int64_t every = keys_ ? file_.plan().every : 1;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (every <= 1 || marks_.rows[i].second % every == 0)
        fmt::format_to(std::back_inserter(out), "{:016x}", all[i]);
    return out;
  }

  TraceFile& file_;
  TraceMarks& marks_;
  Reader& reader_;
  const uint64_t keys_;
  JsonArray tensors_;
};

std::string attributes_of(const rlk_op_schema& op, const rlk_slot* slots) {
  JsonObject out;
  for (uint32_t i = 0; i < op.num_attributes; ++i) {
    const rlk_attribute& a = op.attributes[i];
    const rlk_slot& value = slots[op.num_arguments + i];
    if (a.type == RLK_FLOAT && std::isfinite(value.f))
      out.number(a.name, value.f);
    else if (a.type == RLK_FLOAT)
      out.text(a.name, fmt::format("{}", value.f));
    else if (a.type == RLK_FLAG)
      out.flag(a.name, value.i != 0);
    else if (a.type == RLK_INT)
      out.number(a.name, value.i);
    else {
      auto word = split(a.choices, '|').begin();
      for (int64_t n = value.i; n > 0; --n) ++word;
      out.text(a.name, *word);
    }
  }
  return out.str();
}

const Backend* backend_of(int32_t op, const rlk_implementation& implementation) {
  for (const ImplementationEntry& e : snapshot().ops[static_cast<std::size_t>(op)].implementations)
    if (e.implementation == &implementation) return e.backend;
  return nullptr;
}

bool holds_reals(const DLTensor& t) {
  return (static_cast<uint32_t>(dtype_of(t.dtype)) & (RLK_F16 | RLK_BF16 | RLK_F32 | RLK_F64)) != 0;
}

class Inside {
 public:
  explicit Inside(TraceMarks& marks) noexcept : marks_(marks) { marks_.inside = true; }
  ~Inside() { marks_.inside = false; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  TraceMarks& marks_;
};

// How a call's tensors are recorded.
class Tensors {
 public:
  Tensors(const rlk_op_schema& op, const rlk_slot* slots, std::size_t keys)
      : op_(op), slots_(slots), keys_(keys) {
    // A tensor of more dimensions than the first argument and the results is a cache: its first dimension
    // counts something else than rows.
    for (uint32_t i = 0; i < op.num_arguments; ++i)
      if (slots[i].tensor && (i == 0 || op.arguments[i].role != RLK_READ))
        most_ = std::max(most_, slots[i].tensor->ndim);
  }

  void add_read(Record& record) const {
    for (uint32_t i = 0; i < op_.num_arguments; ++i) {
      const rlk_argument& a = op_.arguments[i];
      const DLTensor* t = slots_[i].tensor;
      if (!t || a.role == RLK_WRITE) continue;
      const int32_t lead = lead_of(i);
      if (!holds_reals(*t))
        record.add(a.name, "index", *t, lead);
      else if (a.batch_axis == -1)
        record.add_weight(a.name, *t);
      else if (lead < 0)
        record.mention(a.name, "state", *t);
      else
        record.add(a.name, "input", *t, lead);
    }
  }
  void add_written(Record& record) const {
    for (uint32_t i = 0; i < op_.num_arguments; ++i)
      if (const DLTensor* t = slots_[i].tensor; t && op_.arguments[i].role != RLK_READ)
        record.add(op_.arguments[i].name, "output", *t, lead_of(i));
  }

 private:
  int32_t lead_of(uint32_t i) const {
    const int32_t axis = op_.arguments[i].batch_axis;
    const DLTensor& t = *slots_[i].tensor;
    return (axis == 0 || axis == -2) && t.ndim <= most_ ? leading(t, keys_) : -1;
  }

  const rlk_op_schema& op_;
  const rlk_slot* slots_;
  const std::size_t keys_;
  int32_t most_ = 0;
};

// One call's record: what it reads before it runs, what it wrote afterwards.
class CallRecord {
 public:
  CallRecord(TraceFile& file, TraceMarks& marks, const Prepared& p, int32_t op, const rlk_slot* slots,
             void* stream)
      : schema_(*p.op),
        implementation_(*p.implementation),
        backend_(backend_of(op, implementation_)),
        precision_(static_cast<int>(p.policy->precision)),
        slots_(slots),
        reader_(backend_ ? backend_->services() : nullptr, p.call.device, stream),
        record_(file, marks, reader_),
        tensors_(schema_, slots, marks.rows.size()) {}

  void before() {
    attributes_ = attributes_of(schema_, slots_);
    if (reader_.wait()) tensors_.add_read(record_);
  }
  void after() {
    if (reader_.wait()) tensors_.add_written(record_);
    JsonObject head;
    head.text("op", schema_.name)
        .text("implementation", implementation_.id)
        .text("version", backend_ ? backend_->table->version : "")
        .text("arithmetic", implementation_.arithmetic)
        .number("precision", precision_)
        .raw("attributes", attributes_);
    record_.write(std::move(head));
  }

 private:
  const rlk_op_schema& schema_;
  const rlk_implementation& implementation_;
  const Backend* const backend_;
  const int precision_;
  const rlk_slot* const slots_;
  Reader reader_;
  Record record_;
  const Tensors tensors_;
  std::string attributes_;
};

}  // namespace

Status run_traced(const Prepared& p, int32_t op, const rlk_slot* slots, const Options& options,
                  RunPrepared run) {
  const std::shared_ptr<TraceFile> file = TraceFile::now();
  TraceMarks& marks = ThreadState::need().trace;
  if (!file || marks.inside || !file->plan().wants(marks.tag)) return run(p, slots, options);
  // The implementation may call the library, and its call may take this one's place in the cache: what is
  // needed afterwards is taken now.
  std::optional<CallRecord> record;
  try {
    record.emplace(*file, marks, p, op, slots, options.stream);
    record->before();
  } catch (const std::bad_alloc&) {
    record.reset();
    file->lose("no memory for a record");
  }
  {
    const Inside inside(marks);
    if (Status s = run(p, slots, options); !s) return s;
  }
  try {
    if (record) record->after();
  } catch (const std::bad_alloc&) {
    file->lose("no memory for a record");
  }
  return {};
}

namespace {

Status begin_trace(const char* name, const rlk_trace_options* given) {
  if (!name || !*name) return {RLK_INVALID_ARGUMENT, "trace: the file's name is empty"};
  rlk_trace_options o{};
  if (given)
    if (Status s = read_struct("trace options", *given, offsetof(rlk_trace_options, tags), o); !s) return s;
  if (o.every < 0)
    return {RLK_INVALID_ARGUMENT, fmt::format("trace: every is {}, it must be 0 or more", o.every)};
  TraceFile::Plan plan{{}, std::max<int64_t>(o.every, 1), o.weights_once != 0};
  for (const std::string_view glob : split(o.tags ? o.tags : "", ',')) plan.tags.emplace_back(trimmed(glob));
  return TraceFile::begin(name, std::move(plan));
}

// What Walk and Footprint take for granted; calls are checked by their schemas.
Status check_foreign(const char* name, const DLTensor& t) {
  const auto wrong = [&](std::string what) {
    return Status(RLK_INVALID_ARGUMENT, fmt::format("trace: {} {}", quoted(name), what));
  };
  if (t.ndim < 0 || t.ndim > RLK_MAX_RANK)
    return wrong(fmt::format("has rank {}, at most {} is taken", t.ndim, RLK_MAX_RANK));
  if (dtype_of(t.dtype) == DType::none)
    return wrong(
        fmt::format("has a dtype of code {} and {} bits, which is unknown", t.dtype.code, t.dtype.bits));
  if (t.ndim && !t.shape) return wrong("has no shape");
  int64_t elements = 1, reach = 0;
  for (int32_t d = 0; d < t.ndim; ++d) {
    int64_t far = 0;
    if (t.shape[d] < 0) return wrong(fmt::format("has size {} in dimension {}", t.shape[d], d));
    if (__builtin_mul_overflow(elements, t.shape[d], &elements) || elements > INT64_MAX / 64 ||
        (t.strides && (t.strides[d] == INT64_MIN || t.strides[d] == INT64_MAX ||
                       __builtin_mul_overflow(std::abs(t.strides[d]), t.shape[d], &far) ||
                       __builtin_add_overflow(reach, far, &reach) || reach > INT64_MAX / 64)))
      return wrong("is larger than memory");
  }
  if (elements && !t.data) return wrong("has no data");
  return {};
}

const Backend* backend_for(DLDeviceType type, int32_t id, rlk_device& device) {
  for (const auto& b : snapshot().backends) {
    if (!b->table || !b->services()) continue;
    for (const rlk_device& d : b->devices())
      if (d.type == type && d.id == id) return device = d, b.get();
  }
  return nullptr;
}

Status trace_foreign(const char* tag, const char* name, const DLTensor& t, void* stream) {
  const std::shared_ptr<TraceFile> file = TraceFile::now();
  TraceMarks& own = ThreadState::need().trace;
  if (!file || !file->plan().wants(tag ? tag : own.tag)) return {};
  if (Status s = check_foreign(name, t); !s) return s;
  rlk_device device{};
  const DLDevice at = normal(t.device);
  const Backend* backend =
      at.device_type == kDLCPU ? nullptr : backend_for(at.device_type, at.device_id, device);
  if (at.device_type != kDLCPU && !backend)
    return {RLK_INVALID_ARGUMENT,
            fmt::format("trace: {} is on device type {}, number {}, which no backend reads", quoted(name),
                        static_cast<int>(at.device_type), at.device_id)};
  Reader reader(backend ? backend->services() : nullptr, backend ? &device : nullptr, stream);
  Record record(*file, own, reader);
  if (reader.wait()) record.add(name, "output", t, leading(t, own.rows.size()));
  std::string before;
  if (tag) before = std::exchange(own.tag, tag);
  record.write(JsonObject().text("op", ""));
  if (tag) own.tag = std::move(before);
  return {};
}

}  // namespace

namespace {

// "FILE;weights_once;every=16;tags=layer 1 *"
Status begin_from_words(std::string_view spec) {
  rlk_trace_options o{.struct_size = sizeof o, .weights_once = 0, .tags = nullptr, .every = 0};
  std::string file, tags;
  for (const std::string_view word : split(spec, ';')) {
    const std::string_view name = word.substr(0, word.find('='));
    const std::string value(name.size() < word.size() ? word.substr(name.size() + 1) : "");
    if (word.data() == spec.data())
      file = word;
    else if (word == "weights_once")
      o.weights_once = 1;
    else if (name == "tags" && name != word)
      tags = value, o.tags = tags.c_str();
    else if (name == "every" && !value.empty() && value.size() < 10 &&
             value.find_first_not_of("0123456789") == value.npos)
      o.every = std::stoll(value);
    else
      return {RLK_CONFIGURATION,
              fmt::format("{} is none of: weights_once, every=NUMBER, tags=GLOBS", quoted(word))};
  }
  return begin_trace(file.c_str(), &o);
}

}  // namespace

void trace_environment() {
  const Status s = begin_from_words(environment().trace);
  if (!s) log(LogLevel::error, fmt::format("RLK_TRACE: {}", s.message()));
}

}  // namespace rlk

// ---- for C ----------------------------------------------------------------------------------------------

using namespace rlk;

extern "C" {

rlk_code rlk_trace_begin(const char* file, const rlk_trace_options* options) {
  return guarded([&] { return snapshot(), set_failure(begin_trace(file, options)); });
}
rlk_code rlk_trace_end(void) {
  return guarded([] { return set_failure(TraceFile::end()); });
}
int32_t rlk_tracing(void) {
  return guarded_or<int32_t>(0, [] { return snapshot(), Gate::now().traced() && TraceFile::now() ? 1 : 0; });
}

rlk_code rlk_trace_tag(const char* tag) {
  return guarded([&] { return ThreadState::need().trace.tag = tag ? tag : "", RLK_OK; });
}

rlk_code rlk_trace_rows(const int64_t* sequences, const int64_t* positions, uint64_t rows) {
  if (rows && !sequences) return null_argument("sequences");
  if (rows && !positions) return null_argument("positions");
  return guarded([&] {
    TraceMarks& marks = ThreadState::need().trace;
    marks.trace = 0;
    marks.rows.resize(rows);
    for (uint64_t i = 0; i < rows; ++i) marks.rows[i] = {sequences[i], positions[i]};
    return RLK_OK;
  });
}

rlk_code rlk_trace_weights_changed(void) {
  return guarded([] {
    if (const auto file = TraceFile::now()) file->forget_weights();
    return RLK_OK;
  });
}

rlk_code rlk_trace_tensor(const char* tag, const char* name, const DLTensor* tensor, void* stream) {
  if (!name) return null_argument("name");
  if (!tensor) return null_argument("tensor");
  return guarded([&] { return set_failure(trace_foreign(tag, name, *tensor, stream)); });
}

}  // extern "C"
