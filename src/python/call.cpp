#include "src/python/call.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>

#include "src/python/torch_native.hpp"

namespace rlk::python {
namespace {

struct DtypeName {
  const char *name, *torch;
  DLDataType type;
};
// In the order of the bits RLK_F16, RLK_BF16, ...
constexpr DtypeName kDtypes[] = {
    {"fp16", "torch.float16", {kDLFloat, 16, 1}},   {"bf16", "torch.bfloat16", {kDLBfloat, 16, 1}},
    {"fp32", "torch.float32", {kDLFloat, 32, 1}},   {"fp64", "torch.float64", {kDLFloat, 64, 1}},
    {"int32", "torch.int32", {kDLInt, 32, 1}},      {"int64", "torch.int64", {kDLInt, 64, 1}},
    {"uint8", "torch.uint8", {kDLUInt, 8, 1}},      {"bool", "torch.bool", {6, 8, 1}},
    {"fp8_e4m3", "torch.float8_e4m3fn", {10, 8, 1}}};

const DtypeName& dtype_of_bit(uint32_t bit) { return kDtypes[__builtin_ctz(bit)]; }

// Where a call needs a stream. Of device types that there are not the library says so.
bool is_gpu(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged ||
         device.device_type == kDLROCM;
}

bool equal(PyObject* a, PyObject* b) { return a == b || PyUnicode_Compare(a, b) == 0; }

const char* text_of(PyObject* value) { return PyUnicode_AsUTF8AndSize(value, nullptr); }

// "k" of "k_out", where k is an optional argument: who gives it wants its result.
int32_t followed(const rlk_op_schema& schema, const rlk_argument& result) {
  const std::string_view name = result.name;
  constexpr std::string_view kOut = "_out";
  for (uint32_t i = 0; i < schema.num_arguments; ++i) {
    const rlk_argument& a = schema.arguments[i];
    if (a.role != RLK_READ || !(a.flags & RLK_OPTIONAL)) continue;
    const std::string_view given = a.name;
    // "k_out" goes with "k", and in its gradient "d_k" with "d_k_out".
    if (name == std::string(given) + std::string(kOut) || given == std::string(name) + std::string(kOut))
      return static_cast<int32_t>(i);
  }
  return -1;
}

// Optional results that a recorded call has for its backward: those that it cannot be without, and what it would compute again
// from whole rows though it is a few numbers of each, which never have fewer than 32 bits (a softmax's sums, a norm's rstd).
// What is as large as its inputs (KDA's states) is asked for by who has the memory.
std::vector<uint32_t> kept_by(const rlk_op_schema& schema) {
  const int32_t at = schema.backward && *schema.backward ? rlk_op_index(schema.backward) : -1;
  std::vector<uint32_t> out;
  for (uint32_t i = 0; at >= 0 && i < schema.num_arguments; ++i) {
    const rlk_argument& a = schema.arguments[i];
    if (a.role != RLK_WRITE || !(a.flags & RLK_OPTIONAL) || !(a.flags & RLK_SAVED)) continue;
    const bool few = a.batch_axis != -1 && !(a.dtypes & ~(RLK_F32 | RLK_F64));
    const rlk_op_schema& backward = *rlk_op_schema_at(at);
    for (uint32_t j = 0; j < backward.num_arguments; ++j) {
      const rlk_argument& b = backward.arguments[j];
      if (b.role == RLK_READ && std::strcmp(a.name, b.name) == 0 && (few || !(b.flags & RLK_OPTIONAL)))
        out.push_back(i);
    }
  }
  return out;
}

// Python's own words for a signature, which help() and inspect read.
std::string signature_of(const rlk_op_schema& s, const std::string& name) {
  std::string text = name + "(";
  bool defaults = false;  // Python knows no argument without one behind one that has it
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    if (s.arguments[i].role == RLK_WRITE) continue;
    defaults |= s.arguments[i].flags & RLK_OPTIONAL;
    text += std::string(s.arguments[i].name) + (defaults ? "=None, " : ", ");
  }
  text += "*";
  for (uint32_t i = 0; i < s.num_arguments; ++i)
    if (s.arguments[i].role == RLK_WRITE) text += ", " + std::string(s.arguments[i].name) + "=None";
  for (uint32_t i = 0; i < s.num_attributes; ++i) text += ", " + std::string(s.attributes[i].name) + "=...";
  return text +
         ", backend=None, arithmetic=None, precision=None, gradients=None, deterministic=False, threads=0, "
         "evidence=False)\n--\n\n";
}

std::string doc_of(const rlk_op_schema& s, const std::string& name) {
  std::string text = signature_of(s, name) + s.doc + "\n\n";
  constexpr const char* kRoles[] = {"", " (result)", " (changed in place)"};
  for (uint32_t i = 0; i < s.num_arguments; ++i)
    text += std::string("  ") + s.arguments[i].name + kRoles[s.arguments[i].role] + ": " +
            s.arguments[i].doc + "\n";
  for (uint32_t i = 0; i < s.num_attributes; ++i) {
    const rlk_attribute& a = s.attributes[i];
    text += std::string("  ") + a.name + ": " + a.doc;
    if (a.type == RLK_CHOICE) text += std::string(" [") + a.choices + "]";
    text += "\n";
  }
  return text;
}

bool set(PyObject* dict, const char* name, PyObject* value) {
  const Owned owned(value);
  return owned && PyDict_SetItemString(dict, name, owned.get()) == 0;
}

// A tuple of (name, description) for every slot of a kind.
PyObject* describe_argument(const rlk_argument& a) {
  const Owned out(PyDict_New());
  if (!out || !set(out.get(), "name", PyUnicode_FromString(a.name)) ||
      !set(out.get(), "doc", PyUnicode_FromString(a.doc)) ||
      !set(out.get(), "role", PyLong_FromLong(a.role)) ||
      !set(out.get(), "dtypes", PyLong_FromLong(static_cast<long>(a.dtypes))) ||
      !set(out.get(), "min_rank", PyLong_FromLong(a.min_rank)) ||
      !set(out.get(), "max_rank", PyLong_FromLong(a.max_rank)) ||
      !set(out.get(), "batch_axis", PyLong_FromLong(a.batch_axis)) ||
      !set(out.get(), "optional", PyBool_FromLong(a.flags & RLK_OPTIONAL)) ||
      !set(out.get(), "differentiable",
           PyBool_FromLong(a.role != RLK_WRITE && !(a.flags & RLK_NO_GRADIENT))) ||
      !set(out.get(), "saved", PyBool_FromLong(a.flags & RLK_SAVED)) ||
      !set(out.get(), "strided", PyBool_FromLong(a.flags & RLK_STRIDED)) ||
      !set(out.get(), "host", PyBool_FromLong(a.flags & RLK_HOST)))
    return nullptr;
  Py_INCREF(out.get());
  return out.get();
}

PyObject* describe_attribute(const rlk_attribute& a, rlk_slot value) {
  constexpr const char* kTypes[] = {"int", "float", "flag", "choice"};
  const Owned out(PyDict_New());
  if (!out || !set(out.get(), "name", PyUnicode_FromString(a.name)) ||
      !set(out.get(), "doc", PyUnicode_FromString(a.doc)) ||
      !set(out.get(), "type", PyUnicode_FromString(kTypes[a.type])) ||
      !set(out.get(), "choices", PyUnicode_FromString(a.choices ? a.choices : "")) ||
      !set(out.get(), "default",
           a.type == RLK_FLOAT  ? PyFloat_FromDouble(value.f)
           : a.type == RLK_FLAG ? PyBool_FromLong(value.i != 0)
                                : PyLong_FromLongLong(value.i)))
    return nullptr;
  Py_INCREF(out.get());
  return out.get();
}

}  // namespace

