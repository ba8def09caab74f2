#include "src/python/record.hpp"

#include <utility>

namespace rlk::python {
namespace {

constexpr std::size_t kMostPlans = 256;

// The call that an apply of this thread is about to come back with.
struct Recording {
  TorchOp* op;
  Call* call;
};
Recording& recording() noexcept {
  static thread_local Recording now{};
  return now;
}

Owned shared(PyObject* object) {
  Py_INCREF(object);
  return Owned(object);
}

// Null with an exception.
Owned plan_of(TorchOp& op, const Call& call, PyObject* args, PyObject* keywords) {
  for (const TorchOp::Seen& seen : op.seen)
    if (call.is(seen.kind)) return shared(seen.plan);
  PyObject* const plan = call_python(op.plan, args, keywords).release();
  if (!plan) return {};
  if (op.seen.size() == kMostPlans) {
    Py_DECREF(op.seen.front().plan);
    op.seen.erase(op.seen.begin());
  }
  op.seen.push_back({call.kind(), plan});
  return shared(plan);
}

// Until the backward has run, an op that would write what it reads fails. None where hooks (checkpointing, offloading) keep
// something else than the tensors themselves.
PyObject* guard_of(const Call& call) {
  const int elsewhere = torch_saves_elsewhere();
  if (elsewhere < 0) return nullptr;
  if (elsewhere) Py_RETURN_NONE;
  auto tickets = std::make_unique<Tickets>();
  call.guard_kept(*tickets);
  return make_guard(std::move(tickets));
}

// context.save_for_backward(*tensors), which sets an attribute of torch's own base of contexts; a call of it costs as much as the
// two tensors that it saves.
bool save(PyObject* context, PyObject* tensors) {
  static const bool has_attribute = torch_contexts_have(names().to_save);
  if (has_attribute) return PyObject_SetAttr(context, names().to_save, tensors) == 0;
  const Owned method(PyObject_GetAttr(context, names().save_for_backward));
  return method && call_python(method.get(), tensors);
}

// What the backward will find: context.saved_tensors, and context.rlk = (plan, scopes, guard).
bool keep(const Recording& now, PyObject* context, PyObject* plan, PyObject* results) {
  const Owned tensors(now.call->kept());
  if (!tensors || !save(context, tensors.get())) return false;
  const Owned scopes(scopes_entered() ? call_scopes() : Owned(PyTuple_New(0)));
  const Owned guard(scopes ? guard_of(*now.call) : nullptr);
  const Owned state(guard ? PyTuple_Pack(3, plan, scopes.get(), guard.get()) : nullptr);
  if (!state || PyObject_SetAttr(context, names().rlk, state.get()) < 0) return false;
  if (now.op->op->results < 2) return true;
  const Owned words(PyTuple_Pack(3, context, plan, results));
  return words && call_python(now.op->several, words.get());
}

}  // namespace

int& scopes_entered() noexcept {
  static thread_local int count = 0;
  return count;
}

PyObject* make_guard(std::unique_ptr<Tickets> tickets) {
  PyObject* const capsule = PyCapsule_New(tickets.get(), "rlk.guard", [](PyObject* object) {
    delete static_cast<Tickets*>(PyCapsule_GetPointer(object, "rlk.guard"));
  });
  [[maybe_unused]] const Tickets* const held = capsule ? tickets.release() : nullptr;
  return capsule;
}

PyObject* record(TorchOp& op, Call& call, PyObject* args, PyObject* keywords) {
  if (op.apply == Py_None || !call.can_be_recorded())
    return call_python(op.dispatched, args, keywords).release();
  const Owned plan = plan_of(op, call, args, keywords);
  const Owned inputs(plan ? call.inputs(plan.get()) : nullptr);
  if (!inputs) return nullptr;
  call.keep();
  recording() = {&op, &call};
  Owned out = call_python(op.apply, inputs.get());
  recording() = {};
  return out.release();
}

PyObject* recorded_forward(PyObject*, PyObject* args) {
  const Recording now = std::exchange(recording(), {});
  if (!now.call || PyTuple_Size(args) < 2)
    return PyErr_SetString(PyExc_RuntimeError, "rlk.torch alone applies this function"), nullptr;
  Owned out(now.call->run());
  if (!out) return nullptr;
  const bool wanted = now.op->op->schema->backward != nullptr;
  if (wanted && !keep(now, PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1), out.get())) return nullptr;
  return out.release();
}

}  // namespace rlk::python
