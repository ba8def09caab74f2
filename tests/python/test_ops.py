"""rlk without torch: numpy and jax."""

import ast
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy
import pytest
import rlk
from examples import ALL, BUILT_IN, examples
from rlk import _C

HIDDEN = numpy.arange(8, dtype=numpy.float32).reshape(2, 4)
WEIGHT = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
LOGITS = HIDDEN @ WEIGHT.T


def python(code, **environment):
    """Runs a program of its own; its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- every op is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ALL)
def test_every_op_of_the_registry_is_a_function_with_its_arguments(op):
    names = set(inspect.signature(getattr(rlk, op)).parameters)
    schema = _C.schema(op)
    assert {a["name"] for a in schema["arguments"]} <= names
    assert {a["name"] for a in schema["attributes"]} <= names
    assert schema["doc"] in getattr(rlk, op).__doc__


def test_stubs_have_every_op_with_the_signature_of_its_function():
    stubs = {f.name: f for f in ast.parse((Path(_C.__file__).parent / "_ops.pyi").read_text()).body
             if isinstance(f, ast.FunctionDef)}
    for op in BUILT_IN:
        arguments = stubs[op].args
        names = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
        assert names == list(inspect.signature(getattr(rlk, op)).parameters)
    pairing = next(d for a, d in zip(stubs["rope_i"].args.kwonlyargs, stubs["rope_i"].args.kw_defaults) if a.arg == "pairing")
    assert pairing.value == "adjacent"


def test_every_alias_is_a_function():
    aliases = [a.partition(":")[0] for op in ALL for a in _C.schema(op)["aliases"].split(",") if a]
    assert "rope_i" in aliases
    for alias in aliases:
        assert callable(getattr(rlk, alias))


def test_functions_of_ops_are_pickled_by_name():
    aliases = [a.partition(":")[0] for op in ALL for a in _C.schema(op)["aliases"].split(",") if a]
    for op in (*ALL, *aliases):
        function = getattr(rlk, op)
        assert function.__module__ == "rlk" and pickle.loads(pickle.dumps(function)) is function


def test_every_op_of_the_table_is_there():
    assert len(BUILT_IN) > 10 and set(BUILT_IN) <= set(ALL)


@pytest.mark.parametrize("op", BUILT_IN)
def test_examples_of_every_op_run_and_give_what_infer_says(op):
    cases = examples(op, ("fp32", "fp16", "int32", "int64"))
    assert cases
    for name, tensors, results, attributes in cases:
        asked = {r: True for r in results}
        shapes = _C.infer(op, **tensors, **attributes)
        found = getattr(rlk, op)(**tensors, **attributes, **asked)
        found = found if isinstance(found, tuple) else (found,)
        names = [r for r in shapes if r in asked] or [n for n in shapes if n in tensors]
        assert len(found) == len(names), name
        for array, result in zip(found, names):
            assert array.shape == shapes[result][0], (name, result)
            assert numpy.isfinite(array).all(), (name, result)


@pytest.mark.parametrize("op", BUILT_IN)
def test_a_result_in_every_dtype_that_is_offered_is_right_or_refused(op):
    known = {i["id"]: i["arithmetic"] for i in rlk.implementations() if i["op"] == op and i["backend"] == "native"}
    tried = 0

    def nth(found, at):
        return (found if isinstance(found, tuple) else (found,))[at]

    for name, tensors, results, attributes in examples(op, ("fp32", "fp16", "int32", "int64", "uint8", "bool"))[:2]:
        shapes, asked = _C.infer(op, **tensors, **attributes), dict.fromkeys(results, True)
        order = [r for r in shapes if r in asked]
        call = partial(getattr(rlk, op), **tensors, **attributes)
        want = call(**asked)
        for at, result in enumerate(order):
            for dtype in set(shapes[result][2]) - {"bf16"}:
                for implementation, arithmetic in known.items():
                    try:
                        got = nth(call(**(asked | {result: dtype}), backend=implementation), at)
                    except rlk.Error:
                        continue
                    exact = nth(want, at)
                    if exact.dtype.kind in "iu":  # it may say whose bits a record has
                        exact = nth(call(**asked, arithmetic=arithmetic), at)
                    exact = exact.astype(numpy.float64)
                    far = 2e-2 * (abs(exact).max() if exact.size else 0) + 1e-3
                    assert abs(got - exact).max(initial=0) <= far, (name, implementation, result, dtype)
                    tried += 1
    assert tried or not any(a["role"] == 1 for a in _C.schema(op)["arguments"])  # an op in place makes none


# ---- a call -----------------------------------------------------------------------------------------------------------------


def test_results_are_right():
    assert numpy.array_equal(rlk.lm_head(HIDDEN, WEIGHT), LOGITS)
    assert numpy.array_equal(rlk.lm_head(HIDDEN, WEIGHT, numpy.ones(3, numpy.float32)), LOGITS + 1)
    assert numpy.array_equal(rlk.lm_head(weight=WEIGHT, hidden=HIDDEN), LOGITS)


def test_a_given_result_is_written_and_returned():
    out = numpy.full((2, 3), numpy.nan, numpy.float32)
    assert rlk.lm_head(HIDDEN, WEIGHT, out=out) is out
    assert numpy.array_equal(out, LOGITS)


def test_a_result_may_be_asked_for_in_a_dtype():
    half = rlk.lm_head(HIDDEN.astype(numpy.float16), WEIGHT.astype(numpy.float16))
    single = rlk.lm_head(HIDDEN.astype(numpy.float16), WEIGHT.astype(numpy.float16), out="fp32")
    assert (half.dtype, single.dtype) == (numpy.float16, numpy.float32)


def test_strided_views_are_taken_as_they_lie():
    wide = numpy.zeros((2, 8), numpy.float32)
    wide[:, :4] = HIDDEN
    assert numpy.array_equal(rlk.lm_head(wide[:, :4], WEIGHT), LOGITS)


def test_a_result_follows_its_argument():
    cos, sin = rlk.rope_tables(rotary_dim=8, rows=5)
    x = numpy.ones((1, 2, 5, 8), numpy.float32)
    assert rlk.rope(x, cos, sin).shape == x.shape
    turned, k = rlk.rope(x, cos, sin, k=x[:, :1])
    assert numpy.array_equal(k, turned[:, :1])


def test_an_op_in_place_returns_what_it_changed():
    cos, sin = rlk.rope_tables(rotary_dim=8, rows=5)
    x = numpy.random.default_rng(1).normal(size=(1, 2, 5, 8)).astype(numpy.float32)
    want = rlk.rope(x, cos, sin)
    assert rlk.rope_(x, cos, sin) is x
    assert numpy.array_equal(x, want)


def packed_qkv():
    """[batch, tokens, 4 + 2 + 2 heads of 8] as one product gives it, and its parts."""
    qkv = numpy.random.default_rng(2).normal(size=(2, 6, 64)).astype(numpy.float32)
    return qkv, *(part.reshape(2, 6, -1, 8) for part in numpy.split(qkv, [32, 48], axis=2))


def test_q_and_k_of_one_packed_array_turn_in_place():
    cos, sin = rlk.rope_tables(rotary_dim=8, rows=6)
    qkv, q, k, v = packed_qkv()
    assert all(numpy.shares_memory(qkv, part) for part in (q, k, v))
    want_q, want_k = rlk.rope(q.copy(), cos, sin, k=k.copy(), layout="bshd")
    want_v = v.copy()
    turned = rlk.rope_(q, cos, sin, k=k, layout="bshd")
    assert turned[0] is q and turned[1] is k
    assert numpy.array_equal(q, want_q) and numpy.array_equal(k, want_k) and numpy.array_equal(v, want_v)
    assert numpy.array_equal(qkv[..., :32].reshape(q.shape), want_q)
    meets = qkv[..., 24:40].reshape(2, 6, 2, 8)  # the last head of q and the first of k
    before = qkv.copy()
    with pytest.raises(rlk.OverlapError):
        rlk.rope_(q, cos, sin, k=meets, layout="bshd")
    assert numpy.array_equal(qkv, before)


def test_an_alias_sets_its_attributes():
    cos, sin = rlk.rope_tables(rotary_dim=8, rows=5)
    x = numpy.random.default_rng(1).normal(size=(1, 2, 5, 8)).astype(numpy.float32)
    assert numpy.array_equal(rlk.rope_i(x, cos, sin), rlk.rope(x, cos, sin, pairing="adjacent"))
    assert not numpy.array_equal(rlk.rope_i(x, cos, sin), rlk.rope(x, cos, sin))


def test_jax_arrays_come_back_as_jax_arrays():
    jax = pytest.importorskip("jax.numpy")
    for dtype in (jax.float32, jax.bfloat16):
        out = rlk.lm_head(jax.asarray(HIDDEN, dtype), jax.asarray(WEIGHT, dtype))
        assert out.dtype == dtype
        assert type(out) is type(jax.asarray(HIDDEN))
        assert numpy.array_equal(numpy.asarray(out, numpy.float32), LOGITS)


# ---- bad input ----------------------------------------------------------------------------------------------------------------


def read_only():
    out = numpy.zeros((2, 3), numpy.float32)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize("call, kind, code, text", [
    (lambda: rlk.lm_head(HIDDEN, WEIGHT[:, :3].copy()), ValueError, "RLK_INVALID_ARGUMENT",
     "lm_head: hidden has K=4, weight has K=3"),
    (lambda: rlk.lm_head(HIDDEN), ValueError, "RLK_INVALID_ARGUMENT", "lm_head: weight is missing"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, wieght=1), KeyError, "RLK_UNKNOWN_NAME",
     "lm_head: no argument, attribute or option is called 'wieght', did you mean 'weight'?"),
    (lambda: rlk.lm_head(1, WEIGHT), ValueError, "RLK_INVALID_ARGUMENT",
     "lm_head: hidden is of type int, which is no tensor: it has no __dlpack__"),
    (lambda: rlk.lm_head(HIDDEN.astype(">f4"), WEIGHT), ValueError, "RLK_INVALID_ARGUMENT",
     "lm_head: hidden is of type ndarray, which gives no DLPack view: "),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, out=HIDDEN[:, :3]), ValueError, "RLK_OVERLAP",
     "lm_head: out is written and overlaps hidden"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, out="fp8"), ValueError, "RLK_INVALID_ARGUMENT",
     "lm_head: out is 'fp8', it takes a tensor, True or a dtype: fp16, bf16, fp32, fp64"),
    (lambda: rlk.rope(HIDDEN, HIDDEN, HIDDEN, pairing="left"), ValueError, "RLK_INVALID_ARGUMENT",
     "rope: pairing is 'left', it is one of half|adjacent|adjacent_to_half"),
    (lambda: rlk.lm_head_bwd(LOGITS, HIDDEN, WEIGHT), ValueError, "RLK_INVALID_ARGUMENT",
     "lm_head_bwd: no result is asked for, each is optional: name=True asks for one"),
    (lambda: rlk.lm_head(HIDDEN, WEIGHT, threads=-1), ValueError, "RLK_INVALID_ARGUMENT",
     "options: threads is -1, it must be 0 or more"),
    (lambda: rlk.explain("lm_haed"), KeyError, "RLK_UNKNOWN_NAME", "unknown op 'lm_haed', did you mean 'lm_head'?"),
])
def test_bad_input_raises_the_librarys_line(call, kind, code, text):
    with pytest.raises(rlk.Error) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert caught.value.code == code
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("hidden", [
    numpy.asfortranarray(HIDDEN), HIDDEN[::-1], HIDDEN[:, ::-1], numpy.ascontiguousarray(HIDDEN).view(numpy.recarray),
    numpy.broadcast_to(HIDDEN[:1], HIDDEN.shape), HIDDEN.astype(numpy.float16), numpy.empty((0, 4), numpy.float32)])
def test_arrays_of_any_strides_and_dtypes_are_read_as_they_lie_or_refused(hidden):
    weight = WEIGHT.astype(hidden.dtype)
    try:
        got = rlk.lm_head(hidden, weight)
    except rlk.InvalidArgument as error:
        assert "stride" in str(error)
        return
    assert got.tobytes() == rlk.lm_head(numpy.array(hidden, order="C", copy=True, subok=False), weight).tobytes()


@pytest.mark.parametrize("hidden", [
    numpy.zeros(4, [("a", "u1"), ("b", "f4")])["b"].reshape(1, 4),  # strides that are no whole elements
    HIDDEN.astype(">f4"), HIDDEN.astype(object), HIDDEN.astype("complex64")])
def test_what_no_dtype_and_strides_describe_is_refused(hidden):
    with pytest.raises(rlk.InvalidArgument, match="hidden is of type ndarray, which gives no DLPack view|hidden has DLPack dtype"):
        rlk.lm_head(hidden, WEIGHT)


def test_what_cannot_be_written_is_refused():
    with pytest.raises(rlk.InvalidArgument, match="out is of type ndarray, which is read-only"):
        rlk.lm_head(HIDDEN, WEIGHT, out=read_only())
    jax = pytest.importorskip("jax.numpy")
    with pytest.raises(rlk.InvalidArgument, match="which never changes"):
        rlk.lm_head(HIDDEN, WEIGHT, out=jax.zeros((2, 3)))


def test_too_many_arguments_by_position_are_a_type_error():
    with pytest.raises(TypeError, match="lm_head takes 3 arguments by position, 4 were given"):
        rlk.lm_head(HIDDEN, WEIGHT, WEIGHT, WEIGHT)
    with pytest.raises(TypeError, match="lm_head got hidden twice"):
        rlk.lm_head(HIDDEN, WEIGHT, hidden=HIDDEN)


def test_no_implementation_lists_the_candidates():
    with pytest.raises(NotImplementedError) as caught:
        rlk.lm_head(HIDDEN, WEIGHT, backend="native.golden", arithmetic="fma32/kb1024")
    reasons = {c["id"]: c["reason"] for c in caught.value.candidates}
    assert "native.golden.scalar" in reasons
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.candidates) == (str(caught.value), caught.value.candidates)


# ---- questions and scopes ---------------------------------------------------------------------------------------------------------


def test_explain_prints_what_the_program_prints():
    program = rlk._tools.dispatch_program()
    shape = ["--explain", "lm_head", "--shape", "hidden=512x64,weight=100x64", "--dtype", "bf16"]
    want = subprocess.run([program, *shape], capture_output=True, text=True, check=True).stdout
    text = rlk.explain("lm_head", rlk.Spec((512, 64), "bf16"), rlk.Spec((100, 64), "bf16"))
    assert "chosen" in text
    for line in text.splitlines():  # the program pads its columns for all lines together
        assert line.split() in [words.split() for words in want.splitlines()]
    assert text._repr_html_().startswith("<pre>")


def test_a_resolution_names_the_choice():
    r = rlk.resolve("lm_head", HIDDEN, WEIGHT, backend="native.golden")
    assert r and r.id.startswith("native.golden") and r.arithmetic == "fma64"
    assert r.fingerprint == rlk.resolve("lm_head", HIDDEN, WEIGHT, backend="native.golden").fingerprint
    assert r.capture_safe in (True, False)
    assert r.id in r._repr_html_()
    assert not rlk.resolve("lm_head", HIDDEN, WEIGHT, arithmetic="none")


def test_scopes_hold_within_and_nest():
    def arithmetic():
        return rlk.resolve("lm_head", HIDDEN, WEIGHT).arithmetic

    usual = arithmetic()
    with rlk.precision("golden"):
        assert arithmetic() == "fma64"
        with rlk.precision("standard"), rlk.backend("lm_head=native"):
            assert arithmetic() == "fma64"
    assert arithmetic() == usual
    with pytest.raises(rlk.InvalidArgument, match="precision is 'platinum'"):
        with rlk.precision("platinum"):
            pass
    assert arithmetic() == usual


def test_a_scope_ends_with_an_exception():
    usual = rlk.resolve("lm_head", HIDDEN, WEIGHT).arithmetic
    with pytest.raises(ZeroDivisionError), rlk.precision("golden"):
        raise ZeroDivisionError
    assert rlk.resolve("lm_head", HIDDEN, WEIGHT).arithmetic == usual


def test_verify_proves_an_op_and_its_certificate_is_evidence(tmp_path):
    path = tmp_path / "certificate.json"
    assert rlk.verify("rope_tables", "--budget", "short", certificate=path)
    rlk.load_evidence(path)
    rlk.clear_evidence()


# ---- processes and threads --------------------------------------------------------------------------------------------------------


def test_importing_rlk_imports_no_framework():
    loaded = python("import sys, rlk; print(' '.join(sys.modules))").split()
    assert not {"torch", "numpy", "jax", "cupy"} & set(loaded)


def test_many_threads_call_at_once():
    wrong = []

    def work(seed):
        random = numpy.random.default_rng(seed)
        for _ in range(50):
            m = int(random.integers(1, 9))
            hidden = random.integers(-4, 5, (m, 16)).astype(numpy.float32)
            weight = random.integers(-4, 5, (300, 16)).astype(numpy.float32)  # enough for the interpreter's lock to be given up
            if not numpy.array_equal(rlk.lm_head(hidden, weight), hidden @ weight.T):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def another_version(package, folder):
    """The package in `folder` with a library whose name says another version, as two minor versions have."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = Path(next(line.split(maxsplit=5)[-1] for line in maps if "librlk_registry.so" in line))
    shutil.copytree(package, folder / "rlk", dirs_exist_ok=True)
    for source, target in ((Path(_C.__file__), folder / "rlk" / Path(_C.__file__).name), (library, folder / "librlk_registry.so.0.9")):
        target.unlink(missing_ok=True)
        target.write_bytes(re.sub(rb"librlk_registry\.so\.\d\.\d", b"librlk_registry.so.0.9", source.read_bytes()))