// ---- Op ----------------------------------------------------------------------------------------------------------------------

Op::Op(const char* op, int32_t at)
    : name(op), index(at), schema(rlk_op_schema_at(at)), kept(kept_by(*schema)) {
  const rlk_op_schema& s = *schema;
  doc = doc_of(s, name);
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    names.push_back(PyUnicode_InternFromString(s.arguments[i].name));
    if (s.arguments[i].role == RLK_WRITE)
      ++results;
    else
      positional.push_back(i);
    if (s.arguments[i].flags & RLK_SAVED) saved.push_back(i);
    const bool result = s.arguments[i].role == RLK_WRITE && s.arguments[i].flags & RLK_OPTIONAL;
    follows.push_back(result ? followed(s, s.arguments[i]) : -1);
  }
  for (uint32_t i = 0; i < s.num_attributes; ++i) {
    names.push_back(PyUnicode_InternFromString(s.attributes[i].name));
    auto& words = choices.emplace_back();
    std::string_view list = s.attributes[i].choices ? s.attributes[i].choices : "";
    while (!list.empty()) {
      const auto bar = list.find('|');
      words.push_back(PyUnicode_InternFromString(std::string(list.substr(0, bar)).c_str()));
      list = bar == list.npos ? "" : list.substr(bar + 1);
    }
  }
  if (const rlk_code code = rlk_default_slots(op, defaults, slots())) raise(code, rlk_last_error());
}

