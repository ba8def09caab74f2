#include "src/python/support.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace rlk::python {
namespace {

// The exception that is set, as one object with its traceback.
Owned take_raised() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Owned kind(type), where(trace);
  if (value && trace) PyException_SetTraceback(value, trace);
  return Owned(value);
}
void set_raised(PyObject* exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
}

Names interned{};
PyObject *raise_hook = nullptr, *empty_hook = nullptr, *stream_hook = nullptr, *scopes_hook = nullptr,
         *error_type = nullptr, *torch_hook = nullptr;

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
                                                    {&interned.forward_level, "_current_level"},
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

void set_hooks_to(PyObject* raise, PyObject* empty, PyObject* stream, PyObject* scopes, PyObject* error,
                  PyObject* torch) {
  for (PyObject* held : {raise, empty, stream, scopes, error, torch}) Py_INCREF(held);
  error_type = error;
  raise_hook = raise;
  empty_hook = empty;
  stream_hook = stream;
  scopes_hook = scopes;
  torch_hook = torch;
}

bool read_text(PyObject* object, const char* what, std::string& text) {
  if (!PyUnicode_Check(object)) {
    const Owned type(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
    if (type) PyErr_Format(PyExc_TypeError, "%s is a str, a %U is given", what, type.get());
    return false;
  }
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(object, &size);
  if (bytes && std::strlen(bytes) == static_cast<std::size_t>(size)) return text.assign(bytes), true;
  PyErr_Clear();  // a lone surrogate
  const Owned shown(PyObject_ASCII(object));
  const char* const all = shown ? PyUnicode_AsUTF8AndSize(shown.get(), nullptr) : nullptr;
  if (all) raise_text(RLK_INVALID_ARGUMENT, "%s is %s, which has a character that no name has", what, all);
  return false;
}

void raise(rlk_code code, const char* text, const char* op, const char* resolution) {
  if (!raise_hook) return PyErr_SetString(PyExc_RuntimeError, text);
  const Owned said(PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace"));
  const Owned words(said ? Py_BuildValue("(iOzz)", static_cast<int>(code), said.get(), resolution, op)
                         : nullptr);
  const Owned exception(words ? call_python(raise_hook, words.get()) : Owned());
  if (exception) set_raised(exception.get());
}

void raise_text(rlk_code code, const char* format, ...) {
  va_list values, again;
  va_start(values, format);
  va_copy(again, values);
  std::string text(static_cast<std::size_t>(std::vsnprintf(nullptr, 0, format, again)), '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, format, values);
  va_end(values);
  raise(code, text.c_str());
}

Raised::Raised() noexcept : value_(take_raised()) {}

bool Raised::passes() noexcept {
  if (!value_) return false;
  const bool usual = PyErr_GivenExceptionMatches(value_.get(), PyExc_Exception) != 0;
  if (usual && !(error_type && PyErr_GivenExceptionMatches(value_.get(), error_type))) return false;
  set_raised(value_.get());
  return true;
}

std::string Raised::line() const {
  Owned said(value_ ? PyObject_Str(value_.get()) : nullptr);
  Py_ssize_t size = 0;
  if (said) size = PyUnicode_GetLength(said.get());
  if (size <= 0 && value_)
    said = Owned(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(value_.get())), "__name__"));
  const Owned bytes(said ? PyUnicode_AsEncodedString(said.get(), "utf-8", "replace") : nullptr);
  const char* all = bytes ? PyBytes_AsString(bytes.get()) : nullptr;
  PyErr_Clear();
  const std::string text = all ? all : "no reason";
  return text.substr(0, text.find('\n'));
}

void Raised::becomes_cause() noexcept {
  const Owned now = take_raised();
  if (!now) return;
  if (value_ && value_.get() != now.get()) PyException_SetCause(now.get(), value_.release());
  set_raised(now.get());
}

Owned call_empty(PyObject* like, const rlk_shape& shape, const char* dtype) {
  const Owned sizes(PyTuple_New(shape.ndim));
  if (!sizes) return {};
  for (int32_t i = 0; i < shape.ndim; ++i) PyTuple_SetItem(sizes.get(), i, PyLong_FromLongLong(shape.dim[i]));
  const Owned words(Py_BuildValue("(OOs)", like ? like : Py_None, sizes.get(), dtype));
  return words ? call_python(empty_hook, words.get()) : Owned();
}

Owned call_stream(PyObject* like, int32_t device) {
  const Owned words(Py_BuildValue("(Oi)", like ? like : Py_None, static_cast<int>(device)));
  return words ? call_python(stream_hook, words.get()) : Owned();
}

Owned call_prove() {
  const Owned prove(PyObject_GetAttrString(torch_hook, "prove"));
  return prove ? call_python(prove.get()) : Owned();
}

Owned call_scopes() { return call_python(scopes_hook); }

}  // namespace rlk::python
