"""rlk in RL-Kernel: what its PyTorch ops compute with, whoever asks its registry for them.

    with rlk.adapters.rl_kernel.patch():
        kernel_registry.get_op("lm_head")(hidden, weight)

lm_head, the logits of linear_logp, rms_norm and swiglu. An op's ``forward_fp32`` casts up and computes in fp32, as RL-Kernel's does.
"""

from contextlib import nullcontext

import torch

import rlk.torch
from rlk.adapters._patch import Patch, dense, known


def _lm_head(hidden, weight, bias, *, compute_dtype, output_dtype, strict_fp32=False):
    bias = None if bias is None else bias.to(compute_dtype)
    with torch.autocast(hidden.device.type, enabled=False) if strict_fp32 else nullcontext():
        return rlk.torch.lm_head(*dense(hidden.to(compute_dtype), weight.to(compute_dtype), bias)).to(output_dtype)


def _linear_logits(hidden_2d, weight, bias, *, use_fp32):
    if use_fp32:
        hidden_2d, weight, bias = (None if t is None else t.float() for t in (hidden_2d, weight, bias))
    return rlk.torch.lm_head(*dense(hidden_2d, weight, bias))


def _rms_norm(x, weight, *, eps, output_dtype):
    if output_dtype is not x.dtype:
        x = x.to(output_dtype)
    weight = weight if weight.dtype in (x.dtype, torch.float32) else weight.float()
    return rlk.torch.rms_norm(*dense(x, weight), eps=eps, cast="end")


def _swiglu(gate, up, *, output_dtype):
    return rlk.torch.swiglu(*dense(gate.to(output_dtype), up.to(output_dtype)))


def patch():
    """Takes what RL-Kernel's PyTorch ops compute from rlk. Returns what undoes it."""
    from rl_engine.kernels.ops.pytorch.activation.swiglu import NativeSwiGLUOp
    from rl_engine.kernels.ops.pytorch.linear.lm_head import NativeLMHeadOp
    from rl_engine.kernels.ops.pytorch.loss import linear_logp
    from rl_engine.kernels.ops.pytorch.norm.rms_norm import NativeRMSNormOp
    patch = Patch()
    for op, mine in ((NativeLMHeadOp, _lm_head), (NativeRMSNormOp, _rms_norm), (NativeSwiGLUOp, _swiglu)):
        known(getattr(op, mine.__name__), mine)
        patch.replace(op, mine.__name__, staticmethod(mine))
    patch.everywhere(known(linear_logp._linear_logits, _linear_logits), _linear_logits)
    return patch