int32_t Op::find(PyObject* keyword) const {
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i] == keyword) return static_cast<int32_t>(i);
  for (std::size_t i = 0; i < names.size(); ++i)
    if (PyUnicode_Compare(names[i], keyword) == 0) return static_cast<int32_t>(i);
  return -1;
}

PyObject* Op::describe() const {
  const rlk_op_schema& s = *schema;
  const Owned out(PyDict_New()), arguments(PyList_New(0)), attributes(PyList_New(0));
  if (!out || !arguments || !attributes) return nullptr;
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    const Owned one(describe_argument(s.arguments[i]));
    if (!one ||
        !set(one.get(), "kept", PyBool_FromLong(std::find(kept.begin(), kept.end(), i) != kept.end())) ||
        !set(
            one.get(), "follows",
            follows[i] < 0 ? PyUnicode_FromString("") : PyUnicode_FromString(s.arguments[follows[i]].name)) ||
        PyList_Append(arguments.get(), one.get()) < 0)
      return nullptr;
  }
  for (uint32_t i = 0; i < s.num_attributes; ++i) {
    const Owned one(describe_attribute(s.attributes[i], defaults[s.num_arguments + i]));
    if (!one || PyList_Append(attributes.get(), one.get()) < 0) return nullptr;
  }
  if (PyDict_SetItemString(out.get(), "arguments", arguments.get()) < 0 ||
      PyDict_SetItemString(out.get(), "attributes", attributes.get()) < 0 ||
      !set(out.get(), "name", PyUnicode_FromString(s.name)) ||
      !set(out.get(), "doc", PyUnicode_FromString(s.doc)) ||
      !set(out.get(), "aliases", PyUnicode_FromString(s.aliases ? s.aliases : "")) ||
      !set(out.get(), "backward", PyUnicode_FromString(s.backward ? s.backward : "")))
    return nullptr;
  Py_INCREF(out.get());
  return out.get();
}

// ---- reading Python's arguments ------------------------------------------------------------------------------------------

Call::Call(const Op& op, Face face) : op_(op), face_(face) {
  std::memcpy(slots_, op.defaults, op.slots() * sizeof(rlk_slot));
  std::uninitialized_default_construct_n(parts(), op.schema->num_arguments);
  options_.struct_size = sizeof options_;
}
Call::~Call() { std::destroy_n(parts(), op_.schema->num_arguments); }

bool Call::read(PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  if (static_cast<std::size_t>(nargs) > op_.positional.size()) {
    PyErr_Format(PyExc_TypeError,
                 "%s takes %d arguments by position, %d were given; results and attributes go by name",
                 op_.name.c_str(), static_cast<int>(op_.positional.size()), static_cast<int>(nargs));
    return false;
  }
  for (Py_ssize_t i = 0; i < nargs; ++i)
    if (!read_argument(op_.positional[static_cast<std::size_t>(i)], args[i])) return false;
  const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i)
    if (!read_keyword(PyTuple_GetItem(names, i), args[nargs + i])) return false;
  return true;
}

bool Call::read(PyObject* args, PyObject* keywords) {
  PyObject* given[RLK_MAX_SLOTS];
  const Py_ssize_t nargs = PyTuple_Size(args);
  for (Py_ssize_t i = 0; i < nargs && i < RLK_MAX_SLOTS; ++i) given[i] = PyTuple_GetItem(args, i);
  if (!read(given, nargs, nullptr)) return false;
  PyObject *keyword = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(keywords, &at, &keyword, &value);)
    if (!read_keyword(keyword, value)) return false;
  return true;
}

bool Call::read_keyword(PyObject* keyword, PyObject* value) {
  const int32_t slot = op_.find(keyword);
  const bool argument = slot >= 0 && static_cast<uint32_t>(slot) < op_.schema->num_arguments;
  if (argument && slots_[slot].tensor) {
    PyErr_Format(PyExc_TypeError, "%s got %U twice", op_.name.c_str(), keyword);
    return false;
  }
  return argument    ? read_argument(static_cast<uint32_t>(slot), value)
         : slot >= 0 ? read_attribute(static_cast<uint32_t>(slot), value)
                     : read_option(keyword, value);
}

bool Call::read_argument(uint32_t i, PyObject* value) {
  if (value == Py_None || value == Py_False) return true;
  if (op_.argument(i).role != RLK_WRITE) return read_tensor(i, value);
  if (value == Py_True) return parts()[i].wanted = true;
  const bool of_torch = is_torch_dtype(value);
  if (!of_torch && !PyUnicode_Check(value)) return read_tensor(i, value);
  const Owned said(PyObject_Str(value));
  const char* word = said ? text_of(said.get()) : nullptr;
  if (!word) return false;
  for (uint32_t bit = 0; bit < std::size(kDtypes); ++bit)
    if (std::strcmp(word, of_torch ? kDtypes[bit].torch : kDtypes[bit].name) == 0) {
      parts()[i].dtype = 1u << bit;
      return parts()[i].wanted = true;
    }
  raise_text(RLK_INVALID_ARGUMENT,
             "%s: %s is '%s', it takes a tensor, True or a dtype: fp16, bf16, fp32, fp64", op_.schema->name,
             op_.argument(i).name, word);
  return false;
}

