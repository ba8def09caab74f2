// torch's own C++ functions behind the questions that every call asks of its tensors and its thread: the ones that torch's Python
// functions of these names call, without objects made of their answers, and without giving the interpreter's lock up and taking it
// again for one bit (which is_neg() does).
//
// They are exported by torch's libraries and looked up by symbol; where they or their types change, a symbol is missing. That a
// tensor's object holds its at::Tensor, one pointer, and where, is looked up too, and that what torch's exchange API owns begins with
// one. Nothing here is relied on before rlk/_torch_native.py
// has compared every answer with that of Python's functions, for tensors and states that give each; until then, or where anything is
// missing or differs, torch's Python functions are asked.
#pragma once

#include "src/python/dlpack_exchange.hpp"
#include "src/python/support.hpp"

namespace rlk::python {

class TorchNative {
 public:
  explicit operator bool() const { return found_; }
  bool is_neg(PyObject* tensor) const { return is_neg_(at(tensor)); }
  bool requires_grad(PyObject* tensor) const {
    return requires_grad_(*static_cast<void* const*>(at(tensor)));
  }
  // What the exchange API's view is made of, by the same function. False: the exchange API says why not.
  bool view(PyObject* tensor, DLTensor& out) const;
  // The object of a tensor that torch's exchange API allocated. As torch imports one, its memory would be a stranger's to torch: no
  // record_stream, no resizing. Null with an exception.
  PyObject* object_of(const ManagedTensorVersioned& owned) const;
  // What saved it before must not use it. Inference tensors have no version: nothing is to be done.
  void written(PyObject* tensor) const;
  // Whether torch's dispatcher must see calls of this thread: a dispatch mode or transform is on, or torch.jit traces.
  bool dispatches() const;
  int64_t function_modes() const { return function_modes_(); }
  bool grad_enabled() const { return grad_enabled_(); }
  // On a device that an op here may run on.
  bool autocasts() const { return autocasts_(kCpu) || autocasts_(kCuda); }

  // Looks all of them up, by tensors and the addresses of their at::Tensor's implementation, the first of them dense.
  bool find(const ExchangeApi* api, PyObject* tensors, PyObject* addresses, int tracer, int transforms);

 private:
  static constexpr int8_t kCpu = 0, kCuda = 1;  // c10::DeviceType; AMD's are its CUDA
  const void* at(PyObject* tensor) const { return reinterpret_cast<const char*>(tensor) + place_; }
  bool found_ = false;  // all of them
  Py_ssize_t place_ = 0;
  uint16_t tracer_ = 0, transforms_ = 0;
  bool (*is_neg_)(const void* tensor) = nullptr;
  bool (*requires_grad_)(const void* implementation) = nullptr;
  void (*view_)(const void* tensor, DLTensor* out) = nullptr;
  PyObject* (*wrap_)(const void* tensor) = nullptr;
  void (*written_)(const void* tensor) = nullptr;
  int64_t (*function_modes_)() = nullptr;
  int64_t (*dispatch_modes_)() = nullptr;
  bool (*key_included_)(uint16_t key) = nullptr;
  bool (*grad_enabled_)() = nullptr;
  bool (*autocasts_)(int8_t device) = nullptr;
};

// Null: torch's Python functions are to be asked.
const TorchNative* torch_native();

// For rlk/_torch_native.py. find(exchange API, tensors, addresses, tracer, transforms): whether all were found.
PyObject* torch_native_find(PyObject* self, PyObject* args);
// (is_neg, requires_grad, (address, shape, strides) or None) of a tensor.
PyObject* torch_native_tensor(PyObject* self, PyObject* tensor);
// The object of what torch's exchange API hands out of a tensor: the tensor.
PyObject* torch_native_object(PyObject* self, PyObject* args);
PyObject* torch_native_written(PyObject* self, PyObject* tensor);
// (function modes, whether it dispatches, grad mode, autocast) of this thread.
PyObject* torch_native_thread(PyObject* self, PyObject* none);

}  // namespace rlk::python
