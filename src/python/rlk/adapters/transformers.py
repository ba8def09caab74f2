"""rlk in models of Hugging Face transformers.

    with rlk.adapters.transformers.patch(model):
        model(...)

takes rope and lm_head of that model from rlk; without ``with`` it stays so until ``restore()``. Rope is a function of a model's
module, so other models of the same kind are changed too. A function that is not known, by its very text, is refused.
"""

import ast
import inspect
import sys
import textwrap

import torch

import rlk.torch
from rlk import _errors
from rlk.adapters._patch import Patch

_KNOWN_ROPE = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
_KNOWN_HALF = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


def _body(source):
    """What a function does, without its docstring and decorators."""
    function = ast.parse(textwrap.dedent(source)).body[0]
    first = function.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return [ast.dump(function.args), *(ast.dump(s) for s in function.body[1 if text else 0:])]


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """The function of that name in models that turn halves, over rlk.torch.rope."""
    if unsqueeze_dim not in (1, 2):
        raise _errors.InvalidArgument(f"apply_rotary_pos_emb: unsqueeze_dim is {unsqueeze_dim}, it must be 1 or 2")
    if cos.dim() == 3 and cos.shape[0] == 1:  # one table for the whole batch
        cos, sin = cos[0], sin[0]
    return rlk.torch.rope(q, cos, sin, k=k, table="full", layout="bhsd" if unsqueeze_dim == 1 else "bshd")


def patch(model):
    """Takes a model's rope and lm_head from rlk. Returns what undoes it."""
    patch = Patch()
    module = sys.modules[type(model).__module__]
    rope = getattr(module, "apply_rotary_pos_emb", None)
    if rope is not None and rope is not apply_rotary_pos_emb:
        half = getattr(module, "rotate_half", None)
        if _body(inspect.getsource(rope)) != _body(_KNOWN_ROPE) or _body(inspect.getsource(half)) != _body(_KNOWN_HALF):
            raise _errors.Unsupported(f"{module.__name__}: its apply_rotary_pos_emb is none that this adapter knows")
        patch.replace(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    head = getattr(model, "lm_head", None)
    if type(head) is torch.nn.Linear:
        patch.replace(head, "forward", lambda hidden: rlk.torch.lm_head(hidden, head.weight, head.bias))
    return patch
