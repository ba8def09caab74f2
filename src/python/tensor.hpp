// Anybody's tensor as a DLTensor, for the time of one call.
#pragma once

#include "src/python/dlpack_exchange.hpp"
#include "src/python/support.hpp"

namespace rlk::python {

// What is known of a type of tensors.
struct TensorType {
  PyTypeObject* type;
  const ExchangeApi* api;  // null: through __dlpack__, or as numpy's own arrays are laid out
  enum Kind { other, numpy, masked, torch, torch_subclass, immutable } kind;
  bool is_torch() const noexcept { return kind == torch || kind == torch_subclass; }
};

// Whether torch's dispatcher must see calls of this thread: a dispatch mode, function mode or transform (vmap) is on, or torch.jit traces.
// With an exception set it could not be found out.
bool torch_modes_active();
// Whether an object is numpy's own True or False, which is no integer.
bool is_numpy_bool(PyObject* object);
// Whether an object is a torch.dtype.
bool is_torch_dtype(PyObject* object);
// Tells autograd that a tensor was written: what saved it before must not use it.
void torch_written(PyObject* tensor);
// Whether the base of autograd's contexts has an attribute.
bool torch_contexts_have(PyObject* attribute);
// Whether autocast is on for some device: 0, 1, or -1 with an exception.
int torch_autocasts();
// Whether autograd's saved tensors go through hooks: 0, 1, or -1 with an exception.
int torch_saves_elsewhere();
// torch.get_num_threads().
int32_t torch_threads();

// What a call asks its thread once, whatever number of tensors it has.
struct Asked {
  int tangents = -1;  // whether forward-mode differentiation is on; -1: not asked yet
};

class TensorView {
 public:
  // plain: by an op outside of autograd. look: no data pass (questions, saved ranges). torch: for rlk.torch, which records gradients
  // and sends what torch must see to its dispatcher. recorded: below the dispatcher, which has seen it.
  enum class Use { plain, look, torch, recorded };

  TensorView() noexcept {}
  ~TensorView() { Py_XDECREF(capsule_); }
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;

  // False with an exception, or only wants_dispatcher(). The text names the op and its argument, which it may write.
  bool take(PyObject* object, Use use, bool writes, const char* op, const char* argument, Asked& asked);
  bool take(PyObject* object, Use use, bool writes, const char* op, const char* argument) {
    Asked asked;
    return take(object, use, writes, op, argument, asked);
  }
  const DLTensor& tensor() const noexcept { return tensor_; }
  DLTensor& tensor() noexcept { return tensor_; }
  const TensorType* type() const noexcept { return type_; }
  const char* argument() const noexcept { return argument_; }
  bool wants_dispatcher() const noexcept { return wants_dispatcher_; }
  bool needs_gradient() const noexcept { return needs_gradient_; }

 private:
  bool refuse(PyObject* object, const char* why) const;
  // The same where its framework raised: with the first line of what that said, and its exception as the cause.
  bool refuse_as_raised(PyObject* object) const;
  bool take_as_given(PyObject* object, Use use, Asked& asked);
  void leave_dense_strides_out() noexcept;
  bool take_exchanged(PyObject* object, Use use, Asked& asked);
  bool ask_torch(PyObject* object, Use use, Asked& asked);
  bool take_capsule(PyObject* object);
  bool take_numpy(PyObject* object);
  bool take_spec(PyObject* shape, PyObject* object);

  DLTensor tensor_;
  const TensorType* type_ = nullptr;
  const char *op_ = "", *argument_ = "";
  PyObject* capsule_ = nullptr;
  int64_t shape_[RLK_MAX_RANK];    // of a spec
  int64_t strides_[RLK_MAX_RANK];  // of numpy's array, in elements
  bool writes_ = false, wants_dispatcher_ = false, needs_gradient_ = false;
};

}  // namespace rlk::python
