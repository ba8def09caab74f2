// rlk._C: every op as a Python function, over the C face alone, in Python's limited API (one build for 3.11 and later).
//
// A call is parsed into slots by the schema, so nothing here knows an op. Tensors come in through DLPack's exchange API
// where their type has it (views without capsules, the framework's allocator and current stream), else through
// __dlpack__. Whatever needs words (exceptions, allocation by numpy) is asked of the package, which gives its functions
// to set_hooks().
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "rlk/introspect.h"
#include "src/python/record.hpp"
#include "src/python/torch_native.hpp"
#include "src/python/trace.hpp"
#include "src/python/xla.hpp"

namespace rlk::python {
namespace {

// ---- an op as a function ----------------------------------------------------------------------------------------------

std::unordered_map<std::string, Op*>& known_ops() {
  static auto& ops = *new std::unordered_map<std::string, Op*>;  // functions may outlive the module
  return ops;
}

Op* op_named(const char* name) {
  auto& ops = known_ops();
  if (const auto it = ops.find(name); it != ops.end()) return it->second;
  const int32_t index = rlk_op_index(name);
  if (index < 0) return raise(RLK_UNKNOWN_NAME, rlk_last_error()), nullptr;
  Op* op = new Op(name, index);
  if (PyErr_Occurred()) return delete op, nullptr;
  return ops.emplace(name, op).first->second;
}

Op* op_of(PyObject* name) {
  std::string text;
  return read_text(name, "the name of an op", text) ? op_named(text.c_str()) : nullptr;
}

// What an op's function is bound to: a module of its own with the op as its state. A function of a module is pickled by its name, as
// `spawn` and process pools hand it on; one of any other object by that object.
PyObject* module_of(Op* op) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "rlk", nullptr, sizeof(Op*), nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* const module = PyModule_Create(&definition);
  if (module) *static_cast<Op**>(PyModule_GetState(module)) = op;
  return module;
}

PyObject* call_op(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  Call call(**static_cast<Op**>(PyModule_GetState(self)));
  if (!call.read(args, nargs, names)) return nullptr;
  return call.run();
}

PyObject* call_recorded(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  Call call(*static_cast<Op*>(PyCapsule_GetPointer(self, "rlk.op")), Call::Face::recorded);
  if (!call.read(args, nargs, names)) return nullptr;
  return call.run();
}

// The same for rlk.torch, which records gradients, and whose functions go through torch's dispatcher where torch must see a call.
// Its own function in Python has a tuple and a dict: to spread them over a call costs as much as to read them.
PyObject* call_torch_op(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 2 || !PyTuple_Check(given[0]) || !PyDict_Check(given[1]))
    return PyErr_SetString(PyExc_TypeError, "a tuple and a dict are wanted"), nullptr;
  PyObject *const args = given[0], *const keywords = given[1];
  auto& entry = *static_cast<TorchOp*>(PyCapsule_GetPointer(self, "rlk.torch_op"));
  if (entry.autocast != Py_None) {
    const int casts = torch_autocasts();
    if (casts) return casts < 0 ? nullptr : call_python(entry.autocast, args, keywords).release();
  }
  if (!torch_modes_active()) {
    Call call(*entry.op, Call::Face::torch);
    if (call.read(args, keywords))
      return call.needs_gradient() ? record(entry, call, args, keywords) : call.run();
    if (!call.needs_dispatcher()) return nullptr;
  } else if (PyErr_Occurred()) {
    return nullptr;
  }
  return call_python(entry.dispatched, args, keywords).release();
}

template <auto Function>
constexpr PyCFunction fast() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Function));
}

PyObject* make_op(PyObject*, PyObject* name) {
  Op* op = op_of(name);
  if (!op) return nullptr;
  op->definition = {op->name.c_str(), fast<call_op>(), METH_FASTCALL | METH_KEYWORDS, op->doc.c_str()};
  const Owned self(module_of(op)), package(PyUnicode_FromString("rlk"));
  return self && package ? PyCFunction_NewEx(&op->definition, self.get(), package.get()) : nullptr;
}

// What torch's dispatcher calls, below autograd.
PyObject* make_recorded(PyObject*, PyObject* name) {
  static PyMethodDef definition{"recorded", fast<call_recorded>(), METH_FASTCALL | METH_KEYWORDS, nullptr};
  Op* op = op_of(name);
  const Owned self(op ? PyCapsule_New(op, "rlk.op", nullptr) : nullptr);
  return self ? PyCFunction_NewEx(&definition, self.get(), nullptr) : nullptr;
}

PyObject* make_torch_op(PyObject*, PyObject* args) {
  PyObject *name, *dispatched, *apply, *plan, *several, *autocast;
  if (!PyArg_ParseTuple(args, "OOOOOO", &name, &dispatched, &apply, &plan, &several, &autocast))
    return nullptr;
  Op* op = op_of(name);
  if (!op) return nullptr;
  for (PyObject* held : {dispatched, apply, plan, several, autocast}) Py_INCREF(held);
  auto* entry = new TorchOp{op, dispatched, apply, plan, several, autocast, {}, {}};
  entry->definition = {op->name.c_str(), fast<call_torch_op>(), METH_FASTCALL, op->doc.c_str()};
  const Owned self(PyCapsule_New(entry, "rlk.torch_op", nullptr));
  return self ? PyCFunction_NewEx(&entry->definition, self.get(), nullptr) : nullptr;
}

