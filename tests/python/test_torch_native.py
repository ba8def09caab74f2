"""torch's C++ functions behind the questions of a call: relied on where they answer as torch's Python functions do, and only there."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
import rlk.torch  # noqa: E402

HERE = Path(__file__).parent


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


LIES = """
n._view = lambda t: None
torch.Tensor.is_neg = lambda t: False
torch.Tensor.requires_grad = property(lambda t: False)
torch.is_grad_enabled = lambda: True
torch._C._len_torch_function_stack = lambda: 0
torch._C._len_torch_dispatch_stack = lambda: 0
torch._C._is_any_autocast_enabled = lambda: False
torch._C._functorch.peek_interpreter_stack = lambda: None
_C.torch_native_written = lambda t: None
_C.torch_native_object = lambda api, t: t[:]
torch._C._dispatch_key_parse = lambda name: 7
"""


def test_they_are_relied_on_where_every_answer_is_that_of_python():
    said = run(f"""
import torch, rlk, rlk.torch
from rlk import _C, _torch_native as n
for mode in (torch.device("cpu"), torch.inference_mode(), torch.utils._python_dispatch.TorchDispatchMode()):
    with mode:
        assert n.prove() is None, mode  # not now
first = n.prove()
for lie in '''{LIES}'''.strip().splitlines():
    target = lie.partition(" =")[0]
    owner, _, name = target.rpartition(".")
    here, before = name in vars(eval(owner)), getattr(eval(owner), name)
    exec(lie)
    assert n.prove() is False, lie
    setattr(eval(owner), name, before) if here else delattr(eval(owner), name)
assert n.prove() is first
h, w = torch.ones(1, 4), torch.ones(2, 4)
with torch.inference_mode():
    rlk.torch.lm_head(h, w)
rlk.torch.lm_head(h, w)
print(first, _C.torch_native_find(None, (h, w), (h._cdata, w._cdata), 0, 0))  # what is in use is not replaced
""")
    assert said == ("True False\n" if torch.__version__.startswith("2.11.") else said)


#: Of every question one test that sees its answer.
ASKED = ("no_op_reads_or_writes_a_tensor_with_the_negative_bit and (lm_head or rope_) or a_written_tensor or a_function_mode or "
         "autocast_takes or tangents or transforms or jit or does_not_lose_one or default_device or of_torchs_own or a_second_gradient_is_refused and not every")


def test_without_them_torchs_python_functions_are_asked():
    run("import sys, pytest, rlk._torch_native as n\nasked = []\nn.prove = lambda: asked.append(1) or False\n"
        f"code = pytest.main(['-q', '-x', '-p', 'no:cacheprovider', '-k', {ASKED!r}, 'test_torch.py', 'test_torch_ops.py'])\n"
        "assert asked == [1], asked\nsys.exit(code)")


def test_what_a_call_writes_has_a_version_more_and_what_it_reads_has_not():
    hidden, weight, out = torch.ones(1, 4), torch.ones(2, 4), torch.empty(1, 2)
    rlk.lm_head(hidden, weight, out=out)
    rlk.torch.lm_head(hidden, weight, out=out[:])  # a view shares its version
    assert (hidden._version, weight._version, out._version) == (0, 0, 2)
    with torch.inference_mode():
        unversioned = torch.empty(1, 2)
        assert (rlk.lm_head(hidden, weight, out=unversioned) == 4).all()
    assert (rlk.lm_head(hidden, weight, out=unversioned) == 4).all()
