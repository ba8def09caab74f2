#include "src/python/tensor.hpp"

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "src/python/numpy_array.hpp"
#include "src/python/torch_native.hpp"

namespace rlk::python {
namespace {

// ---- torch, where it is imported: looked up in sys.modules, never imported from here ---------------------------------

// A function of torch's module, called without the interpreter between where it is C code that takes its one argument, or none,
// as it is: a quarter of what the shortest ones cost.
class Function {
 public:
  Function() = default;
  explicit Function(PyObject* object) : object_(object) {
    if (!object || !PyCFunction_CheckExact(object)) return;
    flags_ = PyCFunction_GetFlags(object);
    if (flags_ == METH_NOARGS || flags_ == METH_O) code_ = PyCFunction_GetFunction(object);
  }
  explicit operator bool() const noexcept { return object_; }
  Owned operator()() const { return call(METH_NOARGS, nullptr); }
  Owned operator()(PyObject* argument) const { return call(METH_O, argument); }

 private:
  Owned call(int flags, PyObject* argument) const {
    if (code_ && flags_ == flags) return Owned(code_(PyCFunction_GetSelf(object_), argument));
    return Owned(argument ? PyObject_CallFunctionObjArgs(object_, argument, nullptr)
                          : PyObject_CallNoArgs(object_));
  }

  PyObject* object_ = nullptr;
  PyCFunction code_ = nullptr;
  int flags_ = 0;
};

struct Torch {
  PyObject *tensor, *parameter, *dtype, *forward_mode, *requires_grad, *is_neg;
  Function function_mode_at, grad_enabled, threads, dispatch_modes, function_modes, transforms, jit_traces,
      written, saving_hooks, autocasts;
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
  const auto function = [](const char* module, const char* name) {
    return Function(attribute_of(module, name));
  };
  Torch found{attribute_of("torch", "Tensor"),
              attribute_of("torch.nn", "Parameter"),
              attribute_of("torch", "dtype"),
              attribute_of("torch.autograd", "forward_ad"),
              nullptr,
              nullptr,
              function("torch._C", "_get_function_stack_at"),
              function("torch", "is_grad_enabled"),
              function("torch", "get_num_threads"),
              function("torch._C", "_len_torch_dispatch_stack"),
              function("torch._C", "_len_torch_function_stack"),
              function("torch._C._functorch", "peek_interpreter_stack"),
              function("torch._C", "_is_tracing"),
              function("torch._C", "_increment_version"),
              function("torch._C._autograd", "_top_saved_tensors_default_hooks"),
              function("torch._C", "_is_any_autocast_enabled")};
  PyErr_Clear();
  if (!found.tensor || !found.parameter || !found.grad_enabled || !found.threads) return nullptr;
  // Looking these up in every tensor would cost as much as they do.
  found.requires_grad = PyObject_GetAttr(found.tensor, names().requires_grad);
  found.is_neg = PyObject_GetAttr(found.tensor, names().is_neg);
  if (!found.requires_grad || !found.is_neg) return PyErr_Clear(), nullptr;
  all = found;
  ready = true;
  return &all;
}

// An attribute of a plain tensor by its descriptor, a new reference.
PyObject* property_of(PyObject* tensor, PyObject* descriptor) {
  static const auto get =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get));
  return get(descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
}

// A call of a function without arguments that returns a number; -1 with an exception.
long number_of(const Function& function) {
  if (!function) return 0;
  const Owned value(function());
  return value ? PyLong_AsLong(value.get()) : -1;
}

// Whether autograd would record what a plain tensor is read by: 0, 1, or -1 with an exception.
int is_recorded(PyObject* tensor) {
  if (const TorchNative* native = torch_native())
    return native->requires_grad(tensor) && native->grad_enabled();
  const Owned grad(property_of(tensor, torch()->requires_grad));
  if (!grad) return -1;
  return grad.get() == Py_True ? static_cast<int>(number_of(torch()->grad_enabled)) : 0;
}

// Whether a plain tensor has its negative bit: 0, 1, or -1 with an exception. Of every tensor alike the code is one function of C's.
int is_negative(PyObject* tensor) {
  if (const TorchNative* native = torch_native()) return native->is_neg(tensor);
  static const PyCFunction code = [tensor]() -> PyCFunction {
    const Owned bound(PyObject_GetAttr(tensor, names().is_neg));
    const bool plain =
        bound && PyCFunction_CheckExact(bound.get()) && PyCFunction_GetFlags(bound.get()) == METH_NOARGS;
    PyErr_Clear();
    return plain ? PyCFunction_GetFunction(bound.get()) : nullptr;
  }();
  const Owned bit(code ? code(tensor, nullptr)
                       : PyObject_CallFunctionObjArgs(torch()->is_neg, tensor, nullptr));
  return bit ? bit.get() == Py_True : -1;
}

// Whether forward-mode differentiation is on: 0, 1, or -1 with an exception. Its level is -1 where it is not.
int tangents_are_on() {
  PyObject* const module = torch()->forward_mode;
  PyObject* const level = module ? PyDict_GetItemWithError(PyModule_GetDict(module), names().forward_level)
                                 : nullptr;  // borrowed
  if (level && PyLong_AsLong(level) >= 0) return 1;
  return PyErr_Occurred() ? -1 : 0;
}

// Whether a tensor carries a tangent: 0, 1, or -1 with an exception.
int has_tangent(PyObject* tensor) {
  const Owned unpack(PyObject_GetAttrString(torch()->forward_mode, "unpack_dual"));
  const Owned parts(unpack ? PyObject_CallFunctionObjArgs(unpack.get(), tensor, nullptr) : nullptr);
  const Owned tangent(parts ? PyObject_GetAttrString(parts.get(), "tangent") : nullptr);
  return tangent ? tangent.get() != Py_None : -1;
}

// Whether all function modes are torch's default device (set_default_device, `with torch.device(...)`), which changes where torch's
// own factories make tensors and no op here.
bool are_default_devices(const Torch& t, long modes) {
  const Owned context(
      attribute_of("torch.utils._device", "DeviceContext"));  // imported when it is first used
  if (!context) return PyErr_Clear(), false;
  for (long i = 0; i < modes; ++i) {
    const Owned at(PyLong_FromLong(i));
    const Owned mode(at && t.function_mode_at ? t.function_mode_at(at.get()) : Owned());
    if (!mode) return PyErr_Clear(), false;
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode.get())) != context.get()) return false;
  }
  return true;
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

