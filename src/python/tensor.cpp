#include "src/python/tensor.hpp"

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace rlk::python {
namespace {

// ---- torch, where it is imported: looked up in sys.modules, never imported from here ---------------------------------

struct Torch {
  PyObject *tensor, *parameter;
  PyObject *grad_enabled, *threads, *dispatch_modes, *function_modes, *transforms, *written;
};

PyObject* attribute_of(const char* module, const char* name) {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  PyObject* found = modules ? PyDict_GetItemString(modules, module) : nullptr;
  return found ? PyObject_GetAttrString(found, name) : nullptr;
}

const Torch* torch() {
  static Torch all{};
  static bool ready = false;
  if (ready) return &all;
  Torch found{attribute_of("torch", "Tensor"),
              attribute_of("torch.nn", "Parameter"),
              attribute_of("torch", "is_grad_enabled"),
              attribute_of("torch", "get_num_threads"),
              attribute_of("torch._C", "_len_torch_dispatch_stack"),
              attribute_of("torch._C", "_len_torch_function_stack"),
              attribute_of("torch._C._functorch", "peek_interpreter_stack"),
              attribute_of("torch._C", "_increment_version")};
  PyErr_Clear();
  if (!found.tensor || !found.parameter || !found.grad_enabled || !found.threads) return nullptr;
  all = found;
  ready = true;
  return &all;
}

// A call of a function without arguments that returns a number; -1 with an exception.
long number_of(PyObject* function) {
  if (!function) return 0;
  const Owned value(PyObject_CallNoArgs(function));
  return value ? PyLong_AsLong(value.get()) : -1;
}

// ---- types ----------------------------------------------------------------------------------------------------------------

const ExchangeApi* api_of(PyTypeObject* type) {
  const Owned capsule(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), names().exchange));
  if (!capsule) return PyErr_Clear(), nullptr;
  const auto* api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  if (!api) PyErr_Clear();
  while (api && api->version.major > 1) api = api->earlier;
  return api && api->version.major == 1 && api->view_of_object ? api : nullptr;
}