bool Call::read_tensor(uint32_t i, PyObject* value) {
  Part& part = parts()[i];
  const auto use = face_ == Face::question   ? TensorView::Use::look
                   : face_ == Face::torch    ? TensorView::Use::torch
                   : face_ == Face::recorded ? TensorView::Use::recorded
                                             : TensorView::Use::plain;
  const bool writes = op_.argument(i).role != RLK_READ && face_ != Face::question;
  if (!part.view.take(value, use, writes, op_.schema->name, op_.argument(i).name, asked_)) {
    needs_dispatcher_ |= part.view.wants_dispatcher();
    return false;
  }
  needs_gradient_ |= part.view.needs_gradient();
  part.object = value;
  slots_[i].tensor = &part.view.tensor();
  if (!first_ && !(op_.argument(i).flags & RLK_HOST)) first_ = &part.view, like_ = value;
  return true;
}

bool Call::refuse(const char* name, PyObject* value, const char* takes) {
  Raised raised;
  if (raised.passes()) return false;
  const Owned shown(PyObject_ASCII(value));
  const char* const all = shown ? text_of(shown.get()) : nullptr;
  PyErr_Clear();
  const std::string text = all ? all : "what cannot be shown";
  constexpr std::size_t kMost = 60;
  raise_text(RLK_INVALID_ARGUMENT, "%s: %s is %s%s, it takes %s", op_.schema->name, name,
             text.substr(0, std::min(kMost, text.find('\n'))).c_str(), text.size() > kMost ? "..." : "",
             takes);
  raised.becomes_cause();
  return false;
}

bool Call::read_attribute(uint32_t i, PyObject* value) {
  const rlk_attribute& a = op_.schema->attributes[i - op_.schema->num_arguments];
  if (value == Py_None) return true;
  if (a.type == RLK_CHOICE) return read_choice(i, value);
  if (a.type == RLK_FLOAT) {
    slots_[i].f = PyFloat_AsDouble(value);
    return !(slots_[i].f == -1 && PyErr_Occurred()) || refuse(a.name, value, "a number");
  }
  slots_[i].i = PyLong_AsLongLong(value);
  if (slots_[i].i != -1 || !PyErr_Occurred()) return true;
  if (a.type != RLK_FLAG) return refuse(a.name, value, "an integer of 64 bits");
  if (!is_numpy_bool(value)) return refuse(a.name, value, "True or False");
  PyErr_Clear();
  slots_[i].i = PyObject_IsTrue(value);
  return slots_[i].i >= 0;
}

bool Call::read_choice(uint32_t i, PyObject* value) {
  const uint32_t at = i - op_.schema->num_arguments;
  const rlk_attribute& a = op_.schema->attributes[at];
  const auto& words = op_.choices[at];
  if (!PyUnicode_Check(value)) {
    slots_[i].i = PyLong_AsLongLong(value);
    return !(slots_[i].i == -1 && PyErr_Occurred()) || refuse(a.name, value, a.choices);
  }
  const auto word = std::find_if(words.begin(), words.end(), [=](PyObject* w) { return equal(w, value); });
  slots_[i].i = word - words.begin();
  if (word != words.end()) return true;
  const char* text = text_of(value);
  if (!text) return refuse(a.name, value, a.choices);
  raise_text(RLK_INVALID_ARGUMENT, "%s: %s is '%s', it is one of %s", op_.schema->name, a.name, text,
             a.choices);
  return false;
}

bool Call::read_option(PyObject* keyword, PyObject* value) {
  const Names& n = names();
  const std::pair<PyObject*, const char**> texts[] = {{n.backend, &options_.backend},
                                                      {n.arithmetic, &options_.arithmetic},
                                                      {n.precision, &options_.precision},
                                                      {n.gradients, &options_.gradients}};
  for (const auto& [name, member] : texts)
    if (equal(name, keyword)) {
      if (value == Py_None) return true;
      Py_ssize_t size = 0;
      *member = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
      if (*member && std::strlen(*member) == static_cast<std::size_t>(size)) return true;
      return refuse(text_of(keyword), value, "a name");
    }
  const std::pair<PyObject*, uint32_t*> flags[] = {{n.deterministic, &options_.deterministic},
                                                   {n.evidence, &options_.evidence}};
  for (const auto& [name, member] : flags)
    if (equal(name, keyword)) {
      const int truth = PyObject_IsTrue(value);
      *member = truth > 0;
      return truth >= 0 || refuse(text_of(keyword), value, "True or False");
    }
  if (equal(n.threads, keyword)) {
    const long count = PyLong_AsLong(value);
    options_.threads = static_cast<int32_t>(count);
    return (options_.threads == count && !(count == -1 && PyErr_Occurred())) ||
           refuse("threads", value, "a number of threads");
  }
  const char* word = text_of(keyword);
  if (!word) PyErr_Clear(), word = "?";  // it has a lone surrogate
  const std::string text = op_.name + ": no argument, attribute or option is called '" + word + "'";
  raise(RLK_UNKNOWN_NAME, text.c_str(), op_.name.c_str());
  return false;
}

