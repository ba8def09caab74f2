// The handler by which XLA calls ops, in the capsule that jax.ffi.register_ffi_target takes.
#pragma once

#include "src/python/support.hpp"

namespace rlk::python {

PyObject* xla_handler(PyObject*, PyObject*);

}  // namespace rlk::python
