// The head of numpy's array object as its binary interface lays it out, from version 1 on through 2: what every extension
// that was compiled against numpy reads. Numpy's own interface says its version, which is asked before anything is read.
#pragma once

#include "src/python/support.hpp"

namespace rlk::python {

struct NumpyDescriptor {
  PyObject head;
  PyTypeObject* scalar;
  char kind, letter, byte_order, flags;
  int type;
};

struct NumpyArray {
  static constexpr int kAligned = 0x100, kWritable = 0x400;
  PyObject head;
  char* data;
  int ndim;
  Py_ssize_t *shape, *strides;  // strides in bytes
  PyObject* base;
  const NumpyDescriptor* dtype;
  int flags;
};

enum NumpyType : int {
  kNumpyBool = 0,
  kNumpyUInt8 = 2,
  kNumpyInt = 5,
  kNumpyLong = 7,
  kNumpyLongLong = 9,
  kNumpyFloat = 11,
  kNumpyDouble = 12,
  kNumpyHalf = 23,
};

// The entry of numpy's table of functions that says the version of its binary interface.
using NumpyVersion = unsigned (*)();

}  // namespace rlk::python