@pytest.mark.parametrize("versions", [1, 2])
def test_two_copies_live_in_one_process(versions, tmp_path):
    package = Path(_C.__file__).parent
    for copy in ("first", "second"):
        shutil.copytree(package, tmp_path / copy / "rlk")
    if versions == 2:
        if not Path("/proc/self/maps").exists():
            pytest.skip("finds the library in /proc")
        another_version(package, tmp_path / "second")
    assert python(f"""
import sys, numpy, multiprocessing
a = numpy.ones((1, 1), numpy.float32)
h, w = numpy.ones((64, 256), numpy.float32), numpy.ones((300, 256), numpy.float32)
copies = []
for name in ("first", "second"):
    sys.path.insert(0, {str(tmp_path)!r} + "/" + name)
    import rlk
    copies.append(rlk)
    for module in [m for m in sys.modules if m.partition(".")[0] == "rlk"]:
        del sys.modules[module]
assert copies[0].__file__ != copies[1].__file__
if {versions} == 2:
    assert len({{line.split()[-1] for line in open("/proc/self/maps") if "librlk_registry" in line}}) == 2
def arithmetics(_=None):
    return [rlk.resolve("lm_head", h, w).arithmetic for rlk in copies if (rlk.lm_head(h, w) == 256).all()]
usual = arithmetics()
with copies[0].precision("golden"):
    held = arithmetics()
assert usual == arithmetics() and usual[0] == usual[1] and held[0] == "fma64" and (held[1] == usual[1]) == ({versions} == 2)
for rlk in copies + copies:
    assert rlk.lm_head(a, a)[0, 0] == 1
    try:
        rlk.lm_head(a)
    except rlk.Error as e:
        print(e)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(arithmetics, range(4)) == [usual] * 4
""", LD_LIBRARY_PATH=str(tmp_path / "second")).count("weight is missing") == 4