// ---- running --------------------------------------------------------------------------------------------------------------

// Which results there will be: those that were given or asked for, those that must be, and those that follow an argument.
bool Call::want_results() {
  bool any = false, some = false, could = false, infer = false;
  for (uint32_t i = 0; i < op_.schema->num_arguments; ++i) {
    const rlk_argument& a = op_.argument(i);
    if (a.role == RLK_READ) continue;
    if (slots_[i].tensor || a.role == RLK_READWRITE) {
      some = true;
      continue;
    }
    Part& part = parts()[i];
    could = true;
    if (!(a.flags & RLK_OPTIONAL) || (op_.follows[i] >= 0 && slots_[op_.follows[i]].tensor))
      part.wanted = true;
    any |= part.wanted && !part.hidden;
    infer |= part.wanted;
  }
  if (could && !some && !any) {
    raise_text(RLK_INVALID_ARGUMENT, "%s: no result is asked for, each is optional: name=True asks for one",
               op_.schema->name);
    return false;
  }
  if (!infer) return true;
  const rlk_code code = rlk_infer_slots(op_.index, slots_, op_.slots(), shapes_);
  if (code != RLK_OK) return fail(code), false;
  inferred_ = true;
  for (uint32_t i = 0; i < op_.schema->num_arguments; ++i)
    if (parts()[i].wanted && !shapes_[i].dtypes) {
      parts()[i].wanted = !parts()[i].hidden;
      if (parts()[i].hidden) continue;
      raise_text(RLK_INVALID_ARGUMENT, "%s: %s is asked for, this call cannot have it", op_.schema->name,
                 op_.argument(i).name);
      return false;
    }
  return true;
}

void set_error(void*, const char* kind, const char* message) {
  (void)kind;
  PyErr_SetString(PyExc_MemoryError, message);
}

bool Call::allocate_by_framework(Part& part, const DLTensor& like) {
  const TensorType& type = *first_->type();
  const ExchangeApi& api = *type.api;
  ManagedTensorVersioned* managed = nullptr;
  DLTensor prototype = like;
  if (api.allocate(&prototype, &managed, nullptr, set_error) != 0 || !managed) return false;
  part.allocated.data = managed->tensor.data;
  part.allocated.byte_offset = managed->tensor.byte_offset;
  if (type.is_torch()) {
    part.made = Owned(torch_native()->object_of(*managed));
    managed->deleter(managed);
    return bool(part.made);
  }
  void* object = nullptr;
  if (api.to_object(managed, &object) != 0) return false;
  part.made = Owned(static_cast<PyObject*>(object));
  return true;
}

bool Call::allocate(uint32_t i) {
  Part& part = parts()[i];
  const rlk_shape& shape = shapes_[i];
  const DtypeName& dtype = dtype_of_bit(part.dtype ? part.dtype : shape.preferred);
  const DLDevice device = first_ ? first_->tensor().device : DLDevice{kDLCPU, 0};
  part.allocated = {nullptr, device, shape.ndim, dtype.type, shapes_[i].dim, nullptr, 0};
  slots_[i].tensor = &part.allocated;
  int64_t strides[RLK_MAX_RANK];
  int64_t step = 1;
  for (int32_t d = shape.ndim; d-- > 0;) {
    strides[d] = step;
    if (!__builtin_mul_overflow(step, shape.dim[d], &step)) continue;
    PyErr_SetString(PyExc_MemoryError, "it has more elements than an address space has");
    return false;
  }
  // Where only torch's Python functions give a tensor whose memory is torch's own, they are asked.
  if (first_ && first_->type()->api && (!first_->type()->is_torch() || torch_native())) {
    DLTensor prototype = part.allocated;
    prototype.strides = strides;
    return allocate_by_framework(part, prototype);
  }
  const Owned pair = call_empty(like_, shape, dtype.name);
  if (!pair) return false;
  PyObject *buffer, *finish;
  if (!PyArg_ParseTuple(pair.get(), "OO", &buffer, &finish)) return false;
  TensorView view;
  if (!view.take(buffer, TensorView::Use::plain, true, op_.schema->name, op_.argument(i).name)) return false;
  part.allocated.data = view.tensor().data;
  part.allocated.byte_offset = view.tensor().byte_offset;
  Py_INCREF(buffer);
  part.made = Owned(buffer);
  if (finish != Py_None) {
    Py_INCREF(finish);
    part.finish = Owned(finish);
  }
  return true;
}

