"""rlk in Liger-Kernel: rope, RMSNorm and SwiGLU, wherever Liger uses them.

    with rlk.adapters.liger.patch():
        model(...)

The functions here take what Liger's of the same names take. Unlike Liger's they leave their inputs and the incoming gradient alone.
"""

import torch

import rlk.torch
from rlk import _errors
from rlk.adapters._patch import Patch, dense, known, refuse


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """q and k [B, H, S, D], tables [1 or B, S, R] of which, as in Liger, the first half is read. position_ids are not used."""
    if cos.dim() == 4:
        axis = unsqueeze_dim if cos.shape[unsqueeze_dim] == 1 else 1
        cos, sin = cos.squeeze(axis), sin.squeeze(axis)
    if cos.dim() == 3 and cos.shape[0] == 1:  # one table for the whole batch
        cos, sin = cos[0], sin[0]
    rotary_dim = rotary_dim or min(cos.shape[-1], q.shape[-1])
    half = rotary_dim // 2
    q, k, cos, sin = dense(q, k, cos[..., :half], sin[..., :half])
    return rlk.torch.rope(q, cos, sin, k=k, table="half", rotary_dim=rotary_dim)


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    """in_place and row_mode are about Liger's kernels and change nothing here."""
    mode = getattr(casting_mode, "value", casting_mode)
    if mode not in ("llama", "gemma", 0, 1) and not (mode in ("none", -1) and X.dtype is torch.float32):
        raise _errors.Unsupported(f"liger_rms_norm: casting_mode is {casting_mode} for {X.dtype}, rlk serves llama and gemma")
    if offset not in (0, 1):
        raise _errors.Unsupported(f"liger_rms_norm: offset is {offset}, rlk serves 0 and 1")
    return rlk.torch.rms_norm(*dense(X, W), eps=float(eps), weight_offset=bool(offset), cast="early" if mode in ("llama", 0) else "end")


def liger_swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    refuse("liger_swiglu", gate_multiplier=(gate_multiplier, 1.0), down_multiplier=(down_multiplier, 1.0))
    return rlk.torch.swiglu(*dense(a, b), roundings="twice")


def patch():
    """Takes Liger's rope, RMSNorm and SwiGLU from rlk. Returns what undoes it."""
    from liger_kernel import ops
    from liger_kernel.transformers import rope
    patch = Patch()
    for function, mine in ((ops.LigerRopeFunction, liger_rope), (ops.LigerRMSNormFunction, liger_rms_norm),
                           (ops.LigerSiLUMulFunction, liger_swiglu)):
        known(function.forward, mine, function.__name__)
        patch.replace(function, "apply", staticmethod(mine))
    if hasattr(rope, "dispatch"):  # which looks for a GPU before it comes to LigerRopeFunction
        patch.replace(rope, "dispatch", lambda _, *args, **keywords: liger_rope(*args, **keywords))
    return patch
