#include "src/python/torch_native.hpp"

#include <dlfcn.h>

#include <cstring>
#include <exception>

namespace rlk::python {
namespace {

TorchNative& found() {
  static TorchNative functions;
  return functions;
}

// A function of a library that torch has loaded.
template <class Function>
bool look_up(const char* library, const char* symbol, Function*& out) {
#ifdef RTLD_NOLOAD
  void* const loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  out = loaded ? reinterpret_cast<Function*>(dlsym(loaded, symbol)) : nullptr;
  if (loaded) dlclose(loaded);  // torch stays
#else
  (void)library, (void)symbol, out = nullptr;
#endif
  return out;
}

// Where in these objects the words lie that are given for them; 0: nowhere, or at several places.
Py_ssize_t place_of(PyObject* objects, PyObject* words) {
  const Py_ssize_t count = PyTuple_Size(objects);
  if (count < 2 || PyTuple_Size(words) != count) return 0;
  const Owned size(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GetItem(objects, 0))),
                                          "__basicsize__"));
  const Py_ssize_t end = size ? PyLong_AsSsize_t(size.get()) : 0;
  Py_ssize_t place = 0;
  for (Py_ssize_t at = sizeof(PyObject); at + static_cast<Py_ssize_t>(sizeof(void*)) <= end;
       at += sizeof(void*)) {
    bool all = true;
    for (Py_ssize_t i = 0; i < count && all; ++i) {
      void* word;
      std::memcpy(static_cast<void*>(&word), reinterpret_cast<const char*>(PyTuple_GetItem(objects, i)) + at,
                  sizeof word);
      all = word && word == PyLong_AsVoidPtr(PyTuple_GetItem(words, i));
    }
    if (all && place) return 0;
    if (all) place = at;
  }
  return PyErr_Occurred() ? 0 : place;
}

enum class Proof { pending, running, good, bad };
Proof& proof() {
  static Proof state = Proof::pending;
  return state;
}

// A tensor as torch's exchange API owns it, for the time of this.
class Exported {
 public:
  Exported(const ExchangeApi* api, PyObject* tensor) {
    if (!api || api->from_object(tensor, &owned_) != 0) PyErr_Clear(), owned_ = nullptr;
  }
  Exported(const Exported&) = delete;
  Exported& operator=(const Exported&) = delete;
  ~Exported() {
    if (owned_ && owned_->deleter) owned_->deleter(owned_);
  }
  const ManagedTensorVersioned* get() const { return owned_; }

 private:
  ManagedTensorVersioned* owned_ = nullptr;
};

// Whether what the exchange API owns begins with the at::Tensor, one pointer, whose address is given.
bool begins_with_tensor(const ExchangeApi* api, PyObject* tensor, PyObject* address) {
  const Exported owned(api, tensor);
  if (!owned.get() || !owned.get()->context) return false;
  void* word;
  std::memcpy(static_cast<void*>(&word), owned.get()->context, sizeof word);
  return word && word == PyLong_AsVoidPtr(address);
}

const ExchangeApi* api_in(PyObject* capsule) {
  const void* const api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (!api) PyErr_Clear();
  return static_cast<const ExchangeApi*>(api);
}

// What the package says: True, False, or None: not now (a mode is active).
void prove() {
  static int tries = 64;
  proof() = Proof::running;
  const Owned said(call_prove());
  PyErr_Clear();
  proof() = said.get() == Py_True && found()   ? Proof::good
            : said.get() == Py_None && --tries ? Proof::pending
                                               : Proof::bad;
}

}  // namespace

bool TorchNative::view(PyObject* tensor, DLTensor& out) const {
  try {
    return view_(at(tensor), &out), true;
  } catch (const std::exception&) {
    return false;
  }
}

