"""What adapters share: replacing a peer's functions, and putting them back."""

import inspect
import sys

from rlk import _errors


class Patch:
    """What was replaced, and how it was before. Leaving the ``with`` puts it back, and so does ``restore()``."""

    def __init__(self):
        self._undo = []

    def replace(self, owner, name, value):
        here, before = name in owner.__dict__, owner.__dict__.get(name)
        self._undo.append(lambda: setattr(owner, name, before) if here else delattr(owner, name))
        setattr(owner, name, value)

    def everywhere(self, function, value):
        """Replaces a function of a module in every module of its package that has imported it by name."""
        package = function.__module__.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if module is not None and name.partition(".")[0] == package:
                for key in [k for k, v in vars(module).items() if v is function]:
                    self.replace(module, key, value)

    def undo(self, action):
        """Also to be done when all is put back."""
        self._undo.append(action)

    def restore(self):
        while self._undo:
            self._undo.pop()()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.restore()


def known(function, mine, name=None):
    """The peer's function, if its replacement takes what it takes, in that order; a version of which that is not true is refused."""
    theirs = [p for p in inspect.signature(function).parameters if p not in ("ctx", "self")]
    wanted = list(inspect.signature(mine).parameters)
    if theirs != wanted[:len(theirs)]:
        raise _errors.Unsupported(f"{name or function.__module__ + '.' + function.__qualname__}: it takes "
                                  f"{', '.join(theirs)}; this adapter knows the version that takes {', '.join(wanted)}")
    return function


def dense(*tensors):
    """The tensors with elements of a row side by side: a peer copies others in silence, and so does what stands for it. One as itself."""
    found = tuple(t if t is None or t.dim() == 0 or t.stride(-1) == 1 else t.contiguous() for t in tensors)
    return found if len(found) > 1 else found[0]


def refuse(name, **given):
    """Refuses an argument of the peer's that rlk has nothing for: refuse("f", mode=(mode, None)) where only None is served."""
    for argument, (value, served) in given.items():
        if value != served:
            raise _errors.Unsupported(f"{name}: {argument} is {value}, rlk serves {served} alone")
