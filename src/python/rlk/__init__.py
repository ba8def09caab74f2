"""rlk: numerically pinned kernels for reinforcement learning and large language models.

Every op of the registry is a function of this module, which takes whatever has ``__dlpack__`` (torch, numpy, jax, cupy):

    logits = rlk.lm_head(hidden, weight)
    rlk.rope(x, cos, sin, out=out)

``rlk.torch`` holds the same ops for autograd and torch.compile, ``rlk.jax`` for jax on CPUs. Results that are not given are allocated by the framework of
the first tensor; optional ones are asked for by name, ``final_state=True``, or with a dtype, ``out="fp32"``.
"""

from rlk import _C
from rlk._errors import (BackendError, ConfigurationError, Error, InternalError, InvalidArgument, NoImplementation,
                         OutOfMemory, OverlapError, PluginError, UnknownName, Unsupported)
from rlk._memory import Spec
from rlk._scopes import backend, options_of_scopes, precision
from rlk._tools import (Resolution, clear_evidence, explain, implementations, load_evidence, load_plugin,
                        reload_environment, resolve, saved, verify)
from rlk._trace import trace, trace_rows, trace_tag, trace_tensor, trace_weights_changed, tracing

__version__ = _C.version

#: The names of all ops, without aliases.
ops = tuple(_C.ops())


def _aliases():
    for name in ops:
        for alias in _C.schema(name)["aliases"].split(","):
            if alias:
                yield alias.partition(":")[0]


for _name in (*ops, *_aliases()):
    globals()[_name] = _C.op(_name)
del _name


def __getattr__(name):
    # What needs a framework is imported when it is first used; a backend plugin may have added an op meanwhile.
    import importlib
    if name in ("torch", "jax", "adapters", "parallel"):
        return importlib.import_module(f"rlk.{name}")
    if name in _C.ops():
        globals()[name] = _C.op(name)
        return globals()[name]
    raise AttributeError(f"module 'rlk' has no attribute '{name}'")
