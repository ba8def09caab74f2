// Ops as one XLA custom call, for CPUs: rlk.jax gives the op and its attributes, and which slot each buffer is.
#include "src/python/xla.hpp"

#include <cstring>
#include <string>
#include <string_view>

#include "src/python/xla_ffi.hpp"

namespace rlk::python {
namespace {

using namespace xla;

Error* fail(const Frame& frame, rlk_code code, const char* text) {
  const std::string message = std::string(rlk_code_name(code)) + ": " + text;
  ErrorArguments arguments{{sizeof(ErrorArguments), nullptr}, message.c_str(), internal};
  if (code == RLK_INVALID_ARGUMENT || code == RLK_OVERLAP) arguments.code = invalid_argument;
  if (code == RLK_NO_IMPLEMENTATION || code == RLK_UNSUPPORTED) arguments.code = unimplemented;
  if (code == RLK_OUT_OF_MEMORY) arguments.code = resource_exhausted;
  return frame.api->make_error(&arguments);
}

// The framework asks what a handler was made for: what it has itself, as long as that is of this major version.
bool answered_metadata(const Frame& frame) {
  for (const Extension* e = frame.head.extension; e; e = e->next) {
    if (e->type != kMetadataExtension) continue;
    Metadata& metadata = *reinterpret_cast<const MetadataExtension*>(e)->metadata;
    metadata.version.major = 0;
    metadata.version.minor = frame.api->version.minor;
    metadata.traits = 0;
    if (metadata.struct_size >= sizeof(Metadata)) metadata.state_type = 0;
    return true;
  }
  return false;
}

const void* find(const Attributes& attributes, std::string_view name, AttributeType type) {
  for (int64_t i = 0; i < attributes.size; ++i)
    if (attributes.types[i] == type &&
        std::string_view(attributes.names[i]->data, attributes.names[i]->size) == name)
      return attributes.values[i];
  return nullptr;
}

std::string text_of(const Attributes& attributes, std::string_view name) {
  const auto* bytes = static_cast<const Bytes*>(find(attributes, name, string));
  return bytes ? std::string(bytes->data, bytes->size) : std::string();
}

const Array* integers(const Attributes& attributes, std::string_view name) {
  const auto* values = static_cast<const Array*>(find(attributes, name, array));
  return values && values->dtype == s64 ? values : nullptr;
}
int64_t at(const Array& list, std::size_t i) { return static_cast<const int64_t*>(list.data)[i]; }

bool view(const Buffer& buffer, DLTensor& out) {
  out = {buffer.data, {kDLCPU, 0}, static_cast<int32_t>(buffer.rank), {}, buffer.dims, nullptr, 0};
  switch (buffer.dtype) {
    case pred:
      return out.dtype = {6, 8, 1}, true;
    case u8:
      return out.dtype = {kDLUInt, 8, 1}, true;
    case s32:
      return out.dtype = {kDLInt, 32, 1}, true;
    case s64:
      return out.dtype = {kDLInt, 64, 1}, true;
    case f16:
      return out.dtype = {kDLFloat, 16, 1}, true;
    case bf16:
      return out.dtype = {kDLBfloat, 16, 1}, true;
    case f32:
      return out.dtype = {kDLFloat, 32, 1}, true;
    case f64:
      return out.dtype = {kDLFloat, 64, 1}, true;
    default:
      return false;
  }
}

// `places`: the slot of each buffer; those of results may be those of inputs that are changed.
bool place(const Buffers& buffers, const Array* places, uint32_t count, DLTensor* tensors, rlk_slot* slots) {
  if (!places || static_cast<int64_t>(places->size) != buffers.size) return false;
  for (std::size_t i = 0; i < places->size; ++i) {
    const int64_t slot = at(*places, i);
    if (slot < 0 || slot >= count || !view(*buffers.buffers[i], tensors[slot])) return false;
    slots[slot].tensor = &tensors[slot];
  }
  return true;
}

// The scopes in which a call was traced, a line each: precision|backend.
class Scopes {
 public:
  explicit Scopes(std::string_view lines) {
    while (code_ == RLK_OK && !lines.empty()) {
      const std::string line(lines.substr(0, lines.find('\n')));
      lines.remove_prefix(line.size() + 1);
      const auto bar = line.find('|');
      const std::string precision = line.substr(0, bar), backend = line.substr(bar + 1);
      code_ = rlk_scope_enter(precision.empty() ? nullptr : precision.c_str(),
                              backend.empty() ? nullptr : backend.c_str());
      entered_ += code_ == RLK_OK;
    }
  }
  ~Scopes() {
    for (; entered_ > 0; --entered_) rlk_scope_leave();
  }
  Scopes(const Scopes&) = delete;
  Scopes& operator=(const Scopes&) = delete;
  rlk_code code() const { return code_; }

 private:
  rlk_code code_ = RLK_OK;
  int entered_ = 0;
};

Error* run(const Frame& frame) {
  const Attributes& given = frame.attributes;
  const std::string name = text_of(given, "op");
  const int32_t op = rlk_op_index(name.c_str());
  if (op < 0) return fail(frame, RLK_UNKNOWN_NAME, rlk_last_error());
  const rlk_op_schema& schema = *rlk_op_schema_at(op);
  const uint32_t arguments = schema.num_arguments, count = arguments + schema.num_attributes;
  const Array *attributes = integers(given, "attributes"), *numbers = integers(given, "options");
  rlk_slot slots[RLK_MAX_SLOTS] = {};
  DLTensor tensors[RLK_MAX_SLOTS];
  if (!attributes || attributes->size != schema.num_attributes || !numbers || numbers->size != 3 ||
      !place(frame.inputs, integers(given, "inputs"), arguments, tensors, slots) ||
      !place(frame.results, integers(given, "results"), arguments, tensors, slots))
    return fail(frame, RLK_INTERNAL, (name + ": the call does not say what rlk.jax says").c_str());
  for (uint32_t i = 0; i < schema.num_attributes; ++i) slots[arguments + i].i = at(*attributes, i);
  const std::string backend = text_of(given, "backend"), arithmetic = text_of(given, "arithmetic"),
                    precision = text_of(given, "precision");
  const auto word = [](const std::string& text) { return text.empty() ? nullptr : text.c_str(); };
  rlk_options options{};
  options.struct_size = sizeof options;
  options.backend = word(backend), options.arithmetic = word(arithmetic), options.precision = word(precision);
  options.deterministic = at(*numbers, 0) != 0;
  options.threads = static_cast<int32_t>(at(*numbers, 1));
  options.evidence = at(*numbers, 2) != 0;
  const Scopes scopes(text_of(given, "scopes"));
  const rlk_code code = scopes.code() ? scopes.code() : rlk_run_slots(op, slots, count, &options);
  return code == RLK_OK ? nullptr : fail(frame, code, rlk_last_error());
}

Error* handle(Frame* frame) {
  if (answered_metadata(*frame) || frame->stage != kExecute) return nullptr;
  return run(*frame);
}

}  // namespace

PyObject* xla_handler(PyObject*, PyObject*) {
  return PyCapsule_New(reinterpret_cast<void*>(&handle), "xla._CUSTOM_CALL_TARGET", nullptr);
}

}  // namespace rlk::python
