// What torch's own functions cost that every call with three of its tensors needs: python_overhead.py compiles this and calls it
// as rlk is called. Each function does what the one before it does, and more.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "rlk/dlpack.h"

typedef struct {
  uint32_t major, minor;
  void* earlier;
  void *allocate, *from_object, *to_object;
  int (*view_of_object)(void*, DLTensor*);
} ExchangeApi;

static const ExchangeApi* api;
static PyCFunction is_neg, written;
static PyObject* requires_grad;
static descrgetfunc get;

// prepare(tensor): finds all of them.
static PyObject* prepare(PyObject* module, PyObject* tensor) {
  PyObject* const type = (PyObject*)Py_TYPE(tensor);
  PyObject* const capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  PyObject* const bound = PyObject_GetAttrString(tensor, "is_neg");
  PyObject* const torch = PyImport_ImportModule("torch._C");
  PyObject* const increment = torch ? PyObject_GetAttrString(torch, "_increment_version") : NULL;
  requires_grad = PyObject_GetAttrString(type, "requires_grad");
  if (!capsule || !bound || !increment || !requires_grad) return NULL;
  api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  is_neg = PyCFunction_GetFunction(bound);
  written = PyCFunction_GetFunction(increment);
  get = (descrgetfunc)PyType_GetSlot(Py_TYPE(requires_grad), Py_tp_descr_get);
  Py_RETURN_NONE;
}

static int exchange(PyObject* const* tensors) {
  DLTensor views[3];
  for (int i = 0; i < 3; ++i)
    if (api->view_of_object(tensors[i], &views[i]) != 0) return 0;
  return 1;
}

static int ask(PyObject* const* tensors) {
  for (int i = 0; i < 3; ++i) {
    PyObject* const bit = is_neg(tensors[i], NULL);
    PyObject* const grad = get(requires_grad, tensors[i], (PyObject*)Py_TYPE(tensors[i]));
    if (bit != Py_False || grad != Py_False) return 0;
    Py_DECREF(bit);
    Py_DECREF(grad);
  }
  return 1;
}

static int mark(PyObject* tensor) {
  PyObject* const one = PyTuple_Pack(1, tensor);
  PyObject* const done = written(NULL, one);
  Py_XDECREF(one);
  Py_XDECREF(done);
  return done != NULL;
}

static PyObject* given_back(int good, PyObject* out) {
  if (!good) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "not plain tensors");
  Py_INCREF(out);
  return out;
}

#define CALL(name, condition)                                                                      \
  static PyObject* name(PyObject* module, PyObject* const* t, Py_ssize_t count, PyObject* words) { \
    return given_back(count + (words ? PyTuple_Size(words) : 0) == 3 && (condition), t[2]);        \
  }
CALL(nothing, 1)
CALL(exchanged, exchange(t))
CALL(asked, exchange(t) && ask(t))
CALL(marked, exchange(t) && ask(t) && mark(t[2]))

static PyMethodDef methods[] = {
    {"prepare", prepare, METH_O, NULL},
    {"nothing", (PyCFunction)(void (*)(void))nothing, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"exchanged", (PyCFunction)(void (*)(void))exchanged, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"asked", (PyCFunction)(void (*)(void))asked, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"marked", (PyCFunction)(void (*)(void))marked, METH_FASTCALL | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "python_floor", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_python_floor(void) { return PyModule_Create(&definition); }