// Whether numpy's arrays are laid out as numpy_array.hpp says.
bool numpy_is_known() {
  Owned table(attribute_of("numpy._core._multiarray_umath", "_ARRAY_API"));
  if (!table) table = Owned(attribute_of("numpy.core._multiarray_umath", "_ARRAY_API"));  // before 2.0
  void** entries = table ? static_cast<void**>(PyCapsule_GetPointer(table.get(), nullptr)) : nullptr;
  PyErr_Clear();
  if (!entries) return false;
  const unsigned version = reinterpret_cast<NumpyVersion>(entries[0])() >> 24;
  return version == 1 || version == 2;
}

bool is_subclass(PyObject* type, PyObject* base) {
  const int is = base ? PyObject_IsSubclass(type, base) : 0;
  if (is < 0) PyErr_Clear();
  return is > 0;
}

TensorType::Kind kind_of(PyTypeObject* type) {
  const Owned module(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__module__"));
  const char* text = module ? PyUnicode_AsUTF8AndSize(module.get(), nullptr) : nullptr;
  PyErr_Clear();
  const std::string_view name = text ? text : "";
  if (const auto package = name.substr(0, name.find('.')); package == "jax" || package == "jaxlib")
    return TensorType::immutable;
  auto* object = reinterpret_cast<PyObject*>(type);
  if (const Owned array(attribute_of("numpy", "ndarray")); array.get() == object && numpy_is_known())
    return TensorType::numpy;
  if (const Owned masked(attribute_of("numpy.ma", "MaskedArray")); is_subclass(object, masked.get()))
    return TensorType::masked;
  PyErr_Clear();
  const Torch* t = torch();
  if (!t) return TensorType::other;
  if (object == t->tensor || object == t->parameter) return TensorType::torch;
  return is_subclass(object, t->tensor) ? TensorType::torch_subclass : TensorType::other;
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

// The dtype of one of numpy's type numbers; no bits: none that is known here.
DLDataType dtype_of_numpy(int type) {
  constexpr uint8_t kLong = 8 * sizeof(long), kBool = 6;
  switch (type) {
    case kNumpyBool:
      return {kBool, 8, 1};
    case kNumpyUInt8:
      return {kDLUInt, 8, 1};
    case kNumpyInt:
      return {kDLInt, 32, 1};
    case kNumpyLong:
      return {kDLInt, kLong, 1};
    case kNumpyLongLong:
      return {kDLInt, 64, 1};
    case kNumpyFloat:
      return {kDLFloat, 32, 1};
    case kNumpyDouble:
      return {kDLFloat, 64, 1};
    case kNumpyHalf:
      return {kDLFloat, 16, 1};
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
  const TorchNative* const native = torch_native();
  const long functions = native ? static_cast<long>(native->function_modes()) : number_of(t->function_modes);
  if (functions < 0 || (functions > 0 && !are_default_devices(*t, functions))) return true;
  if (native) return native->dispatches();
  if (number_of(t->dispatch_modes) != 0 || number_of(t->jit_traces) != 0) return true;
  const Owned transform(t->transforms ? t->transforms() : Owned());
  return transform ? transform.get() != Py_None : PyErr_Occurred() != nullptr;
}

bool is_numpy_bool(PyObject* object) {
  Owned type(attribute_of("numpy", "bool"));
  if (!type) type = Owned(attribute_of("numpy", "bool_"));  // before 2.0
  PyErr_Clear();
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.get();
}

bool is_torch_dtype(PyObject* object) {
  const Torch* t = torch();
  return t && reinterpret_cast<PyObject*>(Py_TYPE(object)) == t->dtype;
}

void torch_written(PyObject* tensor) {
  if (const TorchNative* native = torch_native()) return native->written(tensor);
  const Torch* t = torch();
  const Owned tensors(t && t->written ? PyTuple_Pack(1, tensor) : nullptr);
  if (!tensors) return PyErr_Clear();
  const Owned done(t->written(tensors.get()));
  if (!done) PyErr_Clear();  // inference tensors have no version
}

bool torch_contexts_have(PyObject* attribute) {
  const Owned base(attribute_of("torch._C", "_FunctionBase"));
  const Owned found(base ? PyObject_GetAttr(base.get(), attribute) : nullptr);
  PyErr_Clear();
  return bool(found);
}

int torch_autocasts() {
  const Torch* t = torch();
  if (!t) return 0;
  if (const TorchNative* native = torch_native()) return native->autocasts();
  return static_cast<int>(number_of(t->autocasts));
}

int torch_saves_elsewhere() {
  const Torch* t = torch();
  if (!t || !t->saving_hooks) return 0;
  const Owned hooks(t->saving_hooks(Py_True));
  return hooks ? hooks.get() != Py_None : -1;
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
  Raised raised;
  if (raised.passes()) return false;
  refuse(object, ("gives no DLPack view: " + raised.line()).c_str());
  raised.becomes_cause();
  return false;
}

// DLPack's way to say that a tensor is dense, and the only one that a simple implementation need know. What a tensor says of
// itself is not checked yet.
void TensorView::leave_dense_strides_out() noexcept {
  if (!tensor_.strides || tensor_.ndim > RLK_MAX_RANK || !tensor_.shape) return;
  int64_t dense = 1;
  for (int32_t i = tensor_.ndim; i-- > 0;) {
    if (tensor_.shape[i] != 1 && tensor_.strides[i] != dense) return;
    if (__builtin_mul_overflow(dense, tensor_.shape[i], &dense)) return;
  }
  tensor_.strides = nullptr;
}

bool TensorView::take(PyObject* object, Use use, bool writes, const char* op, const char* argument,
                      Asked& asked) {
  op_ = op;
  argument_ = argument;
  writes_ = writes;
  type_ = type_of(object);
  if (!take_as_given(object, use, asked)) return false;
  leave_dense_strides_out();
  return true;
}

bool TensorView::take_as_given(PyObject* object, Use use, Asked& asked) {
  if (type_->api) return take_exchanged(object, use, asked);
  if (type_->kind == TensorType::numpy && take_numpy(object)) return true;
  if (type_->kind == TensorType::masked)
    return refuse(object, "hides elements behind a mask: filled() writes them out");
  if (use == Use::look)
    if (const Owned shape(PyObject_GetAttr(object, names().spec_shape)); shape)
      return take_spec(shape.get(), object);
  PyErr_Clear();
  return take_capsule(object);
}

// What the exchange API does not look at: it hands out the bytes as they lie.
bool TensorView::ask_torch(PyObject* object, Use use, Asked& asked) {
  // Below the dispatcher there are only those that are memory: what handles ops by itself was asked above.
  if (type_->kind == TensorType::torch_subclass && use != Use::recorded) {
    wants_dispatcher_ = use == Use::torch;
    return !wants_dispatcher_ && refuse(object, "is no plain torch.Tensor: rlk.torch may take it");
  }
  if (use != Use::recorded) {
    const int recorded = is_recorded(object);
    if (recorded < 0) return false;
    if (recorded && use != Use::torch)
      return refuse(object, "requires grad here: use rlk.torch, or torch.no_grad()");
    needs_gradient_ = recorded != 0;
  }
  if (asked.tangents < 0) asked.tangents = tangents_are_on();
  const int tangent = asked.tangents > 0 ? has_tangent(object) : asked.tangents;
  if (tangent < 0) return false;
  if (tangent)
    return refuse(
        object,
        "carries a tangent of forward-mode differentiation (jvp, jacfwd), which no op here carries on");
  const int negative = is_negative(object);
  if (negative < 0) return false;
  return !negative || refuse(object, "has its negative bit set here: resolve_neg() writes it out");
}

bool TensorView::take_exchanged(PyObject* object, Use use, Asked& asked) {
  if (type_->is_torch()) {
    if (use != Use::look && !ask_torch(object, use, asked)) return false;
    const TorchNative* const native = torch_native();
    if (native && native->view(object, tensor_)) return true;
  }
  if (type_->api->view_of_object(object, &tensor_) == 0) return true;
  // Meta tensors and those of torch's batches have no memory, and their own kernels.
  wants_dispatcher_ = use == Use::torch && PyErr_ExceptionMatches(PyExc_Exception);
  if (!wants_dispatcher_) return refuse_as_raised(object);
  return PyErr_Clear(), false;
}

bool TensorView::take_capsule(PyObject* object) {
  if (writes_ && type_->kind == TensorType::immutable)
    return refuse(object, "never changes: it cannot be a result");
  Owned method(PyObject_GetAttr(object, names().dlpack));
  if (!method) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return refuse_as_raised(object);
    return PyErr_Clear(), refuse(object, "is no tensor: it has no __dlpack__");
  }
  const Owned nothing(PyTuple_New(0)), keywords(PyDict_New());
  if (!nothing || !keywords ||
      PyDict_SetItem(keywords.get(), names().max_version, names().dlpack_version) < 0)
    return false;
  capsule_ = call_python(method.get(), nothing.get(), keywords.get()).release();
  if (!capsule_ && PyErr_ExceptionMatches(PyExc_TypeError)) {  // from before DLPack 1.0
    PyErr_Clear();
    capsule_ = call_python(method.get()).release();
  }
  if (!capsule_) return refuse_as_raised(object);
  // The capsule stays as it is: its destructor gives the tensor back.
  if (PyCapsule_IsValid(capsule_, "dltensor_versioned")) {
    const auto* t =
        static_cast<ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule_, "dltensor_versioned"));
    if (t->version.major != 1) return refuse(object, "speaks a DLPack that is not version 1");
    if (writes_ && t->flags & ManagedTensorVersioned::kReadOnly)
      return refuse(object, "is read-only: it cannot be a result");
    tensor_ = t->tensor;
    return true;
  }
  if (!PyCapsule_IsValid(capsule_, "dltensor")) return refuse(object, "gave no DLPack capsule");
  tensor_ = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule_, "dltensor"))->tensor;
  return true;
}

// A tenth of what a capsule costs. False without an exception: then the capsule's way takes it, or says why not.
bool TensorView::take_numpy(PyObject* object) {
  const auto& array = *reinterpret_cast<const NumpyArray*>(object);
  const int wanted = NumpyArray::kAligned | (writes_ ? NumpyArray::kWritable : 0);
  const DLDataType dtype = dtype_of_numpy(array.dtype->type);
  if ((array.flags & wanted) != wanted || array.dtype->byte_order == '>' || !dtype.bits ||
      array.ndim > RLK_MAX_RANK)
    return false;
  const Py_ssize_t size = dtype.bits / 8;
  for (int i = 0; i < array.ndim; ++i) {
    if (array.strides[i] % size != 0) return false;
    strides_[i] = array.strides[i] / size;
  }
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  tensor_ = {array.data, {kDLCPU, 0}, array.ndim, dtype, reinterpret_cast<int64_t*>(array.shape), strides_,
             0};
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
