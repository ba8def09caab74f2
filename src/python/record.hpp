// Calls of which torch's autograd records a gradient. rlk.torch makes one autograd.Function of each op, whose forward is a
// function of this module: what a call needs besides torch's own node is done here, in one pass over its arguments.
#pragma once

#include <memory>
#include <vector>

#include "src/python/call.hpp"

namespace rlk::python {

// An op as rlk.torch calls it, with the functions that rlk.torch gives for it.
struct TorchOp {
  Op* op;
  PyObject* dispatched;  // the call through torch's dispatcher
  PyObject* apply;       // of the autograd.Function; None: no gradient can be recorded
  PyObject* plan;        // what the backward must know of a call with these arguments, tensors aside
  PyObject* several;     // (context, plan, results): what torch must be told of more than one result
  PyObject* autocast;    // the call as autocast has it; None: that does not touch this op
  PyMethodDef definition;
  struct Seen {
    Call::Kind kind;
    PyObject* plan;
  };
  std::vector<Seen> seen;  // calls that differ in their tensors alone are understood once
};

// A call whose arguments were read, as given: a tuple and a dict.
PyObject* record(TorchOp& op, Call& call, PyObject* args, PyObject* keywords);
// forward(context, plan, *inputs), within apply.
PyObject* recorded_forward(PyObject* self, PyObject* args);

// Saved ranges as an object: until it is given back.
PyObject* make_guard(std::unique_ptr<Tickets> tickets);

// How many scopes this thread is in.
int& scopes_entered() noexcept;

}  // namespace rlk::python