// ---- questions about a call: the op's name comes first -------------------------------------------------------------------

template <PyObject* (Call::*Ask)()>
PyObject* ask(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  if (nargs < 1) return PyErr_SetString(PyExc_TypeError, "the first argument is the name of an op"), nullptr;
  Op* op = op_of(args[0]);
  if (!op) return nullptr;
  Call call(*op, Call::Face::question);
  if (!call.read(args + 1, nargs - 1, names)) return nullptr;
  return (call.*Ask)();
}

// ---- the rest of the C face -----------------------------------------------------------------------------------------------

PyObject* none_or_raise(rlk_code code) {
  if (code != RLK_OK) return raise(code, rlk_last_error()), nullptr;
  Py_RETURN_NONE;
}

PyObject* text_or_raise(char* text) {
  if (!text) return raise(RLK_UNKNOWN_NAME, rlk_last_error()), nullptr;
  PyObject* out = PyUnicode_FromString(text);
  rlk_free(text);
  return out;
}

PyObject* list_json(PyObject*, PyObject* what) {
  std::string text;
  return read_text(what, "what to list", text) ? text_or_raise(rlk_list_json(text.c_str())) : nullptr;
}
PyObject* examples_json(PyObject*, PyObject* op) {
  std::string text;
  return read_text(op, "the name of an op", text) ? text_or_raise(rlk_examples_json(text.c_str())) : nullptr;
}
PyObject* schema(PyObject*, PyObject* name) {
  Op* op = op_of(name);
  return op ? op->describe() : nullptr;
}
PyObject* op_names(PyObject*, PyObject*) {
  Owned list(PyList_New(0));
  for (std::size_t i = 0; list && i < rlk_op_count(); ++i) {
    const Owned name(PyUnicode_FromString(rlk_op_name(i)));
    if (!name || PyList_Append(list.get(), name.get()) < 0) return nullptr;
  }
  return list.release();
}

PyObject* scope_enter(PyObject*, PyObject* args) {
  const char *precision, *backend;
  if (!PyArg_ParseTuple(args, "zz", &precision, &backend)) return nullptr;
  const rlk_code code = rlk_scope_enter(precision, backend);
  if (code == RLK_OK) ++scopes_entered();
  return none_or_raise(code);
}
PyObject* scope_leave(PyObject*, PyObject*) {
  const rlk_code code = rlk_scope_leave();
  if (code == RLK_OK) --scopes_entered();
  return none_or_raise(code);
}

PyObject* save(PyObject*, PyObject* args) {
  PyObject* object;
  const char* name;
  if (!PyArg_ParseTuple(args, "Os", &object, &name)) return nullptr;
  TensorView view;
  if (!view.take(object, TensorView::Use::look, false, "save", name)) return nullptr;
  const uint64_t ticket = rlk_save(&view.tensor(), name);
  return PyLong_FromUnsignedLongLong(ticket);
}
PyObject* release(PyObject*, PyObject* ticket) {
  const unsigned long long id = PyLong_AsUnsignedLongLong(ticket);
  if (PyErr_Occurred()) return nullptr;
  rlk_release(id);
  Py_RETURN_NONE;
}

// Saves several tensors, by a tuple of names and one of tensors or None, until the result is given back.
PyObject* guard(PyObject*, PyObject* args) {
  PyObject *given, *tensors;
  if (!PyArg_ParseTuple(args, "OO", &given, &tensors)) return nullptr;
  auto tickets = std::make_unique<Tickets>();
  const Py_ssize_t count = PyTuple_Size(tensors);
  if (count < 0) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const tensor = PyTuple_GetItem(tensors, i);
    if (tensor == Py_None) continue;
    PyObject* const name = PyTuple_GetItem(given, i);
    const char* text = name ? PyUnicode_AsUTF8AndSize(name, nullptr) : nullptr;
    TensorView view;
    if (!text || !view.take(tensor, TensorView::Use::look, false, "save", text)) return nullptr;
    tickets->add(view.tensor(), text);
  }
  return make_guard(std::move(tickets));
}

PyObject* load_evidence(PyObject*, PyObject* path) {
  std::string text;
  return read_text(path, "the path of a certificate", text) ? none_or_raise(rlk_load_evidence(text.c_str()))
                                                            : nullptr;
}
PyObject* clear_evidence(PyObject*, PyObject*) {
  rlk_clear_evidence();
  Py_RETURN_NONE;
}
PyObject* load_plugin(PyObject*, PyObject* path) {
  std::string text;
  return read_text(path, "the path of a plugin", text) ? none_or_raise(rlk_load_plugin(text.c_str()))
                                                       : nullptr;
}
PyObject* reload_environment(PyObject*, PyObject*) { return none_or_raise(rlk_reload_environment()); }
PyObject* code_name(PyObject*, PyObject* code) {
  const long number = PyLong_AsLong(code);
  if (PyErr_Occurred()) return nullptr;
  return PyUnicode_FromString(rlk_code_name(static_cast<int32_t>(number)));
}

