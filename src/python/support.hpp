// What all of rlk._C shares: owned references, exceptions, and the functions that the package gives.
#pragma once

#ifndef Py_LIMITED_API
#  define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <string>
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

// A daemon thread that wants the lock of an interpreter that ends does not get it: before Python 3.14 it is unwound, from within
// whatever called Python, and what its frames own would be given back without the lock. Here it sleeps instead, until the
// process is gone. Around all that gives the lock up or runs Python's code while a call is under way.
template <class Code>
auto unless_the_interpreter_ends(Code code) {
#ifdef __GLIBCXX__
  try {
    return code();
  } catch (abi::__forced_unwind&) {  // must not be left, so nothing is unwound
    for (;;) pause();
  }
#else
  return code();
#endif
}

// The interpreter's lock given up while this lives.
class Unlocked {
 public:
  Unlocked() noexcept : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    unless_the_interpreter_ends([this] { PyEval_RestoreThread(state_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// PyObject_Call and PyObject_CallNoArgs, for code that may be Python's.
inline Owned call_python(PyObject* function, PyObject* arguments = nullptr, PyObject* keywords = nullptr) {
  return Owned(unless_the_interpreter_ends([=] {
    return arguments ? PyObject_Call(function, arguments, keywords) : PyObject_CallNoArgs(function);
  }));
}

// Names that are looked up in every call, interned once.
struct Names {
  PyObject *exchange, *dlpack, *dlpack_device, *max_version, *stream, *requires_grad, *is_neg,
      *save_for_backward, *to_save, *rlk, *forward_level;
  PyObject *backend, *arithmetic, *precision, *deterministic, *threads, *evidence, *gradients;
  PyObject *spec_shape, *spec_dtype, *spec_device;
  PyObject* dlpack_version;  // the newest that is understood
};
const Names& names() noexcept;
bool prepare_names();

// The package's functions: raise(code, text, resolution JSON or None, op or None), which returns the exception to be
// raised; empty(like, shape, dtype), which gives a buffer to write and a function that makes it a result; stream(like, device),
// a GPU array's stream; and scopes(), what this thread is in. The base of its exceptions, and its module with prove(): see torch_native.hpp.
void set_hooks_to(PyObject* raise, PyObject* empty, PyObject* stream, PyObject* scopes, PyObject* error,
                  PyObject* torch);

// A str without a zero in it, else false with an exception. `what` says what it is.
bool read_text(PyObject* object, const char* what, std::string& text);

// Sets the exception that stands for a failure.
void raise(rlk_code code, const char* text, const char* op = nullptr, const char* resolution = nullptr);
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void raise_text(rlk_code code, const char* format, ...);

// The exception that is set, taken away: another one is about to say it in the library's words.
class Raised {
 public:
  Raised() noexcept;
  // Puts it back where it should stay as it is: KeyboardInterrupt, SystemExit, an rlk.Error.
  bool passes() noexcept;
  // The first line of what it says.
  std::string line() const;
  // Makes it the cause of the exception that is set now.
  void becomes_cause() noexcept;

 private:
  Owned value_;
};

// empty(like, shape, dtype).
Owned call_empty(PyObject* like, const rlk_shape& shape, const char* dtype);
// stream(like, device): a number, or None.
Owned call_stream(PyObject* like, int32_t device);
// scopes().
Owned call_scopes();
// prove().
Owned call_prove();

}  // namespace rlk::python
