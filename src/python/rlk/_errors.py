"""Failures of the library as exceptions: one class a code, each also of the built-in class that fits."""

from rlk import _C


class Error(Exception):
    """A failure of the library: one line of text, and the code of the C face in ``code``."""

    code = "RLK_INTERNAL"

    # No __init__: Dynamo, which would have to trace one, then says which error a compiled function raises.
    @property
    def message(self):
        return self.args[0] if self.args else ""

    def __str__(self):  # KeyError would show its argument's repr
        return self.message


class InvalidArgument(Error, ValueError):
    """A tensor, attribute or option is wrong; the text names it and both values."""

    code = "RLK_INVALID_ARGUMENT"


class UnknownName(Error, KeyError):
    """No such op, argument, attribute, backend or implementation."""

    code = "RLK_UNKNOWN_NAME"


class ConfigurationError(Error, ValueError):
    """RLK_BACKEND or another RLK_ variable is wrong."""

    code = "RLK_CONFIGURATION"


class NoImplementation(Error, NotImplementedError):
    """Every candidate refused. ``candidates``: a dict each, with id, reason and nearest (what would change it)."""

    code = "RLK_NO_IMPLEMENTATION"

    @property
    def candidates(self):
        import json
        return json.loads(self.args[1])["candidates"] if self.args[1:] and self.args[1] else []


class Unsupported(Error, NotImplementedError):
    """An implementation refused a request at run time, or a gradient is asked of what has none."""

    code = "RLK_UNSUPPORTED"


class OverlapError(Error, ValueError):
    """A written range meets a read, written or saved range."""

    code = "RLK_OVERLAP"


class PluginError(Error, ImportError):
    """A plugin could not be used."""

    code = "RLK_PLUGIN"


class BackendError(Error, RuntimeError):
    """A driver or vendor library failed."""

    code = "RLK_BACKEND_ERROR"


class OutOfMemory(Error, MemoryError):
    """There is no memory."""

    code = "RLK_OUT_OF_MEMORY"


class InternalError(Error, RuntimeError):
    """A broken promise inside rlk: please report it."""

    code = "RLK_INTERNAL"


_BY_CODE = {c.code: c for c in (InvalidArgument, UnknownName, ConfigurationError, NoImplementation, Unsupported,
                                OverlapError, PluginError, BackendError, OutOfMemory, InternalError)}


def keywords(op):
    """All names that a call of an op may use."""
    schema = _C.schema(op)
    return [*(a["name"] for a in schema["arguments"]), *(a["name"] for a in schema["attributes"]), *OPTIONS]


#: What every call takes beside its arguments and attributes.
OPTIONS = ("backend", "arithmetic", "precision", "gradients", "deterministic", "threads", "evidence")


def make(code, text, resolution=None, op=None):
    """The exception for a failure; the native module raises what this returns."""
    kind = _BY_CODE.get(_C.code_name(code), InternalError)
    if kind is NoImplementation:
        return NoImplementation(text, resolution)
    if kind is UnknownName and op and "'" in text:
        import difflib  # slow to import, and seldom needed
        near = difflib.get_close_matches(text.split("'")[1], keywords(op), 1)
        if near:
            text += f", did you mean '{near[0]}'?"
    return kind(text)