// Objects of one interpreter are not another's, and what is interned and known here is the first one's. Python's own import does not
// ask this module twice.
bool is_of_this_interpreter() {
  static const int64_t first = PyInterpreterState_GetID(PyInterpreterState_Get());
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) == first) return true;
  PyErr_SetString(PyExc_ImportError,
                  "rlk serves one interpreter of a process, another has imported it before");
  return false;
}

PyObject* set_hooks(PyObject*, PyObject* args) {
  if (!is_of_this_interpreter()) return nullptr;
  PyObject *raise, *empty, *stream, *scopes, *error, *torch;
  if (!PyArg_ParseTuple(args, "OOOOOO", &raise, &empty, &stream, &scopes, &error, &torch)) return nullptr;
  set_hooks_to(raise, empty, stream, scopes, error, torch);
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"op", make_op, METH_O, "The function of an op or alias."},
    {"torch_op", make_torch_op, METH_VARARGS,
     "The same with rlk.torch's functions: through the dispatcher, of the autograd.Function, of its plan."},
    {"recorded_forward", recorded_forward, METH_VARARGS, "The forward of that autograd.Function."},
    {"recorded_op", make_recorded, METH_O, "The same, for tensors that torch's autograd has seen."},
    {"infer", fast<ask<&Call::infer>>(), METH_FASTCALL | METH_KEYWORDS,
     "Shape, dtype and admissible dtypes of every result."},
    {"resolve", fast<ask<&Call::resolve>>(), METH_FASTCALL | METH_KEYWORDS, "A resolution as JSON."},
    {"explain", fast<ask<&Call::explain>>(), METH_FASTCALL | METH_KEYWORDS, "A resolution in words."},
    {"ops", op_names, METH_NOARGS, "The names of all ops."},
    {"schema", schema, METH_O, "An op's schema."},
    {"list_json", list_json, METH_O, "What rlk_list_json gives."},
    {"examples_json", examples_json, METH_O, "What rlk_examples_json gives."},
    {"scope_enter", scope_enter, METH_VARARGS, "Enters a scope of this thread."},
    {"scope_leave", scope_leave, METH_NOARGS, "Leaves it."},
    {"save", save, METH_VARARGS, "Marks a tensor's bytes as saved for a backward."},
    {"guard", guard, METH_VARARGS, "Saves several tensors for as long as the result lives."},
    {"release", release, METH_O, "Releases what save marked."},
    {"load_evidence", load_evidence, METH_O, "Reads a certificate."},
    {"clear_evidence", clear_evidence, METH_NOARGS, "Forgets all certificates."},
    {"load_plugin", load_plugin, METH_O, "Loads a backend plugin."},
    {"reload_environment", reload_environment, METH_NOARGS, "Reads the RLK_ variables again."},
    {"code_name", code_name, METH_O, "The name of a code."},
    {"xla_handler", xla_handler, METH_NOARGS, "What XLA calls ops by, as jax.ffi takes it."},
    {"trace_begin", trace_begin, METH_VARARGS, "Begins a trace: file, tags, every, weights_once."},
    {"trace_end", trace_end, METH_NOARGS, "Ends it."},
    {"tracing", tracing, METH_NOARGS, "Whether calls are recorded."},
    {"trace_tag", trace_tag, METH_O, "What the next calls of this thread are for."},
    {"trace_rows", trace_rows, METH_VARARGS, "Whose rows they compute."},
    {"trace_weights_changed", trace_weights_changed, METH_NOARGS, "Weights have been written."},
    {"trace_tensor", trace_tensor, METH_VARARGS, "Records a tensor that another program computed."},
    {"torch_native_find", torch_native_find, METH_VARARGS, "For rlk._torch_native, as the next four."},
    {"torch_native_object", torch_native_object, METH_VARARGS, "The object of what its exchange API owns."},
    {"torch_native_tensor", torch_native_tensor, METH_O, "What torch's own C++ functions say of a tensor."},
    {"torch_native_written", torch_native_written, METH_O, "Tells autograd that it was written."},
    {"torch_native_thread", torch_native_thread, METH_NOARGS, "What they say of this thread."},
    {"set_hooks", set_hooks, METH_VARARGS, "What the package does for this module."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "rlk._C", "rlk's C face.", -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace rlk::python

PyMODINIT_FUNC PyInit__C(void) {
  PyObject* module = PyModule_Create(&rlk::python::kModule);
  if (!module) return nullptr;
  if (!rlk::python::prepare_names() || PyModule_AddStringConstant(module, "version", rlk_version()) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
