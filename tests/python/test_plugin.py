"""An op and an implementation that a plugin brings are in every face, also when it is loaded after them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rlk  # noqa: F401  (skips where it is not built)

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, numpy, rlk
early = sys.argv[2] == "early"
if early:
    rlk.load_plugin(sys.argv[1])
def importable(name):
    try:
        __import__(name)
        return getattr(rlk, name)
    except ImportError:
        return None
torch_face, jax_face = importable("torch"), importable("jax")
try:
    rlk.example_scale
    assert early
except AttributeError:
    assert not early
    rlk.load_plugin(sys.argv[1])
x = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
assert (rlk.example_scale(x) == 2 * x).all() and (rlk.example_scale(x, factor=0.5) == x / 2).all()
out = rlk.example_scale(x, out=x)
assert out is x and x[1, 2] == 10
try:
    rlk.example_scale(x, factor=0.0)
    raise SystemExit("a factor of 0 was taken")
except rlk.InvalidArgument as error:
    assert "factor is 0" in str(error)
ones = numpy.ones((2, 4), numpy.float32)
assert rlk.resolve("lm_head", ones, ones, backend="example").id == "example.rows"
assert (rlk.lm_head(ones, ones, backend="example.rows") == 4).all()
try:
    rlk.lm_head(ones, ones, ones[0, :2], backend="example.rows")
    raise SystemExit("a bias was taken")
except rlk.NoImplementation as error:
    assert "takes no bias" in str(error)
print("plain")
if torch_face:
    import torch
    t = torch.arange(6.)
    assert torch.equal(torch_face.example_scale(t, factor=3.0), 3 * t)
    assert torch.equal(torch.compile(lambda t: torch_face.example_scale(t), fullgraph=True, backend="aot_eager")(t), 2 * t)
    try:
        torch_face.example_scale(t.requires_grad_()).sum().backward()
        raise SystemExit("a gradient was given")
    except rlk.Unsupported as error:
        assert "example_scale" in str(error)
    print("torch")
if jax_face:
    import jax
    assert (jax.jit(jax_face.example_scale)(jax.numpy.ones(3)) == 2).all()
    print("jax")
for face in filter(None, (rlk, torch_face, jax_face)):
    try:
        face.example_scales
        raise SystemExit("there is no such op")
    except AttributeError:
        pass
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_an_op_of_a_plugin_is_in_every_face(when, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler is here")
    plugin = tmp_path / "librlk_backend_example.so"
    subprocess.run([compiler, "-std=c11", "-O1", "-shared", "-fPIC", "-I", ROOT / "include",
                    ROOT / "tests/consumer/plugin/example.c", "-o", plugin], check=True)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, plugin, when], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RLK_PLUGIN_TRUST": "all"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "plain"