PyObject* TorchNative::object_of(const ManagedTensorVersioned& owned) const {
  try {
    return wrap_(owned.context);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}

void TorchNative::written(PyObject* tensor) const {
  try {
    written_(at(tensor));
  } catch (const std::exception&) {
  }
}

bool TorchNative::dispatches() const {
  return dispatch_modes_() != 0 || key_included_(transforms_) || key_included_(tracer_);
}

bool TorchNative::find(const ExchangeApi* api, PyObject* tensors, PyObject* addresses, int tracer,
                       int transforms) {
  constexpr const char *kCore = "libc10.so", *kAten = "libtorch_cpu.so", *kPython = "libtorch_python.so";
  tracer_ = static_cast<uint16_t>(tracer), transforms_ = static_cast<uint16_t>(transforms);
  place_ = place_of(tensors, addresses);
  found_ = place_ && begins_with_tensor(api, PyTuple_GetItem(tensors, 0), PyTuple_GetItem(addresses, 0)) &&
           look_up(kPython, "_Z16THPVariable_WrapRKN2at10TensorBaseE", wrap_) &&
           look_up(kAten, "_ZN2at6native6is_negERKNS_6TensorE", is_neg_) &&
           look_up(kCore, "_ZNK3c1010TensorImpl13requires_gradEv", requires_grad_) &&
           look_up(kAten, "_ZN2at17toDLPackNonOwningERKNS_6TensorEP8DLTensor", view_) &&
           look_up(kAten, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", written_) &&
           look_up(kAten, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", function_modes_) &&
           look_up(kCore, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", dispatch_modes_) &&
           look_up(kCore, "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE", key_included_) &&
           look_up(kCore, "_ZN3c108GradMode10is_enabledEv", grad_enabled_) &&
           look_up(kAten, "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE", autocasts_);
  return found_;
}

const TorchNative* torch_native() {
  if (proof() == Proof::good) return &found();
  if (proof() == Proof::pending) prove();
  return proof() == Proof::good ? &found() : nullptr;
}

PyObject* torch_native_find(PyObject*, PyObject* args) {
  PyObject *api, *tensors, *addresses;
  int tracer, transforms;
  if (!PyArg_ParseTuple(args, "OO!O!ii", &api, &PyTuple_Type, &tensors, &PyTuple_Type, &addresses, &tracer,
                        &transforms))
    return nullptr;
  if (proof() == Proof::good) Py_RETURN_FALSE;  // what is in use stays as it is
  const bool all = found().find(api_in(api), tensors, addresses, tracer, transforms);
  PyErr_Clear();
  return PyBool_FromLong(all);
}

static PyObject* tuple_of(const int64_t* numbers, int32_t count) {
  PyObject* const tuple = PyTuple_New(count);
  for (int32_t i = 0; tuple && i < count; ++i) PyTuple_SetItem(tuple, i, PyLong_FromLongLong(numbers[i]));
  return tuple;
}

PyObject* torch_native_tensor(PyObject*, PyObject* tensor) {
  DLTensor view;
  PyObject* seen = Py_None;
  if (found().view(tensor, view))
    seen = Py_BuildValue("(NNN)", PyLong_FromVoidPtr(static_cast<char*>(view.data) + view.byte_offset),
                         tuple_of(view.shape, view.ndim), tuple_of(view.strides, view.ndim));
  else
    Py_INCREF(seen);
  return Py_BuildValue("(NNN)", PyBool_FromLong(found().is_neg(tensor)),
                       PyBool_FromLong(found().requires_grad(tensor)), seen);
}

PyObject* torch_native_object(PyObject*, PyObject* args) {
  PyObject *api, *tensor;
  if (!PyArg_ParseTuple(args, "OO", &api, &tensor)) return nullptr;
  const Exported owned(api_in(api), tensor);
  if (owned.get()) return found().object_of(*owned.get());
  Py_RETURN_NONE;
}

PyObject* torch_native_written(PyObject*, PyObject* tensor) {
  found().written(tensor);
  Py_RETURN_NONE;
}

PyObject* torch_native_thread(PyObject*, PyObject*) {
  const TorchNative& f = found();
  return Py_BuildValue("(LNNN)", static_cast<long long>(f.function_modes()), PyBool_FromLong(f.dispatches()),
                       PyBool_FromLong(f.grad_enabled()), PyBool_FromLong(f.autocasts()));
}

}  // namespace rlk::python
