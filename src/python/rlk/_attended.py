"""Attention of one product of q, k and v: what a layer's training forward does between its first product and its second."""

import torch
from torch.autograd.function import once_differentiable

import rlk.torch
from rlk import _errors, _scopes


class Attended(torch.autograd.Function):
    """Attention within packed sequences of qkv [T, heads, D], and k as it was attended to. Norms (where there are weights) and rotation are
    one op. The backward is that of the ops one by one, but writes the gradients of q, k and v where those lie in qkv."""

    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, positions, bounds, prefix_of, shape):
        q, k, v = parts(qkv, shape)
        q, k = rlk.torch.qk_norm_rope(q, k, cos, sin, positions, q_weight=q_weight, k_weight=k_weight, k_out=True, eps=shape.eps,
                                      arithmetic="rms32/rope32")
        x, lse = rlk.torch.attention(q, k, v, bounds, bounds, prefix_of=prefix_of, lse=True)
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin, positions, bounds, prefix_of, q, k, x, lse)
        ctx.rlk = shape, _scopes.options_of_scopes()
        ctx.set_materialize_grads(False)
        return x, k

    @staticmethod
    @once_differentiable
    def backward(ctx, d_x, d_turned):
        qkv, q_weight, k_weight, cos, sin, positions, bounds, prefix_of, q, k, x, lse = ctx.saved_tensors
        shape, scopes = ctx.rlk
        d_qkv, d_q, d_k = torch.empty_like(qkv), torch.empty_like(q), torch.empty_like(k)
        (q_in, k_in, v), (d_q_in, d_k_in, d_v) = parts(qkv, shape), parts(d_qkv, shape)
        d_x = torch.zeros_like(x) if d_x is None else d_x.contiguous()
        with _scopes.within(scopes):
            within = dict(cu_q=bounds, cu_k=bounds, prefix_of=prefix_of)
            _write(rlk.torch.attention_bwd, dict(q=q, k=k, v=v, out=x, lse=lse, d_out=d_x, **within), d_q=d_q, d_k=d_k, d_v=d_v)
            if d_turned is not None:
                d_k = d_k + d_turned
            back = dict(d_out=d_q, cos=cos, sin=sin, d_k_out=d_k, positions=positions, layout="thd")
            if q_weight is None:
                _write(rlk.torch.rope_bwd, back, d_x=d_q_in, d_k=d_k_in)
                return d_qkv, *[None] * 8
            d_q, d_k = rlk.torch.rope_bwd(**back, d_x=True, d_k=True)
            d_q_weight = _norm(d_q, q_in, q_weight, d_q_in, ctx.needs_input_grad[1], shape.eps)
            d_k_weight = _norm(d_k, k_in, k_weight, d_k_in, ctx.needs_input_grad[2], shape.eps)
        return d_qkv, d_q_weight, d_k_weight, *[None] * 6


def parts(qkv, shape):
    """q, k and v, where they lie."""
    return qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)


def _norm(d_y, x, weight, d_x, needed, eps):
    """Writes a norm's d_x. The gradient of its weight, if it is needed."""
    learned = {"d_weight": torch.empty_like(weight)} if needed else {}
    _write(rlk.torch.rms_norm_bwd, dict(d_y=d_y, x=x, weight=weight, eps=eps), d_x=d_x, **learned)
    return learned.get("d_weight")


def _write(op, given, **results):
    """Calls op to leave its results there. Where a mode of torch must follow every call, nothing can be given to be written: then by a copy."""
    try:
        op(**given, **results)
    except _errors.Unsupported:
        found = op(**given, **dict.fromkeys(results, True))
        for place, result in zip(results.values(), found if isinstance(found, tuple) else (found,)):
            place.copy_(result)
