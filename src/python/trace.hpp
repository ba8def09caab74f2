// Traces: rlk/trace.h for Python.
#pragma once

#include "src/python/support.hpp"

namespace rlk::python {

PyObject* trace_begin(PyObject*, PyObject* args);
PyObject* trace_end(PyObject*, PyObject*);
PyObject* tracing(PyObject*, PyObject*);
PyObject* trace_tag(PyObject*, PyObject* tag);
PyObject* trace_rows(PyObject*, PyObject* args);
PyObject* trace_weights_changed(PyObject*, PyObject*);
PyObject* trace_tensor(PyObject*, PyObject* args);

}  // namespace rlk::python