// Stream and workspace of a device come from the framework of the first tensor.
bool Call::use_device(bool small) {
  if (!first_ || !is_gpu(first_->tensor().device)) {
    if (first_ && !options_.threads && first_->type()->kind == TensorType::torch)
      options_.threads = small ? 1 : torch_threads();  // for so few elements nobody wakes another thread
    return true;
  }
  const DLDevice device = first_->tensor().device;
  options_.allocate_context = this;
  if (const ExchangeApi* api = first_->type()->api) {
    options_.allocate = give_workspace;
    return api->current_stream(device.device_type, device.device_id, &options_.stream) == 0;
  }
  const Owned stream = call_stream(like_, device.device_id);
  if (!stream) return false;
  if (stream.get() == Py_None) {
    raise_text(RLK_UNSUPPORTED,
               "%s: %s is on %s:%d and its type has no DLPack exchange API, so that its stream is not known",
               op_.schema->name, first_->argument(), device.device_type == kDLROCM ? "hip" : "cuda",
               device.device_id);
    return false;
  }
  options_.allocate = give_bytes;
  options_.stream = PyLong_AsVoidPtr(stream.get());
  return !PyErr_Occurred();
}

// Freed when the call returns: the framework's allocator hands it out again in the order of the stream.
void* Call::give_workspace(void* context, uint64_t bytes) {
  Call& call = *static_cast<Call*>(context);
  const ExchangeApi& api = *call.first_->type()->api;
  int64_t size = static_cast<int64_t>(bytes), step = 1;
  DLTensor prototype{nullptr, call.first_->tensor().device, 1, {kDLUInt, 8, 1}, &size, &step, 0};
  ManagedTensorVersioned* managed = nullptr;
  if (api.allocate(&prototype, &managed, nullptr, set_error) != 0 || !managed) return PyErr_Clear(), nullptr;
  void* const data = static_cast<char*>(managed->tensor.data) + managed->tensor.byte_offset;
  void* object = nullptr;
  if (api.to_object(managed, &object) != 0) return PyErr_Clear(), nullptr;
  call.workspace_ = Owned(static_cast<PyObject*>(object));
  return data;
}

// The same, from a framework that is asked in Python.
void* Call::give_bytes(void* context, uint64_t bytes) {
  Call& call = *static_cast<Call*>(context);
  rlk_shape shape{};
  shape.ndim = 1, shape.dim[0] = static_cast<int64_t>(bytes);
  const Owned pair = call_empty(call.like_, shape, "uint8");
  PyObject *buffer = nullptr, *finish = nullptr;
  TensorView view;
  if (!pair || !PyArg_ParseTuple(pair.get(), "OO", &buffer, &finish) ||
      !view.take(buffer, TensorView::Use::plain, true, call.op_.schema->name, "workspace"))
    return PyErr_Clear(), nullptr;
  Py_INCREF(buffer);
  call.workspace_ = Owned(buffer);
  return static_cast<char*>(view.tensor().data) + view.tensor().byte_offset;
}

// A call of so few elements is over before another thread could have taken the interpreter's lock.
bool Call::is_small() const noexcept {
  int64_t elements = 0;
  for (uint32_t i = 0; i < op_.schema->num_arguments; ++i) {
    const DLTensor* const t = slots_[i].tensor;
    if (!t) continue;
    int64_t mine = 1;
    if (t->ndim > RLK_MAX_RANK || !t->shape) continue;  // which the library refuses
    for (int32_t d = 0; d < t->ndim && mine <= kSmall; ++d) mine *= t->shape[d];
    elements += mine;
    if (elements > kSmall) return false;
  }
  return true;
}

PyObject* Call::run() {
  if (!want_results()) return nullptr;
  for (uint32_t i = 0; inferred_ && i < op_.schema->num_arguments; ++i)
    if (parts()[i].wanted && !allocate(i)) return fail_to_allocate(i);
  const bool small = is_small();
  if (!use_device(small)) return nullptr;
  rlk_code code;
  if (options_.allocate || small) {  // a launch is short too, and its allocator may need the interpreter
    code = rlk_run_slots(op_.index, slots_, op_.slots(), &options_);
  } else {
    const Unlocked others_run;
    code = rlk_run_slots(op_.index, slots_, op_.slots(), &options_);
  }
  return code == RLK_OK ? results() : fail(code);
}

