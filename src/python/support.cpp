#include "src/python/support.hpp"

#include <cstdarg>
#include <cstdio>

namespace rlk::python {
namespace {

Names interned{};
PyObject *raise_hook = nullptr, *empty_hook = nullptr, *scopes_hook = nullptr;

}  // namespace

const Names& names() noexcept { return interned; }

bool prepare_names() {
  const std::pair<PyObject**, const char*> all[] = {{&interned.exchange, "__dlpack_c_exchange_api__"},
                                                    {&interned.dlpack, "__dlpack__"},
                                                    {&interned.dlpack_device, "__dlpack_device__"},
                                                    {&interned.max_version, "max_version"},
                                                    {&interned.stream, "stream"},
                                                    {&interned.requires_grad, "requires_grad"},
                                                    {&interned.is_neg, "is_neg"},
                                                    {&interned.save_for_backward, "save_for_backward"},
                                                    {&interned.to_save, "to_save"},
                                                    {&interned.rlk, "rlk"},
                                                    {&interned.backend, "backend"},
                                                    {&interned.arithmetic, "arithmetic"},
                                                    {&interned.precision, "precision"},
                                                    {&interned.deterministic, "deterministic"},
                                                    {&interned.threads, "threads"},
                                                    {&interned.evidence, "evidence"},
                                                    {&interned.gradients, "gradients"},
                                                    {&interned.spec_shape, "_rlk_shape"},
                                                    {&interned.spec_dtype, "_rlk_dtype"},
                                                    {&interned.spec_device, "_rlk_device"}};
  for (const auto& [name, text] : all) {
    *name = PyUnicode_InternFromString(text);
    if (!*name) return false;
  }
  interned.dlpack_version = Py_BuildValue("(ii)", 1, 1);
  return interned.dlpack_version;
}

void set_hooks_to(PyObject* raise, PyObject* empty, PyObject* scopes) {
  for (PyObject* held : {raise, empty, scopes}) Py_INCREF(held);
  raise_hook = raise;
  empty_hook = empty;
  scopes_hook = scopes;
}

void raise(rlk_code code, const char* text, const char* op, const char* resolution) {
  if (!raise_hook) return PyErr_SetString(PyExc_RuntimeError, text);
  const Owned words(Py_BuildValue("(iszz)", static_cast<int>(code), text, resolution, op));
  const Owned exception(words ? call_python(raise_hook, words.get()) : Owned());
  if (exception) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.get())), exception.get());
}

void raise_text(rlk_code code, const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  raise(code, text);
}

Owned call_empty(PyObject* like, const rlk_shape& shape, const char* dtype) {
  const Owned sizes(PyTuple_New(shape.ndim));
  if (!sizes) return {};
  for (int32_t i = 0; i < shape.ndim; ++i) PyTuple_SetItem(sizes.get(), i, PyLong_FromLongLong(shape.dim[i]));
  const Owned words(Py_BuildValue("(OOs)", like ? like : Py_None, sizes.get(), dtype));
  return words ? call_python(empty_hook, words.get()) : Owned();
}

Owned call_scopes() { return call_python(scopes_hook); }

}  // namespace rlk::python
