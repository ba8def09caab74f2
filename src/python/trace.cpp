#include "src/python/trace.hpp"

#include <vector>

#include "rlk/trace.h"
#include "src/python/tensor.hpp"

namespace rlk::python {
namespace {

PyObject* none_or_raise(rlk_code code) {
  if (code != RLK_OK) return raise(code, rlk_last_error()), nullptr;
  Py_RETURN_NONE;
}

// A list of integers; false with an exception.
bool read_integers(PyObject* from, std::vector<int64_t>& out) {
  const Owned list(PySequence_List(from));
  if (!list) return false;
  const Py_ssize_t n = PyList_Size(list.get());
  out.resize(static_cast<std::size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    out[static_cast<std::size_t>(i)] = PyLong_AsLongLong(PyList_GetItem(list.get(), i));
    if (PyErr_Occurred()) return false;
  }
  return true;
}

}  // namespace

PyObject* trace_begin(PyObject*, PyObject* args) {
  const char *file, *tags;
  long long every;
  int weights_once;
  if (!PyArg_ParseTuple(args, "szLp", &file, &tags, &every, &weights_once)) return nullptr;
  const rlk_trace_options options{sizeof options, static_cast<uint32_t>(weights_once), tags, every};
  return none_or_raise(rlk_trace_begin(file, &options));
}
PyObject* trace_end(PyObject*, PyObject*) { return none_or_raise(rlk_trace_end()); }
PyObject* tracing(PyObject*, PyObject*) { return PyBool_FromLong(rlk_tracing()); }

PyObject* trace_tag(PyObject*, PyObject* tag) {
  if (tag == Py_None) return none_or_raise(rlk_trace_tag(nullptr));
  std::string text;
  return read_text(tag, "trace_tag: the tag", text) ? none_or_raise(rlk_trace_tag(text.c_str())) : nullptr;
}

PyObject* trace_rows(PyObject*, PyObject* args) {
  PyObject *sequences, *positions;
  if (!PyArg_ParseTuple(args, "OO", &sequences, &positions)) return nullptr;
  std::vector<int64_t> s, p;
  if (!read_integers(sequences, s) || !read_integers(positions, p)) return nullptr;
  if (s.size() != p.size())
    return raise_text(RLK_INVALID_ARGUMENT, "trace_rows: %zu sequences and %zu positions are given", s.size(),
                      p.size()),
           nullptr;
  return none_or_raise(rlk_trace_rows(s.data(), p.data(), s.size()));
}

PyObject* trace_weights_changed(PyObject*, PyObject*) { return none_or_raise(rlk_trace_weights_changed()); }

PyObject* trace_tensor(PyObject*, PyObject* args) {
  const char *name, *tag;
  PyObject* object;
  if (!PyArg_ParseTuple(args, "sOz", &name, &object, &tag)) return nullptr;
  if (!rlk_tracing()) Py_RETURN_NONE;
  TensorView view;
  if (!view.take(object, TensorView::Use::recorded, false, "trace_tensor", name)) return nullptr;
  void* stream = nullptr;
  const DLDevice device = view.tensor().device;
  const bool streams = view.type() && view.type()->api && device.device_type != kDLCPU;
  if (streams && view.type()->api->current_stream(device.device_type, device.device_id, &stream) != 0)
    return nullptr;
  return none_or_raise(rlk_trace_tensor(tag, name, &view.tensor(), stream));
}

}  // namespace rlk::python