PyObject* Call::fail_to_allocate(uint32_t i) {
  Raised raised;
  if (raised.passes()) return nullptr;
  std::string shape;
  for (int32_t d = 0; d < shapes_[i].ndim; ++d) shape += (d ? ", " : "") + std::to_string(shapes_[i].dim[d]);
  raise_text(RLK_OUT_OF_MEMORY, "%s: there is no memory for %s [%s]: %s", op_.schema->name,
             op_.argument(i).name, shape.c_str(), raised.line().c_str());
  raised.becomes_cause();
  return nullptr;
}

// One result as itself, several as a tuple in the schema's order; None for an op that has none. What is changed in place is a result
// of an op that has no others.
PyObject* Call::results() {
  PyObject* found[RLK_MAX_SLOTS];
  Py_ssize_t n = 0;
  bool writes = false;
  for (uint32_t i = 0; i < op_.schema->num_arguments; ++i) writes |= op_.argument(i).role == RLK_WRITE;
  for (uint32_t i = 0; i < op_.schema->num_arguments; ++i) {
    Part& part = parts()[i];
    const int32_t role = op_.argument(i).role;
    if (role == RLK_READ || !slots_[i].tensor || part.hidden) continue;
    if (part.finish) {
      const Owned buffer(PyTuple_Pack(1, part.made.get()));
      part.made = buffer ? call_python(part.finish.get(), buffer.get()) : Owned();
      if (!part.made) return nullptr;
    }
    if (role == RLK_WRITE || !writes) found[n++] = part.made ? part.made.get() : part.object;
    if (part.object && part.view.type()->kind == TensorType::torch) torch_written(part.object);
  }
  if (n <= 1) {
    PyObject* const only = n ? found[0] : Py_None;
    Py_INCREF(only);
    return only;
  }
  PyObject* const tuple = PyTuple_New(n);
  for (Py_ssize_t i = 0; tuple && i < n; ++i) {
    Py_INCREF(found[i]);
    PyTuple_SetItem(tuple, i, found[i]);
  }
  return tuple;
}

PyObject* Call::fail(rlk_code code) {
  const std::string text = rlk_last_error();  // which resolving again would replace
  char* resolution = nullptr;
  if (code == RLK_NO_IMPLEMENTATION)
    resolution = rlk_resolve_slots_json(op_.index, slots_, op_.slots(), &options_);
  raise(code, text.c_str(), op_.name.c_str(), resolution);
  rlk_free(resolution);
  return nullptr;
}

// ---- recorded calls --------------------------------------------------------------------------------------------------------

const char* Call::text(std::size_t i) const noexcept {
  const char* const all[kTexts] = {options_.backend, options_.arithmetic, options_.precision,
                                   options_.gradients};
  return all[i];
}

std::size_t Call::words(int64_t* out) const noexcept {
  const uint32_t arguments = op_.schema->num_arguments;
  for (uint32_t i = 0; i < arguments; ++i) {
    const Part& part = parts()[i];
    out[i] = (slots_[i].tensor != nullptr) | part.wanted << 1 | static_cast<int64_t>(part.dtype) << 2;
  }
  for (uint32_t i = arguments; i < op_.slots(); ++i) out[i] = slots_[i].i;
  int64_t* const options = out + op_.slots();
  options[0] = options_.deterministic, options[1] = options_.evidence, options[2] = options_.threads;
  options[3] = 0;
  for (std::size_t t = 0; t < kTexts; ++t) options[3] |= static_cast<int64_t>(text(t) != nullptr) << t;
  return op_.slots() + kOptionWords;
}

bool Call::is(const Kind& kind) const noexcept {
  int64_t mine[RLK_MAX_SLOTS + kOptionWords];
  const std::size_t n = words(mine);
  if (n != kind.words.size() || std::memcmp(mine, kind.words.data(), n * sizeof *mine) != 0) return false;
  for (std::size_t t = 0; t < kTexts; ++t)
    if (text(t) && kind.texts[t] != text(t)) return false;
  return true;
}

Call::Kind Call::kind() const {
  Kind kind{std::vector<int64_t>(op_.slots() + kOptionWords), std::vector<std::string>(kTexts)};
  words(kind.words.data());
  for (std::size_t t = 0; t < kTexts; ++t)
    if (text(t)) kind.texts[t] = text(t);
  return kind;
}

bool Call::can_be_recorded() const noexcept {
  for (uint32_t i = 0; i < op_.schema->num_arguments; ++i)
    if (slots_[i].tensor &&
        (op_.argument(i).role != RLK_READ || parts()[i].view.type()->kind != TensorType::torch))
      return false;
  return true;
}