TensorType::Kind kind_of(PyTypeObject* type) {
  const Owned module(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__module__"));
  const char* text = module ? PyUnicode_AsUTF8AndSize(module.get(), nullptr) : nullptr;
  PyErr_Clear();
  if (text && std::strncmp(text, "jax", 3) == 0) return TensorType::immutable;
  auto* object = reinterpret_cast<PyObject*>(type);
  if (text && std::strcmp(text, "numpy") == 0) {
    const Owned name(PyObject_GetAttrString(object, "__name__"));
    const char* word = name ? PyUnicode_AsUTF8AndSize(name.get(), nullptr) : nullptr;
    if (word && std::strcmp(word, "ndarray") == 0) return TensorType::numpy;
    PyErr_Clear();
  }
  const Torch* t = torch();
  if (!t) return TensorType::other;
  if (object == t->tensor || object == t->parameter) return TensorType::torch;
  const int is = PyObject_IsSubclass(object, t->tensor);
  if (is < 0) PyErr_Clear();
  return is > 0 ? TensorType::torch_subclass : TensorType::other;
}

// Types are few; each is looked at once and kept.
const TensorType* type_of(PyObject* object) {
  static auto& known = *new std::vector<const TensorType*>;
  PyTypeObject* const type = Py_TYPE(object);
  for (const TensorType* t : known)
    if (t->type == type) return t;
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  known.push_back(new TensorType{type, api_of(type), kind_of(type)});
  return known.back();
}

// The dtype of a buffer's format; no bits: none that is known here.
DLDataType dtype_of_format(const char* format, Py_ssize_t size) {
  if (!format || !format[0] || format[1]) return {};
  const auto bits = static_cast<uint8_t>(8 * size);
  switch (format[0]) {
    case 'e':
    case 'f':
    case 'd':
      return {kDLFloat, bits, 1};
    case 'i':
    case 'l':
    case 'q':
      return {kDLInt, bits, 1};
    case 'B':
      return {kDLUInt, bits, 1};
    case '?':
      return {6, bits, 1};
    default:
      return {};
  }
}

// "torch.Tensor", for messages.
std::string_view short_name(PyTypeObject* type, Owned& holder) {
  holder = Owned(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__name__"));
  const char* text = holder ? PyUnicode_AsUTF8AndSize(holder.get(), nullptr) : nullptr;
  return text ? text : "object";
}

}  // namespace

bool torch_modes_active() {
  const Torch* t = torch();
  if (!t) return false;
  if (number_of(t->dispatch_modes) != 0 || number_of(t->function_modes) != 0) return true;
  const Owned transform(t->transforms ? PyObject_CallNoArgs(t->transforms) : nullptr);
  return transform ? transform.get() != Py_None : PyErr_Occurred() != nullptr;
}

void torch_written(PyObject* tensors) {
  const Owned owned(tensors);
  const Torch* t = torch();
  if (!t || !t->written || !tensors) return PyErr_Clear();
  const Owned done(PyObject_CallFunctionObjArgs(t->written, tensors, nullptr));
  if (!done) PyErr_Clear();  // inference tensors have no version
}

int32_t torch_threads() {
  const Torch* t = torch();
  const long n = t ? number_of(t->threads) : 0;
  if (n < 0) PyErr_Clear();
  return n > 0 ? static_cast<int32_t>(n) : 0;
}

bool TensorView::refuse(PyObject* object, const char* why) const {
  Owned holder;
  const std::string_view name = short_name(Py_TYPE(object), holder);
  raise_text(RLK_INVALID_ARGUMENT, "%s: %s is of type %.*s, which %s", op_, argument_,
             static_cast<int>(name.size()), name.data(), why);
  return false;
}

bool TensorView::refuse_as_raised(PyObject* object) const {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const Owned kind(type), raised(value), where(trace);
  const Owned text(value ? PyObject_Str(value) : nullptr);
  const char* all = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  PyErr_Clear();
  const std::string_view said = all ? all : "no reason";
  const std::string why = "gives no DLPack view: " + std::string(said.substr(0, said.find('\n')));
  return refuse(object, why.c_str());
}

bool TensorView::take(PyObject* object, Use use, const char* op, const char* argument) {
  op_ = op;
  argument_ = argument;
  type_ = type_of(object);
  if (type_->api) return take_exchanged(object, use);
  if (type_->kind == TensorType::numpy && take_buffer(object, use)) return true;
  if (use == Use::look)
    if (const Owned shape(PyObject_GetAttr(object, names().spec_shape)); shape)
      return take_spec(shape.get(), object);
  PyErr_Clear();
  return take_capsule(object, use);
}

bool TensorView::take_exchanged(PyObject* object, Use use) {
  if (type_->api && use != Use::look &&
      (type_->kind == TensorType::torch || type_->kind == TensorType::torch_subclass)) {
    const auto to_dispatcher = [&](const char* why) {
      wants_dispatcher_ = use == Use::torch;
      return !wants_dispatcher_ && refuse(object, why);
    };
    if (type_->kind == TensorType::torch_subclass)
      return to_dispatcher("is no plain torch.Tensor: rlk.torch may take it");
    if (use != Use::recorded) {
      const Owned grad(PyObject_GetAttr(object, names().requires_grad));
      if (!grad) return false;
      const long enabled = grad.get() == Py_True ? number_of(torch()->grad_enabled) : 0;
      if (enabled < 0) return false;
      if (enabled) return to_dispatcher("requires grad here: use rlk.torch, or torch.no_grad()");
    }
    // The exchange API hands out the bytes as they lie, whatever this bit says.
    const Owned negative(PyObject_CallMethodObjArgs(object, names().is_neg, nullptr));
    if (!negative) return false;
    if (negative.get() == Py_True)
      return refuse(object, "has its negative bit set here: resolve_neg() writes it out");
  }
  return type_->api->view_of_object(object, &tensor_) == 0 || refuse_as_raised(object);
}

bool TensorView::take_capsule(PyObject* object, Use use) {
  if (use == Use::write && type_->kind == TensorType::immutable)
    return refuse(object, "never changes: it cannot be a result");
  Owned method(PyObject_GetAttr(object, names().dlpack));
  if (!method) return PyErr_Clear(), refuse(object, "is no tensor: it has no __dlpack__");
  const Owned nothing(PyTuple_New(0)), keywords(PyDict_New());
  if (!nothing || !keywords ||
      PyDict_SetItem(keywords.get(), names().max_version, names().dlpack_version) < 0)
    return false;
  capsule_ = PyObject_Call(method.get(), nothing.get(), keywords.get());
  if (!capsule_ && PyErr_ExceptionMatches(PyExc_TypeError)) {  // from before DLPack 1.0
    PyErr_Clear();
    capsule_ = PyObject_CallNoArgs(method.get());
  }
  if (!capsule_) return refuse_as_raised(object);
  // The capsule stays as it is: its destructor gives the tensor back.
  if (PyCapsule_IsValid(capsule_, "dltensor_versioned")) {
    const auto* t =
        static_cast<ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule_, "dltensor_versioned"));
    if (t->version.major != 1) return refuse(object, "speaks a DLPack that is not version 1");
    if (use == Use::write && t->flags & ManagedTensorVersioned::kReadOnly)
      return refuse(object, "is read-only: it cannot be a result");
    tensor_ = t->tensor;
    return true;
  }
  if (!PyCapsule_IsValid(capsule_, "dltensor")) return refuse(object, "gave no DLPack capsule");
  tensor_ = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule_, "dltensor"))->tensor;
  return true;
}

