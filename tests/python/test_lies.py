"""Tensors that are not what they say, exporters that fail, words of the wrong kind: an error of one line each, and nothing is read
or written that should not be."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading

import numpy
import pytest
import rlk
from rlk import _C

HIDDEN, WEIGHT = numpy.ones((2, 4), numpy.float32), numpy.ones((3, 4), numpy.float32)


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int), ("dtype", _Dtype), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Says:
    """Some memory, and what it says of itself."""

    def __init__(self, *, shape=(2, 4), strides=(4, 1), ndim=None, dtype=(2, 32, 1), device=(1, 0), data=True, offset=0,
                 name=b"dltensor"):
        self.memory, self.name = numpy.ones(64, numpy.float32), name
        self.sizes = [s if s is None else (ctypes.c_int64 * len(s))(*s) for s in (shape, strides)]
        at = [s if s is None else ctypes.addressof(s) for s in self.sizes]
        self.tensor = _Tensor(self.memory.ctypes.data if data else None, _Device(*device), len(shape or strides) if ndim is None else ndim,
                              _Dtype(*dtype), at[0], at[1], offset, None, None)

    def __dlpack__(self, **_):
        return _new(ctypes.addressof(self.tensor), self.name, None)


def result(rows=2):
    return numpy.full((rows, 3), numpy.nan, numpy.float32)


def test_a_stranger_that_says_the_truth_is_read():
    assert (rlk.lm_head(Says(), WEIGHT, out=result()) == 4).all()
    assert (rlk.lm_head(Says(strides=None), WEIGHT, out=result()) == 4).all()


@pytest.mark.parametrize("lie, text", [
    ({"ndim": 1 << 30}, "hidden has rank 1073741824, rlk takes up to 8"),
    ({"ndim": -1}, "hidden has rank -1, rlk takes up to 8"),
    ({"shape": (1,) * 9, "strides": (1,) * 9}, "hidden has rank 9, rlk takes up to 8"),
    ({"shape": None}, "hidden has rank 2 and no shape"),
    ({"shape": (-2, 4)}, "hidden has size -2 in dimension 0"),
    ({"shape": (1 << 62, 4)}, "hidden is .4611686018427387904, 4., more bytes than an address space has"),
    ({"shape": (1 << 60, 4), "strides": (0, 1)}, "more bytes than an address space has"),
    ({"shape": (3, 4), "strides": (-(1 << 63), 1)}, "its reach overflows 64 bits"),
    ({"shape": (3, 4), "strides": (1 << 62, 1)}, "its reach overflows 64 bits"),
    ({"strides": (1, 2)}, "hidden has stride 2 in its last dimension"),
    ({"data": False}, "hidden .2, 4. has null data"),
    ({"offset": 1}, "hidden starts at an address that is 1 past"),
    ({"dtype": (2, 32, 4)}, "hidden has DLPack dtype code 2, 32 bits, 4 lanes"),
    ({"dtype": (2, 0, 1)}, "hidden has DLPack dtype code 2, 0 bits"),
    ({"dtype": (77, 32, 1)}, "hidden has DLPack dtype code 77"),
    ({"device": (77, 0)}, "hidden is on DLPack device type 77"),
    ({"device": (-5, 0)}, "hidden is on DLPack device type -5"),
    ({"device": (2, 0)}, "on cuda:0"),
    ({"name": b"used_dltensor"}, "hidden is of type Says, which gave no DLPack capsule"),
    ({"name": b"tensor"}, "gave no DLPack capsule"),
])
def test_a_tensor_that_lies_is_refused(lie, text):
    out = result()
    with pytest.raises(rlk.Error, match=text) as caught:
        rlk.lm_head(Says(**lie), WEIGHT, out=out)
    assert "\n" not in str(caught.value) and numpy.isnan(out).all()
    with pytest.raises(rlk.Error):  # with a result to be made, and as a question
        rlk.lm_head(Says(**lie), WEIGHT)
    if "data" not in lie and "offset" not in lie and "device" not in lie:
        with pytest.raises(rlk.Error):
            rlk.resolve("lm_head", Says(**lie), WEIGHT).fingerprint


@pytest.mark.parametrize("lie", [{"shape": None, "strides": (3, 1)}, {"shape": (2, 3), "strides": (3, 1), "ndim": 1 << 30},
                                 {"shape": (2, 3), "strides": (3, 1), "data": False}, {"shape": (2, 3), "strides": (0, 1)},
                                 {"shape": (2, 3), "strides": (2, 1)}, {"shape": (1 << 62, 3), "strides": (3, 1)}])
def test_a_result_that_lies_is_not_written(lie):
    out = Says(**lie)
    with pytest.raises(rlk.InvalidArgument, match="lm_head: out"):
        rlk.lm_head(HIDDEN, WEIGHT, out=out)
    assert (out.memory == 1).all()


class Raises:
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **_):
        raise self.error


@pytest.mark.parametrize("error, words", [
    (ValueError("one\ntwo"), "one"), (ValueError(), "ValueError"), (ValueError("ä" * 999), "ä" * 999), (TypeError("no"), "no"),
    (ValueError("\ud800 x"), "? x"), (MemoryError("all gone"), "all gone")])
def test_what_an_exporter_raises_is_said_in_one_line_and_kept(error, words):
    with pytest.raises(rlk.InvalidArgument) as caught:
        rlk.lm_head(Raises(error), WEIGHT)
    assert str(caught.value) == f"lm_head: hidden is of type Raises, which gives no DLPack view: {words}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), rlk.OverlapError("mine")])
def test_what_is_no_failure_of_an_exporter_passes_through(error):
    with pytest.raises(type(error)) as caught:
        rlk.lm_head(Raises(error), WEIGHT)
    assert caught.value is error


def test_an_attribute_that_fails_is_not_a_missing_one():
    class Property:
        @property
        def __dlpack__(self):
            raise ZeroDivisionError("in a property")

    with pytest.raises(rlk.InvalidArgument, match="gives no DLPack view: in a property"):
        rlk.lm_head(Property(), WEIGHT)
    with pytest.raises(rlk.InvalidArgument, match="gave no DLPack capsule"):
        rlk.lm_head(type("Five", (), {"__dlpack__": lambda self, **_: 5})(), WEIGHT)


def test_a_type_that_calls_itself_numpys_is_not_read_as_numpys():
    impostor = type("ndarray", (), {"__module__": "numpy", "__slots__": ()})()
    with pytest.raises(rlk.InvalidArgument, match="hidden is of type ndarray, which is no tensor"):
        rlk.lm_head(impostor, WEIGHT)


def test_a_masked_array_is_refused_and_a_matrix_is_not():
    with pytest.raises(rlk.InvalidArgument, match="hidden is of type MaskedArray, which hides elements"):
        rlk.lm_head(numpy.ma.masked_array(HIDDEN, mask=[[True] * 4, [False] * 4]), WEIGHT)
    assert (rlk.lm_head(numpy.matrix(HIDDEN), WEIGHT) == 4).all()


def test_what_one_capsule_holds_is_given_back():
    freed = []
    array = HIDDEN.copy()

    class Counts:
        def __dlpack__(self, **keywords):
            freed.append(sys.getrefcount(array))
            return array.__dlpack__(**keywords)

    for _ in range(20):
        rlk.lm_head(Counts(), WEIGHT, out=result())
        with pytest.raises(rlk.Error):
            rlk.lm_head(Counts(), WEIGHT[:, :3])
    gc.collect()
    assert freed[0] == freed[-1] == sys.getrefcount(array) == freed[20]


# ---- words and numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, text", [
    (lambda: rlk.rms_norm(HIDDEN, eps="a"), "rms_norm: eps is 'a', it takes a number"),
    (lambda: rlk.rms_norm(HIDDEN, eps=10**400), "rms_norm: eps is 10000"),
    (lambda: rlk.rms_norm(HIDDEN, eps=HIDDEN), "rms_norm: eps is array"),
    (lambda: rlk.rms_norm(HIDDEN, gate=HIDDEN, gate_act=1.5), "rms_norm: gate_act is 1.5, it takes silu|sigmoid"),
    (lambda: rlk.rms_norm(HIDDEN, gate=HIDDEN, gate_act=7), "rms_norm: gate_act is choice 7, there are 2: silu|sigmoid"),
    (lambda: rlk.rms_norm(HIDDEN, gate=HIDDEN, gate_act="\ud800"), "rms_norm: gate_act is '\\ud800', it takes silu|sigmoid"),
    (lambda: rlk.rope_tables(rotary_dim=8.0, rows=4), "rope_tables: rotary_dim is 8.0, it takes an integer of 64 bits"),
    (lambda: rlk.rope_tables(rotary_dim=8, rows=1 << 70), "rope_tables: rows is 1180591620717411303424, it takes an integer"),
    (lambda: rlk.rope(HIDDEN[None, None], HIDDEN, HIDDEN, transpose="yes"), "rope: transpose is 'yes', it takes True or False"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, threads=(1 << 32) + 1), "lm_head: threads is 4294967297, it takes"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, threads="2"), "lm_head: threads is '2', it takes"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, backend=5), "lm_head: backend is 5, it takes a name"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, backend="native\0"), "lm_head: backend is 'native\\x00', it takes a name"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, **{"\ud800": 1}), "lm_head: no argument, attribute or option is called"),
    (lambda: rlk.explain("lm_head\0"), "the name of an op is 'lm_head\\x00', which has a character that no name has"),
    (lambda: rlk.Spec((2.5, 4), "fp32"), "Spec: shape is (2.5, 4), it is a sequence of integers"),
    (lambda: rlk.Spec(5, "fp32"), "Spec: shape is 5, it is a sequence of integers"),
    (lambda: rlk.Spec((1 << 80,), "fp32"), "Spec: shape is (1208925819614629174706176,), its sizes have more than 64 bits"),
    (lambda: rlk.Spec((2,), ["fp32"]), "Spec: dtype is '['fp32']', it is one of"),
    (lambda: rlk.Spec((2,), "fp32", "cuda:x"), "Spec: device is 'cuda:x', it is cpu, cuda:N or hip:N"),
])
def test_a_wrong_word_is_named_with_its_value(call, text):
    with pytest.raises(rlk.Error) as caught:
        call()
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)


def test_what_is_no_text_is_a_type_error():
    for call in (lambda: rlk.explain(5), lambda: rlk.trace_tag(5), lambda: rlk.load_plugin(b"/x"), lambda: rlk.precision(5).__enter__()):
        with pytest.raises(TypeError, match="str"):
            call()


def test_numpys_own_scalars_are_numbers_and_flags():
    cos, sin = rlk.rope_tables(rotary_dim=numpy.int64(8), rows=numpy.int32(5))
    x = numpy.random.default_rng(1).normal(size=(1, 2, 5, 8)).astype(numpy.float32)
    for flag in (True, False):
        assert numpy.array_equal(rlk.rope(x, cos, sin, transpose=numpy.bool_(flag)), rlk.rope(x, cos, sin, transpose=flag))


def test_a_result_without_memory_says_so():
    row = numpy.ones((1, 1), numpy.float32)
    with pytest.raises(rlk.OutOfMemory, match=r"lm_head: there is no memory for out \[1099511627776, 1073741824\]: ") as caught:
        rlk.lm_head(numpy.broadcast_to(row, (1 << 40, 1)), numpy.broadcast_to(row, (1 << 30, 1)))
    assert isinstance(caught.value, MemoryError)


def test_a_spec_shows_what_it_is():
    assert repr(rlk.Spec([numpy.int64(2), 3], "bf16", "cuda:1")) == "rlk.Spec((2, 3), 'bf16', 'cuda:1')"


# ---- scopes, threads, signals -----------------------------------------------------------------------------------------------------


def arithmetic():
    return rlk.resolve("lm_head", HIDDEN, WEIGHT).arithmetic


def test_a_scope_that_is_left_before_a_later_one_is_an_error_and_the_later_one_stays():
    usual = arithmetic()
    outer, inner = rlk.backend("lm_head=native"), rlk.precision("golden")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(rlk.InvalidArgument, match=r"scope: backend\('lm_head=native'\) is left while 1 entered later"):
        outer.__exit__(None, None, None)
    assert arithmetic() == "fma64" and rlk.resolve("lm_head", HIDDEN, WEIGHT, backend="cuda").error
    inner.__exit__(None, None, None)
    assert arithmetic() == usual and rlk.options_of_scopes() == ()
    with pytest.raises(rlk.InvalidArgument, match=r"precision\('golden'\) is left on a thread that has not entered it"):
        inner.__exit__(None, None, None)


def test_a_generator_that_keeps_a_scope_open_is_noticed():
    def golden():
        with rlk.precision("golden"):
            yield

    usual = arithmetic()
    generator = golden()
    next(generator)
    with rlk.backend("native"):
        with pytest.raises(rlk.InvalidArgument, match="is left while 1 entered later"):
            generator.close()
        assert arithmetic() == usual


def test_a_scope_is_left_on_the_thread_that_entered_it():
    scope, errors = rlk.precision("golden"), []
    scope.__enter__()

    def leave():
        try:
            scope.__exit__(None, None, None)
        except rlk.InvalidArgument as error:
            errors.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert errors and arithmetic() == "fma64"
    scope.__exit__(None, None, None)


INTERRUPTED = """
import os, signal, threading, numpy, rlk
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores the signal, and Python then too
h, w = numpy.ones((256, 512), numpy.float32), numpy.ones((2000, 512), numpy.float32)
inside = threading.Event()
def interrupt():
    inside.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    while True:
        inside.set()
        rlk.lm_head(h, w)
except KeyboardInterrupt:
    print("interrupted", rlk.saved(), rlk.lm_head(h[:1], w[:1])[0, 0])
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_a_key_pressed_during_a_call_interrupts_after_it():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.split("\n")[0] == "interrupted [] 512.0", done.stderr
    assert done.returncode == 0 and signal.getsignal(signal.SIGINT) is not None


def test_the_native_module_is_not_asked_with_lies():
    with pytest.raises(TypeError):
        _C.save(HIDDEN)
    with pytest.raises(rlk.InvalidArgument):
        _C.save(5, "x")
    with pytest.raises(rlk.UnknownName):
        _C.op("nope")