def test_a_second_interpreter_is_refused_and_the_first_goes_on():
    assert python("""
import rlk
try:
    import _interpreters as interpreters
except ImportError:  # before Python 3.13
    import _xxsubinterpreters as interpreters
other = interpreters.create()
try:
    failure = interpreters.run_string(other, "import rlk")
except RuntimeError as error:
    failure = error
print("ImportError" in str(failure))
interpreters.destroy(other)
try:
    rlk.lm_head(1, 2)
except rlk.Error as error:
    print(error)
""").splitlines() == ["True", "lm_head: hidden is of type int, which is no tensor: it has no __dlpack__"]


def test_a_call_while_the_interpreter_ends_is_harmless():
    # The debug allocator ends a program that gives memory back without the interpreter's lock.
    assert "late 1.0" in python("""
import atexit, threading, time, numpy, rlk
a = numpy.full((64, 64), 1 / 64, numpy.float32)  # enough for the interpreter's lock to be given up
atexit.register(lambda: print("late", 64 * rlk.lm_head(a, a)[0, 0]))
class Last:
    def __del__(self):
        rlk.lm_head(a, a)
keep = Last()
def keep_calling():
    while True:
        rlk.lm_head(a, a, threads=1)
for _ in range(8):
    threading.Thread(target=keep_calling, daemon=True).start()
time.sleep(0.2)
rlk.lm_head(a, a)
""", PYTHONMALLOC="debug")


