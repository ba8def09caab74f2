"""The norm of a sum with both gradients in one kernel: what stands between the parts of a layer."""

import torch

import rlk.torch
from rlk import _scopes


class AddNorm(torch.autograd.Function):
    """rms_norm of a sum, and the sum, of which the backward keeps the sum alone: the gradients of both meet in one kernel."""

    @staticmethod
    def forward(ctx, added, stream, weight, eps):
        y, stream, rstd = rlk.torch.rms_norm(added, weight, stream, sum=True, rstd=True, eps=eps)
        ctx.save_for_backward(stream, weight, rstd)
        ctx.rlk = eps, _scopes.options_of_scopes()
        ctx.set_materialize_grads(False)
        return y, stream

    @staticmethod
    def backward(ctx, d_y, d_stream, others=None):
        """others(d_y, stream): of all rows, whose sum the gradient of the weight is, where there are more than these."""
        stream, weight, rstd = ctx.saved_tensors
        eps, scopes = ctx.rlk
        if d_y is None:
            return d_stream, d_stream, None, None
        d_y, wanted = d_y.contiguous(), ctx.needs_input_grad[2]
        with _scopes.within(scopes):
            here = {"d_weight": True} if wanted and others is None else {}
            found = rlk.torch.rms_norm_bwd(d_y, stream, weight, rstd=rstd, d_sum=d_stream, d_x=True, eps=eps, **here)
            d_x, d_weight = found if here else (found, None)
            if wanted and others is not None:
                d_weight = rlk.torch.rms_norm_bwd(*others(d_y, stream), weight, d_weight=True, eps=eps)
        return d_x, d_x, d_weight, None
