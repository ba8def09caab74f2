// What all of rlk._C shares: owned references, exceptions, and the functions that the package gives.
#pragma once

#ifndef Py_LIMITED_API
#  define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

#include "rlk/binding.h"

namespace rlk::python {

// A reference that is given back.
class Owned {
 public:
  Owned() = default;
  explicit Owned(PyObject* object) noexcept : object_(object) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const noexcept { return object_; }
  PyObject* release() noexcept { return std::exchange(object_, nullptr); }
  explicit operator bool() const noexcept { return object_; }

 private:
  PyObject* object_ = nullptr;
};

// Names that are looked up in every call, interned once.
struct Names {
  PyObject *exchange, *dlpack, *dlpack_device, *max_version, *stream, *requires_grad, *is_neg,
      *save_for_backward, *to_save, *rlk;
  PyObject *backend, *arithmetic, *precision, *deterministic, *threads, *evidence, *gradients;
  PyObject *spec_shape, *spec_dtype, *spec_device;
  PyObject* dlpack_version;  // the newest that is understood
};
const Names& names() noexcept;
bool prepare_names();

// The package's functions: raise(code, text, resolution JSON or None, op or None), which returns the exception to be
// raised; empty(like, shape, dtype), which gives a buffer to write and a function that makes it a result; and scopes(), what
// this thread is in.
void set_hooks_to(PyObject* raise, PyObject* empty, PyObject* scopes);

// Sets the exception that stands for a failure.
void raise(rlk_code code, const char* text, const char* op = nullptr, const char* resolution = nullptr);
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void raise_text(rlk_code code, const char* format, ...);

// empty(like, shape, dtype).
Owned call_empty(PyObject* like, const rlk_shape& shape, const char* dtype);
// scopes().
Owned call_scopes();

}  // namespace rlk::python