def test_sample_gives_tokens_that_sample_verify_finds_again():
    random = numpy.random.default_rng(5)
    logits = random.normal(0, 2, (6, 300)).astype(numpy.float32)
    seed, position = numpy.full(6, 7, numpy.int64), numpy.arange(6, dtype=numpy.int64)
    top_k = numpy.full(6, 20, numpy.int32)
    token, logp, keep = rlk.sample(logits, top_k=top_k, seed=seed, position=position, logp=True, keep=True)
    assert token.dtype == numpy.int64 and (logp <= 0).all()
    kept = numpy.unpackbits(keep.view(numpy.uint8), axis=1, bitorder="little")[:, :300]
    assert (kept.sum(1) == 20).all() and kept[numpy.arange(6), token].all()
    assert numpy.array_equal(numpy.sort(logits, 1)[:, -20], numpy.where(kept, logits, numpy.inf).min(1))
    given = {"top_k": top_k, "seed": seed, "position": position}
    assert (rlk.sample_verify(logits, token=token, logp=logp, **given) == 0).all()
    assert numpy.array_equal(rlk.sample(logits, token="int32", **given), token)
    token[2] = logits[2].argmin()
    assert rlk.sample_verify(logits, token=token, **given).tolist() == [0, 0, 3, 0, 0, 0]