PyObject* Call::inputs(PyObject* first) const {
  PyObject* const tuple = PyTuple_New(1 + static_cast<Py_ssize_t>(op_.positional.size()));
  if (!tuple) return nullptr;
  Py_INCREF(first);
  PyTuple_SetItem(tuple, 0, first);
  for (std::size_t at = 0; at < op_.positional.size(); ++at) {
    PyObject* const given = parts()[op_.positional[at]].object;
    PyObject* const item = given ? given : Py_None;
    Py_INCREF(item);
    PyTuple_SetItem(tuple, 1 + static_cast<Py_ssize_t>(at), item);
  }
  return tuple;
}

void Call::keep() noexcept {
  for (const uint32_t i : op_.kept) {
    Part& part = parts()[i];
    if (!part.wanted && !slots_[i].tensor) part.wanted = part.hidden = true;
  }
}

PyObject* Call::object(uint32_t i) const noexcept {
  return parts()[i].made ? parts()[i].made.get() : parts()[i].object;
}

PyObject* Call::kept() const {
  const auto saved = static_cast<Py_ssize_t>(op_.saved.size());
  PyObject* const tuple = PyTuple_New(saved);
  for (Py_ssize_t at = 0; tuple && at < saved; ++at) {
    PyObject* const found = object(op_.saved[static_cast<std::size_t>(at)]);
    PyObject* const item = found ? found : Py_None;
    Py_INCREF(item);
    PyTuple_SetItem(tuple, at, item);
  }
  return tuple;
}

void Call::guard_kept(Tickets& tickets) const {
  for (const uint32_t i : op_.saved)
    if (slots_[i].tensor) tickets.add(*slots_[i].tensor, op_.argument(i).name);
}

// ---- questions ------------------------------------------------------------------------------------------------------------

// Optional results that are asked for, as shapes without data: they may change the choice.
bool Call::give_shapes() {
  if (!want_results()) return false;
  for (uint32_t i = 0; inferred_ && i < op_.schema->num_arguments; ++i) {
    Part& part = parts()[i];
    if (!part.wanted) continue;
    const DtypeName& dtype = dtype_of_bit(part.dtype ? part.dtype : shapes_[i].preferred);
    const DLDevice device = first_ ? first_->tensor().device : DLDevice{kDLCPU, 0};
    part.allocated = {nullptr, device, shapes_[i].ndim, dtype.type, shapes_[i].dim, nullptr, 0};
    slots_[i].tensor = &part.allocated;
  }
  return true;
}

PyObject* Call::infer() {
  const rlk_code code = rlk_infer_slots(op_.index, slots_, op_.slots(), shapes_);
  if (code != RLK_OK) return fail(code);
  const Owned out(PyDict_New());
  for (uint32_t i = 0; out && i < op_.schema->num_arguments; ++i) {
    const rlk_shape& s = shapes_[i];
    if (op_.argument(i).role == RLK_READ || !s.dtypes) continue;
    const Owned sizes(PyTuple_New(s.ndim)), dtypes(PyList_New(0));
    if (!sizes || !dtypes) return nullptr;
    for (int32_t d = 0; d < s.ndim; ++d) PyTuple_SetItem(sizes.get(), d, PyLong_FromLongLong(s.dim[d]));
    for (uint32_t bit = 1; bit < RLK_ALL_DTYPES; bit <<= 1) {
      if (!(s.dtypes & bit)) continue;
      const Owned name(PyUnicode_FromString(dtype_of_bit(bit).name));
      if (!name || PyList_Append(dtypes.get(), name.get()) < 0) return nullptr;
    }
    if (!set(out.get(), op_.argument(i).name,
             Py_BuildValue("(OsO)", sizes.get(), dtype_of_bit(s.preferred).name, dtypes.get())))
      return nullptr;
  }
  Py_XINCREF(out.get());
  return out.get();
}

PyObject* Call::resolve() {
  if (!give_shapes()) return nullptr;
  char* text = rlk_resolve_slots_json(op_.index, slots_, op_.slots(), &options_);
  if (!text) return fail(RLK_INVALID_ARGUMENT);
  PyObject* out = PyUnicode_FromString(text);
  rlk_free(text);
  return out;
}

PyObject* Call::explain() {
  if (!give_shapes()) return nullptr;
  char* text = rlk_explain_slots(op_.index, slots_, op_.slots(), &options_);
  if (!text) return fail(RLK_INVALID_ARGUMENT);
  PyObject* out = PyUnicode_FromString(text);
  rlk_free(text);
  return out;
}

}  // namespace rlk::python
