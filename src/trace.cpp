#include "src/trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <optional>

#include "rlk/tensor.hpp"
#include "rlk/trace.h"
#include "src/c_api.hpp"
#include "src/gate.hpp"
#include "src/json.hpp"
#include "src/registry.hpp"
#include "src/text.hpp"
#include "src/thread_state.hpp"
#include "src/trace_begin.hpp"
#include "src/trace_file.hpp"
#include "src/trace_record.hpp"

namespace rlk {
namespace {

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

  void add_read(TraceRecord& record) const {
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
  void add_written(TraceRecord& record) const {
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
  TraceReader reader_;
  TraceRecord record_;
  const Tensors tensors_;
  std::string attributes_;
};

}  // namespace

Status run_traced(const Prepared& p, int32_t op, const rlk_slot* slots, const Options& options,
                  RunPrepared run) {
  const std::shared_ptr<TraceFile> file = TraceFile::now();
  TraceMarks& marks = ThreadState::need().trace;
  if (!file || marks.inside || !file->choice().wants(marks.tag)) return run(p, slots, options);
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

// What a record and Footprint take for granted; calls are checked by their schemas.
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
  if (!file || !file->choice().wants(tag ? tag : own.tag)) return {};
  if (Status s = check_foreign(name, t); !s) return s;
  rlk_device device{};
  const DLDevice at = normal(t.device);
  const Backend* backend =
      at.device_type == kDLCPU ? nullptr : backend_for(at.device_type, at.device_id, device);
  if (at.device_type != kDLCPU && !backend)
    return {RLK_INVALID_ARGUMENT,
            fmt::format("trace: {} is on device type {}, number {}, which no backend reads", quoted(name),
                        static_cast<int>(at.device_type), at.device_id)};
  TraceReader reader(backend ? backend->services() : nullptr, backend ? &device : nullptr, stream);
  TraceRecord record(*file, own, reader);
  if (reader.wait()) record.add(name, "output", t, leading(t, own.rows.size()));
  std::string before;
  if (tag) before = std::exchange(own.tag, tag);
  record.write(JsonObject().text("op", ""));
  if (tag) own.tag = std::move(before);
  return {};
}

}  // namespace

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