// A quarter of what a capsule costs. False without an exception: then the capsule's way takes it, or says why not.
bool TensorView::take_buffer(PyObject* object, Use use) {
  const int how = PyBUF_STRIDES | PyBUF_FORMAT | (use == Use::write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object, &buffer_, how) != 0) return PyErr_Clear(), false;
  buffered_ = true;
  const DLDataType dtype = dtype_of_format(buffer_.format, buffer_.itemsize);
  if (!dtype.bits || buffer_.ndim > RLK_MAX_RANK) return false;
  for (int i = 0; i < buffer_.ndim; ++i) {
    if (buffer_.strides[i] % buffer_.itemsize != 0) return false;
    strides_[i] = buffer_.strides[i] / buffer_.itemsize;
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  tensor_ = {
      buffer_.buf, {kDLCPU, 0}, buffer_.ndim, dtype, reinterpret_cast<int64_t*>(buffer_.shape), strides_, 0};
  return true;
}

// rlk.Spec: a shape and a dtype without data.
bool TensorView::take_spec(PyObject* shape, PyObject* object) {
  const Owned dtype(PyObject_GetAttr(object, names().spec_dtype)),
      device(PyObject_GetAttr(object, names().spec_device));
  int code = 0, bits = 0, type = 0, id = 0;
  if (!dtype || !device || !PyArg_ParseTuple(dtype.get(), "ii", &code, &bits) ||
      !PyArg_ParseTuple(device.get(), "ii", &type, &id))
    return false;
  const Py_ssize_t rank = PyTuple_Size(shape);
  if (rank < 0) return false;
  if (rank > RLK_MAX_RANK) return refuse(object, "has more dimensions than rlk takes");
  for (Py_ssize_t i = 0; i < rank; ++i) shape_[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
  if (PyErr_Occurred()) return false;
  tensor_ = {nullptr,
             {static_cast<DLDeviceType>(type), id},
             static_cast<int32_t>(rank),
             {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1},
             shape_,
             nullptr,
             0};
  return true;
}

}  // namespace rlk::python
