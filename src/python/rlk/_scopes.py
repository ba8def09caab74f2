"""Scopes: what everything below them is held to, on the thread that entered them."""

import threading

from rlk import _C, _errors


class _Entered(threading.local):
    def __init__(self):
        self.stack = ()


_entered = _Entered()


class Scope:
    """Enters when used with ``with``; may be used again, also within itself."""

    __slots__ = ("_demand",)

    def __init__(self, precision, backend):
        self._demand = (precision, backend)

    def __enter__(self):
        _C.scope_enter(*self._demand)
        _entered.stack = (*_entered.stack, self._demand)

    def __exit__(self, *_):
        stack = _entered.stack
        if stack and stack[-1] is self._demand:
            _entered.stack = stack[:-1]
            return _C.scope_leave()
        _leave_from_within(self._demand)


def _leave_from_within(demand):
    """Leaves a scope that others were entered in and not left: they stay, and this is an error. Tasks of asyncio that share a
    thread do that, and generators."""
    stack = _entered.stack
    at = next((i for i in reversed(range(len(stack))) if stack[i] is demand), None)
    words = next(f"{kind}({value!r})" for kind, value in zip(("precision", "backend"), demand) if value is not None)
    if at is None:
        raise _errors.InvalidArgument(f"scope: {words} is left on a thread that has not entered it")
    for _ in stack[at:]:
        _C.scope_leave()
    for inner in stack[at + 1:]:
        _C.scope_enter(*inner)
    _entered.stack = stack[:at] + stack[at + 1:]
    raise _errors.InvalidArgument(f"scope: {words} is left while {len(stack) - at - 1} entered later on this thread are not; what ran "
                                  "meanwhile was held to all of them")


def precision(word):
    """``with rlk.precision("golden"):`` every call is at least of this precision: standard, strict or golden."""
    return Scope(word, None)


def backend(spec):
    """``with rlk.backend("lm_head=native"):`` overrides in the grammar of RLK_BACKEND."""
    return Scope(None, spec)


def options_of_scopes():
    """The scopes of this thread, from the outside: (precision, backend) pairs. ``within`` enters them elsewhere."""
    return _entered.stack


class within:
    """Enters scopes that another thread was in: backwards run on threads of their own."""

    __slots__ = ("_scopes",)

    def __init__(self, scopes):
        self._scopes = [Scope(*demand) for demand in scopes]

    def __enter__(self):
        for scope in self._scopes:
            scope.__enter__()

    def __exit__(self, *error):
        for scope in reversed(self._scopes):
            scope.__exit__(*error)
