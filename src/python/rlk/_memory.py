"""Shapes without data, and results for frameworks whose tensor type has no allocator of its own."""

import sys

from rlk import _C, _errors, _scopes, _torch_native

#: DLPack's (code, bits) of each dtype, by the name that rlk uses.
DTYPES = {"fp16": (2, 16), "bf16": (4, 16), "fp32": (2, 32), "fp64": (2, 64), "int32": (0, 32), "int64": (0, 64),
          "uint8": (1, 8), "bool": (6, 8), "fp8_e4m3": (10, 8)}
_DEVICES = {"cpu": 1, "cuda": 2, "hip": 10}
_NUMPY = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "int32": "int32", "int64": "int64", "uint8": "uint8",
          "bool": "bool"}


class Spec:
    """A tensor of which only shape, dtype and device are known: for explain, resolve and infer."""

    __slots__ = ("_rlk_shape", "_rlk_dtype", "_rlk_device")

    def __init__(self, shape, dtype, device="cpu"):
        kind, _, number = str(device).partition(":")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise _errors.InvalidArgument(f"Spec: dtype is '{dtype}', it is one of {', '.join(DTYPES)}")
        if kind not in _DEVICES or not (number or "0").isdecimal():
            raise _errors.InvalidArgument(f"Spec: device is '{device}', it is cpu, cuda:N or hip:N")
        try:
            self._rlk_shape = tuple(n.__index__() for n in shape)
        except (AttributeError, TypeError):
            raise _errors.InvalidArgument(f"Spec: shape is {shape!r}, it is a sequence of integers") from None
        if any(abs(n) >= 2**63 for n in self._rlk_shape):
            raise _errors.InvalidArgument(f"Spec: shape is {shape!r}, its sizes have more than 64 bits")
        self._rlk_dtype = DTYPES[dtype]
        self._rlk_device = (_DEVICES[kind], int(number or 0))

    def __repr__(self):
        dtype = next(n for n, d in DTYPES.items() if d == self._rlk_dtype)
        kind = next(n for n, d in _DEVICES.items() if d == self._rlk_device[0])
        return f"rlk.Spec({self._rlk_shape}, '{dtype}', '{kind}{f':{self._rlk_device[1]}' if kind != 'cpu' else ''}')"


def empty(like, shape, dtype):
    """A buffer for a result, and what makes the caller's own type of it (None: it is that already)."""
    module = type(like).__module__.partition(".")[0]
    if module in ("numpy", "builtins", "rlk") and dtype in _NUMPY:
        import numpy
        return numpy.empty(shape, _NUMPY[dtype]), None
    if module == "cupy" and dtype in _NUMPY:
        import cupy
        return cupy.empty(shape, _NUMPY[dtype]), None
    torch = sys.modules.get("torch")
    if torch and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=torch.bfloat16 if dtype == "bf16" else getattr(torch, _NUMPY[dtype]), device=like.device), None
    if module in ("jax", "jaxlib"):
        return _empty_jax(shape, dtype)
    raise _errors.InvalidArgument(
        f"{dtype} results beside a {type(like).__name__} cannot be allocated here: pass them, out=...")


def _empty_jax(shape, dtype):
    # jax arrays never change, so the result is written as numpy's and handed over.
    import jax.numpy
    import numpy
    if dtype in _NUMPY:
        return numpy.empty(shape, _NUMPY[dtype]), jax.numpy.asarray
    bits = numpy.empty(shape, "uint16")  # numpy's DLPack has no bf16
    return bits, lambda b: jax.numpy.asarray(b.view(jax.numpy.bfloat16))


def stream(like, device):
    """The stream that a GPU array's framework runs on now, as a number; None where it does not say."""
    if type(like).__module__.partition(".")[0] != "cupy":
        return None
    import cupy
    with cupy.cuda.Device(device):
        return cupy.cuda.get_current_stream().ptr


_C.set_hooks(_errors.make, empty, stream, _scopes.options_of_scopes, _errors.Error, _torch_native)
